"""Goal: an archive holds a ledger bit for bit, comes back bit for bit, and mixes with no other.

Method: ledgers with evidence are exported, whole and in ranges, imported, compared row by row and
exported again; exports and imports are interrupted, run out of space, meet other ledgers and other
files, on either store and from one to the other. Archives that are whole and say what no export
would write are made by the writer itself.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from shiftbook.ledger import archive_writer
from shiftbook.ledger.archive import BATCH_EVENTS, export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_format import MAX_CHUNK_BYTES, Range
from shiftbook.ledger.archive_writer import ArchiveWriter
from shiftbook.ledger.cli import main
from shiftbook.ledger.dialect import side_path
from shiftbook.ledger.errors import (
    ArchiveError,
    ArchiveMismatch,
    InvalidEvent,
    InvalidInput,
    LedgerUnreachable,
    NotALedger,
    UnknownPosition,
)
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.evidence import write_segment
from shiftbook.ledger.ledger import Ledger
from tests.ledger.sample_ledger import write_sample
from tests.ledger.stores import STORES, attack, fetch, literal, new_url

DEADLINE_S = 120.0


Urls = Callable[[str], str]
"""URL by name of a ledger that is not there yet."""


def rows(url: str) -> list[tuple[Any, ...]]:
    """Every column of every event."""
    return fetch(url, "SELECT * FROM events ORDER BY position")


def evidence(url: str) -> dict[str, bytes]:
    """Every segment's file."""
    folder = side_path(url, ".evidence")
    return {p.name: p.read_bytes() for p in folder.iterdir()} if folder.exists() else {}


def missing(url: str) -> bool:
    """Say whether no ledger stands there."""
    try:
        Ledger.open(url, create=False).close()
    except LedgerUnreachable as error:
        return "found nothing" in str(error)
    return False


def fork(reason: object) -> ExperimentForked:
    return ExperimentForked(parent="p", reason=str(reason))


@pytest.fixture
def small(store_urls: Urls) -> str:
    """A ledger of 60 events, a segment in it."""
    url = store_urls("small")
    with Ledger.open(url) as ledger:
        write_segment(ledger, {"a": [1]})
        for number in range(3):
            ledger.append("job", [fork(f"{number}.{n}") for n in range(20)], key=str(number))
    return url


