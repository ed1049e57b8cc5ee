"""The first pass: are the stored bytes whole, in order, and the ones that were hashed.

Most ledgers are sound, so pages and blocks are first looked at by scan_block.py, which is fast and
says yes or no. From the first page on that it does not accept, each row is checked here and what is
wrong is said in full. Whatever the fast look accepts, this one accepts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shiftbook.ledger.canonical import decode, leaf_hash
from shiftbook.ledger.envelope import ENVELOPE_FIELDS, StoredEvent
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.tables import KNOWN, META_NAMES, REVISION, STORAGE_SCHEMA
from shiftbook.verify.coverage import Row
from shiftbook.verify.evidence import EvidenceFolder, Rows, RowSource
from shiftbook.verify.findings import Finding, FindingList
from shiftbook.verify.heads import HeadCheck
from shiftbook.verify.scan_block import COLUMNS, Block, Named, check_page
from shiftbook.verify.sources import EventSource, TableSource
from shiftbook.verify.stored import DamagedPages, RawRow

_TYPES: dict[str, type | tuple[type, ...]] = {
    "position": int,
    "job": str,
    "version": int,
    "type": str,
    "schema": int,
    "occurred_ns": int,
    "recorded_ns": int,
    "writer": str,
    "sequence": int,
    "actor": str,
    "operation": (str, type(None)),
    "cause": (int, type(None)),
    "key": (str, type(None)),
    "body": dict,
}
"""What each field of the envelope is."""

_CHANGED = "the file was edited, or the disk or a copy of it lost bytes"
_RESTORE_SEGMENT = (
    "Restore the segment's file from a copy; where the segments lie in another folder, name it "
    "with --evidence."
)
_RESTORE = "Restore the ledger from a copy; what stands from this position on proves nothing."


@dataclass
class IntegrityReport:
    """What the first pass found; ``sound_until`` is the last position before the first damage."""

    findings: FindingList = field(default_factory=FindingList)
    rows: list[Row] = field(default_factory=list)
    events: int = 0
    head: bytes | None = None
    """Leaf of the last sound event."""
    sound_until: int = -1


class Integrity:
    """Checks rows one after the other; use ``check`` on each, or ``take`` blocks, then ``finish``.

    Per row: position gapless from 0; version gapless within its job; sequence gapless within its
    writer; leaf equal to the hash of the bytes; the bytes an envelope with fields of their types;
    columns equal to the bytes; a cause before its effect; the events of one idempotency key one
    batch; evidence segments there and unaltered.
    """

    def __init__(self, rows: RowSource, heads: HeadCheck | None = None, first: int = 0) -> None:
        """``first`` is the position at which the range begins."""
        self._heads = heads
        self.report = IntegrityReport()
        self._row = Row("", "integrity", "stored bytes whole, in order and as hashed")
        self._evidence = Row("", "evidence", "evidence segments present and unaltered")
        self._evidence.idle = "no event binds a segment"
        self._source = rows
        self._first = first
        self._position = first - 1
        self._versions: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._batch: tuple[str, str] | None = None
        self._broken = False
        self.evidence_apart = False
        """Whether segments are left to whoever reads their rows; see ``take_segments``."""
        self.readable = True
        """False once the store gave up in the middle."""
        self.tree_damage: int | None = None
        """First position at which other bytes stand than those that were hashed, or none."""

    def check(self, row: RawRow) -> StoredEvent | None:
        """Check a row; the event where it and all before it are sound, else None."""
        before = self._row.findings
        self.report.events += 1
        self._gapless(row)
        stored = self._envelope(row)
        if stored is not None:
            self._order(stored, row.position)
        if self._row.findings > before:
            self._broken = True
        self._row.checks += 1
        if self._broken or stored is None:
            return None
        self.report.sound_until, self.report.head = stored.position, row.leaf
        self.segment(stored.position, stored.type, stored.body)
        return stored

    def take(self, block: Block) -> bool:
        """Take in a block that is sound by itself; False, and nothing is, where it does not fit.

        Hashes and segments are still to be given to ``take_hashes`` and ``segment``.
        """
        if self._broken or not block.sound or block.first != self._position + 1:
            return False
        pairs = (
            (self._versions, block.first_versions, block.versions),
            (self._sequences, block.first_sequences, block.sequences),
        )
        for known, first, _ in pairs:
            if any(number != known.get(name, -1) + 1 for name, number in first.items()):
                return False
        for known, _, last in pairs:
            known.update(last)
        self._position = self.report.sound_until = block.last
        self.report.head = block.head
        count = block.last + 1 - block.first
        self.report.events += count
        self._row.checks += count
        return True

    def take_hashes(self, block: Block, leaves: Sequence[bytes] | None) -> None:
        """Put the hashes of a block under the heads: by its leaves, else by its subtrees."""
        if self._heads is None:
            return
        if leaves is None:
            self._heads.take(block)
            return
        for leaf in leaves:
            self._heads.feed(leaf)

    def take_evidence(self, block: Block) -> None:
        """Take in what a block says of the evidence that its events name."""
        if self.evidence_apart:
            return
        self.take_segments(block.bound, block.problems)
        for position, type_, segment in block.segments:
            self.segment(position, type_, {"segment": segment})

    def take_segments(self, count: int, problems: Sequence[tuple[Named, Rows]]) -> None:
        """Take in segments that others have read, and what is wrong with some, in order."""
        self._evidence.checks += count - len(problems)
        for (position, type_, named), rows in problems:
            self._segment(position, type_, named, rows)

    @property
    def versions(self) -> Mapping[str, int]:
        """Last version of each job that was seen, in the order in which they began."""
        return self._versions

    @property
    def folder(self) -> Path | None:
        """Folder of the evidence, where other processes can read it too."""
        return self._source.folder if isinstance(self._source, EvidenceFolder) else None

    @property
    def sizes(self) -> Collection[int]:
        """Numbers of events at which a head stands."""
        return () if self._heads is None else self._heads.sizes

    def damaged(self, damage: DamagedPages) -> None:
        """Report that the store could not go on."""
        self._broken, self.readable = True, False
        self._damage_tree(damage.after + 1)
        self._flag(
            damage.after + 1,
            damage.expected,
            damage.found + damage.reason,
            _CHANGED,
        )

    def split_key(self, job: str, key: str, first: Any, last: Any, count: int) -> None:
        """Report an idempotency key whose events are no single batch."""
        self._broken = True
        self._flag(
            self._place(first),
            f"the events of key {key!r} of job {job!r} side by side",
            f"{count} events spread from {first!s:.40} to {last!s:.40}",
            "a retry was appended again instead of answered with its first receipt",
            (last,) if type(last) is int else (),
        )

    def _place(self, position: Any) -> int:
        """A position; where it is none and points at no place, what was flagged first does."""
        if type(position) is int and position >= 0:
            return position
        return min((f.position for f in self.report.findings), default=0)

    def hidden(self, count: int, position: Any) -> None:
        """Report rows that a reader who goes by position does not see."""
        self._flag(
            self._place(position),
            "each position once, from 0",
            f"{count} rows too many, one of them at position {position!r:.40}",
            "rows were forged in after the table's key was taken away",
        )

    @property
    def last(self) -> int:
        """Position of the last row that was checked."""
        return self._position

    def meta(self, rows: Sequence[tuple[Any, Any]]) -> None:
        """Check what the store says about itself: the names that are known, each once, as text."""
        listed = sorted(rows, key=repr)
        for name, value in listed:
            if name not in META_NAMES or not isinstance(value, str):
                self._flag(0, f"in the table meta only {', '.join(META_NAMES)}, as text",
                           f"{name!r:.60} with {value!r:.60}")  # fmt: skip
        schema = [value for name, value in listed if name == "storage_schema"]
        if schema not in [[str(known)] for known in range(1, STORAGE_SCHEMA + 1)]:
            self._flag(0, f"one storage schema from 1 to {STORAGE_SCHEMA} in the table meta",
                       f"{schema!r:.60}")  # fmt: skip

    def revision(self, found: Sequence[Any]) -> None:
        """Check what the store says of its derived tables: one known revision, or none at all."""
        if len(found) > 1 or any(value not in KNOWN for value in found):
            self._flag(0, f"one revision of {', '.join(KNOWN)} in the table {REVISION.name}",
                       f"{list(found)!r:.60}")  # fmt: skip

    def meta_damaged(self, reason: str) -> None:
        """Report that what the store says about itself cannot be read."""
        self._flag(0, f"readable tables meta and {REVISION.name}", reason)

    def finish(self) -> IntegrityReport:
        """The report, with its two rows of the coverage table."""
        self._row.checks = max(self._row.checks, self._row.findings)
        self.report.rows = [self._row, self._evidence]
        return self.report

    def _flag(
        self,
        at: int,
        expected: str,
        found: str,
        cause: str = _CHANGED,
        others: tuple[int, ...] = (),
        row: Row | None = None,
    ) -> None:
        row = row or self._row
        row.findings += 1
        at = max(0, at)
        action = _RESTORE if row is self._row else _RESTORE_SEGMENT
        self.report.findings.add(
            Finding(
                row.invariant,
                "stop",
                "",
                at,
                tuple(sorted({at, *others})),
                expected,
                found,
                cause,
                action,
            )
        )

    def _damage_tree(self, at: int) -> None:
        if self.tree_damage is None or at < self.tree_damage:
            self.tree_damage = max(0, at)

    def _gapless(self, row: RawRow) -> None:
        expected = self._position + 1
        if row.position != expected:
            self._damage_tree(expected)
            found = f"position {row.position}"
            self._flag(expected, f"position {expected}", found, "events were cut out or forged in")
        self._position = row.position

    def _envelope(self, row: RawRow) -> StoredEvent | None:
        at = row.position
        leaf = leaf_hash(row.data)
        if self._heads is not None:
            self._heads.feed(leaf)
        if row.misfit is not None:
            self._flag(at, "data and leaf as bytes", row.misfit)
        if leaf != row.leaf:
            self._damage_tree(at)
            self._flag(at, f"leaf {leaf.hex()[:16]}…, the hash of the bytes",
                       f"leaf {row.leaf.hex()[:16]}…")  # fmt: skip
        try:
            value = decode(row.data)
        except InvalidEvent as error:
            self._flag(at, "the bytes of an event", " ".join(str(error).split())[:200])
            return None
        for name in ("operation", "cause", "key"):
            value.setdefault(name, None)
        wrong = _wrong_field(value)
        if wrong is not None:
            self._flag(at, f"an envelope with {wrong[0]}", wrong[1])
            return None
        for name in COLUMNS:
            found = row.columns[name]
            if found != value[name] or type(found) is not type(value[name]):
                if name == "position":
                    self._damage_tree(at)
                self._flag(at, f"column {name} {value[name]!r}, as in the bytes",
                           f"{found!r}")  # fmt: skip
        body = value.pop("body")
        return StoredEvent(**value, body=body, data=row.data, leaf=row.leaf)

    def _order(self, stored: StoredEvent, at: int) -> None:
        scopes: tuple[tuple[str, dict[str, int], str, int], ...] = (
            (f"version of job {stored.job!r}", self._versions, stored.job, stored.version),
            (f"sequence of {stored.writer!r}", self._sequences, stored.writer, stored.sequence),
        )
        for what, last, name, found in scopes:
            # What stands before the range of an archive is not there to count from.
            expected = last.get(name, found - 1 if self._first else -1) + 1
            if found != expected:
                self._flag(at, f"{what} {expected}", f"{found}", "events were cut out or forged in")
            last[name] = found
        if stored.cause is not None and not 0 <= stored.cause < at:
            self._flag(at, "a cause before its effect", f"cause {stored.cause}")

    def segment(self, position: int, type_: str, body: dict[str, Any]) -> None:
        """Check the evidence segment that an event names, if it names one."""
        named = body.get("segment")
        if isinstance(named, dict) and not self.evidence_apart:
            self._segment(position, type_, named)

    def _segment(
        self, position: int, type_: str, named: dict[str, Any], read: Rows | None = None
    ) -> None:
        self._evidence.checks += 1
        try:
            segment = Segment.model_validate(named)
        except ValidationError:
            return  # an event of another shape; legality says what it thinks of it
        rows = self._source(type_, segment) if read is None else read
        problem = rows.problem
        if problem is not None:
            self._flag(
                position,
                f"segment {segment.sha256[:16]}… with {segment.rows} rows",
                problem,
                "an evidence file was removed, altered, or not copied with the ledger",
                row=self._evidence,
            )


def _wrong_field(value: dict[str, Any]) -> tuple[str, str] | None:
    """The first field of an envelope that is missing, of a wrong type, or one too many."""
    for name, wanted in _TYPES.items():
        if name not in value:
            return f"the field {name}", "none"
        if not isinstance(value[name], wanted) or isinstance(value[name], bool):
            return f"a valid {name}", repr(value[name])[:80]
    extra = sorted(set(value) - {*ENVELOPE_FIELDS, "body"})
    return ("no other fields", ", ".join(extra)[:80]) if extra else None


def sound_events(
    raw: EventSource, integrity: Integrity, until: int | None
) -> Iterator[StoredEvent]:
    """Walk the range through the first pass; yields the events before the first damage.

    What ``integrity`` has taken in already is left out.
    """
    yield from _sound_rows(raw, integrity, until)
    check_whole(raw, integrity, until)


def _sound_rows(raw: EventSource, integrity: Integrity, until: int | None) -> Iterator[StoredEvent]:
    yield from _sound_at_first_sight(raw, integrity, until)
    try:
        for row in raw.rows(integrity.last, until):
            stored = integrity.check(row)
            if stored is not None:
                yield stored
    except DamagedPages as damage:
        integrity.damaged(damage)


def _sound_at_first_sight(
    raw: EventSource, integrity: Integrity, until: int | None
) -> Iterator[StoredEvent]:
    try:
        for page in raw.pages(integrity.last, until):
            first = integrity.last + 1
            block = Block(first, first + len(page) - 1)
            leaves: list[bytes] = []
            values: list[dict[str, Any]] = []
            if not check_page(page, block, leaves, values) or not integrity.take(block):
                return
            integrity.take_hashes(block, leaves)
            data = [bytes(row[-2]) for row in page]
            yield from _opened(integrity, values, data, leaves)
    except DamagedPages:
        return  # the row after the last good one tells


def _opened(
    integrity: Integrity,
    values: Iterable[dict[str, Any]],
    data: Sequence[bytes],
    leaves: Sequence[bytes],
) -> Iterator[StoredEvent]:
    """Events of rows that are sound, in order, their evidence checked."""
    for value, stored, leaf in zip(values, data, leaves, strict=True):
        body = value.pop("body")
        for name in ("operation", "cause", "key"):
            value.setdefault(name, None)
        if "segment" in body:
            integrity.segment(value["position"], value["type"], body)
        yield StoredEvent(**value, body=body, data=stored, leaf=leaf)


def check_stored(
    raw: EventSource,
    integrity: Integrity,
    until: int | None,
    on_event: Callable[[int], None] | None = None,
) -> None:
    """Send the whole range through the first pass, on all cores where the source can be so read.

    ``on_event`` is called with positions that were reached.
    """
    check_rows(raw, integrity, until, on_event)
    check_whole(raw, integrity, until)


def check_rows(
    raw: EventSource,
    integrity: Integrity,
    until: int | None,
    on_event: Callable[[int], None] | None = None,
) -> None:
    """As ``check_stored``, without what ``check_whole`` looks at afterwards."""
    apart = integrity.evidence_apart
    evidence = None if apart else integrity.folder
    with closing(raw.blocks(until, integrity.sizes, evidence, named=not apart)) as blocks:
        for block in blocks:
            if not integrity.take(block):
                break
            integrity.take_hashes(block, None)
            integrity.take_evidence(block)
            if on_event is not None:
                on_event(block.last)
    for stored in _sound_rows(raw, integrity, until):
        if on_event is not None:
            on_event(stored.position)


def check_whole(raw: TableSource, integrity: Integrity, until: int | None) -> None:
    """Check what shows only once all rows were read: split batches, unseen rows, the table meta."""
    if not integrity.readable:
        return
    try:
        for split in raw.split_keys():
            last = split[3]
            if until is None or type(last) is not int or last <= until:
                integrity.split_key(*split)
        hidden = raw.hidden(integrity.last, integrity.report.events)
        if hidden is not None:
            integrity.hidden(*hidden)
    except DamagedPages as damage:
        integrity.damaged(damage)
    try:
        integrity.meta(raw.meta())
        integrity.revision(raw.revision())
    except DamagedPages as damage:
        integrity.meta_damaged(damage.reason)
