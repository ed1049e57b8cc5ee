"""Goal: an outage of the evidence store stops no record, and no event stands before its segment.

Method: a real server of the S3 protocol is stopped and started, fails at each request in turn, cuts
uploads, and comes back for a while only; the process that drains is killed; the disk of the spool
is full; kept segments rot and vanish. Each append first looks whether the store has every segment
that its events name.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import EvidenceOutOfReach, LedgerUnreachable, SpoolError
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.probes import RandomStatesRecorded
from shiftbook.ledger.evidence import read_segment, segment_place, writable_place, write_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Receipt
from shiftbook.ledger.segment_spool import refuse_wrong_place
from shiftbook.ledger.spool import SpoolingWriter, drain_leftovers
from tests.s3_server import DOWN, Application, Respond, S3Server, refused, running_s3

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, running_s3(patch) as running:
        yield running


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    yield server
    server.fault = None


@pytest.fixture
def url(s3: S3Server, tmp_path: Path) -> str:
    return f"s3://book/{tmp_path.name}"


def stored(url: str) -> dict[str, bytes]:
    """Objects of the store by name, asked past everything that is tested."""
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    root = url.removeprefix("s3://")
    return {path.rsplit("/", 1)[-1]: fs.cat_file(path) for path in fs.find(root)}


class Door:
    """``Ledger.append``, which looks first whether the store has what the events name."""

    def __init__(self, ledger: Ledger, url: str, server: S3Server) -> None:
        self.ledger, self.url, self.server = ledger, url, server
        self.open = True

    def __call__(self, job: str, events: Any, *, key: str | None = None) -> Receipt:
        if not self.open:
            raise LedgerUnreachable("the ledger is out of reach; nothing was written")
        fault, self.server.fault = self.server.fault, None
        for draft in events:
            segment = getattr(draft.event, "segment", None)
            if segment is not None:
                read_segment(self.url, segment)
        self.server.fault = fault
        return self.ledger.append(job, events, key=key)


@pytest.fixture
def door(s3: S3Server, tmp_path: Path, url: str) -> Iterator[Door]:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", evidence=url) as ledger:
        yield Door(ledger, url, s3)


def opened(door: Door, folder: Path, name: str = "w") -> SpoolingWriter:
    return SpoolingWriter(door, folder, writer=name, evidence=writable_place(door.ledger))


def record(writer: SpoolingWriter, number: int) -> Receipt | None:
    """Two events with a segment each, and one without."""
    events: list[Event] = []
    for which in (f"{writer.writer}a", f"{writer.writer}b"):
        segment = write_segment(writer.segments, {"n": [number], "which": [which]})
        events.append(event(number, segment))
    return writer.record("job", [*events, event(number)])


def event(number: int, segment: Any = None) -> Event:
    return RandomStatesRecorded(
        attempt="a", iteration=number, moment="before", states={}, segment=segment
    )


def story(door: Door) -> list[int]:
    """Iterations in order, each event's segment read on the way."""
    for found in door.ledger.read(types=["RandomStatesRecorded"]):
        parsed = found.parsed()
        assert isinstance(parsed, RandomStatesRecorded)
        if parsed.segment is not None:
            assert read_segment(door.url, parsed.segment).to_pydict()["n"] == [parsed.iteration]
    return [e.body["iteration"] for e in door.ledger.read(types=["RandomStatesRecorded"])]


def each(*numbers: int) -> list[int]:
    return [number for number in numbers for _ in range(3)]


