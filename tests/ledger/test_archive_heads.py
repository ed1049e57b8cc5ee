"""Goal: signed heads travel inside an archive, bit for bit, into a ledger on either store.

Method: a signed run is exported, judged as a file, imported into a new ledger and judged there
against the heads outside; then heads that do not fit are put in their place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shiftbook.ledger.archive import export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_heads import (
    HEADS_SECTION,
    heads_section,
    read_heads,
    restore_heads,
)
from shiftbook.ledger.errors import ArchiveError, ArchiveMismatch
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import verify
from tests.verify.signed_run import EVENTS, KEY, SIZES, THIEF, Signed, write_signed


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


@pytest.fixture
def archive(signed: Signed, tmp_path: Path) -> Path:
    path = tmp_path / "archive.tar"
    with Ledger.open(f"sqlite:///{signed.path}", read_only=True) as ledger:
        sections = heads_section(ledger, 0, EVENTS - 1)
        export_archive(ledger, path, sections=sections)
    return path


def outside(signed: Signed) -> Outside:
    return Outside.read([str(signed.heads)], [KEY.verifier.text()])


def test_an_archive_is_held_against_the_heads_outside(signed: Signed, archive: Path) -> None:
    verdict = verify(str(archive), outside=outside(signed), require_signed=True)
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
    assert verdict.protected_until == EVENTS - 1
    assert verdict.coverage.row("heads").status == "checked"


def test_heads_come_into_a_ledger_as_they_were(
    signed: Signed, archive: Path, store_url: str
) -> None:
    with ArchiveFile.open(archive) as opened, Ledger.open(store_url) as ledger:
        notes = read_heads(opened.section(HEADS_SECTION))
        for _ in range(2):  # the second import finds all of it there
            done = import_archive(
                opened,
                ledger,
                restore_section=lambda name, data: restore_heads(ledger, data) is None,
            )
            assert done.sections == ()
        assert [(h.size, h.data()) for h in ledger.tree().heads()] == notes
        assert [size for size, _ in notes] == list(SIZES)
        again = archive.with_name("again.tar")
        export_archive(ledger, again, sections=heads_section(ledger, 0, EVENTS - 1))
        assert again.read_bytes() == archive.read_bytes()
        where = ledger.evidence
    verdict = verify(
        store_url,
        outside=outside(signed),
        require_signed=True,
        evidence=None if where is None else str(where),
    )
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
    assert verdict.protected_until == EVENTS - 1


def test_a_range_has_no_tree(signed: Signed) -> None:
    with Ledger.open(f"sqlite:///{signed.path}", read_only=True) as ledger:
        assert heads_section(ledger, 10, EVENTS - 1) == {}
        (data,) = heads_section(ledger, 0, SIZES[1] - 1).values()
        assert [size for size, _ in read_heads(data)] == list(SIZES[:2]), "no head beyond its end"


def test_another_head_of_one_size_is_refused(archive: Path, store_url: str) -> None:
    from shiftbook.ledger.signed_note import SignedHead

    forged = SignedHead.sign(SIZES[0], bytes(32), THIEF)
    line = heads_line(forged.size, forged.data())
    with ArchiveFile.open(archive) as opened, Ledger.open(store_url) as ledger:
        import_archive(opened, ledger)
        restore_heads(ledger, opened.section(HEADS_SECTION))
        with pytest.raises(ArchiveMismatch, match="another history"):
            restore_heads(ledger, line)


@pytest.mark.parametrize("data", [b"text\n", b'{"size": 3}\n', b'{"size": 1, "note": "?"}\n'])
def test_what_is_no_head_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(ArchiveError, match="expected a head in line 1"):
        read_heads(data)


def heads_line(size: int, note: bytes) -> bytes:
    import base64
    import json

    return json.dumps({"size": size, "note": base64.b64encode(note).decode()}).encode() + b"\n"
