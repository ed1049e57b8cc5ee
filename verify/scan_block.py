"""Looks at one stretch of stored events as fast as Python can; runs in processes of its own, too.

It says whether the stretch is sound, and never what is wrong with one that is not: that is told by
integrity.py, row by row. Whatever this module accepts, that one accepts as well; in doubt (a field
that is null instead of absent, say) it refuses. Imports little, since each process pays for it.
"""

from __future__ import annotations

import gc
import hashlib
import io
import pickle
import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, overload

import orjson

from shiftbook.ledger.merkle import TILE_HEIGHT, edge_of

if TYPE_CHECKING:
    from shiftbook.verify.evidence import EvidenceFolder, Rows

PAGE_ROWS = 256
"""Rows of one read: they are still in the processor's cache when they are looked at. Each is a
short transaction, so none holds a checkpoint up."""

BLOCK_EVENTS = 1 << 16
"""Events of a block that starts at a multiple of it: a complete subtree of the Merkle tree."""

RARELY = 50_000
"""Objects made between two looks of the collector in a process of its own: what is read here has
many and nearly none that refer to themselves."""

_IN_BOTH = ("position", "job", "version", "type", "schema", "writer", "sequence", "recorded_ns")
"""Fields that stand in the bytes and as columns, and are never absent."""

COLUMNS = (*_IN_BOTH, "operation", "key")
"""Columns that repeat what stands in the bytes."""

_fields = itemgetter(*_IN_BOTH, "occurred_ns", "actor", "body")
_FIELD_TYPES = (int, str, int, str, int, str, int, int, int, str, dict)
_SHARED = len(_IN_BOTH)
_LEAST_FIELDS = len(_FIELD_TYPES)
_TYPES = _FIELD_TYPES + _FIELD_TYPES[:_SHARED]
"""Of the fields, and of the columns that repeat them."""

# Quoted names: `schema` and `key` are words of SQL.
_LISTED = ", ".join(f'"{name}"' for name in (*COLUMNS, "data", "leaf"))
SELECT = (
    f"SELECT {_LISTED} FROM events WHERE position > ? AND position <= ? ORDER BY position LIMIT ?"
)
"""Rows of a page, for the last position before it, the last one in it, and their number."""

Page = Sequence[Sequence[Any]]
"""Rows with the values of COLUMNS, the bytes and the leaf, as they are stored."""

Named = tuple[int, str, dict[str, Any]]
"""An evidence segment as an event names it: position, type, segment."""


@dataclass
class Block:
    """What is known of a sound stretch of events, for whoever puts the stretches together."""

    first: int
    last: int
    sound: bool = False
    first_versions: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    """First and last version of each job in it; those between have no gap."""
    first_sequences: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    """First and last sequence of each writer in it."""
    head: bytes = b""
    """Leaf of its last event."""
    edge: list[bytes] = field(default_factory=list)
    """Roots of its maximal complete subtrees, largest first (RFC 9162, 2.1.1)."""
    edges: dict[int, list[bytes]] = field(default_factory=dict)
    """The same for its first events, by the number of events up to there in the ledger."""
    nodes: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Roots of full tiles: tile level from 1, number in the ledger, hash."""
    segments: list[Named] = field(default_factory=list)
    """Evidence that its events name and that nobody has looked at yet."""
    bound: int = 0
    """Evidence that its events name and that was looked at."""
    problems: list[tuple[Named, Rows]] = field(default_factory=list)
    """What of it is not as it should be."""


@dataclass(frozen=True)
class Orders:
    """What a process of its own is to look at."""

    uri: str
    """Opened by sqlite3 as it stands."""
    stretches: Sequence[Stretch]
    evidence: Path | None = None
    """Folder of the segments, where they are to be read as well."""
    named: bool = True
    """Whether the segments that events name are wanted at all."""

    def blocks(self) -> Iterator[Block]:
        """What ``scan_blocks`` says of them."""
        return scan_blocks(self)


Stretch = tuple[int, int, Sequence[int]]
"""First and last position, and the numbers of events in it whose edge is wanted."""


@dataclass(frozen=True)
class Stretches(Sequence[Stretch]):
    """Stretches, each made when it is asked for: a forged last position names any number of them.

    One begins at each of ``starts``, has ``length`` events or ends before ``end``, and takes its
    own of ``sizes``, which are in order.
    """

    starts: range
    length: int
    end: int
    sizes: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Stretch: ...

    @overload
    def __getitem__(self, index: slice) -> Stretches: ...

    def __getitem__(self, index: int | slice) -> Stretch | Stretches:
        if isinstance(index, slice):
            return replace(self, starts=self.starts[index])
        first = self.starts[index]
        end = min(first + self.length, self.end)
        within = slice(bisect_right(self.sizes, first), bisect_right(self.sizes, end))
        return first, end - 1, self.sizes[within]


def scan_blocks(orders: Orders) -> Iterator[Block]:
    """Look at stretches of events, one after the other, through one connection of its own.

    Each begins at a multiple of its longest length, a power of two. Never raises for what the
    store holds: such a block is not sound.
    """
    folder: EvidenceFolder | None = None
    if orders.evidence is not None:
        from shiftbook.verify.evidence import EvidenceFolder  # pydantic: only where it is needed

        folder = EvidenceFolder(orders.evidence)
    try:
        with closing(sqlite3.connect(orders.uri, uri=True, isolation_level=None)) as connection:
            for first, last, sizes in orders.stretches:
                block = _look(connection, Block(first, last), sizes)
                if not orders.named:
                    block.segments = []
                if block.sound and folder is not None:
                    _read_evidence(block, folder)
                yield block
    except sqlite3.Error:
        return  # it cannot even be opened


def _look(connection: sqlite3.Connection, block: Block, sizes: Iterable[int]) -> Block:
    leaves: list[bytes] = []
    try:
        after = block.first - 1
        while after < block.last:
            page = connection.execute(SELECT, (after, block.last, PAGE_ROWS)).fetchall()
            if not page or not check_page(page, block, leaves):
                block.sound = False
                return block
            after += len(page)
    except (sqlite3.Error, ValueError, OverflowError, MemoryError):
        block.sound = False
        return block
    _grow(block, leaves, sizes)
    return block


def _read_evidence(block: Block, folder: EvidenceFolder) -> None:
    """Read the segments that a block's events name."""
    for named in block.segments:
        _, type_, segment = named
        rows = folder.named(type_, segment)
        if rows is not None and rows.problem is not None:
            block.problems.append((named, rows))
    block.bound, block.segments = len(block.segments), []


