"""Learns online how fast components work and what moves cost, and predicts with an interval."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shiftbook.ledger.events.observation import ComponentWindow, WindowObserved
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.errors import PlanningError, TelemetryError
from shiftbook.scheduler.estimate import Z_80, Estimate
from shiftbook.scheduler.layout import COMBINED, Roles
from shiftbook.scheduler.makespan import (
    Array,
    Draws,
    FollowUps,
    Makespan,
    Moved,
    Progress,
    Station,
    makespan,
)
from shiftbook.scheduler.prediction import (
    IterationMeasured,
    Placements,
    Prediction,
    Priors,
    Score,
)

__all__ = [
    "IterationMeasured",
    "Placements",
    "Prediction",
    "Priors",
    "Score",
    "ThroughputModel",
    "tail_scale",
]

DRAWS = 65
"""One central draw and 32 antithetic pairs: a probability is known to about 0.06."""

SATURATED = 0.9
"""Share of its lanes from which on a source counts as working at its full rate."""

ENOUGH_UNITS = {"source": 24.0, "follower": 3.0}
"""Units that are gathered before a rate is learned from them: windows are shorter than units."""


@dataclass
class _Gathered:
    units: float = 0.0
    busy_s: float = 0.0


class ThroughputModel:
    """Rates, tail, update and move costs of one job, with forgetting and intervals."""

    def __init__(self, roles: Roles | None = None, priors: Priors | None = None, *, seed: int = 7):
        self.roles = roles or Roles()
        self.priors = p = priors or Priors()
        self.version = 0
        """Number of updates that the estimates have taken in."""
        self.turn_s = self._prior(p.turn_s, 0.9)
        self.turns_per_episode = self._prior(p.turns_per_episode, 0.7)
        self.tail_s = self._prior(p.tail_s, 0.7)
        self.tail_s.limit = 2.0
        self.lane_share = self._prior(p.lane_share, 0.98)
        self.update_s = self._prior(p.update_s, 0.8)
        self.follower_s: dict[str, Estimate] = {}
        self.move_s: dict[str, Estimate] = {}
        self.speeds: dict[str, Estimate] = {}
        self._gathered: dict[str, _Gathered] = {}
        self._scores: deque[Score] = deque(maxlen=256)
        half = np.random.default_rng(seed).standard_normal((DRAWS // 2, 16))
        self._normals = np.vstack([np.zeros((1, 16)), half, -half])

    def _prior(self, mean: float, forget: float) -> Estimate:
        return Estimate(mean, self.priors.spread * mean, forget)

    # What it learns from

    def observe(self, window: WindowObserved, lanes: int | None = None) -> None:
        """Learn from a window: seconds of a replica per unit, by component."""
        for name, component in window.components.items():
            self.observe_component(name, component, window.window_s, lanes)

    def observe_component(
        self, name: str, window: ComponentWindow, window_s: float, lanes: int | None = None
    ) -> None:
        """Learn one component's seconds per unit.

        A source is judged only by windows in which its lanes were full (``lanes`` a replica): with
        fixed lanes an emptier engine makes fewer turns in the same time.
        """
        if window_s <= 0 or name in self.roles.slotless or window.replicas == 0:
            return
        source = name == self.roles.source
        if source and (not lanes or window.running < SATURATED * lanes * window.replicas):
            self._gathered.pop(name, None)
            return
        gathered = self._gathered.setdefault(name, _Gathered())
        gathered.units += window.throughput * window_s
        gathered.busy_s += (1.0 if source else window.busy_share) * window.replicas * window_s
        if gathered.units < ENOUGH_UNITS["source" if source else "follower"]:
            return
        estimate = self.turn_s if source else self._follower(name)
        per_unit_s = gathered.busy_s / gathered.units
        if per_unit_s > 0:
            estimate.observe(per_unit_s)
            self.version += 1
        del self._gathered[name]

    def observe_progress(self, progress: Progress) -> None:
        """Learn which share of an episode's life needs a lane, while no turn waits for one."""
        if progress.waiting == 0 and progress.outstanding >= 2 and progress.running > 0:
            share = min(1.0, progress.running / progress.outstanding)
            self.lane_share.observe(share)
            self.version += 1

    def observe_iteration(self, measured: IterationMeasured) -> None:
        """Learn from a whole iteration."""
        if measured.episodes > 0:
            self.turns_per_episode.observe(measured.turns / measured.episodes)
        if measured.update_s is not None:
            self.update_s.observe(measured.update_s)
        if measured.tail_s is not None and measured.tail_episodes:
            self.tail_s.observe(tail_scale(measured.tail_s, measured.tail_episodes))
        self.version += 1

    def observe_move(self, kind: str, cost_s: float) -> None:
        """Learn what a kind of move takes, from its first refusal of work to working again."""
        if cost_s < 0:
            raise TelemetryError(f"expected a move's cost of at least 0 s, found {cost_s}")
        self.move_cost(kind).observe(cost_s)
        self.version += 1

    def observe_speed(self, device_kind: str, factor: float) -> None:
        """Learn how fast a kind of device is, as a multiple of the kind that rates refer to."""
        if factor <= 0:
            raise TelemetryError(f"expected a speed above 0 for {device_kind}, found {factor}")
        self.speeds.setdefault(device_kind, Estimate(1.0, 0.2)).observe(factor)
        self.version += 1

    # What it knows

    def speed(self, device_kind: str) -> float:
        """Speed of a kind of device; 1 where nothing else was measured."""
        known = self.speeds.get(device_kind)
        return known.mean if known else 1.0

    def move_cost(self, kind: str) -> Estimate:
        """Duration of a kind of move in seconds."""
        known = self.move_s.get(kind)
        if known is not None and (known.observed or kind != COMBINED):
            return known
        p, roles = self.priors, self.roles
        if kind == COMBINED:
            # Never tried: no dearer than its parts one after the other.
            parts = (f"{roles.trainer}-reshard", f"{roles.source}-grow")
            mean = sum(self.move_cost(part).mean for part in parts)
        else:
            by_ending = {"shrink": p.shrink_s, "grow": p.grow_s}
            mean = by_ending.get(kind.rsplit("-", 1)[-1], p.reshard_s)
        known = self.move_s[kind] = self._prior(mean, 0.8)
        return known

    def _follower(self, name: str) -> Estimate:
        known = self.follower_s.get(name)
        if known is None:
            known = self.follower_s[name] = self._prior(self.priors.follower_s, 0.9)
        return known

    def seconds_per_unit(self, name: str) -> Estimate:
        """Seconds of one replica per unit of a component (a turn of the source, a group)."""
        return self.turn_s if name == self.roles.source else self._follower(name)

    def turns_left(self, progress: Progress) -> float:
        """Turns until the last episode ends: as told, or by the mean number of turns."""
        if progress.outstanding == 0:
            return 0.0
        if progress.turns_left is not None:
            return max(progress.turns_left, float(progress.outstanding))
        expected = self.turns_per_episode.mean * progress.episodes - progress.turns_done
        # Each outstanding episode still has a turn at least, and no more than a whole one's.
        most = self.turns_per_episode.mean * progress.outstanding
        return float(np.clip(expected, progress.outstanding, max(most, progress.outstanding)))

    def draws(self, progress: Progress, count: int = DRAWS) -> Draws:
        """Joint draws of what matters for the rest of the iteration; the first is the central."""
        turns = self.turns_left(progress)
        per_episode = self.turns_per_episode
        # Independent episodes: the spread of a sum of n falls like 1 / sqrt(n); 0.3 is that of one.
        told = progress.turns_left is not None
        spread = 0.03 if told else max(0.03, 0.3 / max(progress.outstanding, 1) ** 0.5)
        left = turns * np.maximum(1 + spread * self._normals[:count, 0], 0.3)
        return Draws(
            turn_rate=1.0 / self._draw(self.turn_s, 1, count),
            tail_s=self._draw(self.tail_s, 2, count),
            turns_left=np.maximum(left, float(progress.outstanding)),
            turns_in_tail=(self._draw(per_episode, 3, count, least=1.0) + 1.0) / 2.0,
            lane_share=np.clip(self._draw(self.lane_share, 4, count), 0.05, 1.0),
            update_s=self._draw(self.update_s, 5, count),
        )

    def _draw(self, estimate: Estimate, column: int, count: int, least: float = 0.0) -> Array:
        if count == 1:
            return np.array([max(estimate.mean, least, 1e-9)])
        values = estimate.mean + estimate.predictive * self._normals[:count, column]
        return np.maximum(values, max(0.2 * estimate.mean, least, 1e-9))

    def station(
        self, names: Sequence[str], progress: Progress, replicas: Array, free: Array, count: int
    ) -> Station:
        """Followers that share devices, with the work that they have left."""
        work, ready, fixed = np.zeros((3, count))
        for name in names:
            # One column per component's name, the same in every process.
            column = 6 + sum(name.encode()) % 5
            per_unit = self._draw(self._follower(name), column, count)
            owed = progress.left.get(name, 0) * per_unit
            work = work + owed
            if name == self.roles.trainer:
                fixed = fixed + owed
            ready = ready + progress.ready(name) * per_unit
        units = float(max((progress.left.get(name, 0) for name in names), default=0))
        share = fixed / np.maximum(work, 1e-12)
        return Station(replicas, free, work, ready, share, max(units, 1.0))

    def _others(self, placements: Placements, progress: Progress, count: int) -> Station | None:
        """All followers with devices of their own, along a leading axis."""
        if not placements.others:
            return None
        single = [
            self.station([name], progress, replicas, free, count)
            for name, (replicas, free) in placements.others.items()
        ]
        return Station(
            replicas=np.stack([s.replicas for s in single]),
            free=np.stack([s.free for s in single]),
            work_s=np.stack([s.work_s for s in single])[:, None],
            ready_s=np.stack([s.ready_s for s in single])[:, None],
            fixed_share=np.zeros((len(single), 1, 1)),
            units=np.array([s.units for s in single])[:, None, None],
        )

    # What it predicts

    def evaluate(
        self, placements: Placements, progress: Progress, *, count: int = DRAWS
    ) -> Makespan:
        """Time to the end for several placements at once, the cost of each move in it.

        ``count`` of 1 gives the central draw alone.
        """
        draws = self.draws(progress, count)
        roles = self.roles
        cost = np.zeros((placements.source.shape[0], count))
        by_kind = {
            kind: self._draw(self.move_cost(kind), 13, count)
            for kind in set(placements.kinds)
            if kind is not None
        }
        for row, kind in enumerate(placements.kinds):
            if kind is not None:
                cost[row] = by_kind[kind]
        kept = np.minimum(placements.source, placements.source_before)
        largest = np.maximum(placements.source, placements.source_before)
        taking_part = 1.0 - kept / np.maximum(largest, 1e-9)
        own = [*(n for n in roles.stacked if n not in placements.others), roles.trainer]
        trainer = self.station(own, progress, placements.trainer, placements.trainer_free, count)
        others = self._others(placements, progress, count)
        reshard = self._draw(self.move_cost(f"{roles.trainer}-reshard"), 11, count)
        pause = self._draw(self.move_cost(f"{roles.source}-shrink"), 12, count)
        follow = FollowUps(
            sizes=placements.sizes,
            reshard_s=reshard if placements.sizes else None,
            pause_s=pause if placements.paused is not None else None,
            paused=placements.paused,
            paused_free=placements.paused_free,
        )
        moved = Moved(cost * taking_part, cost * placements.trainer_moved)
        return makespan(progress, draws, placements.source, moved, trainer, others, follow)

    def prediction(self, result: Makespan, row: int, progress: Progress) -> Prediction:
        """One placement's row as a prediction."""
        end = result.end_s[row]
        reach = Z_80 * float(end.std())
        mean = float(end[0])
        total = progress.elapsed_s + max(mean, 1e-9)
        return Prediction(
            mean_s=mean,
            low_s=max(0.0, min(mean, float(end.mean()) - reach)),
            high_s=max(mean, float(end.mean()) + reach),
            bottleneck=self.bottleneck(result, row, progress),
            throughput=progress.episodes / total,
            source_end_s=float(result.source_end_s[row, 0]),
            model_version=self.version,
        )

    def bottleneck(self, result: Makespan, row: int, progress: Progress) -> str:
        """Component that the end waits for longest: the source, its tools, or a follower."""
        source_s, follow_s = float(result.source_end_s[row, 0]), float(result.follow_s[row, 0])
        roles = self.roles
        if source_s >= follow_s and progress.outstanding:
            in_tail = float(result.tail_s[row, 0]) > 0.5 * source_s
            waits_for_tools = self.lane_share.mean < 0.5 and roles.slotless
            return roles.slotless[0] if in_tail and waits_for_tools else roles.source
        work = {
            name: left * self._follower(name).mean for name, left in progress.left.items() if left
        }
        return max(work, key=lambda name: work[name]) if work else roles.trainer

    def placements_of(self, topology: Topology) -> Placements:
        """A topology as it stands, in numbers; device kinds count where Layout knows them."""
        roles = self.roles
        source = {d for r in topology.replicas(roles.source) for d in r.devices}
        counts: dict[str, tuple[Array, Array]] = {}
        for name, replicas in topology.components.items():
            if name in roles.slotless or name == roles.source:
                continue
            free = sum(1 for r in replicas if not source.intersection(r.devices))
            counts[name] = (_column(len(replicas)), _column(free))
        if roles.trainer not in counts:
            raise PlanningError(f"no component {roles.trainer!r} stands in {topology.text()}")
        trainer, trainer_free = counts.pop(roles.trainer)
        for name in roles.stacked:
            counts.pop(name, None)
        here = _column(len(topology.replicas(roles.source)))
        return Placements(
            source=here,
            source_before=here,
            trainer=trainer,
            trainer_free=trainer_free,
            trainer_moved=_column(0),
            others=counts,
            kinds=(None,),
        )

    def predict_end(self, topology: Topology, progress: Progress) -> Prediction:
        """Time to the end of the iteration when the topology stays as it is until then."""
        result = self.evaluate(self.placements_of(topology), progress)
        return self.prediction(result, 0, progress)

    # How good it is

    def score(self, prediction: Prediction, observed_s: float) -> Score:
        """Compare a prediction with what came, and remember it for the calibration."""
        score = Score(
            predicted_s=prediction.mean_s,
            observed_s=observed_s,
            error_s=observed_s - prediction.mean_s,
            within=prediction.low_s <= observed_s <= prediction.high_s,
        )
        self._scores.append(score)
        return score

    @property
    def calibration(self) -> float | None:
        """Share of the last predictions whose interval held what came; 0.8 is meant."""
        if not self._scores:
            return None
        return sum(score.within for score in self._scores) / len(self._scores)

    @property
    def bias_s(self) -> float | None:
        """Mean of observed minus predicted over the last predictions."""
        if not self._scores:
            return None
        return sum(score.error_s for score in self._scores) / len(self._scores)


def tail_scale(tail_s: float, episodes: int) -> float:
    """Scale of a tail: its seconds, over the growth of the longest of ``episodes`` chains."""
    return tail_s / math.log1p(episodes)


def _column(value: float) -> Array:
    return np.array([[float(value)]])
