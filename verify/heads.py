"""Holds signed heads, in the ledger and outside it, against the tree that its stored bytes give.

A head that fits proves every event under it to be the one that was signed. A head that does not fit
is itself wrong where a larger one fits, and otherwise proves that the history was changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.errors import InvalidNote, ProofInvalid, PublicationFailed
from shiftbook.ledger.merkle import CompactRange
from shiftbook.ledger.object_folder import shown_url
from shiftbook.ledger.publication import named_size, read_published
from shiftbook.ledger.signed_note import SignedHead, holds_trace
from shiftbook.ledger.signing_keys import Verifier, read_verifier
from shiftbook.verify.coverage import Row
from shiftbook.verify.findings import Finding
from shiftbook.verify.nodes import EDITED, first_wrong, nodes_under
from shiftbook.verify.scan_block import Block
from shiftbook.verify.sources import TableSource
from shiftbook.verify.stored import DamagedPages

TABLE = "the table of heads"

_RENAMED = "an object at the place was renamed, or copied under another name"
_FORGED = (
    "somebody without the signer's key wrote it, or it was altered after it was signed; or the "
    "wrong key was given"
)
_GONE = "heads were deleted to hide that the history behind them was changed or cut"
_TWICE = (
    "the signer's key signed two histories: the database was rolled back or forked under a signer "
    "that lost its memory, or the key was stolen"
)
_REWRITTEN = "somebody who owns the database rewrote, cut or forked the history after it was signed"
_OLD_COPY = "the ledger was rolled back to an older copy, or its end was cut off"
_RESTORE = "Restore the ledger from a copy that fits the head outside; keep this file as evidence."
_ASK_SIGNER = "Ask whoever holds the signer's key; `shiftbook sign` writes what it knows again."
_REWRITE_NODES = (
    "Where no other finding names an event: delete the table's rows; `shiftbook sign` writes them "
    "again."
)
_RESTORE_PLACE = "Restore the place from a copy; run `shiftbook sign` where the signer was killed."


@dataclass(frozen=True)
class Outside:
    """What an auditor brings: places with published heads, and the signer's verifier keys."""

    places: tuple[tuple[str, tuple[tuple[str, bytes], ...]], ...] = ()
    """Name of each place, with (where, bytes) of its heads in their order."""
    verifiers: tuple[Verifier, ...] = ()

    @classmethod
    def read(cls, places: Iterable[str], keys: Iterable[str]) -> Outside:
        """Read places and keys; raises InvalidKey, InvalidInput or PublicationFailed.

        A place where nothing is left of any head is none, as one that is missing or empty: it is
        refused. What is left of a head, torn or altered, is evidence, and a finding.

        Read this before the ledger: what is published while the ledger is read is no gap then.
        """
        verifiers = tuple(read_verifier(key) for key in keys)
        read = tuple((place, tuple(read_published(place))) for place in places)
        names = [verifier.name for verifier in verifiers]
        for place, heads in read:
            if not any(named_size(at) is not None or holds_trace(d, names) for at, d in heads):
                shown = shown_url(place) if "://" in place else place
                raise PublicationFailed(
                    f"expected published heads in {shown}, found nothing that is, or is "
                    "left of, a head; check the path. If heads were published there, somebody "
                    "overwrote them: keep what is there and restore the place from a copy"
                )
        return cls(read, verifiers)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A head as it is believed to be signed: number of events and root, and where it stands."""

    where: str
    size: int
    root: bytes
    outside: bool


@dataclass
class HeadReport:
    """What the heads say about the events."""

    findings: list[Finding] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sound: int | None = None
    """Where the history is not the signed one: events that are, by the last head that fits."""
    protected: int = 0
    """Events under the largest fitting head outside the database."""
    signed: int = 0
    """Events under the largest fitting head anywhere."""
    stored: int = 0
    """Heads in the table."""
    places: int = 0
    """Places outside that were given."""


class HeadCheck:
    """Feed the hash of each event in order, then ``finish``; memory is bounded by the heads."""

    def __init__(self, outside: Outside) -> None:
        self.report = HeadReport(places=len(outside.places))
        self._outside = outside
        self._claims: list[_Claim] = []
        self._nodes: dict[tuple[int, int], bytes] = {}
        self._tree = CompactRange(on_node=self._on_node)
        self._roots: dict[int, bytes] = {}
        self._wanted: set[int] = set()
        self._table: dict[int, bytes] = {}
        self._one_head: str | None = None
        self._loaded = False
        self._heads_row = Row("", "heads", "signed heads fit the events and are the signer's")
        self._outside_row = Row("", "outside", "heads outside the database fit the events")

    def _on_node(self, level: int, number: int, value: bytes) -> None:
        self._nodes[level, number] = value

    def load(self, raw: TableSource) -> None:
        """Read the heads; before the events, so that roots are kept as the events pass."""
        self._loaded = True
        self._one_head = getattr(raw, "one_head", None)
        for place, heads in self._outside.places:
            self._load_place(place, heads)
        try:
            self._load_table(raw.heads())
        except DamagedPages as damage:
            self._flag(0, "a readable table of heads", f"damage: {damage.reason}", EDITED)
        self._wanted = {claim.size for claim in self._claims}

    def feed(self, leaf: bytes) -> None:
        """Take in the hash of the next event's bytes, as computed from them."""
        self._tree.append(leaf)
        if self._tree.size in self._wanted:
            self._roots[self._tree.size] = self._tree.root()

    def take(self, block: Block) -> None:
        """Take in the hashes of a block, which begins where the last event ended."""
        for size, edge in block.edges.items():
            tree = CompactRange(self._tree.size, self._tree.edge)
            tree.extend(size - block.first, edge)
            self._roots[size] = tree.root()
        for level, number, value in block.nodes:
            self._nodes[level, number] = value
        self._tree.extend(block.last + 1 - block.first, block.edge)

    @property
    def sizes(self) -> set[int]:
        """Numbers of events at which a head stands."""
        return self._wanted

    @property
    def has_key(self) -> bool:
        """Whether signatures are checked."""
        return bool(self._outside.verifiers)

    def finish(self, raw: TableSource, until: int | None, damage: int | None) -> HeadReport:
        """Hold every head against the tree; ``until`` limits them to those that it covers.

        ``damage`` is the first position at which the bytes themselves are known to be others than
        those that were hashed: heads over it can fit nothing and say nothing more.
        """
        if not self._loaded:
            self.load(raw)
            self._read_again(raw)
        claims = [c for c in self._claims if until is None or c.size <= until + 1]
        self._judge(claims, damage)
        if until is None and damage is None and self.report.sound is None:
            self._judge_nodes(raw)
        self._rows(claims)
        self.report.stored = len(self._table)
        return self.report

    # -- reading -----------------------------------------------------------------------------

    def _load_place(self, place: str, heads: Sequence[tuple[str, bytes]]) -> None:
        last: _Claim | None = None
        for where, data in heads:
            claim = self._claim(where, data, named_size(where), outside=True)
            if claim is None:
                continue
            if last is not None and claim.size <= last.size:
                self._out_of_order(claim, last)
            else:
                last = claim
            self._claims.append(claim)

    def _out_of_order(self, claim: _Claim, last: _Claim) -> None:
        same = claim.size == last.size
        two = same and claim.root != last.root
        what = "another" if two else "the same again," if same else "one"
        self._flag(
            claim.size - 1,
            f"heads that grow, after one of {last.size} events",
            f"{what} of {claim.size} events in {claim.where}",
            _TWICE if two else "heads at the place were reordered, copied or put in",
            row=self._outside_row,
            do=_RESTORE_PLACE,
        )

    def _load_table(self, rows: Sequence[tuple[Any, Any]]) -> None:
        last = 0
        for size, note in rows:
            self._heads_row.checks += 1
            if type(size) is not int or not isinstance(note, bytes):
                self._flag(0, "a number of events and a note in the table of heads",
                           f"{size!r:.40} and {type(note).__name__}", EDITED)  # fmt: skip
                continue
            where = self._one_head or f"{TABLE}, row {size}"
            claim = self._claim(where, note, size, outside=False)
            if size <= last:
                self._flag(max(0, size - 1), f"heads that grow, after one of {last} events",
                           f"one of {size} events", EDITED)  # fmt: skip
            last = max(last, size)
            if claim is not None:
                self._claims.append(claim)
                self._table.setdefault(claim.size, claim.root)

    def _claim(self, where: str, data: bytes, size: int | None, *, outside: bool) -> _Claim | None:
        """The head in these bytes, None where it is no evidence; says what is wrong with it."""
        row = self._outside_row if outside else self._heads_row
        at = 0 if size is None else max(0, min(size, 2**63 - 1) - 1)
        do = _RESTORE_PLACE if outside else _ASK_SIGNER
        try:
            head = SignedHead.parse(data)
        except InvalidNote as error:
            self._flag(at, "a signed head", f"{error} in {where}",
                       "it was altered, or torn by a crash", row=row, do=do)  # fmt: skip
            return None
        if size is not None and head.size != size:
            self._flag(at, f"a head of {size} events in {where}", f"one of {head.size}",
                       _RENAMED if outside else EDITED, row=row, do=do)  # fmt: skip
            return None
        at = max(0, head.size - 1)
        if self._outside.verifiers:
            try:
                head.verify(self._outside.verifiers)
            except ProofInvalid as error:
                self._flag(at, "a head signed by the ledger's signer", f"{error} in {where}",
                           _FORGED, row=row, do=do)  # fmt: skip
                return None
        return _Claim(where, head.size, head.root, outside)

    def _read_again(self, raw: TableSource) -> None:
        """Roots for heads that came while a live ledger was followed."""
        missing = {claim.size for claim in self._claims} - set(self._roots)
        if not missing:
            return
        self._tree = CompactRange(on_node=self._on_node)
        try:
            for row in raw.rows(until=max(missing) - 1):
                self.feed(leaf_hash(row.data))
        except DamagedPages:
            return  # the first pass says so

    # -- judging -----------------------------------------------------------------------------

    def _judge(self, claims: Sequence[_Claim], damage: int | None) -> None:
        fits: list[_Claim] = []
        wrong: list[_Claim] = []
        for claim in sorted(claims, key=lambda c: (c.size, not c.outside)):
            fit = claim.size == 0 or self._roots.get(claim.size) == claim.root
            (fits if fit else wrong).append(claim)
        self.report.signed = max((c.size for c in fits), default=0)
        self.report.protected = max((c.size for c in fits if c.outside), default=0)
        for claim in wrong:
            row = self._outside_row if claim.outside else self._heads_row
            # A head in the database, which anybody may have put there, disproves none outside it.
            if claim.size <= (self.report.protected if claim.outside else self.report.signed):
                self._contradicted(claim, row)
            elif damage is not None and damage < claim.size:
                why = f"the events are damaged from position {damage} on"
                row.missing[why] = row.missing.get(why, 0) + 1
            elif self.report.sound is None:
                below = (c.size for c in fits if c.size < claim.size)
                self._changed(claim, max(below, default=0), row)
            else:
                row.findings += 1  # the first one proves it already; one story is enough
        self._gone(fits)
        if self.report.sound is None:
            self._holes(fits)

    def _contradicted(self, claim: _Claim, row: Row) -> None:
        """A head that a later one, which fits, proves wrong."""
        found = self._roots.get(claim.size)
        other = f"root {found.hex()[:16]}…" if found else "another root"
        self._flag(
            claim.size - 1,
            f"{other} at {claim.size} events, as the events give and a later head confirms",
            f"root {claim.root.hex()[:16]}… in {claim.where}",
            _TWICE if self._outside.verifiers else EDITED,
            row=row,
            do=_ASK_SIGNER,
        )

    def _changed(self, claim: _Claim, proved: int, row: Row) -> None:
        """The first head that the events do not fit."""
        self.report.sound = min(proved, self._tree.size)
        if claim.size > self._tree.size:
            here = self._tree.size
            unproved = f"; events {proved} to {here - 1} are unproved too" if proved < here else ""
            self._flag(
                here,
                f"at least {claim.size} events, as the head in {claim.where} says",
                f"{here} events{unproved}",
                _OLD_COPY,
                others=(claim.size - 1,),
                row=row,
                do=_RESTORE,
            )
            return
        self._flag(
            proved,
            f"root {claim.root.hex()[:16]}… at {claim.size} events, as in {claim.where}",
            f"root {self._roots.get(claim.size, b'').hex()[:16]}…: among the events {proved} to "
            f"{claim.size - 1} is one that was not signed",
            _TWICE if self.report.signed > claim.size else _REWRITTEN,
            others=(claim.size - 1,),
            row=row,
            do=_RESTORE,
        )

    def _gone(self, fits: Sequence[_Claim]) -> None:
        """Heads that were published and are not in the table, where all stand in one."""
        if self._one_head:
            return
        gone = sorted(
            {c.size: c for c in fits if c.outside and c.size and c.size not in self._table}.items()
        )
        if gone:
            size, claim = gone[0]
            more = f", and {len(gone) - 1} more are gone" if len(gone) > 1 else ""
            self._flag(
                size - 1,
                f"the head of {size} events in the table of heads",
                f"none of that size; {claim.where} has one{more}",
                _GONE,
            )

    def _holes(self, fits: Sequence[_Claim]) -> None:
        """Heads of the table that a place should have, since it has smaller and larger ones."""
        inside = sorted({c.size for c in fits if not c.outside})
        for place, heads in self._outside.places:
            wheres = {where for where, _ in heads}
            sizes = {c.size for c in fits if c.outside and c.where in wheres}
            first, last = min(sizes, default=0), max(sizes, default=0)
            hole = next((s for s in inside if first < s < last and s not in sizes), None)
            if hole is not None:
                self._flag(
                    hole - 1,
                    f"the head of {hole} events in {place}",
                    "none that fits, and larger ones",
                    "a published head was taken away or altered",
                    row=self._outside_row,
                    do=_RESTORE_PLACE,
                )

    def _judge_nodes(self, raw: TableSource) -> None:
        """Stored roots of full tiles, against those that the events give."""
        expected = nodes_under(self._nodes, max(self._table, default=0))
        try:
            stored = raw.nodes()
            if stored is None:
                return
            count, wrong = first_wrong(stored, expected, self._tree.size)
        except DamagedPages as damage:
            self._flag(0, "a readable table of nodes", f"damage: {damage.reason}", EDITED)
            return
        self._heads_row.checks += count
        if wrong is not None:
            others = () if wrong.last is None else (wrong.last,)
            self._flag(wrong.at, wrong.expected, wrong.found, wrong.cause, others=others,
                       do=_REWRITE_NODES)  # fmt: skip

    # -- reporting ---------------------------------------------------------------------------

    def _rows(self, claims: Sequence[_Claim]) -> None:
        heads, outside = self._heads_row, self._outside_row
        inside = [c for c in claims if not c.outside]
        if not heads.checks:
            heads.idle = "no head was signed"
        elif not self._outside.verifiers:
            heads.missing["no verifier key was given, so signatures were not checked"] = len(inside)
        outside.checks = sum(c.outside for c in claims)
        if not self._outside.places:
            outside.needs = "no head from outside was given"
            if not self._table:
                outside.idle = "no head was signed"
        elif not self._outside.verifiers:
            outside.missing["no verifier key was given, so signatures were not checked"] = (
                outside.checks
            )
        last = max((c.size for c in claims if c.outside), default=0)
        behind = sum(1 for size in self._table if size > last)
        if self._outside.places and behind:
            outside.missing[f"heads of the ledger after {last} events stand in no place"] = behind
        self.report.rows = [heads, outside]

    def _flag(
        self,
        at: int,
        expected: str,
        found: str,
        cause: str,
        *,
        others: Iterator[int] | tuple[int, ...] = (),
        row: Row | None = None,
        do: str = _ASK_SIGNER,
    ) -> None:
        row = row or self._heads_row
        row.findings += 1
        at = max(0, min(at, 2**63 - 1))
        positions = tuple(sorted({at, *(max(0, other) for other in others)}))
        self.report.findings.append(
            Finding(row.invariant, "stop", "", at, positions, expected, found, cause, do)
        )


def protection_notes(report: HeadReport, events: int, key_given: bool) -> Iterator[str]:
    """What protects the events that were read, and how many nothing does."""
    open_ = events - report.protected
    if report.places:
        if open_ <= 0:
            yield "every event stands under a head outside the database"
        else:
            yield (
                f"{open_} events from position {report.protected} on stand after the last head "
                "outside the database, unprotected: whoever can write the database could change or "
                "cut them unnoticed"
            )
    elif report.stored:
        yield (
            f"{report.stored} heads are signed, the last one over {report.signed} events, and none "
            "from outside the database was given to compare (--heads): whoever can write it could "
            "have rolled it back; no event is protected by what was seen here"
        )
    else:
        yield (
            "heads of this ledger are not signed yet: whoever can write its file could replace the "
            "whole history unnoticed; make a key with `shiftbook key new` and run `shiftbook sign`"
        )
    if (report.stored or report.places) and not key_given:
        yield "signatures were not checked: give the signer's verifier key with --key"
