"""Goal: an archive whose heads do not fit a ledger is refused before anything of it is written.

Method: a ledger holds a beginning of the archive, bit for bit, and a head that the archive's do not
allow; the import must leave it as it was, event for event, evidence included.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shiftbook.ledger.archive import export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_heads import HEADS_SECTION, heads_section, restore_heads
from shiftbook.ledger.errors import ArchiveError, ArchiveMismatch
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.signing_keys import Ed25519Signer

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
OTHER = Ed25519Signer("example.com/runs", bytes(32))
EVENTS = 6
SIGNED = (3, EVENTS)
"""Sizes of the heads in the archive."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A ledger of some events, with heads over a half and over all of them."""
    path = tmp_path / "source.db"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        for number in range(EVENTS):
            ledger.append("job", ExperimentForked(parent="p", reason=str(number)))
            if number + 1 in SIGNED:
                HeadSigner(ledger, KEY).sign()
    return path


def archive_of(
    source: Path, target: Path, events: int, sections: dict[str, bytes] | None = None
) -> Path:
    """The first events of a ledger as an archive, with their heads where none are given."""
    with Ledger.open(f"sqlite:///{source}", read_only=True) as ledger:
        if sections is None:
            sections = heads_section(ledger, 0, events - 1)
        export_archive(ledger, target, last=events - 1, sections=sections)
    return target


def brought_in(archive: Path, ledger: Ledger) -> int:
    """Import an archive with its heads; how many events were new."""

    def restore(name: str, data: bytes) -> bool:
        restore_heads(ledger, data)
        return name == HEADS_SECTION

    with ArchiveFile.open(archive) as opened:
        return import_archive(opened, ledger, restore_section=restore).imported


@pytest.mark.parametrize(
    ("held", "signer", "why"),
    [(3, OTHER, "another history"), (5, KEY, "without later heads than 3 events")],
    ids=["another head of one size", "a later head, and not the one before"],
)
def test_heads_are_held_against_each_other_first(
    source: Path, tmp_path: Path, store_url: str, held: int, signer: Ed25519Signer, why: str
) -> None:
    whole = archive_of(source, tmp_path / "whole.tar", EVENTS)
    part = archive_of(source, tmp_path / "part.tar", held, sections={})
    with Ledger.open(store_url) as ledger:
        assert brought_in(part, ledger) == held
        HeadSigner(ledger, signer).sign()
        before = [row.data for row in ledger.rows()], [h.data() for h in ledger.tree().heads()]
        for _ in range(2):
            with pytest.raises(ArchiveMismatch, match=why):
                brought_in(whole, ledger)
            after = [row.data for row in ledger.rows()], [h.data() for h in ledger.tree().heads()]
            assert after == before


def test_a_section_that_holds_no_heads_is_refused_first(
    source: Path, tmp_path: Path, store_url: str
) -> None:
    archive = archive_of(source, tmp_path / "a.tar", EVENTS, {HEADS_SECTION: b"text\n"})
    with Ledger.open(store_url) as ledger:
        with pytest.raises(ArchiveError, match="expected a head in line 1"):
            brought_in(archive, ledger)
        assert ledger.head().size == 0


def test_a_ledger_with_the_same_heads_goes_on(source: Path, tmp_path: Path, store_url: str) -> None:
    whole = archive_of(source, tmp_path / "whole.tar", EVENTS)
    part = archive_of(source, tmp_path / "part.tar", 4)
    with Ledger.open(store_url) as ledger:
        assert brought_in(part, ledger) == 4
        assert brought_in(whole, ledger) == EVENTS - 4
        assert [head.size for head in ledger.tree().heads()] == list(SIGNED)