@pytest.fixture
def many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a few events each, so that ranges and members do not meet."""
    monkeypatch.setattr(archive_writer, "CHUNK_BYTES", 2_000)


def exported(url: str, to: Path, **options: Any) -> Path:
    with Ledger.open(url, read_only=True) as ledger:
        export_archive(ledger, to, **options)
    return to


def imported(archive: Path, to: str) -> Any:
    with ArchiveFile.open(archive) as opened, Ledger.open(to) as ledger:
        return import_archive(opened, ledger)


@pytest.mark.usefixtures("many_members")
def test_there_and_back_bit_for_bit(store_urls: Urls, tmp_path: Path) -> None:
    source = store_urls("source")
    write_sample(source, iterations=2).close()
    archive = exported(source, tmp_path / "one.tar")
    done = imported(archive, store_urls("copy"))
    assert rows(store_urls("copy")) == rows(source)
    assert evidence(store_urls("copy")) == evidence(source)
    assert (done.imported, done.already) == (len(rows(source)), 0)
    assert done.segments == len(evidence(source)) > 10
    again = exported(store_urls("copy"), tmp_path / "two.tar")
    assert again.read_bytes() == archive.read_bytes(), "the same ledger gives the same file"
    with ArchiveFile.open(archive) as opened:
        assert len(opened.chunks) > 20
        assert opened.damage is None
        assert opened.end["events"] == len(rows(source))
    with Ledger.open(store_urls("copy")) as copy:
        assert copy.append("job", fork("next")).first == len(rows(source))


def test_from_one_store_to_the_other_and_back(tmp_path: Path, postgres_url: str) -> None:
    """The same events give the same archive, whichever store they went through."""
    first, last = new_url("sqlite", tmp_path, "first"), new_url("sqlite", tmp_path, "last")
    write_sample(first, iterations=1).close()
    archives = [exported(first, tmp_path / "0.tar")]
    for number, url in enumerate((postgres_url, last), 1):
        imported(archives[-1], url)
        assert rows(url) == rows(first)
        assert evidence(url) == evidence(first)
        archives.append(exported(url, tmp_path / f"{number}.tar"))
    assert len({archive.read_bytes() for archive in archives}) == 1
    for url in (first, postgres_url, last):
        assert imported(archives[1], url).imported == 0, "each knows it as its own"


def test_common_tools_read_it(small: str, tmp_path: Path) -> None:
    archive = exported(small, tmp_path / "a.tar")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
        assert names[0] == "shiftbook-archive.json"
        assert names[-1] == "end.json"
        member = opened.extractfile(names[1])
        assert member is not None
        text = pa.CompressedInputStream(pa.py_buffer(member.read()), "zstd").read()
    assert text.splitlines() == [row[10] for row in rows(small)]


@pytest.mark.usefixtures("many_members")
def test_ranges_one_after_the_other(small: str, store_urls: Urls, tmp_path: Path) -> None:
    for first, last in ((0, 16), (17, 17), (18, 45), (40, 59)):
        archive = exported(small, tmp_path / "part.tar", first=first, last=last)
        done = imported(archive, store_urls("copy"))
        assert (done.first, done.last) == (first, last)
        assert rows(store_urls("copy")) == rows(small)[: last + 1]


def test_a_range_needs_the_event_before_it(small: str, store_urls: Urls, tmp_path: Path) -> None:
    archive = exported(small, tmp_path / "part.tar", first=20)
    with pytest.raises(ArchiveMismatch, match="ends at position 19 or later, found 0 events"):
        imported(archive, store_urls("empty"))
    with Ledger.open(store_urls("other")) as other:
        other.append("job", [fork(n) for n in range(20)])
    before = rows(store_urls("other"))
    with pytest.raises(ArchiveMismatch, match="the event at position 19 that the archive follows"):
        imported(archive, store_urls("other"))
    assert rows(store_urls("other")) == before


@pytest.mark.parametrize("differs_at", [0, 30, 59])
def test_it_mixes_with_no_other_ledger(
    small: str, store_urls: Urls, tmp_path: Path, differs_at: int
) -> None:
    archive = exported(small, tmp_path / "a.tar")
    if differs_at:
        imported(exported(small, tmp_path / "b.tar", last=differs_at - 1), store_urls("o"))
    with Ledger.open(store_urls("o")) as other:
        other.append("job", fork("mine"))
    before = rows(store_urls("o"))
    with pytest.raises(ArchiveMismatch, match=f"event at position {differs_at}, found another"):
        imported(archive, store_urls("o"))
    assert rows(store_urls("o")) == before
    assert not evidence(store_urls("o"))


def test_a_ledger_that_went_on_already_holds_it(small: str, tmp_path: Path) -> None:
    archive = exported(small, tmp_path / "a.tar")
    with Ledger.open(small) as ledger:
        ledger.append("job", fork("more"))
    done = imported(archive, small)
    assert (done.already, done.imported) == (60, 0)
    assert len(rows(small)) == 61


def test_an_interrupted_import_goes_on(store_urls: Urls, tmp_path: Path) -> None:
    source = store_urls("source")
    with Ledger.open(source) as ledger:
        for _ in range(3):
            ledger.append("job", [fork(n) for n in range(BATCH_EVENTS)])
    archive = exported(source, tmp_path / "a.tar")

    def interrupt(position: int) -> None:
        raise KeyboardInterrupt

    with ArchiveFile.open(archive) as opened, Ledger.open(store_urls("copy")) as copy:
        with pytest.raises(KeyboardInterrupt):
            import_archive(opened, copy, on_event=interrupt)
        assert copy.head().size == BATCH_EVENTS
        done = import_archive(opened, copy)
    assert (done.already, done.imported) == (BATCH_EVENTS, 2 * BATCH_EVENTS)
    assert rows(store_urls("copy")) == rows(source)


def test_a_writer_that_comes_between(small: str, store_urls: Urls, tmp_path: Path) -> None:
    """Somebody appends while the import runs: it stops and says where."""
    archive = exported(small, tmp_path / "a.tar")
    with ArchiveFile.open(archive) as opened, Ledger.open(store_urls("copy")) as copy:
        real = copy.restore

        def late(events: Any) -> None:
            copy.append("job", fork("mine"))
            real(events)

        copy.restore = late  # type: ignore[method-assign]
        with pytest.raises(InvalidEvent, match=r"stopped before position 0: .*expected pos"):
            import_archive(opened, copy)


def test_an_export_takes_what_stood_at_its_start(small: str, tmp_path: Path) -> None:
    with Ledger.open(small) as ledger:
        done = export_archive(
            ledger, tmp_path / "a.tar", on_event=lambda _: ledger.append("job", fork("later"))
        )
    assert done.last == 59
    assert len(rows(small)) == 120


@pytest.mark.parametrize(
    ("first", "last", "error"),
    [(60, None, UnknownPosition), (0, 60, UnknownPosition), (9, 8, InvalidInput)],
)
def test_a_range_that_is_not_there(
    small: str, tmp_path: Path, first: int, last: int | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        exported(small, tmp_path / "a.tar", first=first, last=last)
    assert not (tmp_path / "a.tar").exists()


def test_an_empty_ledger_has_nothing_to_export(store_urls: Urls, tmp_path: Path) -> None:
    Ledger.open(store_urls("empty")).close()
    with pytest.raises(UnknownPosition, match="empty"):
        exported(store_urls("empty"), tmp_path / "a.tar")


@pytest.mark.parametrize("damage", ["leaf", "gap", "line"])
def test_a_damaged_ledger_is_not_exported(small: str, tmp_path: Path, damage: str) -> None:
    from shiftbook.ledger.canonical import leaf_hash

    data = b'{\n"position": 30}' if damage == "line" else b"{}"
    leaf = leaf_hash(data) if damage == "line" else b"x"
    changed = f"data = {literal(small, data)}, leaf = {literal(small, leaf)}"
    attack(
        small,
        "DELETE FROM events WHERE position = 30"
        if damage == "gap"
        else f"UPDATE events SET {changed} WHERE position = 30",
    )
    with pytest.raises((NotALedger, ArchiveError), match=r"30.*shiftbook verify"):
        exported(small, tmp_path / "a.tar")
    assert [p.name for p in tmp_path.glob("*.tar*")] == []
    assert not list(tmp_path.glob(".*draft"))


def test_nothing_but_an_archive_is_replaced(small: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"somebody's")
    with pytest.raises(ArchiveError, match="not replaced"):
        exported(small, other)
    assert other.read_bytes() == b"somebody's"
    target = exported(small, tmp_path / "a.tar", last=5)
    assert exported(small, target).stat().st_size > 0
    with ArchiveFile.open(target) as opened:
        assert opened.range.last == 59


def test_the_ledgers_own_file_is_not_replaced(tmp_path: Path) -> None:
    url = new_url("sqlite", tmp_path)
    with Ledger.open(url) as ledger:
        ledger.append("job", fork("r"))
    file = tmp_path / "ledger.db"
    before = file.read_bytes()
    with pytest.raises(ArchiveError, match="not replaced"):
        exported(url, file)
    assert file.read_bytes() == before


def test_no_space_leaves_the_old_archive_and_no_draft(small: str, tmp_path: Path) -> None:
    target = exported(small, tmp_path / "a.tar", last=5)
    before = target.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger.open(small, read_only=True) as ledger:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            with pytest.raises(ArchiveError, match="give it space"):
                export_archive(ledger, target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_bytes() == before
    assert not list(tmp_path.glob(".*draft"))


KILLED = """
import os, signal, sys
from pathlib import Path
from shiftbook.ledger.archive import export_archive
from shiftbook.ledger.ledger import Ledger
with Ledger.open(sys.argv[1]) as ledger:
    export_archive(
        ledger, Path(sys.argv[2]), on_event=lambda at: at == 40 and os.kill(os.getpid(), 9)
    )
