"""Goal: evidence segments are bound by their hash, durable, repeatable and checked.

Method: segments of real sizes are written, read, altered, cut, removed and written again, also by
threads at once and under a limit on file sizes that stands for a full disk. Remote folders are
fsspec's memory:// and file://; writers are killed between writing a draft and naming it.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shiftbook.ledger import segment_place
from shiftbook.ledger.errors import EvidenceError, InvalidEvent
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.events.training import SamplesDropped
from shiftbook.ledger.evidence import (
    evidence_folder,
    read_segment,
    write_segment,
    write_segments,
)
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.segment_place import DRAFT_AGE_S, LocalFolder

ROWS = {
    "uid": [f"{n}/{m}" for n in range(64) for m in range(8)],
    "reward": [float(n % 3) for n in range(512)],
    "group": [n // 8 for n in range(512)],
}


def test_beside_the_ledger_under_its_hash(store_url: str) -> None:
    """Beside its file; that of a server in a folder of the user's, which is not there before."""
    with Ledger.open(store_url) as ledger:
        segment = write_segment(ledger, ROWS)
        file = ledger.beside(".evidence") / f"{segment.sha256}.parquet"
        if ledger.path is None:
            assert stat.S_IMODE(file.parents[1].stat().st_mode) == 0o700, "as private as the rows"
        else:
            assert evidence_folder(ledger) == file.parent
        assert file.stat().st_size == segment.bytes
        assert (segment.rows, segment.columns) == (512, ("uid", "reward", "group"))
        assert read_segment(ledger, segment).to_pydict() == ROWS
        assert [p.name for p in file.parent.iterdir()] == [file.name], "no draft is left behind"


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    one = write_segment(tmp_path / "one", ROWS)
    two = write_segment(tmp_path / "two", pa.table(ROWS))
    again = write_segment(tmp_path / "one", ROWS)
    assert one == two == again
    assert len(list((tmp_path / "one").iterdir())) == 1
    with_metadata = pa.table(ROWS).replace_schema_metadata({"host": "here"})
    assert write_segment(tmp_path / "one", with_metadata) == one
    assert write_segment(tmp_path / "one", {**ROWS, "group": [0] * 512}) != one


def test_several_at_once_equal_one_by_one(tmp_path: Path) -> None:
    parts = [ROWS, {"a": [1]}, {"a": []}, ROWS]
    together = write_segments(tmp_path / "together", parts)
    assert together == [write_segment(tmp_path / "single", part) for part in parts]
    assert together[0] == together[3]
    assert write_segments(tmp_path / "together", []) == []


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(0, 6).flatmap(
        lambda n: st.fixed_dictionaries(
            {
                "text": st.lists(st.text(max_size=6), min_size=n, max_size=n),
                "real": st.lists(st.floats(allow_nan=False), min_size=n, max_size=n),
                "whole": st.lists(st.integers(0, 2**63 - 1), min_size=n, max_size=n),
                "list": st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=n, max_size=n),
            }
        )
    )
)
def test_values_come_back(tmp_path: Path, rows: dict) -> None:
    assert read_segment(tmp_path / "e", write_segment(tmp_path / "e", rows)).to_pydict() == rows


def test_wide_integers_and_nan(tmp_path: Path) -> None:
    table = pa.table(
        {"u": pa.array([2**64 - 1], pa.uint64()), "r": pa.array([float("nan")], pa.float64())}
    )
    back = read_segment(tmp_path / "e", write_segment(tmp_path / "e", table))
    assert back["u"].to_pylist() == [2**64 - 1]
    assert back["r"].to_pylist()[0] != back["r"].to_pylist()[0]


@pytest.mark.parametrize("damage", ["missing", "cut", "bit", "empty", "other"])
def test_damage_is_said_and_repaired_by_writing_again(tmp_path: Path, damage: str) -> None:
    segment = write_segment(tmp_path / "e", ROWS)
    file = tmp_path / "e" / f"{segment.sha256}.parquet"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            {
                "cut": data[:-1],
                "bit": data[:50] + bytes([data[50] ^ 1]) + data[51:],
                "empty": b"",
                "other": b"not parquet at all",
            }[damage]
        )
    with pytest.raises(EvidenceError, match=segment.sha256) as caught:
        read_segment(tmp_path / "e", segment)
    assert "\n" not in str(caught.value)
    assert write_segment(tmp_path / "e", ROWS) == segment
    assert read_segment(tmp_path / "e", segment).num_rows == 512


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 511},
        {"columns": ("uid", "reward")},
        {"types": ("text", "float32", "int64")},
        {"types": ("text",)},
        {"bytes": 1},
    ],
    ids=str,
)
def test_a_binding_that_does_not_fit_the_file(tmp_path: Path, change: dict) -> None:
    segment = write_segment(tmp_path / "e", ROWS)
    with pytest.raises(EvidenceError, match="the event that binds it"):
        read_segment(tmp_path / "e", segment.model_copy(update=change))


@pytest.mark.parametrize(
    "rows",
    [{"a": [1, 2], "b": [1]}, {"a": [1, "x"]}, {"a": [object()]}, {"a": [2**70]}],
    ids=["lengths", "mixed", "objects", "too large"],
)
def test_rows_that_are_no_table(tmp_path: Path, rows: dict) -> None:
    with pytest.raises(EvidenceError, match="columns"):
        write_segment(tmp_path / "e", rows)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EvidenceError, match="make the folder writable"):
        write_segment(tmp_path / "file" / "e", ROWS)
    with pytest.raises(EvidenceError, match="restore it"):
        read_segment(tmp_path / "none", Segment(sha256="0" * 64, rows=0, columns=(), bytes=0))


