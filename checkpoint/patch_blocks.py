"""Shares the blocks of many tensors among threads, one native call for each stretch of them.

A short call per tensor would leave threads waiting for the interpreter most of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.host_sums import sum_block
from shiftbook.checkpoint.patch_codec import (
    COUNTS,
    MOST_CHANGES,
    Changes,
    Encoded,
    Words,
    blocks_of,
    encode_found,
)
from shiftbook.checkpoint.patch_format import BLOCK, INDEX_BYTES
from shiftbook.checkpoint.patch_kernel import check_blocks, compare_blocks, put_blocks
from shiftbook.checkpoint.patch_numbers import Rule
from shiftbook.checkpoint.patch_places import HostPlace

_STRETCH_BYTES = 4 << 20  # of tensors, for one native call
_WORDS_PER_BYTE = 1 / 64  # first room for what they are packed into; untouched memory costs nothing
_LEAST_WORDS = 4096

Blocks = NDArray[np.int64]


class Pair(NamedTuple):
    """Two versions of one tensor, in places that fit."""

    base: HostPlace
    new: HostPlace
    refused: Rule
    """Numbers that may not come in."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What leads from the bases of some pairs to the new ones; their units are of one type."""

    names: list[str]
    change: NDArray[np.uint64]
    """`[tensor, 2]`: what the changes add to both sums of each fingerprint."""
    new: NDArray[np.uint64]
    """`[tensor, 2]`: both sums of each new version."""
    totals: list[list[int]]
    """Of each tensor: `Packed.found`, added up over its blocks. The last are refused numbers."""
    _pairs: list[Pair]
    _edges: list[int]
    _words_count: list[int]
    _words_end: list[int]
    """Of each block, in the tensors' order: its words, and where they end in `_words`."""
    _index: memoryview
    """Of each block, in the tensors' order, the entry of a section's index."""
    _words: memoryview

    def encoded(self, k: int) -> Encoded:
        """Fields and sections of the `k`th tensor."""
        width = self._pairs[k].new.kind.itemsize
        total = self.totals[k]
        return encode_found(total, width, lambda: self._section(k), lambda: self._changes(k))

    def _section(self, k: int) -> bytes:
        """As `Packed.section` writes it, out of what lies there for all tensors."""
        first, last = self._edges[k], self._edges[k + 1]
        pieces = [self._index[INDEX_BYTES * first : INDEX_BYTES * last]]
        for block in range(first, last):
            end = self._words_end[block]
            pieces.append(self._words[8 * (end - self._words_count[block]) : 8 * end])
        return b"".join(pieces)

    def _changes(self, k: int) -> Changes:
        """Compared once more, which takes less than to read many changes from their bits."""
        base, new = (place.units.reshape(-1) for place in self._pairs[k][:2])
        positions = np.flatnonzero(base != new)
        return Changes(positions, np.asarray(new[positions] - base[positions]))


class Target(NamedTuple):
    """A tensor that changes, in a place that fits, and its packed section."""

    place: HostPlace
    changed: int
    section: memoryview
    """As `Packed.section` wrote it, of any content; empty where nothing changes."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of some targets; their units are of one type."""

    names: list[str]
    good: NDArray[np.bool_]
    """`[tensor]`: whether the bits of its changes say something."""
    base: NDArray[np.uint64]
    """`[tensor, 2]`: both sums of its units, where they were asked for."""
    change: NDArray[np.uint64]
    """`[tensor, 2]`: what the changes add to them."""


def compare_pairs(pairs: Mapping[str, Pair], threads: int) -> list[Compared]:
    """Compare all pairs of versions: one result for each type of units."""
    kinds = _by_type({name: pair.new for name, pair in pairs.items()}).items()
    return [_compare_type(kind, {n: pairs[n] for n in names}, threads) for kind, names in kinds]