def test_records_wait_while_the_store_is_away_and_stand_after_their_segments(
    s3: S3Server, door: Door, tmp_path: Path
) -> None:
    folder = tmp_path / "spool"
    writer = opened(door, folder)
    assert record(writer, 0) is not None
    assert not folder.exists()
    s3.close()
    try:
        assert record(writer, 1) is None
        asked = len(s3.requests)
        assert record(writer, 2) is None
        assert writer.waiting == 2
        left = writer.drain()
        assert (left.appended, left.waiting) == (0, 2), "the outage alone is told of"
        assert left.cause is not None
        assert "evidence at s3://book" in left.cause
        assert len(s3.requests) == asked
        assert len(list((folder / "w.segments").iterdir())) == 4
        with pytest.raises(EvidenceOutOfReach):
            segment_place(door.ledger).get("0" * 64)
    finally:
        s3.start()
    drained = writer.drain()
    assert (drained.appended, drained.waiting, drained.cause, drained.rejected) == (2, 0, None, ())
    assert list(folder.iterdir()) == []
    assert record(writer, 3) is not None
    writer.close()
    assert story(door) == each(0, 1, 2, 3)
    events = list(door.ledger.read())
    assert [e.sequence for e in events] == list(range(14))
    (away, back) = (e for e in events if e.type.startswith("Ledger"))
    assert (away.position, back.position) == (3, 10)
    assert away.body["evidence"] == door.url
    assert away.body["spooled"] == 6
    assert away.body["cause"].startswith("expected to read evidence at s3://book")
    assert len(stored(door.url)) == 8


def failing_from(number: int) -> Any:
    """A fault: that many more requests are answered, none after them."""
    left = number

    def answer(request: dict[str, Any], store: Application, respond: Respond) -> Iterable[bytes]:
        nonlocal left
        left -= 1
        return store(request, respond) if left >= 0 else DOWN(request, store, respond)

    return answer


def test_a_store_that_comes_and_goes_at_every_request(
    s3: S3Server, door: Door, tmp_path: Path
) -> None:
    """Each segment takes some requests; the store goes away again after each number of them."""
    writer = opened(door, tmp_path / "spool")
    s3.fault = DOWN
    for number in range(4):
        assert record(writer, number) is None
    appended, cuts = 0, 0
    for answered in range(100):
        s3.fault = failing_from(answered)
        left = writer.drain()
        appended += left.appended
        assert (left.cause is None) == (left.waiting == 0)
        if left.waiting == 0:
            break
        cuts += 1
        if answered == 3:
            s3.fault = DOWN
            assert record(writer, 4) is None
    writer.close()
    s3.fault = None
    assert cuts > 4
    assert appended == 5
    assert story(door) == each(0, 1, 2, 3, 4)
    types = [e.type for e in door.ledger.read()]
    assert types.count("LedgerUnreachable") == types.count("LedgerRestored") == 1
    assert len(stored(door.url)) == 10