"""


def test_a_killed_export_leaves_a_draft_that_the_next_one_takes_over(
    small: str, store_urls: Urls, tmp_path: Path
) -> None:
    target = tmp_path / "a.tar"
    command = [sys.executable, "-c", KILLED, small, str(target)]
    died = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not target.exists()
    assert (tmp_path / ".a.tar.draft").exists()
    exported(small, target)
    assert not (tmp_path / ".a.tar.draft").exists()
    imported(target, store_urls("copy"))
    assert rows(store_urls("copy")) == rows(small)


def test_two_exports_to_one_name(small: str, tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path / "a.tar", Range(0, 0, None))
    with pytest.raises(ArchiveError, match="another process"):
        exported(small, tmp_path / "a.tar")
    writer.abandon()
    exported(small, tmp_path / "a.tar")


def test_sections_travel_along(small: str, store_urls: Urls, tmp_path: Path) -> None:
    sections = {"notes": b"one\n", "tiles/0/000": bytes(5000), "empty": b""}
    archive = exported(small, tmp_path / "a.tar", sections=sections)
    taken: dict[str, bytes] = {}

    def take(name: str, data: bytes) -> bool:
        taken[name] = data
        return name == "notes"

    with ArchiveFile.open(archive) as opened, Ledger.open(store_urls("copy")) as copy:
        assert opened.section_names == tuple(sections)
        assert opened.end["sections"] == list(sections)
        done = import_archive(opened, copy, restore_section=take)
        with pytest.raises(KeyError):
            opened.section("others")
    assert taken == sections
    assert done.sections == ("tiles/0/000", "empty")
    for name in ("Heads", "../x", "/x", ""):
        with pytest.raises(ArchiveError, match="section's name"):
            exported(small, tmp_path / "b.tar", sections={name: b""})
    assert not (tmp_path / "b.tar").exists()


def test_evidence_wherever_fsspec_reaches(store_urls: Urls, tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").rm("/", recursive=True)
    source = store_urls("source")
    write_sample(source, schedules=("dynamic",), iterations=1).close()
    archive = exported(source, tmp_path / "a.tar")
    with (
        ArchiveFile.open(archive) as opened,
        Ledger.open(store_urls("copy"), evidence="memory://there") as copy,
    ):
        import_archive(opened, copy)
        shutil.rmtree(side_path(source, ".evidence"))
        again = tmp_path / "b.tar"
        export_archive(copy, again)
    assert again.read_bytes() == archive.read_bytes()
    assert not evidence(store_urls("copy"))


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_an_export_without_a_segment_says_so(store_urls: Urls, tmp_path: Path, damage: str) -> None:
    source = store_urls("source")
    write_sample(source, schedules=("dynamic",), iterations=1).close()
    file = next(side_path(source, ".evidence").iterdir())
    file.unlink() if damage == "missing" else file.write_bytes(b"other")
    with Ledger.open(source, read_only=True) as ledger:
        done = export_archive(ledger, tmp_path / "a.tar")
    assert done.missing_segments == 1
    assert file.name in done.missing[0]
    assert damage in done.missing[0]
    imported(tmp_path / "a.tar", store_urls("copy"))
    assert rows(store_urls("copy")) == rows(source)
    assert file.name not in evidence(store_urls("copy"))


# -- files that are none, and archives that no export writes ---------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"x", b"shiftbook-archive.json", b"shiftbook-archive.json\0", bytes(5000)]
)
def test_a_file_that_is_no_archive(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(content)
    with pytest.raises(ArchiveError) as caught:
        ArchiveFile.open(file)
    assert "\n" not in str(caught.value)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ArchiveError, match="check the path"):
            ArchiveFile.open(path)


def forged(path: Path, lines: list[bytes], last: int) -> Path:
    """A whole archive with any bytes for its events, from position 0."""
    writer = ArchiveWriter(path, Range(0, last, None, "tests"))
    for line in lines:
        writer.event(line)
    writer._next = last + 1
    writer.finish(0)
    return path


def envelope(position: object = 0, **changes: Any) -> bytes:
    import orjson

    value = {
        "position": position, "job": "j", "version": position, "type": "T", "schema": 1,
        "occurred_ns": 0, "recorded_ns": 0, "writer": "w", "sequence": position, "actor": "a",
        "body": {},
    }  # fmt: skip
    return orjson.dumps({**value, **changes})


def test_the_forger_of_these_tests_can_write_a_good_one(store_urls: Urls, tmp_path: Path) -> None:
    imported(forged(tmp_path / "a.tar", [envelope(0), envelope(1)], 1), store_urls("copy"))
    assert len(rows(store_urls("copy"))) == 2


@pytest.fixture(scope="module", params=STORES)
def empty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ledger on each store that every import here has to leave empty."""
    url = new_url(request.param, tmp_path_factory.mktemp("empty"))
    Ledger.open(url).close()
    return url


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        ([envelope(0), envelope(2)], 1),
        ([envelope(0), envelope(1, version=5)], 1),
        ([envelope(0), envelope(1, sequence=5)], 1),
        ([envelope(0), envelope("1")], 1),
        ([envelope(0), envelope(1, job=7)], 1),
        ([envelope(0), envelope(1, recorded_ns=2**64 - 1)], 1),
        ([envelope(0), envelope(1, key=[])], 1),
        ([envelope(0), envelope(1, body=[])], 1),
        ([envelope(0), envelope(1, more=1)], 1),
        ([envelope(0), b"{"], 1),
        ([envelope(0), b""], 1),
        ([envelope(0), envelope(1)], 5),
        ([envelope(0), envelope(1), envelope(2)], 1),
        ([b" " * (MAX_CHUNK_BYTES + 10)], 0),
    ],
)
def test_whole_archives_of_what_is_no_history(
    empty: str, tmp_path: Path, lines: list[bytes], last: int
) -> None:
    archive = forged(tmp_path / "a.tar", lines, last)
    with pytest.raises((ArchiveError, InvalidEvent)) as caught:
        imported(archive, empty)
    assert "\n" not in str(caught.value)
    assert rows(empty) == []


