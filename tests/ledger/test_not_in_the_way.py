"""Goal: reading a large ledger blocks nobody, and opening one does not read it.

Method: while the columnar copy is built, at each of its batches, another handle that waits a
fraction of a second for the lock appends, and others read; what a ledger reads as it is opened is
counted, in rows at its connections and in bytes at the operating system.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger import mirror_build
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.store import Store
from shiftbook.ledger.transaction import Transaction

LOCK_LIMIT_S = 0.5
"""Far less than a build that held the lock would take, since the append would wait inside of it."""

EVENTS = 6_000
OPEN_ROWS = 16
"""Rows that an opening may ask for: the head, what the tables are, and some leeway."""


def grow(ledger: Ledger, events: int) -> None:
    for start in range(0, events, 1_000):
        count = min(1_000, events - start)
        ledger.append("job", [ExperimentForked(parent="p", reason="r" * 100)] * count)


def test_a_build_of_the_copy_keeps_nobody_waiting(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_build, "BATCH_EVENTS", 500)
    during: list[int] = []
    real = mirror_build._take_in
    with (
        Ledger.open(store_url) as first,
        Ledger.open(store_url, lock_timeout_s=LOCK_LIMIT_S) as writer,
        Ledger.open(store_url, read_only=True) as reader,
    ):
        grow(first, 2_000)

        def take_in(*args: Any, **values: Any) -> None:
            for moment in ("before", "after"):
                receipt = writer.append("job", ExperimentForked(parent="p", reason=moment))
                during.append(receipt.first)
                assert reader.event(receipt.first).body["reason"] == moment
                assert reader.state().job("job").version == receipt.last_version
                if moment == "before":
                    real(*args, **values)

        monkeypatch.setattr(mirror_build, "_take_in", take_in)
        with Mirror.open(reader, ["events"]) as mirror:
            assert mirror.size == 2_000
        monkeypatch.setattr(mirror_build, "_take_in", real)
        assert during == list(range(2_000, 2_000 + len(during)))
        assert len(during) >= 2 * 4, "each of several batches"
        with Mirror.open(reader, ["events"]) as mirror:
            assert mirror.size == 2_000 + len(during)


def counted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all answers that a ledger gets from now on."""
    sizes: list[int] = []

    def watched(real: Any) -> Any:
        def ask(*args: Any, **values: Any) -> Any:
            found = real(*args, **values)
            sizes.append(len(found))
            return found

        return ask

    monkeypatch.setattr(Store, "_ask", watched(Store._ask))
    monkeypatch.setattr(Transaction, "ask", watched(Transaction.ask))
    return sizes


@pytest.mark.parametrize("read_only", [False, True])
def test_opening_asks_for_a_few_rows(
    store_url: str, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    with Ledger.open(store_url) as ledger:
        grow(ledger, EVENTS)
        ledger.state().job("job")
    with monkeypatch.context() as patch:
        sizes = counted_rows(patch)
        with Ledger.open(store_url, read_only=read_only) as ledger:
            assert ledger.head().size == EVENTS
            assert 0 < sum(sizes) <= OPEN_ROWS
            if not read_only:
                ledger.append("job", ExperimentForked(parent="p", reason="next"))
                assert sum(sizes) <= 2 * OPEN_ROWS, "nor does the first append"


def bytes_read() -> int:
    """What this process has read, from wherever."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("read_only", [False, True])
def test_opening_reads_little_of_the_file(tmp_path: Path, read_only: bool) -> None:
    """Beneath the statements: SQLite itself scans nothing to answer them."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger.open(url) as ledger:
        grow(ledger, EVENTS)
    with Ledger.open(url, read_only=read_only) as ledger:  # imports are paid
        ledger.head()
    size = (tmp_path / "ledger.db").stat().st_size
    before = bytes_read()
    with Ledger.open(url, read_only=read_only) as ledger:
        assert ledger.head().size == EVENTS
        assert bytes_read() - before < size / 10