def half(request: dict[str, Any]) -> None:
    """Leave half of a request's body."""
    data = request["wsgi.input"].read()[: int(request["CONTENT_LENGTH"]) // 2]
    request["wsgi.input"], request["CONTENT_LENGTH"] = BytesIO(data), str(len(data))
    for name in [name for name in request if "CHECKSUM" in name or "CONTENT_MD5" in name]:
        del request[name]


@pytest.mark.parametrize("answer", ["success", "error", "none"])
def test_an_upload_that_is_cut_is_made_again(
    s3: S3Server, door: Door, tmp_path: Path, answer: str
) -> None:
    """A gateway keeps half of an object and says that all is well, that it failed, or nothing."""
    cut: list[str] = []

    def cutting(request: dict[str, Any], store: Application, respond: Respond) -> Iterable[bytes]:
        if request["REQUEST_METHOD"] != "PUT":
            return store(request, respond)
        half(request)
        cut.append(request["PATH_INFO"])
        if answer == "success":
            return store(request, respond)
        list(store(request, lambda *_: None))
        if answer == "error":
            return DOWN(request, store, respond)
        request["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return []

    writer = opened(door, tmp_path / "spool")
    s3.fault = cutting
    assert record(writer, 0) is None, "cut while it was recorded"
    assert cut
    assert record(writer, 1) is None
    left = writer.drain()
    assert left.appended == 0, "cut while it was drained"
    assert left.waiting
    s3.fault = None
    assert any(len(data) < 200 for data in stored(door.url).values()), "half an object is there"
    assert writer.drain().waiting == 0
    writer.close()
    assert story(door) == each(0, 1)


def test_a_ledger_and_a_store_that_are_away_at_different_times(
    s3: S3Server, door: Door, tmp_path: Path
) -> None:
    writer = opened(door, tmp_path / "spool")
    door.open = False
    assert record(writer, 0) is None
    assert len(stored(door.url)) == 2, "the store is there, so nothing is kept beside the spool"
    s3.fault = DOWN
    assert record(writer, 1) is None
    door.open = True
    assert writer.drain().appended == 1
    assert record(writer, 2) is None
    s3.fault, door.open = None, False
    assert writer.drain().appended == 0
    door.open = True
    assert writer.drain().appended == 2
    writer.close()
    assert story(door) == each(0, 1, 2)


def test_a_segment_that_no_record_names_yet_outlives_the_end_of_a_drain(
    s3: S3Server, door: Door, tmp_path: Path
) -> None:
    writer = opened(door, tmp_path / "spool")
    s3.fault = DOWN
    record(writer, 0)
    early = write_segment(writer.segments, {"n": [1]})
    s3.fault = None
    assert writer.drain().waiting == 0
    assert writer.record("job", [event(1, early)]) is not None
    s3.fault = DOWN
    late = write_segment(writer.segments, {"n": [2]})
    held = writer.record("job", [event(2, late)])
    assert held is None
    again = write_segment(writer.segments, {"n": [2]})
    assert again == late
    s3.fault = None
    assert writer.drain().waiting == 0
    assert writer.record("job", [event(2, again)]) is not None
    assert list((tmp_path / "spool").iterdir()) == []
    writer.close()
    assert story(door) == [*each(0), 1, 2, 2]


KILLED = """
import os, signal, sys
from pathlib import Path
import s3fs
s3fs.S3FileSystem.retries = 1
from shiftbook.ledger.evidence import writable_place
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.segment_place import RemoteFolder
from shiftbook.ledger.spool import SpoolingWriter
from tests.ledger.test_segment_spool import record

database, url, folder, name, moment, at = sys.argv[1:]
left = int(at)

def die_at(what):
    global left
    if what == moment:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

with Ledger.open(database, evidence=url) as ledger:
    def append(job, events, *, key=None):
        die_at("before append")
        receipt = ledger.append(job, events, key=key)
        die_at("after append")
        return receipt

    writer = SpoolingWriter(append, Path(folder), writer=name, evidence=writable_place(ledger))
    put = RemoteFolder.put
    def away(self, sha256, data):
        from shiftbook.ledger.errors import EvidenceOutOfReach
        raise EvidenceOutOfReach("away")
    RemoteFolder.put = away
    for number in range(3):
        assert record(writer, number) is None
        die_at("spooled")
    def watched(self, sha256, data):
        die_at("before upload")
        put(self, sha256, data)
        die_at("after upload")
    RemoteFolder.put = watched
    writer.drain()
"""


@pytest.mark.parametrize(
    ("moment", "at"),
    [
        ("spooled", 3),
        ("before upload", 1),
        ("after upload", 3),
        ("before append", 3),
        ("after append", 3),
        ("after append", 5),  # all but the removal of the spool
    ],
)
def test_another_process_goes_on_where_a_killed_one_stopped(
    s3: S3Server, door: Door, tmp_path: Path, moment: str, at: int
) -> None:
    folder = tmp_path / "spool"
    words = (door.ledger.url, door.url, str(folder), "k", moment, str(at))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "AWS_MAX_ATTEMPTS": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [p.name for p in folder.glob("*.spool")] == ["k.spool"]
    s3.fault = DOWN
    before = door.ledger.head().size
    waiting = drain_leftovers(door, folder, writable_place(door.ledger))["k"]
    if moment != "after append":
        assert waiting.waiting
    assert door.ledger.head().size <= before + 1, "at most the event of the outage"
    s3.fault = None
    if waiting.waiting:
        outcome = drain_leftovers(door, folder, writable_place(door.ledger))["k"]
        assert (outcome.waiting, outcome.rejected) == (0, ())
    assert list(folder.iterdir()) == []
    assert story(door) == each(0, 1, 2)
    types = [e.type for e in door.ledger.read()]
    assert types.count("LedgerUnreachable") == types.count("LedgerRestored") == 1
    assert len(stored(door.url)) == 6


def test_records_wait_for_the_place_that_their_segments_belong_to(
    s3: S3Server, door: Door, tmp_path: Path
) -> None:
    folder = tmp_path / "spool"
    writer = opened(door, folder)
    s3.fault = DOWN
    record(writer, 0)
    writer.close()
    s3.fault = None
    for place in (None, writable_place(tmp_path / "beside"), writable_place("s3://book/other")):
        left = drain_leftovers(door, folder, place)["w"]
        assert (left.appended, left.waiting) == (0, 1)
        assert left.cause is not None
        assert f"expected the place of evidence that records wait for, of {door.url}" in left.cause
        assert "--evidence" in left.cause
    assert not (tmp_path / "beside").exists()
    assert drain_leftovers(door, folder, writable_place(door.url))["w"].waiting == 0
    assert story(door) == each(0)


@pytest.mark.parametrize("how", ["rotten", "gone", "gone, but in the store"])
def test_a_kept_segment_that_is_lost_sets_its_record_aside_alone(
    s3: S3Server, door: Door, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "spool"
    writer = opened(door, folder)
    s3.fault = DOWN
    for number in range(3):
        record(writer, number)
    writer.close()
    s3.fault = None
    lost = write_segment(tmp_path / "copy", {"n": [1], "which": ["wb"]})
    path = folder / "w.segments" / f"{lost.sha256}.parquet"
    data = path.read_bytes()
    if how == "rotten":
        path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    else:
        path.unlink()
        if how != "gone":
            writable_place(door.url).put(lost.sha256, data)
    left = drain_leftovers(door, folder, writable_place(door.ledger))["w"]
    if how == "gone, but in the store":
        assert (left.appended, left.rejected) == (3, ())
        assert story(door) == each(0, 1, 2)
        return
    assert (left.appended, left.waiting) == (2, 0)
    (told,) = left.rejected
    assert lost.sha256 in told
    assert "is not there" in told
    assert story(door) == each(0, 2)
    assert lost.sha256.encode() in (folder / "w.rejected").read_bytes()
    assert (folder / f"{path.name}.damaged").exists() == (how == "rotten")


def test_two_writers_that_keep_one_segment_do_not_wait_for_each_other(
    s3: S3Server, door: Door, tmp_path: Path
) -> None:
    writers = [opened(door, tmp_path / "spool", name) for name in "xy"]
    s3.fault = DOWN
    same = [write_segment(writer.segments, {"n": [7]}) for writer in writers]
    assert same[0] == same[1]
    for writer in writers:
        assert writer.record("job", [event(7, same[0])]) is None
    s3.fault = None
    for writer in writers:
        assert writer.drain().appended == 1
        writer.close()
    assert story(door) == [7, 7]


def test_a_disk_that_is_really_full_keeps_what_it_acknowledged(
    s3: S3Server, door: Door, tmp_path: Path
) -> None:
    """On a file system of 128 kB: a record is refused loudly, or stands after its segments."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        writer = opened(door, disk / "spool")
        s3.fault = DOWN
        kept: list[int] = []
        refusals: list[str] = []
        for number in range(40):
            try:
                assert record(writer, number) is None
                kept.append(number)
            except SpoolError as error:
                refusals.append(str(error))
        assert kept
        assert refusals
        assert all("make space there" in said and "not kept" in said for said in refusals)
        writer.close()  # as good as killed, with the disk still full
        s3.fault = None
        outcome = drain_leftovers(door, disk / "spool", writable_place(door.ledger))["w"]
        assert (outcome.waiting, outcome.rejected) == (0, ())
        assert story(door) == each(*kept)
        assert list((disk / "spool").iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_store_that_lets_nobody_in_is_told_from_one_that_is_away(s3: S3Server, url: str) -> None:
    refuse_wrong_place(segment_place(url))
    s3.fault = DOWN
    refuse_wrong_place(segment_place(url))
    s3.fault = refused("403 Forbidden", "AccessDenied")
    with pytest.raises(EvidenceOutOfReach, match="PermissionError"):
        refuse_wrong_place(segment_place(url))
    s3.fault = None
    with pytest.raises(EvidenceOutOfReach, match="no bucket bok"):
        refuse_wrong_place(segment_place("s3://bok/there"))