def test_a_segment_of_another_name(empty: str, tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path / "a.tar", Range(0, 0, None, "tests"))
    writer.segment("0" * 64, b"other bytes")
    writer.event(envelope(0))
    writer.finish(0)
    with pytest.raises(ArchiveError, match="that SHA-256"):
        imported(tmp_path / "a.tar", empty)
    assert rows(empty) == []
    assert not evidence(empty)


# -- the commands ----------------------------------------------------------------------------------


def run(*words: object) -> Any:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_commands(small: str, store_urls: Urls, tmp_path: Path) -> None:
    import json

    out, copy = tmp_path / "a.tar", store_urls("copy")
    done = run("export", "--ledger", small, "-o", out, "--format", "json")
    assert done.exit_code == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["events"], value["missing_segments"]) == (60, 0)
    assert value["bytes"] == out.stat().st_size
    done = run("import", "--ledger", copy, out, "--format", "json")
    assert json.loads(done.stdout)["imported"] == 60
    assert rows(copy) == rows(small)
    part = tmp_path / "part.tar"
    assert run("export", "--ledger", small, "-o", part, "--since", 10, "--until", 20).exit_code == 0
    none = run("import", "--ledger", store_urls("none"), part)
    assert none.exit_code == 2
    assert none.stderr.count("\n") == 1
    assert "begins at 0 first" in none.stderr
    assert missing(store_urls("none"))


