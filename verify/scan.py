"""The fast integrity pass: says in seconds whether millions of stored events are sound.

Blocks of events are checked by all cores at once, each in a process of its own, and put together
here. It checks what integrity.py checks of rows (bytes as hashed, positions, versions and sequences
gapless, columns as the bytes, causes before effects, keys one batch each) and builds the root of
the Merkle tree on the way. A ledger that it calls sound, that pass calls sound; of any other, that
pass tells why.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from shiftbook.verify.scan_block import BLOCK_EVENTS, Block, Named, scan_block

MOST_PROCESSES = 8
ALONE_EVENTS = 2 * BLOCK_EVENTS
"""Up to so many events one process is done before others have started."""


@dataclass
class Scan:
    """What the fast pass says."""

    sound: bool
    events: int
    """Events that were found sound, from the first on, in whole blocks."""
    root: bytes
    """Root of the Merkle tree over these events (RFC 9162, 2.1.1)."""
    head: bytes
    """Leaf of the last of them; empty where there is none."""


@dataclass
class _Together:
    """Puts blocks together, in order."""

    events: int = 0
    head: bytes = b""
    edge: list[bytes] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _versions: dict[str, int] = field(default_factory=dict)
    _sequences: dict[str, int] = field(default_factory=dict)

    def take(self, block: Block) -> bool:
        """Add a block; False where it is not sound or does not follow the last one."""
        if not block.sound or block.first != self.events:
            return False
        for known, first, last in (
            (self._versions, block.first_versions, block.versions),
            (self._sequences, block.first_sequences, block.sequences),
        ):
            if any(number != known.get(name, -1) + 1 for name, number in first.items()):
                return False
            known.update(last)
        self.events, self.head = block.last + 1, block.head
        self._grow(block)
        return True

    def _grow(self, block: Block) -> None:
        size = block.last - block.first + 1
        for root in block.edge:
            part = 1 << (size.bit_length() - 1)
            size -= part
            self.edge.append(root)
            self._sizes.append(part)
            while len(self._sizes) > 1 and self._sizes[-1] == self._sizes[-2]:
                right, left = self.edge.pop(), self.edge.pop()
                self.edge.append(hashlib.sha256(b"\x01" + left + right).digest())
                self._sizes.append(self._sizes.pop() + self._sizes.pop())

    def root(self) -> bytes:
        """Root over all events so far."""
        if not self.edge:
            return hashlib.sha256(b"").digest()
        root = self.edge[-1]
        for left in reversed(self.edge[:-1]):
            root = hashlib.sha256(b"\x01" + left + root).digest()
        return root


def scan(
    path: Path,
    events: int,
    *,
    processes: int | None = None,
    on_segment: Callable[[Named], None] | None = None,
    on_block: Callable[[int], None] | None = None,
) -> Scan:
    """Check the first ``events`` events of an SQLite ledger; ends at the first block that is bad.

    ``on_segment`` is called with each evidence segment that a sound block names, in order;
    ``on_block`` with the number of events that are done. At most ``processes`` blocks are in
    memory at once (default: one for each usable core), some 10 MB each.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    usable = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    together = _Together()
    sound = True
    for block in _blocks(uri, events, 1 if events <= ALONE_EVENTS else processes or usable):
        if not together.take(block):
            sound = False
            break
        if on_segment is not None:
            for segment in block.segments:
                on_segment(segment)
        if on_block is not None:
            on_block(together.events)
    sound = sound and _keys_whole(uri, events)
    return Scan(sound, together.events, together.root(), together.head)


def _keys_whole(uri: str, events: int) -> bool:
    """Say whether the events of each idempotency key stand side by side, as one batch."""
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            split = connection.execute(
                'SELECT 1 FROM events WHERE "key" IS NOT NULL AND position < ? GROUP BY job, "key" '
                "HAVING max(position) - min(position) + 1 <> count(*) LIMIT 1",
                (events,),
            ).fetchone()
    except sqlite3.Error:
        return False
    return split is None


def _blocks(uri: str, events: int, processes: int) -> Iterator[Block]:
    """Checked blocks in order, a few of them ahead of the reader."""
    stretches = [
        (first, min(first + BLOCK_EVENTS, events) - 1) for first in range(0, events, BLOCK_EVENTS)
    ]
    if processes == 1:
        for first, last in stretches:
            yield scan_block(uri, first, last)
        return
    with ExitStack() as stack:
        # Not forked: a child of a process with threads may wait for a lock for ever.
        pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        coming: list[Future[Block]] = []
        for first, last in stretches:
            coming.append(pool.submit(scan_block, uri, first, last))
            if len(coming) > processes:
                yield coming.pop(0).result()
        while coming:
            yield coming.pop(0).result()
