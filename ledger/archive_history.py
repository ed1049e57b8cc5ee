"""Holds an archive against itself, from end to end, before a ledger takes anything of it.

A file may be whole and hold what no ledger wrote. Whatever can be known from the file alone is
asked here: segments under their own names, events that follow each other, heads that fit them.
"""

from __future__ import annotations

from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.archive_heads import HEADS_SECTION, parsed_heads
from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.envelope import StoredEvent, unseal
from shiftbook.ledger.errors import ArchiveError, InvalidEvent
from shiftbook.ledger.merkle import CompactRange
from shiftbook.ledger.segment_place import segment_sha256


def require_history(archive: ArchiveFile) -> None:
    """Raise ArchiveError where a whole archive holds what no ledger can have held.

    Reads it once; memory grows with the names of jobs and writers, and with the heads. What only
    the ledger can say, such as which version of a job comes before a range, is left to it. A second
    call of an open archive does nothing.
    """
    if archive.history:
        return
    for sha256, data in archive.segments():
        if segment_sha256(data) != sha256:
            raise ArchiveError(
                f"expected the bytes of {archive.where(sha256)} to have that SHA-256, found "
                "others; restore the archive from a copy"
            )
    roots = _roots(archive)
    tree = CompactRange()
    last: dict[tuple[str, str], int] = {}
    for position, data in archive.events():
        stored = checked_event(position, data)
        _follow(archive, stored, position, last)
        if roots:
            tree.append(leaf_hash(data))
            wanted = roots.get(tree.size)
            if wanted is not None and tree.root() != wanted:
                raise ArchiveError(
                    f"expected the root {wanted.hex()[:16]}… under {tree.size} events, as the head "
                    f"in {archive.path} says, found {tree.root().hex()[:16]}…: the head or the "
                    "events were changed; `shiftbook verify` says more; keep the file for evidence"
                )
    archive.history = True


def checked_event(position: int, data: bytes) -> StoredEvent:
    """An event with the kinds of values that a ledger's columns have; raise ArchiveError."""
    try:
        stored = unseal(data)
    except InvalidEvent as error:
        raise ArchiveError(f"the archive's event {position} is none: {error}") from error
    texts = (stored.job, stored.type, stored.writer, stored.actor)
    numbers = (
        *(stored.position, stored.version, stored.schema, stored.sequence),
        stored.recorded_ns,
    )
    if (
        not all(isinstance(value, str) and value for value in texts)
        or not all(type(value) is int and value < 2**63 for value in numbers)
        or not isinstance(stored.operation, str | None)
        or not isinstance(stored.key, str | None)
        or not isinstance(stored.body, dict)
    ):
        raise ArchiveError(
            f"expected the envelope of an event at position {position} of the archive, found "
            "values of other kinds; `shiftbook verify` says which"
        )
    return stored


def _follow(
    archive: ArchiveFile, stored: StoredEvent, position: int, last: dict[tuple[str, str], int]
) -> None:
    """Raise ArchiveError where an event is not the next one of the ledger, its job or its writer.

    ``last`` has the last number of each. In an archive that begins at 0 all begin at 0.
    """
    if stored.position != position:
        raise _not_next(archive, position, "position", position, stored.position)
    for what, name, found in (
        ("version", stored.job, stored.version),
        ("sequence", stored.writer, stored.sequence),
    ):
        before = last.get((what, name), None if archive.range.first else -1)
        if before is not None and found != before + 1:
            raise _not_next(archive, position, f"{what} of {name!r}", before + 1, found)
        last[what, name] = found


def _not_next(
    archive: ArchiveFile, position: int, what: str, expected: int, found: int
) -> ArchiveError:
    return ArchiveError(
        f"expected {what} {expected} at position {position} of {archive.path}, found {found}: no "
        "ledger held these events; `shiftbook verify` says more"
    )


def _roots(archive: ArchiveFile) -> dict[int, bytes]:
    """Root by number of events of the heads that an archive carries; raises ArchiveError."""
    if HEADS_SECTION not in archive.section_names:
        return {}
    if archive.range.first:
        raise ArchiveError(
            f"expected no signed heads in {archive.path}, which begins at position "
            f"{archive.range.first} and so has no tree, found some; no build writes this"
        )
    heads = parsed_heads(archive.section(HEADS_SECTION))
    if heads and heads[-1].size > archive.range.last + 1:
        raise ArchiveError(
            f"expected heads over at most the {archive.range.last + 1} events of {archive.path}, "
            f"found one over {heads[-1].size}; no build writes this; keep the file for evidence"
        )
    return {head.size: head.root for head in heads}