@pytest.mark.parametrize("content", [b"", b"text", os.urandom(3000)])
def test_a_wrong_file_is_one_line_and_makes_no_ledger(
    store_urls: Urls, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    for words in (
        ("import", "--ledger", store_urls("n"), tmp_path / "a.tar"),
        ("verify", tmp_path / "a.tar"),
    ):
        done = run(*words)
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""
    assert missing(store_urls("n"))


MEASURED = """
import resource, sys
from pathlib import Path
from shiftbook.ledger.archive import export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import verify
act, url, archive = sys.argv[1:]
def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak_mb()
if act == "export":
    with Ledger.open(url) as ledger:
        export_archive(ledger, Path(archive))
elif act == "verify":
    verify(archive, integrity_only=True)
else:
    with ArchiveFile.open(Path(archive)) as opened, Ledger.open(url) as ledger:
        import_archive(opened, ledger)
print(peak_mb() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_the_ledger(store_urls: Urls, tmp_path: Path) -> None:
    """60 MB are four members and a batch; 200,000 events are 240 MB, each with a key of its own."""
    archive = tmp_path / "a.tar"
    with Ledger.open(store_urls("ledger")) as ledger:
        for number in range(400):
            batch = [fork(f"{number} " + os.urandom(400).hex()) for _ in range(500)]
            ledger.append("job", batch, key=str(number))
    grown = {}
    for act, name in (("export", "ledger"), ("verify", "ledger"), ("import", "copy")):
        command = [sys.executable, "-c", MEASURED, act, store_urls(name), str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        grown[act] = float(done.stdout)
    print({act: f"{mb:.0f} MB" for act, mb in grown.items()})
    assert max(grown.values()) < 120, grown
