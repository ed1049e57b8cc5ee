"""Shares the blocks of many tensors among threads, one native call for each stretch of them.

A short call per tensor would leave threads waiting for the interpreter most of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.host_sums import sum_block
from shiftbook.checkpoint.patch_codec import COUNTS, Packed, Sums, Words, blocks_of
from shiftbook.checkpoint.patch_format import BLOCK
from shiftbook.checkpoint.patch_kernel import check_blocks, compare_blocks, put_blocks
from shiftbook.checkpoint.patch_numbers import Rule
from shiftbook.checkpoint.positions import MASK_64

_STRETCH_BYTES = 4 << 20  # of tensors, for one native call
_WORDS_PER_BYTE = 1 / 64  # first room for what they are packed into; untouched memory costs nothing
_LEAST_WORDS = 4096

Blocks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two versions of one tensor: flat units in memory, aligned to whole words."""

    base: NDArray[Any]
    new: NDArray[Any]
    refused: Rule
    """Numbers that may not come in."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What leads from the base of a pair to the new one."""

    packed: Packed
    change: Sums
    """What the changes add to both sums of the fingerprint."""
    new: Sums
    """Both sums of the new version."""

    @property
    def refused(self) -> int:
        """Refused numbers among the new units."""
        return int(self.packed.found[:, 4].sum())


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that changes: flat units in memory, and what `packed_section` gave for it."""

    units: NDArray[Any]
    index: NDArray[np.uint32] | None
    """None where nothing changes."""
    words: Words | None


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a target."""

    good: bool
    """The bits of its changes say something."""
    base: Sums
    """Both sums of its units, where they were asked for."""
    change: Sums


def fits(units: NDArray[Any]) -> bool:
    """True for units that lie in memory as the loops here read them."""
    return bool(units.flags.c_contiguous) and _address(units) % 4 == 0


def compare_pairs(pairs: Mapping[str, Pair], threads: int) -> dict[str, Compared]:
    """Compare all pairs of versions."""
    found: dict[str, Compared] = {}
    for kind, names in _by_type({name: pair.new for name, pair in pairs.items()}).items():
        found |= _compare_type(kind, {name: pairs[name] for name in names}, threads)
    return found


def _compare_type(
    kind: np.dtype[Any], pairs: Mapping[str, Pair], threads: int
) -> dict[str, Compared]:
    edges, spans = _cut([pair.new.size for pair in pairs.values()])
    starts = [(_address(pair.base), _address(pair.new)) for pair in pairs.values()]
    order = _side_by_side(spans)
    spans = spans[order]
    owner = np.repeat(np.arange(len(starts)), np.diff(edges))[order]
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
    together = np.concatenate(words) if words else np.empty(0, np.uint64)
    pieces = np.split(together, found[:-1, 1].cumsum()) if len(found) else []
    place = np.argsort(order)  # where each block of each tensor went
    found = found[place]
    total = _per_tensor(sums[place], edges)
    compared = {}
    for k, name in enumerate(pairs):
        blocks = slice(edges[k], edges[k + 1])
        own = [pieces[at] for at in place[blocks]]
        packed = Packed(found[blocks], np.concatenate(own) if own else np.empty(0, np.uint64))
        change_0, change_1, new_0, new_1 = total[k]
        new = _with_loose(pairs[name].new, new_0, new_1)
        compared[name] = Compared(packed, (change_0, change_1), new)
    return compared


class Writes:
    """Changes of many tensors that are checked first and written then."""

    def __init__(self, targets: Mapping[str, Target], threads: int) -> None:
        self._threads = threads
        self._types = [
            _TypeWrites(kind, {name: targets[name] for name in names})
            for kind, names in _by_type({n: t.units for n, t in targets.items()}).items()
        ]

    def check(self, *, summed: bool) -> dict[str, Checked]:
        """Unpack, gather and sum. `summed` asks for the sums of the units as they are."""
        found: dict[str, Checked] = {}
        for each in self._types:
            found |= each.check(self._threads, summed)
        return found

    def write(self) -> None:
        """Write what came out."""
        for each in self._types:
            each.write(self._threads)


class _TypeWrites:
    """Those of one type of units."""

    def __init__(self, kind: np.dtype[Any], targets: Mapping[str, Target]) -> None:
        self._units = {name: target.units for name, target in targets.items()}
        self._kind = kind
        self._edges, spans = _cut([target.units.size for target in targets.values()])
        blocks = len(spans)
        starts = np.array([_address(t.units) for t in targets.values()], np.uint64)
        self._addresses = np.repeat(starts, np.diff(self._edges))
        self._addresses += (spans[:, 0] * kind.itemsize).astype(np.uint64)
        index = np.zeros((blocks, 2), np.int64)
        words: list[Words] = []
        for target, first, last in zip(
            targets.values(), self._edges[:-1], self._edges[1:], strict=True
        ):
            if target.index is not None and target.words is not None:
                index[first:last] = target.index
                words.append(target.words)
        self._words = np.concatenate(words) if words else np.empty(0, np.uint64)
        ends = index.cumsum(axis=0)
        spans = np.column_stack(
            [spans, index[:, 0], ends[:, 0] - index[:, 0], ends[:, 1] - index[:, 1], index[:, 1]]
        )
        self._order = _side_by_side(spans)
        self._spans, self._addresses = spans[self._order], self._addresses[self._order]
        changed = int(index[:, 0].sum())
        self._positions = np.empty(changed, np.uint32)
        self._fresh = np.empty(changed, kind)

    def check(self, threads: int, summed: bool) -> dict[str, Checked]:
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
        bad = np.concatenate([[0], (~good[place]).cumsum()])[self._edges]
        checked = {}
        for k, (name, units) in enumerate(self._units.items()):
            base_0, base_1, change_0, change_1 = total[k]
            base = _with_loose(units, base_0, base_1) if summed else (0, 0)
            checked[name] = Checked(bool(bad[k] == bad[k + 1]), base, (change_0, change_1))
        return checked

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


def _by_type(units: Mapping[str, NDArray[Any]]) -> dict[np.dtype[Any], list[str]]:
    names: dict[np.dtype[Any], list[str]] = {}
    for name, array in units.items():
        names.setdefault(array.dtype, []).append(name)
    return names


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


def _per_tensor(sums: NDArray[np.uint64], edges: Blocks) -> list[list[int]]:
    """Sums over the blocks of each tensor (mod 2^64)."""
    ends = np.zeros((len(sums) + 1, sums.shape[1]), np.uint64)
    np.cumsum(sums, axis=0, out=ends[1:])
    total: list[list[int]] = (ends[edges[1:]] - ends[edges[:-1]]).tolist()
    return total


def _with_loose(units: NDArray[Any], sum_0: int, sum_1: int) -> Sums:
    """Both sums of a tensor, given those of its whole words: one to three units may stand after."""
    loose = units.nbytes % 4 // units.itemsize
    if not loose:
        return sum_0, sum_1
    start = np.full(1, units.size - loose, np.uint64)
    more_0, more_1 = sum_block(units[units.size - loose :].reshape(1, -1), start, 1)
    return (sum_0 + more_0) & MASK_64, (sum_1 + more_1) & MASK_64


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
