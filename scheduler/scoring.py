"""Scores candidate topologies: who stands where, and how much sooner the iteration would end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shiftbook.ledger.plan import MovePlan
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.candidates import Counts, Space, search
from shiftbook.scheduler.decision import Thresholds
from shiftbook.scheduler.errors import PlanningError
from shiftbook.scheduler.layout import COMBINED, Layout
from shiftbook.scheduler.makespan import Array, Makespan, Progress
from shiftbook.scheduler.prediction import Placements
from shiftbook.scheduler.throughput import ThroughputModel


@dataclass(frozen=True)
class Scored:
    """Candidates by row; row 0 is the present topology."""

    rows: Counts
    topologies: tuple[Topology, ...]
    placements: Placements
    result: Makespan
    gain: NDArray[np.float64]
    """(C, D) seconds sooner than staying, cost included."""

    def probability(self, row: int) -> float:
        """That a candidate beats staying: the share of the draws in which it ends sooner."""
        return float(np.mean(self.gain[row] > 0))


class Scorer:
    """Scores the candidates of one job by the time to the end of the iteration."""

    def __init__(
        self, model: ThroughputModel, layout: Layout, moves: MovePlan, thresholds: Thresholds
    ) -> None:
        self.model, self.layout = model, layout
        self.moves, self.thresholds = moves, thresholds
        self._free_now: tuple[Topology, int] | None = None

    def _space(self, topology: Topology, progress: Progress) -> Space:
        roles, layout = self.model.roles, self.layout
        sizes = layout.sizes(topology)
        names = (
            roles.source,
            roles.trainer,
            *(n for n in sizes if n not in (roles.source, roles.trainer)),
        )
        owed = progress.owed(roles.source)
        now, lowest, highest = [], [], []
        for name in names:
            count = len(topology.replicas(name))
            low, high = layout.range_of(name, count, sizes[name])
            # A barrier must not wait for a component without devices: whoever owes or expects
            # work keeps a replica.
            expects = progress.more_iterations or (name == roles.trainer and progress.update_due)
            if owed.get(name, 0) or expects:
                low = max(low, 1)
            now.append(count)
            lowest.append(low)
            highest.append(max(high, low))
        return Space(
            names=names,
            sizes=tuple(sizes[name] for name in names),
            lowest=tuple(lowest),
            highest=tuple(highest),
            trainer_sizes=tuple(layout.trainer_sizes(now[1], sizes[roles.trainer])),
            devices=len(layout.devices),
            colocate=layout.colocate,
            now=tuple(now),
        )

    def _rows(self, space: Space, topology: Topology, progress: Progress) -> Counts:
        if space.number() <= self.thresholds.exact:
            return space.all()
        model = self.model
        work_s = {
            name: left * model.seconds_per_unit(name).mean for name, left in progress.left.items()
        }
        for stacked in model.roles.stacked:
            trainer = model.roles.trainer
            work_s[trainer] = work_s.get(trainer, 0.0) + work_s.pop(stacked, 0.0)
        source = model.roles.source
        work_s[source] = model.turns_left(progress) * model.seconds_per_unit(source).mean

        def score(rows: Counts) -> NDArray[np.float64]:
            placements = self._by_number(rows, space, topology)
            end = model.evaluate(placements, progress, count=1).end_s[:, 0]
            return np.asarray(end)

        return search(space, work_s, score, self.thresholds.listed)

    def _by_number(self, rows: Counts, space: Space, topology: Topology) -> Placements:
        """Placements from numbers alone, as the layout's rule would place them."""
        sizes = np.array(space.sizes)
        used = rows * sizes
        room = space.devices - used[:, 2:].sum(axis=1)
        shared = np.maximum(used[:, 0] + used[:, 1] - room, 0)
        free = np.maximum(rows[:, 1] - -(-shared // sizes[1]), 0)
        alone = rows[:, 0] - -(-shared // sizes[0])
        staying = np.maximum(alone, max(1, space.lowest[0]))
        paused = np.where((shared > 0) & (staying < rows[:, 0]), staying, 0)
        covered = -(-(staying - alone) * sizes[0] // sizes[1])
        paused_free = np.maximum(rows[:, 1] - covered, 0)
        if self._free_now is None or self._free_now[0] is not topology:
            self._free_now = (topology, int(self.model.placements_of(topology).trainer_free[0, 0]))
        is_here = np.all(rows == np.array(space.now), axis=1)
        free = np.where(is_here, self._free_now[1], free)
        return self._placements(rows, space, free, paused, paused_free)

    def _placements(
        self,
        rows: Counts,
        space: Space,
        free: NDArray[np.int64],
        paused: NDArray[np.int64],
        paused_free: NDArray[np.int64],
    ) -> Placements:
        now = np.array(space.now)
        changes = rows - now
        changed = changes != 0
        several = changed.sum(axis=1).tolist()
        first = changed.argmax(axis=1).tolist()
        kinds = [
            None
            if number == 0
            else COMBINED
            if number > 1
            else self.model.roles.kind({space.names[at]: int(changes[row, at])})
            for row, (number, at) in enumerate(zip(several, first, strict=True))
        ]
        moved = (changes[:, 1] != 0) | (free != free[0])
        sizes = [s for s in space.trainer_sizes if space.lowest[1] <= s <= space.highest[1]]
        reshards = "reshard" in self.moves.allow
        source_speed, trainer_speed = self._speeds(rows, space)
        return Placements(
            source=_column(rows[:, 0] * source_speed),
            source_before=_column(np.full(len(rows), now[0]) * source_speed),
            trainer=_column(rows[:, 1] * trainer_speed),
            trainer_free=_column(free * trainer_speed),
            trainer_moved=_column(moved.astype(np.float64)),
            others={
                name: (_column(rows[:, 2 + k]), _column(rows[:, 2 + k]))
                for k, name in enumerate(space.names[2:])
            },
            kinds=kinds,
            paused=_column(paused * source_speed) if "pause" in self.moves.allow else None,
            paused_free=_column(paused_free * trainer_speed),
            sizes=[float(s) for s in sizes if s > 0] if reshards else [],
        )

    def _speeds(self, rows: Counts, space: Space) -> tuple[Array, Array]:
        """Mean speed of the source's devices and the lowest of the trainer's, by candidate.

        A trainer's ranks wait for each other, so its slowest device counts.
        """
        by_kind = {kind: self.model.speed(kind) for kind in self.layout.kinds}
        if len(by_kind) == 1:
            same = np.full(len(rows), next(iter(by_kind.values())))
            return same, same
        speeds = np.array([by_kind[device.kind] for device in self.layout.devices])
        front = np.maximum(rows[:, 0] * space.sizes[0], 1)
        mean = np.cumsum(speeds)[np.minimum(front, len(speeds)) - 1] / front
        slowest = np.minimum.accumulate(speeds[::-1])
        back = np.clip(rows[:, 1] * space.sizes[1], 1, len(speeds))
        return mean, slowest[back - 1]

    def score(self, topology: Topology, progress: Progress) -> Scored:
        """Every candidate within the elastic ranges, the present topology first."""
        space = self._space(topology, progress)
        rows = self._rows(space, topology, progress)
        kept, topologies = [0], [topology]
        for row in range(1, len(rows)):
            counts = dict(zip(space.names, rows[row].tolist(), strict=True))
            try:
                after = self.layout.place(topology, counts)
            except PlanningError:
                # Whole replicas of several devices need not fit where their numbers do.
                continue
            kept.append(row)
            topologies.append(after)
        rows = rows[kept]
        if space.number() <= self.thresholds.exact:
            sharing = np.array([self._sharing(t, max(1, space.lowest[0])) for t in topologies])
            placements = self._placements(rows, space, *sharing.T)
        else:
            placements = self._by_number(rows, space, topology)
        result = self.model.evaluate(placements, progress)
        gain = result.end_s[:1] - result.end_s
        return Scored(rows, tuple(topologies), placements, result, gain)

    def _sharing(self, topology: Topology, lowest: int) -> tuple[int, int, int]:
        """(trainer replicas alone, source replicas and trainer replicas alone after a pause).

        A pause takes the source off all devices that it shares, down to its lowest number; 0
        replicas stand for a pause that would change nothing.
        """
        roles = self.model.roles
        source, trainer = topology.replicas(roles.source), topology.replicas(roles.trainer)
        of_source = {device for replica in source for device in replica.devices}
        of_trainer = {device for replica in trainer for device in replica.devices}
        free = sum(1 for r in trainer if of_source.isdisjoint(r.devices))
        alone = [r for r in source if of_trainer.isdisjoint(r.devices)]
        shared = [r for r in source if not of_trainer.isdisjoint(r.devices)]
        staying = [*alone, *shared[: max(0, lowest - len(alone))]]
        if len(staying) >= len(source):
            return free, 0, free
        covered = {device for replica in staying for device in replica.devices}
        return free, len(staying), sum(1 for r in trainer if covered.isdisjoint(r.devices))


def _column(values: NDArray[np.int64] | NDArray[np.float64]) -> Array:
    return np.asarray(values, dtype=np.float64).reshape(-1, 1)