def test_a_full_disk_leaves_no_torn_segment(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    write_segment(folder, {"a": [1]})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(EvidenceError, match="space"):
            write_segment(folder, ROWS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list(folder.iterdir())) == 1
    assert read_segment(folder, write_segment(folder, ROWS)).num_rows == 512


def test_threads_that_write_the_same_segment(tmp_path: Path) -> None:
    found: list[Segment] = []
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        found.append(write_segment(tmp_path / "e", ROWS))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(list((tmp_path / "e").iterdir())) == 1


def test_the_schema_is_bound_by_names_and_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "uid": pa.array(["0/0"]),
            "n": pa.array([1], pa.uint16()),
            "r": pa.array([0.5], pa.float32()),
            "b": pa.array([True]),
            "raw": pa.array([b"x"]),
            "many": pa.array([[1, 2]]),
            "part": pa.array([{"a": 1}]),
            "none": pa.array([None], pa.null()),
            "at": pa.array([0], pa.timestamp("ns")),
        }
    )
    segment = write_segment(tmp_path / "e", table)
    assert segment.types == (
        *("text", "uint16", "float32", "bool", "bytes", "list<int64>", "struct<a: int64>"),
        *("none", "other"),
    )
    assert read_segment(tmp_path / "e", segment).num_rows == 1
    # As schema 1 bound it: names alone.
    assert read_segment(tmp_path / "e", segment.model_copy(update={"types": None})).num_rows == 1


def test_a_long_list_in_an_event_is_refused_with_the_way_out(store_url: str) -> None:
    event = SamplesDropped(
        attempt="a1", iteration=0, uids=tuple(f"{n:08d}/0" for n in range(6000)), reason="r"
    )
    with Ledger.open(store_url) as ledger:
        with pytest.raises(InvalidEvent, match="the limit is 60000; put long lists into an evid"):
            ledger.append("job", event)
        assert ledger.head().size == 0
        write_segment(ledger, {"uid": list(event.uids)})


@pytest.fixture
def memory() -> str:
    """A remote folder of its own, in fsspec's memory."""
    import fsspec

    fsspec.filesystem("memory").rm("/", recursive=True)
    return "memory://bucket/book.evidence"


def test_a_folder_that_fsspec_reaches(store_url: str, memory: str) -> None:
    import fsspec

    with Ledger.open(store_url, evidence=memory) as ledger:
        segment = write_segment(ledger, ROWS)
        assert write_segment(memory, ROWS) == segment
        assert read_segment(ledger, segment).to_pydict() == ROWS
        assert not ledger.beside(".evidence").exists()
        (name,) = fsspec.filesystem("memory").find("/bucket")
        assert name.endswith(f"{segment.sha256}.parquet")
        fsspec.filesystem("memory").pipe_file(name, b"torn")
        with pytest.raises(EvidenceError, match=r"memory://bucket/.*4 bytes; restore"):
            read_segment(ledger, segment)
        write_segment(ledger, ROWS)
        assert read_segment(ledger, segment).num_rows == 512
        fsspec.filesystem("memory").rm(name)
        with pytest.raises(EvidenceError, match="found none; restore it"):
            read_segment(ledger, segment)


def test_a_file_url_is_the_folder_itself(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a%20b"
    segment = write_segment(url, ROWS)
    assert (tmp_path / "a b" / f"{segment.sha256}.parquet").exists()
    assert read_segment(tmp_path / "a b", segment) == read_segment(url, segment)


@pytest.mark.parametrize("url", ["nosuch://x/y", "ftp://user:secret@127.0.0.1:1/e"])
def test_what_fsspec_cannot_reach_is_said_without_credentials(url: str) -> None:
    with pytest.raises(EvidenceError, match="see that fsspec reaches it") as caught:
        write_segment(url, ROWS)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


DYING = """
import os, signal, sys
from pathlib import Path
from shiftbook.ledger.evidence import write_segment
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_segment(Path(sys.argv[1]), {"a": list(range(1000))})
"""


def test_drafts_of_writers_that_died_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "e"
    command = [sys.executable, "-c", DYING, str(folder)]
    died = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    (draft,) = folder.iterdir()
    assert segment_place.DRAFT.fullmatch(draft.name)
    segment = write_segment(folder, ROWS)
    assert draft.exists(), "a young one may be another writer's"
    os.utime(draft, (draft.stat().st_atime, draft.stat().st_mtime - DRAFT_AGE_S - 1))
    monkeypatch.setattr(LocalFolder, "_tidied", set())
    write_segment(folder, ROWS)
    assert [p.stem for p in folder.iterdir()] == [segment.sha256]


def test_the_draft_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    import fcntl

    draft = tmp_path / f".{'0' * 64}.{'0' * 8}"
    with draft.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(draft, (0, 0))
        assert LocalFolder(tmp_path).tidy() == 0
    assert LocalFolder(tmp_path).tidy() == 1
    assert not draft.exists()


def test_after_a_failed_sync_of_the_folder_its_files_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second sync may succeed without the names that the first one failed to write."""
    folder = tmp_path / "e"
    before = write_segment(folder, {"a": [1]})

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(segment_place, "sync_path", fail)
        with pytest.raises(EvidenceError, match="Input/output error"):
            write_segment(folder, ROWS)
    (new,) = (p for p in folder.iterdir() if p.stem != before.sha256)
    inode = new.stat().st_ino
    segment = write_segment(folder, ROWS)
    assert new.stat().st_ino != inode
    inode = new.stat().st_ino
    assert write_segment(folder, ROWS) == segment
    assert new.stat().st_ino == inode, "once is enough"