def check_page(
    page: Page, block: Block, leaves: list[bytes], values: list[dict[str, Any]] | None = None
) -> bool:
    """Say whether all rows are sound and the next ones of a block; add their leaves.

    ``values`` takes the decoded envelopes, where they are wanted.
    """
    try:
        block.sound = _check(page, block.first + len(leaves), block, leaves, values)
    except (ValueError, KeyError, TypeError, OverflowError):
        block.sound = False
    if block.sound:
        block.head = leaves[-1]
    return block.sound


def _check(
    page: Page,
    expected: int,
    block: Block,
    leaves: list[bytes],
    values: list[dict[str, Any]] | None,
) -> bool:
    """One long loop without calls, since a call costs as much as the hash of an event."""
    sha256, loads = hashlib.sha256, orjson.loads
    versions, sequences, segments = block.versions, block.sequences, block.segments
    for row in page:
        position, job, version, type_, _, writer, sequence, _, operation, key, data, leaf = row
        if position != expected or sha256(b"\x00" + data).digest() != leaf:
            return False
        value = loads(data)
        found = _fields(value)
        columns = row[:_SHARED]
        # Equal alone is not enough: JSON's true and 1.0 equal 1, and so do a real and a numeric.
        if found[:_SHARED] != columns or tuple(map(type, found + columns)) != _TYPES:
            return False
        more = len(value) - _LEAST_FIELDS
        # First what most events have: none of the optional fields, or an operation alone.
        if key is None and (more == 0 if operation is None else more == 1):
            if operation is not None and value.get("operation") != operation:
                return False
        elif not _optional(value, row):
            return False
        last = versions.get(job)
        if last is None:
            block.first_versions[job] = version
        elif version != last + 1:
            return False
        versions[job] = version
        last = sequences.get(writer)
        if last is None:
            block.first_sequences[writer] = sequence
        elif sequence != last + 1:
            return False
        sequences[writer] = sequence
        if values is not None:
            values.append(value)
        else:
            body = found[-1]
            if "segment" in body and isinstance(body["segment"], dict):
                segments.append((position, type_, body["segment"]))
        expected += 1
        leaves.append(leaf)
    return True


def _optional(value: dict[str, Any], row: Sequence[Any]) -> bool:
    """Say whether operation, key and cause are right, and no other field stands there."""
    operation, key = row[_SHARED], row[_SHARED + 1]
    expected = _LEAST_FIELDS
    for name, column in (("operation", operation), ("key", key)):
        if column is not None:
            expected += 1
            if type(value.get(name)) is not str or value[name] != column:
                return False
    if "cause" in value:
        expected += 1
        if type(value["cause"]) is not int or not 0 <= value["cause"] < row[0]:
            return False
    return len(value) == expected


def levels_of(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Roots of the complete subtrees over leaf hashes, by their level and number."""
    sha256 = hashlib.sha256
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        pairs = iter(levels[-1])
        levels.append(
            [
                sha256(b"\x01" + left + right).digest()
                for left, right in zip(pairs, pairs, strict=False)
            ]
        )
    return levels


def _grow(block: Block, leaves: Sequence[bytes], sizes: Iterable[int]) -> None:
    """Put into a block what its leaves give of the tree over the ledger."""
    levels = levels_of(leaves)

    def node(level: int, number: int) -> bytes:
        return levels[level][number]

    block.edge = edge_of(len(leaves), node)
    wanted = [size for size in sizes if block.first < size <= block.last + 1]
    block.edges = {size: edge_of(size - block.first, node) for size in wanted}
    for level in range(TILE_HEIGHT, len(levels), TILE_HEIGHT):
        start = block.first >> level
        named = enumerate(levels[level], start)
        block.nodes += [(level // TILE_HEIGHT, number, value) for number, value in named]


def work(orders: BinaryIO, answers: BinaryIO | io.RawIOBase | io.BufferedWriter) -> None:
    """Look at what another process orders, and answer with a block for each stretch.

    The order is one pickled object whose ``blocks`` gives them; answers are pickled too.
    """
    gc.set_threshold(RARELY)
    if isinstance(answers, io.RawIOBase):
        # Under PYTHONUNBUFFERED, where a process that is stopped and continued writes a part, and
        # pickle takes it for the whole.
        answers = io.BufferedWriter(answers)
    for block in pickle.load(orders).blocks():
        pickle.dump(block, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
