"""Which numbers of replicas are worth a look: all in small systems, the best in large ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shiftbook.scheduler.allocation import allocate, margins_of_time

Counts = NDArray[np.int64]
"""Shape (C, N): replicas of N components in C candidates."""

ROUNDS = 1
"""Rounds of exchanging replicas around the best found, after those around the present: the next
window looks again."""


@dataclass(frozen=True)
class Space:
    """The numbers of replicas that a job may have."""

    names: tuple[str, ...]
    """Source, trainer, then the followers with devices of their own."""
    sizes: tuple[int, ...]
    """Devices of a replica."""
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    trainer_sizes: tuple[int, ...]
    devices: int
    colocate: bool
    now: tuple[int, ...]

    def fits(self, counts: Counts) -> NDArray[np.bool_]:
        """Which candidates the ranges and the devices allow."""
        sizes = np.array(self.sizes)
        inside = np.all((counts >= self.lowest) & (counts <= self.highest), axis=1)
        used = counts * sizes
        others = used[:, 2:].sum(axis=1)
        if self.colocate:
            room = np.maximum(used[:, 0], used[:, 1]) + others <= self.devices
        else:
            room = used[:, 0] + used[:, 1] + others <= self.devices
        trainer = np.any(counts[:, 1:2] == np.array(self.trainer_sizes), axis=1)
        return np.asarray(inside & room & trainer)

    def number(self) -> int:
        """How many combinations the ranges hold."""
        ranges = [h - low + 1 for low, h in zip(self.lowest, self.highest, strict=True)]
        ranges[1] = len(self.trainer_sizes)
        return math.prod(max(0, r) for r in ranges)

    def all(self) -> Counts:
        """Every allowed candidate, the present numbers first."""
        ranges: list[Sequence[int]] = [
            range(low, high + 1) for low, high in zip(self.lowest, self.highest, strict=True)
        ]
        ranges[1] = [s for s in self.trainer_sizes if self.lowest[1] <= s <= self.highest[1]]
        rows = np.array(list(itertools.product(*ranges)), dtype=np.int64).reshape(-1, len(ranges))
        return self.first(rows[self.fits(rows)])

    def first(self, rows: Counts) -> Counts:
        """The present numbers, then the other rows, each once."""
        once = dict.fromkeys(map(tuple, rows.tolist()))
        once.pop(self.now, None)
        return np.array([self.now, *once], dtype=np.int64)


def search(
    space: Space,
    work_s: Mapping[str, float],
    score: Callable[[Counts], NDArray[np.float64]],
    listed: int,
) -> Counts:
    """The ``listed`` best candidates of a large system, the present numbers first.

    Starts from exact allocations of the remaining work (``work_s``, replica-seconds) for several
    sizes of the trainer and from the present numbers, then exchanges replicas between two
    components as long as ``score`` (predicted time to the end, by candidate) falls by 1 %.
    """
    rows = np.vstack([_starts(space, work_s), _exchanges(space, space.now)])
    seen = {tuple(row): value for row, value in zip(rows.tolist(), score(rows), strict=True)}
    best = min(seen, key=lambda row: seen[row])
    for _ in range(ROUNDS):
        near = _exchanges(space, best)
        near = near[[tuple(row) not in seen for row in near.tolist()]]
        if near.shape[0] == 0:
            break
        values = score(near)
        seen.update(zip(map(tuple, near.tolist()), values.tolist(), strict=True))
        challenger = tuple(near[int(np.argmin(values))].tolist())
        if seen[challenger] >= seen[best] * 0.99:
            break
        best = challenger
    order = sorted(seen, key=lambda row: seen[row])[:listed]
    return space.first(np.array(order, dtype=np.int64))


def _starts(space: Space, work_s: Mapping[str, float]) -> Counts:
    names, sizes = space.names, space.sizes
    rows: list[list[int]] = [list(space.now)]
    others = [0, *range(2, len(names))]
    unit = max(sizes[index] for index in others)
    for trainer in _trainer_sizes(space, work_s):
        budget = (space.devices - trainer * sizes[1]) // unit
        low = [space.lowest[index] for index in others]
        if budget < sum(low):
            continue
        margins = [
            margins_of_time(work_s.get(names[i], 0.0), space.lowest[i], space.highest[i])[:budget]
            for i in others
        ]
        counts = allocate(margins, low, budget)
        row = [counts[0], trainer, *counts[1:]]
        rows.append(row)
        if space.colocate:
            room = space.devices - sum(n * s for n, s in zip(row[2:], sizes[2:], strict=True))
            rows.append([min(space.highest[0], room // sizes[0]), *row[1:]])
    found = np.array(rows, dtype=np.int64)
    keep = space.fits(found)
    keep[0] = True
    return found[keep]


def _trainer_sizes(space: Space, work_s: Mapping[str, float]) -> list[int]:
    """The present size, its neighbours, and those next to the even share of the work."""
    total = sum(work_s.values())
    roots = {name: math.sqrt(max(work, 0.0)) for name, work in work_s.items()}
    # Minimising a sum of work / n under one budget gives shares like the root of the work.
    share = roots.get(space.names[1], 0.0) / max(sum(roots.values()), 1e-12) if total > 0 else 0.0
    even = space.devices * share / space.sizes[1]
    ordered = sorted(space.trainer_sizes)
    at = ordered.index(space.now[1])
    wanted = {*ordered[max(0, at - 1) : at + 2]}
    wanted.add(max((s for s in ordered if s <= even), default=ordered[0]))
    wanted.add(min((s for s in ordered if s >= even), default=ordered[-1]))
    return sorted(wanted)


def _exchanges(space: Space, best: tuple[int, ...]) -> Counts:
    """Neighbours: replicas from one component to another, in steps of powers of two."""
    rows: list[list[int]] = []
    movable = [0, *range(2, len(space.names))]
    for giver, taker in itertools.permutations(movable, 2):
        step = 1
        while step <= space.highest[taker]:
            row = list(best)
            row[taker] += step
            row[giver] -= -(-step * space.sizes[taker] // space.sizes[giver])
            if row[giver] < space.lowest[giver]:
                break
            rows.append(row)
            step *= 2
    for size in space.trainer_sizes:
        for source in {best[0], best[0] - (size - best[1]) * space.sizes[1] // space.sizes[0]}:
            rows.append([source, size, *best[2:]])
    found = np.array(rows, dtype=np.int64).reshape(-1, len(best))
    return found[space.fits(found)]
