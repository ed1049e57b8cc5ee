"""Decides whether a move is worth it: lasting over-provision, then time to the end net of cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.events.observation import WindowObserved
from shiftbook.ledger.events.reallocation import Candidate, Interval
from shiftbook.ledger.plan import MovePlan
from shiftbook.ledger.topology import Device, Topology
from shiftbook.scheduler.candidates import Counts, Space, search
from shiftbook.scheduler.decision import Decision, Deliberation, Thresholds
from shiftbook.scheduler.errors import PlanningError
from shiftbook.scheduler.estimate import Z_80
from shiftbook.scheduler.layout import COMBINED, Layout
from shiftbook.scheduler.makespan import Array, Makespan, Progress
from shiftbook.scheduler.prediction import Placements, Prediction
from shiftbook.scheduler.throughput import ThroughputModel

__all__ = ["Decision", "Deliberation", "Planner", "Thresholds"]


@dataclass(frozen=True)
class _Scored:
    rows: Counts
    topologies: tuple[Topology, ...]
    placements: Placements
    result: Makespan
    gain: NDArray[np.float64]
    """(C, D) seconds sooner than staying, cost included."""


class Planner:
    """The planner of one job. Pure but for what it remembers of use and of its last decision."""

    def __init__(
        self,
        model: ThroughputModel,
        elastic: Mapping[str, ElasticRange],
        devices: Sequence[Device],
        moves: MovePlan,
        thresholds: Thresholds | None = None,
        *,
        colocate: bool = True,
        largest_trainer: int | None = None,
    ) -> None:
        self.model = model
        self.moves = moves
        self.thresholds = thresholds or Thresholds()
        self.layout = Layout(
            devices, elastic, model.roles, colocate=colocate, largest_trainer=largest_trainer
        )
        self.last: Deliberation | None = None
        """What the last call weighed."""
        self._low_since: dict[str, float] = {}
        self._decided: tuple[Topology, Topology, int, float] | None = None
        self._moved_s: float | None = None
        self._free_now: tuple[Topology, int] | None = None

    def moved(self, now_s: float) -> None:
        """Tell that a move ended, for the cooldown."""
        self._moved_s = now_s
        self._decided = None

    def decide(
        self, window: WindowObserved | None, topology: Topology, progress: Progress, now_s: float
    ) -> Decision | None:
        """The move to make now, or None to stay; ``last`` says what was weighed.

        ``now_s`` is any clock that does not jump. Raises PlanningError when the topology is none
        of this job's.
        """
        self.last = self.deliberate(window, topology, progress, now_s)
        decision = self.last.decision
        if decision is not None:
            self._decided = (topology, decision.after, progress.iteration, now_s)
        return decision

    def deliberate(
        self, window: WindowObserved | None, topology: Topology, progress: Progress, now_s: float
    ) -> Deliberation:
        """Weigh every candidate; the use of the components is noted, no decision is remembered."""
        self._check(topology)
        use = self._use(window, topology, progress)
        donors = self._donors(use, progress, now_s)
        space = self._space(topology, progress)
        scored = self._score(self._rows(space, topology, progress), space, topology, progress)
        stay = self.model.prediction(scored.result, 0, progress)
        reasons = [
            self._reason(scored, row, topology, progress, donors, now_s)
            for row in range(1, len(scored.topologies))
        ]
        chosen = self._best(scored, reasons, topology)
        awaited = self._awaited(scored, reasons, chosen, donors)
        if awaited is not None and chosen is not None:
            reasons[chosen - 1] = "a better one waits for its over-provision to last"
            chosen = None
        candidates = self._candidates(scored, reasons, chosen, topology)
        decision, because = None, "no candidate beats staying"
        if chosen is not None:
            decision = self._decision(scored, chosen, topology, progress, candidates, stay)
            because = f"{decision.kind}: {decision.net_gain_s:.3f} s sooner, net of its cost"
        elif awaited is not None:
            because = f"{scored.topologies[awaited].text()} is best once its over-provision lasts"
        elif not reasons:
            because = "the elastic ranges allow no other topology"
        return Deliberation(stay, candidates, tuple(sorted(donors)), decision, because)

    # First step: over-provision that lasts

    def _check(self, topology: Topology) -> None:
        self.layout.adopt(topology)
        for role in (self.model.roles.source, self.model.roles.trainer):
            if role not in topology.components:
                raise PlanningError(
                    f"expected a component {role!r} in the topology, found "
                    f"{', '.join(topology.components) or 'none'}; name the roles of this job"
                )

    def _use(
        self, window: WindowObserved | None, topology: Topology, progress: Progress
    ) -> dict[str, float]:
        """Share of each component's capacity that is used now, 0 to 1 (queues can exceed it)."""
        roles = self.model.roles
        seen = window.components if window is not None else {}
        replicas = len(topology.replicas(roles.source))
        # Lanes that its turns could fill, whether they run now or wait: what one more or one less
        # replica would change. A KV use lags by a window, and a tail is over in a few windows.
        wanted = progress.running + progress.waiting
        use = {roles.source: min(1.0, wanted / max(1, replicas * progress.lanes))}
        for name in topology.components:
            if name in roles.slotless or name in roles.stacked or name == roles.source:
                continue
            together = [name, *roles.stacked] if name == roles.trainer else [name]
            busy = [seen[n].busy_share for n in together if n in seen]
            ready = any(progress.ready(n) for n in together)
            use[name] = min(1.0, sum(busy)) if busy else float(ready)
        return use

    def _donors(self, use: Mapping[str, float], progress: Progress, now_s: float) -> set[str]:
        """Components whose use stayed low for the declared time, or that can do nothing now."""
        donors: set[str] = set()
        for name, value in use.items():
            if value > self.thresholds.use_low:
                self._low_since.pop(name, None)
                continue
            since_s = self._low_since.setdefault(name, now_s)
            if now_s - since_s >= self.thresholds.lasting_s:
                donors.add(name)
        # Without an outstanding episode, or without a complete group, no window is needed: there
        # is nothing that the component could do with its devices.
        roles = self.model.roles
        if progress.outstanding == 0:
            donors.add(roles.source)
        for name in use:
            together = [name, *roles.stacked] if name == roles.trainer else [name]
            if name != roles.source and not any(progress.ready(n) for n in together):
                donors.add(name)
        return donors

    # Second step: candidates by the time to the end

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

    def _score(self, rows: Counts, space: Space, topology: Topology, progress: Progress) -> _Scored:
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
        return _Scored(rows, tuple(topologies), placements, result, gain)

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

    # What speaks against a candidate, and which one is left

    def _reason(
        self,
        scored: _Scored,
        row: int,
        topology: Topology,
        progress: Progress,
        donors: set[str],
        now_s: float,
    ) -> str | None:
        moves = self.moves
        strategy = self.model.roles.strategy(topology, scored.topologies[row])
        if strategy not in moves.allow:
            return f"the plan allows {', '.join(moves.allow) or 'no moves'}, not {strategy}"
        givers = self._givers(scored, row)
        busy = sorted(givers - donors)
        if busy:
            return (
                f"{busy[0]} would give devices up and has not been under a use of "
                f"{self.thresholds.use_low:g} for {self.thresholds.lasting_s:g} s"
            )
        if self._moved_s is not None and now_s - self._moved_s < moves.cooldown_s:
            ago_s = now_s - self._moved_s
            return f"the last move was {ago_s:.3f} s ago, cooldown {moves.cooldown_s:g} s"
        if (weak := self._weak(scored, row)) is not None:
            return weak
        if self._decided is not None:
            before, after, iteration, at_s = self._decided
            same = before == topology and after == scored.topologies[row]
            if same and iteration == progress.iteration and now_s - at_s < self.thresholds.retry_s:
                return f"decided {now_s - at_s:.3f} s ago and not carried out"
        return None

    def _weak(self, scored: _Scored, row: int) -> str | None:
        """Why a candidate's gain does not suffice; None where it does."""
        gain_s = float(scored.gain[row, 0])
        by_cost_s = self.thresholds.cost_share * self._cost(scored, row)
        least_s = max(self.moves.margin_s, self.thresholds.least_gain_s, by_cost_s)
        if not gain_s > least_s:
            return f"{gain_s:.3f} s sooner than staying, the margin is {least_s:.3f} s"
        probability, least = _probability(scored.gain[row]), self.thresholds.probability
        if probability < least:
            return f"beats staying with probability {probability:.2f} of {least:g}"
        return None

    def _awaited(
        self, scored: _Scored, reasons: list[str | None], chosen: int | None, donors: set[str]
    ) -> int | None:
        """A candidate better than the chosen one that only waits for over-provision to last.

        A second-best move now would spoil it: it is worth waiting the declared time.
        """
        end = scored.result.end_s[:, 0]
        limit = end[chosen] - self.thresholds.tie_s if chosen is not None else np.inf
        waiting = [
            row
            for row in range(1, len(end))
            if (pending := self._givers(scored, row) - donors)
            and all(name in self._low_since for name in pending)
            and reasons[row - 1] is not None
            and self._weak(scored, row) is None
            and end[row] < limit
        ]
        return min(waiting, key=lambda row: end[row]) if waiting else None

    def _givers(self, scored: _Scored, row: int) -> set[str]:
        """Components that lose replicas, or the trainer where the source joins its devices."""
        names = [self.model.roles.source, self.model.roles.trainer, *scored.placements.others]
        changes = scored.rows[row] - scored.rows[0]
        givers = {name for name, change in zip(names, changes.tolist(), strict=True) if change < 0}
        free = scored.placements.trainer_free[:, 0]
        grows = changes[0] > 0
        if grows and free[row] < free[0]:
            givers.add(self.model.roles.trainer)
        return givers

    def _best(self, scored: _Scored, reasons: list[str | None], topology: Topology) -> int | None:
        """The row that ends soonest; among equals the one that moves least. Names the losers."""
        open_rows = [row for row, reason in enumerate(reasons, start=1) if reason is None]
        if not open_rows:
            return None
        end = scored.result.end_s[:, 0]
        soonest = min(float(end[row]) for row in open_rows)
        equal = [row for row in open_rows if end[row] <= soonest + self.thresholds.tie_s]
        chosen = equal[0]
        if len(equal) > 1:
            distance = {row: self._distance(topology, scored.topologies[row]) for row in equal}
            chosen = min(equal, key=lambda row: (distance[row], row))
        for row in open_rows:
            if row != chosen:
                later_s = float(end[row] - end[chosen])
                reasons[row - 1] = (
                    f"the chosen one ends {later_s:.3f} s sooner"
                    if row not in equal
                    else "as good as the chosen one and moves more"
                )
        return chosen

    def _distance(self, before: Topology, after: Topology) -> tuple[int, int, int]:
        """(new replicas, new replicas on a node new to their component, replicas given up)."""
        fresh = foreign = gone = 0
        for name in {**before.components, **after.components}:
            if before.replicas(name) is after.replicas(name):
                continue
            here = {r.devices for r in before.replicas(name)}
            there = {r.devices for r in after.replicas(name)}
            new = there - here
            fresh += len(new)
            gone += len(here - there)
            if new:
                nodes = {devices[0].rsplit("/", 1)[0] for devices in here}
                foreign += sum(1 for devices in new if devices[0].rsplit("/", 1)[0] not in nodes)
        return fresh, foreign, gone

    # What is recorded

    def _cost(self, scored: _Scored, row: int) -> float:
        kind = scored.placements.kinds[row]
        return self.model.move_cost(kind).mean if kind is not None else 0.0

    def _candidates(
        self,
        scored: _Scored,
        reasons: list[str | None],
        chosen: int | None,
        topology: Topology,
    ) -> tuple[Candidate, ...]:
        candidates = [
            Candidate(
                after=after,
                strategy=self.model.roles.strategy(topology, after),
                predicted_end_s=float(scored.result.end_s[row, 0]),
                predicted_gain_s=float(scored.gain[row, 0]) + self._cost(scored, row),
                predicted_cost_s=self._cost(scored, row),
                probability=_probability(scored.gain[row]),
                chosen=row == chosen,
                rejected_because=reasons[row - 1],
            )
            for row, after in enumerate(scored.topologies)
            if row
        ]
        return tuple(sorted(candidates, key=lambda c: (not c.chosen, c.predicted_end_s)))

    def _decision(
        self,
        scored: _Scored,
        row: int,
        topology: Topology,
        progress: Progress,
        candidates: tuple[Candidate, ...],
        stay: Prediction,
    ) -> Decision:
        after = scored.topologies[row]
        kind = scored.placements.kinds[row]
        assert kind is not None, "only staying has no kind"
        cost_s = self._cost(scored, row)
        gain = scored.gain[row] + cost_s
        mean_s, reach_s = float(gain[0]), Z_80 * float(gain.std())
        move = self.model.prediction(scored.result, row, progress)
        return Decision(
            before=topology,
            after=after,
            strategy=self.model.roles.strategy(topology, after),
            kind=kind,
            candidates=candidates,
            bottleneck_before=stay.bottleneck,
            bottleneck_after=move.bottleneck,
            predicted_throughput=move.throughput,
            predicted_gain_s=mean_s,
            gain_interval=Interval(low=mean_s - reach_s, high=mean_s + reach_s),
            predicted_cost_s=cost_s,
            horizon_s=stay.mean_s,
            model_version=self.model.version,
            owed=progress.owed(self.model.roles.source),
            probability=_probability(scored.gain[row]),
            stay=stay,
            move=move,
        )


def _probability(gain: NDArray[np.float64]) -> float:
    return float(np.count_nonzero(gain > 0)) / gain.size


def _column(values: NDArray[np.int64] | NDArray[np.float64]) -> Array:
    return np.asarray(values, dtype=np.float64).reshape(-1, 1)
