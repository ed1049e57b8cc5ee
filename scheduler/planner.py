"""Decides whether a move is worth it: lasting over-provision, then time to the end net of cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.events.observation import WindowObserved
from shiftbook.ledger.events.reallocation import Candidate, Interval
from shiftbook.ledger.plan import MovePlan
from shiftbook.ledger.topology import Device, Topology
from shiftbook.scheduler.decision import Decision, Deliberation, Thresholds
from shiftbook.scheduler.errors import PlanningError
from shiftbook.scheduler.estimate import Z_80
from shiftbook.scheduler.layout import Layout
from shiftbook.scheduler.makespan import Progress
from shiftbook.scheduler.prediction import Prediction
from shiftbook.scheduler.scoring import Scored, Scorer
from shiftbook.scheduler.throughput import ThroughputModel

__all__ = ["Decision", "Deliberation", "Planner", "Thresholds"]


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
        self._scorer = Scorer(model, self.layout, moves, self.thresholds)
        self.last: Deliberation | None = None
        """What the last call weighed."""
        self._low_since: dict[str, float] = {}
        self._decided: tuple[Topology, Topology, int, float] | None = None
        self._moved_s: float | None = None

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
        scored = self._scorer.score(topology, progress)
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

    # What speaks against a candidate, and which one is left

    def _reason(
        self,
        scored: Scored,
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

    def _weak(self, scored: Scored, row: int) -> str | None:
        """Why a candidate's gain does not suffice; None where it does."""
        gain_s = float(scored.gain[row, 0])
        by_cost_s = self.thresholds.cost_share * self._cost(scored, row)
        least_s = max(self.moves.margin_s, self.thresholds.least_gain_s, by_cost_s)
        if not gain_s > least_s:
            return f"{gain_s:.3f} s sooner than staying, the margin is {least_s:.3f} s"
        probability, least = scored.probability(row), self.thresholds.probability
        if probability < least:
            return f"beats staying with probability {probability:.2f} of {least:g}"
        return None

    def _awaited(
        self, scored: Scored, reasons: list[str | None], chosen: int | None, donors: set[str]
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

    def _givers(self, scored: Scored, row: int) -> set[str]:
        """Components that lose replicas, or the trainer where the source joins its devices."""
        names = [self.model.roles.source, self.model.roles.trainer, *scored.placements.others]
        changes = scored.rows[row] - scored.rows[0]
        givers = {name for name, change in zip(names, changes.tolist(), strict=True) if change < 0}
        free = scored.placements.trainer_free[:, 0]
        grows = changes[0] > 0
        if grows and free[row] < free[0]:
            givers.add(self.model.roles.trainer)
        return givers

    def _best(self, scored: Scored, reasons: list[str | None], topology: Topology) -> int | None:
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

    def _cost(self, scored: Scored, row: int) -> float:
        kind = scored.placements.kinds[row]
        return self.model.move_cost(kind).mean if kind is not None else 0.0

    def _candidates(
        self,
        scored: Scored,
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
                probability=scored.probability(row),
                chosen=row == chosen,
                rejected_because=reasons[row - 1],
            )
            for row, after in enumerate(scored.topologies)
            if row
        ]
        return tuple(sorted(candidates, key=lambda c: (not c.chosen, c.predicted_end_s)))

    def _decision(
        self,
        scored: Scored,
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
            probability=scored.probability(row),
            stay=stay,
            move=move,
        )
