"""Goal: evidence segments are bound by their hash, durable, repeatable and checked.

Method: segments of real sizes are written, read, altered, cut, removed and written again, also by
threads at once and under a limit on file sizes that stands for a full disk.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shiftbook.ledger.errors import EvidenceError
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.evidence import (
    evidence_folder,
    read_segment,
    write_segment,
    write_segments,
)
from shiftbook.ledger.ledger import Ledger

ROWS = {
    "uid": [f"{n}/{m}" for n in range(64) for m in range(8)],
    "reward": [float(n % 3) for n in range(512)],
    "group": [n // 8 for n in range(512)],
}


def test_beside_the_ledger_under_its_hash(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        segment = write_segment(ledger, ROWS)
        file = tmp_path / "ledger.db.evidence" / f"{segment.sha256}.parquet"
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
    "change", [{"rows": 511}, {"columns": ("uid", "reward")}, {"bytes": 1}], ids=str
)
def test_a_binding_that_does_not_fit_the_file(tmp_path: Path, change: dict) -> None:
    segment = write_segment(tmp_path / "e", ROWS)
    with pytest.raises(EvidenceError, match="the event that binds it"):
        read_segment(tmp_path / "e", segment.model_copy(update=change))


@pytest.mark.parametrize(
    "rows", [{"a": [1, 2], "b": [1]}, {"a": [1, "x"]}, {"a": [object()]}, {"a": [2**70]}], ids=str
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
