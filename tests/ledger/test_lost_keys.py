"""Goal: a table whose key was taken away makes neither `sign` nor `export` a search for each page.

Method: whoever owns the database makes each table anew without its key. What signs, exports or
imports is refused with words, after as many reads of a long ledger as of a short one; pages are
made small, and the reads of a whole ledger are counted beside it, so that the count counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger import store as store_module
from shiftbook.ledger.archive import export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_heads import heads_section
from shiftbook.ledger.errors import NotALedger
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.signing_keys import Ed25519Signer
from shiftbook.ledger.store import Store
from shiftbook.ledger.tiles import write_tiles
from tests.ledger.stores import attack, new_url

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
SHORT, LONG = 20, 200
MOST_READS = 12


def written(url: str, events: int) -> None:
    """A ledger with a head at its half."""
    with Ledger.open(url) as ledger:
        for half in range(2):
            some = [ExperimentForked(parent="p", reason=f"{half} {n}") for n in range(events // 2)]
            ledger.append("job", some)
            if not half:
                HeadSigner(ledger, KEY).sign()


def without_key(url: str, table: str) -> None:
    """Make a table anew as its rows alone."""
    if url.startswith("sqlite"):
        attack(
            url,
            f"CREATE TABLE free AS SELECT * FROM {table}",
            f"DROP TABLE {table}",
            f"ALTER TABLE free RENAME TO {table}",
        )
    else:
        attack(url, f"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey")


@contextmanager
def reads(patch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Everything that is asked of a store."""
    asked: list[None] = []
    read = Store._read

    def counted(self: Store, act: Callable[[Any], Any]) -> Any:
        asked.append(None)
        return read(self, act)

    with patch.context() as within:
        within.setattr(Store, "_read", counted)
        within.setattr(store_module, "READ_ROWS", 4)
        yield asked


Act = Callable[[Ledger, Path], object]


def imported(ledger: Ledger, folder: Path) -> None:
    with ArchiveFile.open(folder / "whole.tar") as archive:
        import_archive(archive, ledger)


ACTS: dict[str, Act] = {
    "sign": lambda ledger, folder: HeadSigner(ledger, KEY).sign(),
    "export": lambda ledger, folder: export_archive(ledger, folder / "made.tar"),
    "the heads of an export": lambda ledger, folder: heads_section(ledger, 0, 9),
    "tiles": lambda ledger, folder: write_tiles(ledger, folder / "tiles"),
    "import": imported,
}


@pytest.mark.parametrize("table", ["events", "heads", "nodes"])
def test_what_reads_all_is_refused_after_a_few_reads(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    store = store_url.partition(":")[0].partition("+")[0]
    counts: dict[int, list[int]] = {}
    for events in (SHORT, LONG):
        folder = tmp_path / str(events)
        folder.mkdir()
        url = new_url(store, folder)
        written(url, events)
        with Ledger.open(url) as ledger:
            export_archive(ledger, folder / "whole.tar")
            with reads(monkeypatch) as asked:
                export_archive(ledger, folder / "again.tar")
            assert len(asked) > events // 4, "a whole ledger is read to its end"
        without_key(url, table)
        counts[events] = []
        for name, act in ACTS.items():
            with Ledger.open(url) as ledger, reads(monkeypatch) as asked:
                with pytest.raises(NotALedger, match=f"expected the table {table} .*with its key"):
                    act(ledger, folder)
                counts[events].append(len(asked))
                assert 0 < len(asked) <= MOST_READS, name
        assert not (folder / "made.tar").exists()
        assert not (folder / "tiles").exists()
    assert counts[SHORT] == counts[LONG]


def test_a_ledger_that_was_never_signed_has_tables_enough(store_url: str, tmp_path: Path) -> None:
    with Ledger.open(store_url) as ledger:
        ledger.append("job", ExperimentForked(parent="p", reason="r"))
        ledger.require_keys()
        export_archive(ledger, tmp_path / "made.tar")
        assert HeadSigner(ledger, KEY).sign() is not None
