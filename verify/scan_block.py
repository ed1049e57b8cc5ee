"""Checks one stretch of stored events as fast as Python can; runs in processes of its own.

It says whether the stretch is sound, and never what is wrong with one that is not: that is told by
integrity.py, row by row. Whatever this module accepts, that one accepts as well; in doubt (a field
that is null instead of absent, say) it refuses. Imports little, since each process pays for it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import orjson

PAGE_ROWS = 2_048
"""Rows of one read; each is a short transaction, so none holds a checkpoint up."""

BLOCK_EVENTS = 1 << 16
"""Events of a block that starts at a multiple of it: a complete subtree of the Merkle tree."""

_IN_BOTH = ("position", "job", "version", "type", "schema", "writer", "sequence", "recorded_ns")
"""Fields that stand in the bytes and as columns, and are never absent."""

_fields = itemgetter(*_IN_BOTH, "occurred_ns", "actor", "body")
_TYPES = (int, str, int, str, int, str, int, int, int, str, dict)
_SHARED = len(_IN_BOTH)
_LEAST_FIELDS = len(_TYPES)

_COLUMNS = ", ".join(f'"{name}"' for name in (*_IN_BOTH, "operation", "key", "data", "leaf"))
_SELECT = (
    f"SELECT {_COLUMNS} FROM events WHERE position > ? AND position <= ? ORDER BY position LIMIT ?"
)

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
    edge: list[bytes] = field(default_factory=list)
    """Roots of its maximal complete subtrees, largest first (RFC 9162, 2.1.1)."""
    head: bytes = b""
    """Leaf of its last event."""
    segments: list[Named] = field(default_factory=list)


def scan_block(uri: str, first: int, last: int) -> Block:
    """Check the events from ``first`` to ``last``, both included, through a connection of its own.

    ``first`` is a multiple of BLOCK_EVENTS and the stretch no longer than that. ``uri`` is opened
    by sqlite3 as it stands. Never raises for what the store holds: such a block is not sound.
    """
    block = Block(first, last)
    leaves: list[bytes] = []
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            after = first - 1
            while after < last:
                page = connection.execute(_SELECT, (after, last, PAGE_ROWS)).fetchall()
                if not page or not _check(page, after + 1, block, leaves):
                    return block
                after += len(page)
    except (sqlite3.Error, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return block
    block.edge = subtrees(leaves)
    block.head = leaves[-1]
    block.sound = True
    return block


def _check(page: Sequence[Any], expected: int, block: Block, leaves: list[bytes]) -> bool:
    """Say whether all rows of a page are sound and follow the ones before; add their leaves.

    One long loop without calls, since a call costs as much as the hash of an event.
    """
    sha256, loads = hashlib.sha256, orjson.loads
    versions, sequences, segments = block.versions, block.sequences, block.segments
    for row in page:
        position, job, version, type_, _, writer, sequence, _, operation, key, data, leaf = row
        if position != expected or sha256(b"\x00" + data).digest() != leaf:
            return False
        value = loads(data)
        found = _fields(value)
        # Equal alone is not enough: JSON's true and 1.0 equal 1.
        if found[:_SHARED] != row[:_SHARED] or tuple(map(type, found)) != _TYPES:
            return False
        plain = len(value) == _LEAST_FIELDS and operation is None and key is None
        if not plain and not _optional(value, row):
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


def subtrees(leaves: Sequence[bytes]) -> list[bytes]:
    """Roots of the maximal complete subtrees over leaf hashes, largest first (RFC 9162, 2.1.1)."""
    sha256 = hashlib.sha256
    edge: list[bytes] = []
    level = list(leaves)
    while level:
        if len(level) & 1:
            edge.append(level.pop())
        pairs = iter(level)
        level = [
            sha256(b"\x01" + left + right).digest()
            for left, right in zip(pairs, pairs, strict=True)
        ]
    return edge[::-1]