def _compare_type(kind: np.dtype[Any], pairs: Mapping[str, Pair], threads: int) -> Compared:
    edges, spans = _cut([pair.new.count for pair in pairs.values()])
    order = _side_by_side(spans)
    spans = spans[order]
    owner = np.repeat(np.arange(len(pairs)), np.diff(edges))[order]
    starts = [(pair.base.address, pair.new.address) for pair in pairs.values()]
    addresses = np.array(starts, np.uint64).reshape(-1, 2)[owner]
    addresses += (spans[:, :1] * kind.itemsize).astype(np.uint64)
    rules = np.array([pair.refused for pair in pairs.values()], np.uint64).reshape(-1, 4)[owner]
    found = np.zeros((len(spans), COUNTS), np.int64)
    sums = np.zeros((len(spans), 4), np.uint64)

    def compare(stretch: slice) -> Words:
        part = slice(stretch.start, stretch.stop)
        bytes_ = int(spans[part, 1].sum()) * kind.itemsize
        wanted = max(_LEAST_WORDS, int(bytes_ * _WORDS_PER_BYTE))
        pieces = []
        while part.start < part.stop:
            room = np.empty(wanted, np.uint64)
            done, used, wanted = compare_blocks(
                np.empty(0, kind),
                addresses[part],
                spans[part],
                rules[part],
                room,
                found[part],
                sums[part],
            )
            pieces.append(room[:used])
            part = slice(part.start + done, part.stop)
            wanted = max(room.size, int(wanted))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    words = in_threads(_stretches(spans, kind.itemsize), compare, threads)
    place = np.argsort(order)  # where each block of each tensor went
    ends = found[:, 1].cumsum()[place]
    found = found[place]
    total = _per_tensor(sums[place], edges)
    new = _with_loose([pair.new for pair in pairs.values()], total[:, 2:])
    together = np.concatenate(words) if words else np.empty(0, np.uint64)
    return Compared(
        list(pairs),
        total[:, :2],
        new,
        _per_tensor(found, edges).tolist(),
        list(pairs.values()),
        edges.tolist(),
        found[:, 1].tolist(),
        ends.tolist(),
        memoryview(found[:, :2].astype("<u4").tobytes()),
        memoryview(together.astype("<u8", copy=False).tobytes()),
    )


class Writes:
    """Changes of many tensors that are checked first and written then."""

    def __init__(self, targets: Mapping[str, Target], threads: int) -> None:
        self._threads = threads
        self._types = [
            _TypeWrites(kind, {name: targets[name] for name in names})
            for kind, names in _by_type({n: t.place for n, t in targets.items()}).items()
        ]

    def check(self, *, summed: bool) -> list[Checked]:
        """Unpack, gather and sum. `summed` asks for the sums of the units as they are."""
        return [each.check(self._threads, summed) for each in self._types]

    def write(self) -> None:
        """Write what came out."""
        for each in self._types:
            each.write(self._threads)


