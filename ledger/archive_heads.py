"""Signed heads inside an archive: the section that export writes and import restores."""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING

import orjson

from shiftbook.ledger.errors import ArchiveError, ArchiveMismatch, InvalidNote
from shiftbook.ledger.signed_note import SignedHead

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger

HEADS_SECTION = "heads"
"""A line of JSON for each head, smallest first: its number of events, its note in base64."""


def heads_section(ledger: Ledger, first: int, last: int) -> dict[str, bytes]:
    """The section of an archive of these positions, by its name.

    None where the archive does not begin at 0, since such a range has no tree, and where no head
    covers only events of it.
    """
    if first:
        return {}
    ledger.require_keys()
    lines = [
        json.dumps({"size": head.size, "note": base64.b64encode(head.data()).decode()})
        for head in ledger.tree().heads()
        if head.size <= last + 1
    ]
    return {HEADS_SECTION: ("\n".join(lines) + "\n").encode()} if lines else {}


def read_heads(data: bytes) -> list[tuple[int, bytes]]:
    """(size, note) of the heads of a section, not verified; raises ArchiveError."""
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            entry = orjson.loads(line)
            size, note = entry["size"], base64.b64decode(entry["note"], validate=True)
            if type(size) is not int:
                raise TypeError
            found.append((size, note))
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise ArchiveError(
                f"expected a head in line {number} of the section {HEADS_SECTION}, found "
                f"{line[:60]!r}; restore the archive from a copy"
            ) from error
    return found


def parsed_heads(data: bytes) -> list[SignedHead]:
    """Heads of a section, smallest first, not verified; raises ArchiveError."""
    found: list[SignedHead] = []
    for size, note in read_heads(data):
        try:
            head = SignedHead.parse(note)
        except InvalidNote as error:
            raise ArchiveError(f"expected a signed head of {size} events, found {error}") from error
        before = found[-1].size if found else 0
        if head.size != size or size <= before:
            raise ArchiveError(
                f"expected a head of {size} events, more than {before}, in the section "
                f"{HEADS_SECTION}, found one of {head.size}; no build writes this; keep the file "
                "for evidence"
            )
        found.append(head)
    return found


def new_heads(ledger: Ledger, data: bytes) -> list[SignedHead]:
    """Heads of a section that a ledger lacks, smallest first; nothing is written.

    Raises ArchiveError where the section is damaged, ArchiveMismatch where the ledger has another
    head of one size, or a later one than a head that it lacks.
    """
    known = {head.size: head.data() for head in ledger.tree().heads()}
    after = max(known, default=0)
    found = []
    for head in parsed_heads(data):
        if head.size in known:
            if known[head.size] != head.data():
                raise ArchiveMismatch(
                    f"expected the archive's head of {head.size} events, found another in "
                    f"{ledger.url}: one of them is of another history; keep both for evidence"
                )
        elif head.size <= after:
            raise ArchiveMismatch(
                f"expected a ledger without later heads than {head.size} events, found one of "
                f"{after} in {ledger.url}; import into a new ledger"
            )
        else:
            found.append(head)
    return found


def restore_heads(ledger: Ledger, data: bytes) -> None:
    """Put the heads of an archive into a ledger that holds its events, notes kept bit for bit.

    Heads that stand there already must be the same. Raises ArchiveError or ArchiveMismatch.
    """
    tree = ledger.tree()
    last = tree.last_head()
    after = 0 if last is None else last.size
    for head in new_heads(ledger, data):
        tree.add_head(head, after, [])
        after = head.size
    if after:
        tree.complete(after)
