"""Who proposes moves: the planner, operators alone, or (for tests) lawful moves drawn by seed."""

from __future__ import annotations

import random
import time
from typing import Any, Protocol

from shiftbook.ledger.errors import Rejected
from shiftbook.ledger.events.job import JobOpened
from shiftbook.ledger.events.reallocation import Candidate, Interval
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.proposal import Proposal
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.layout import Layout, Roles
from shiftbook.scheduler.moves import Report, strategy_of


class Policy(Protocol):
    """Proposes moves for one job."""

    def propose(self, telemetry: dict[str, Any], job: JobState) -> Proposal | None:
        """The move to propose now, or None."""

    def calm(self, telemetry: dict[str, Any]) -> bool:
        """True when nothing can become worth a move soon."""

    def refused(self, error: Rejected) -> None:
        """A rule refused the proposal."""

    def failed(self, operation: str) -> None:
        """The move was abandoned or rolled back."""

    def moved(self, report: Report, telemetry: dict[str, Any] | None) -> None:
        """The move was committed."""

    def finish(self, telemetry: dict[str, Any]) -> None:
        """The job has ended."""


class NoMoves:
    """Proposes nothing: what moves is what an operator asked for."""

    def propose(self, telemetry: dict[str, Any], job: JobState) -> Proposal | None:
        """Nothing."""
        return None

    def calm(self, telemetry: dict[str, Any]) -> bool:
        """An operator may ask at any time."""
        return False

    def refused(self, error: Rejected) -> None:
        """Nothing is kept."""

    def failed(self, operation: str) -> None:
        """Nothing is kept."""

    def moved(self, report: Report, telemetry: dict[str, Any] | None) -> None:
        """Nothing is learned."""

    def finish(self, telemetry: dict[str, Any]) -> None:
        """Nothing is left to tell."""


def owed_units(telemetry: dict[str, Any]) -> dict[str, int]:
    """Units that each component owes or expects: what the rule of zero replicas looks at."""
    progress = telemetry["progress"]
    if not progress:
        return {}
    return {
        "rollout": progress["outstanding"],
        "tool": telemetry["channels"]["tool"]["in_hand"] + telemetry["channels"]["tool"]["depth"],
        "inference": progress["groups"] - progress["referenced"],
        "trainer": progress["groups"] - progress["trained"],
    }


class RandomMoves:
    """Draws lawful topologies by seed, to try that no move changes the training."""

    def __init__(self, opened: JobOpened, seed: int, *, every_s: tuple[float, float] = (0.05, 0.3)):
        self._opened = opened
        self._random = random.Random(seed)
        self._every_s = every_s
        self._layout = Layout(opened.devices, opened.elastic, Roles())
        self._next_s = 0.0

    def propose(self, telemetry: dict[str, Any], job: JobState) -> Proposal | None:
        """A random topology within the elastic ranges, at random times."""
        now_s = time.monotonic()
        if now_s < self._next_s or not telemetry["progress"] or telemetry["updating"]:
            return None
        self._next_s = now_s + self._random.uniform(*self._every_s)
        trainers = self._layout.trainer_sizes(len(job.topology.replicas("trainer")), 1)
        rollout = self._opened.elastic["rollout"]
        counts = {
            "rollout": self._random.randint(max(1, rollout.minimum), rollout.maximum),
            "trainer": self._random.choice(trainers),
        }
        after = self._layout.place(job.topology, counts)
        if after.placement() == job.topology.placement():
            return None
        return drawn_proposal(self._opened, job.topology, after, owed_units(telemetry))

    def calm(self, telemetry: dict[str, Any]) -> bool:
        """Moves are drawn at any time."""
        return False

    def refused(self, error: Rejected) -> None:
        """Drawn again later."""

    def failed(self, operation: str) -> None:
        """Drawn again later."""

    def moved(self, report: Report, telemetry: dict[str, Any] | None) -> None:
        """Nothing is learned."""

    def finish(self, telemetry: dict[str, Any]) -> None:
        """Nothing is left to tell."""


def drawn_proposal(
    opened: JobOpened, before: Topology, after: Topology, owed: dict[str, int]
) -> Proposal:
    """A proposal that promises nothing, made for its own sake."""
    strategy = strategy_of(before, after)
    candidate = Candidate(
        after=after,
        strategy=strategy,
        predicted_end_s=0.0,
        predicted_gain_s=0.0,
        predicted_cost_s=0.0,
        probability=1.0,
        chosen=True,
    )
    return Proposal(
        before=before,
        after=after,
        strategy=strategy,
        sees=opened.plan.view(),
        candidates=(candidate,),
        bottleneck_before="rollout",
        bottleneck_after="rollout",
        predicted_throughput=0.0,
        predicted_gain_s=0.0,
        gain_interval=Interval(low=0.0, high=0.0),
        predicted_cost_s=0.0,
        horizon_s=0.0,
        model_version=0,
        owed=owed,
        proposer="operator",
    )