class _TypeWrites:
    """Those of one type of units."""

    def __init__(self, kind: np.dtype[Any], targets: Mapping[str, Target]) -> None:
        self._places = {name: target.place for name, target in targets.items()}
        self._kind = kind
        self._edges, spans = _cut([place.count for place in self._places.values()])
        blocks = np.diff(self._edges)
        owner = np.repeat(np.arange(len(targets)), blocks)
        starts = np.array([place.address for place in self._places.values()], np.uint64)
        self._addresses = starts[owner]
        self._addresses += (spans[:, 0] * kind.itemsize).astype(np.uint64)
        # All sections in a row are words of 64 bits: of each tensor its index, one word for each
        # block, then what the index counts.
        sections = [target.section for target in targets.values()]
        self._words = np.frombuffer(bytearray().join(sections), np.uint64)
        sizes = np.array([len(section) // 8 for section in sections], np.int64)
        first = np.cumsum(sizes) - sizes
        index = np.zeros((len(spans), 2), np.int64)
        filled = sizes[owner] > 0
        entry = first[owner] + np.arange(len(spans)) - self._edges[owner]
        index[filled] = self._words.view("<u4").reshape(-1, 2)[entry[filled]]
        told = _per_tensor(index, self._edges)
        changed = np.array([target.changed for target in targets.values()], np.int64)
        words = np.maximum(sizes - blocks, 0)
        right = (told[:, 0] == changed) & ((told[:, 1] == words) | (sizes == 0))
        self._right = right & (changed <= MOST_CHANGES * words)
        index[~self._right[owner]] = 0  # what lies must not be followed
        ends = index.cumsum(axis=0)
        before = ends - index
        within = before[:, 1] - np.append(before[:, 1], 0)[self._edges[:-1]][owner]
        word = first[owner] + blocks[owner] + within
        spans = np.column_stack([spans, index[:, 0], before[:, 0], word, index[:, 1]])
        count = int(index[:, 0].sum())
        self._order = _side_by_side(spans)
        self._spans, self._addresses = spans[self._order], self._addresses[self._order]
        self._positions = np.empty(count, np.uint32)
        self._fresh = np.empty(count, kind)

    def check(self, threads: int, summed: bool) -> Checked:
        good = np.ones(len(self._spans), np.bool_)
        sums = np.zeros((len(self._spans), 4), np.uint64)

        def check(part: slice) -> None:
            check_blocks(
                self._addresses[part],
                self._spans[part],
                summed,
                self._words,
                self._positions,
                self._fresh,
                good[part],
                sums[part],
            )

        in_threads(self._stretches(everywhere=summed), check, threads)
        place = np.argsort(self._order)
        total = _per_tensor(sums[place], self._edges)
        bad = _per_tensor((~good[place]).astype(np.int64)[:, None], self._edges)[:, 0]
        base = total[:, :2]
        if summed:
            base = _with_loose(list(self._places.values()), base)
        return Checked(list(self._places), self._right & (bad == 0), base, total[:, 2:])

    def write(self, threads: int) -> None:
        def put(part: slice) -> None:
            put_blocks(self._addresses[part], self._spans[part], self._positions, self._fresh)

        in_threads(self._stretches(everywhere=False), put, threads)

    def _stretches(self, *, everywhere: bool) -> list[slice]:
        if not everywhere and not self._positions.size:
            return []
        return _stretches(self._spans, self._kind.itemsize)


def in_threads(jobs: Sequence[slice], work: Callable[[slice], Any], threads: int) -> list[Any]:
    """The work's result for each job, in their order. Threads take jobs until none is left."""
    results: list[Any] = [None] * len(jobs)
    waiting, lock = iter(enumerate(jobs)), Lock()

    def loop() -> None:
        while True:
            with lock:
                number, job = next(waiting, (-1, None))
            if job is None:
                return
            results[number] = work(job)

    helpers = min(threads, len(jobs)) - 1
    if helpers < 1:
        loop()
    else:
        with ThreadPoolExecutor(helpers) as pool:
            others = [pool.submit(loop) for _ in range(helpers)]
            loop()
            for other in others:
                other.result()
    return results


def _by_type(places: Mapping[str, HostPlace]) -> dict[np.dtype[Any], list[str]]:
    names: dict[str, list[str]] = {}
    for name, place in places.items():
        names.setdefault(place.dtype, []).append(name)
    kinds: dict[np.dtype[Any], list[str]] = {}
    for same in names.values():
        kinds.setdefault(places[same[0]].kind, []).extend(same)
    return kinds


def _cut(sizes: Sequence[int]) -> tuple[Blocks, Blocks]:
    """The first block of each tensor (and one past the last), and each block's units.

    A row has the first unit in its tensor and how many there are.
    """
    counts = [blocks_of(size) for size in sizes]
    edges = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    first = (np.arange(edges[-1]) - np.repeat(edges[:-1], counts)) * BLOCK
    return edges, np.column_stack([first, np.minimum(BLOCK, np.repeat(sizes, counts) - first)])


def _side_by_side(spans: Blocks) -> NDArray[np.int64]:
    """The order in which blocks that begin at one unit are neighbours, the longest first."""
    return np.lexsort((-spans[:, 1], spans[:, 0]))


def _stretches(spans: Blocks, unit_bytes: int) -> list[slice]:
    """Runs of blocks with about `_STRETCH_BYTES` in each."""
    ends = np.cumsum(spans[:, 1]) * unit_bytes // _STRETCH_BYTES
    edges = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(spans)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _per_tensor(rows: NDArray[Any], edges: Blocks) -> NDArray[Any]:
    """Rows added up over the blocks of each tensor (sums mod 2^64)."""
    ends = np.zeros((len(rows) + 1, rows.shape[1]), rows.dtype)
    np.cumsum(rows, axis=0, out=ends[1:])
    return np.asarray(ends[edges[1:]] - ends[edges[:-1]])


def _with_loose(places: Sequence[HostPlace], sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Both sums of tensors, given those of whole words: one to three units may stand after."""
    unit_bytes = places[0].kind.itemsize
    if unit_bytes >= 4:
        return sums
    whole = sums.copy()
    for k, place in enumerate(places):
        loose = place.count % (4 // unit_bytes)
        if loose:
            start = np.full(1, place.count - loose, np.uint64)
            units = place.units.reshape(-1)[place.count - loose :]
            whole[k] += np.array(sum_block(units.reshape(1, -1), start, 1), np.uint64)
    return whole
