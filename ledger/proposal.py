"""What a scheduler hands to the gate when it proposes a move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shiftbook.ledger.events.reallocation import (
    Candidate,
    Interval,
    ReallocationProposed,
    Strategy,
)
from shiftbook.ledger.plan import TrainingView
from shiftbook.ledger.topology import Topology


@dataclass(frozen=True, slots=True)
class Proposal:
    """A move, with everything that speaks for and against it.

    What the ledger itself knows (topology before, attempt, seconds since the last move) is added
    by the gate. ``before`` is the topology that the planner looked at; where it is given and no
    longer in force, the proposal is rejected as stale.
    """

    after: Topology
    strategy: Strategy
    sees: TrainingView
    candidates: tuple[Candidate, ...]
    bottleneck_before: str
    bottleneck_after: str
    predicted_throughput: float
    """Verified samples a second after the move."""
    predicted_gain_s: float
    gain_interval: Interval
    predicted_cost_s: float
    horizon_s: float
    model_version: int
    owed: Mapping[str, int] = field(default_factory=dict)
    """Units that each component owes or expects at this moment."""
    restoring: bool = False
    window: int | None = None
    """Position of the WindowObserved event that the decision used."""
    proposer: Literal["scheduler", "operator"] = "scheduler"
    before: Topology | None = None

    def event(
        self, *, attempt: str, before: Topology, since_last_move_s: float | None
    ) -> ReallocationProposed:
        """The proposal as it is recorded."""
        return ReallocationProposed(
            attempt=attempt,
            before=before,
            after=self.after,
            strategy=self.strategy,
            sees=self.sees,
            candidates=self.candidates,
            bottleneck_before=self.bottleneck_before,
            bottleneck_after=self.bottleneck_after,
            predicted_throughput=self.predicted_throughput,
            predicted_gain_s=self.predicted_gain_s,
            gain_interval=self.gain_interval,
            predicted_cost_s=self.predicted_cost_s,
            horizon_s=self.horizon_s,
            model_version=self.model_version,
            since_last_move_s=since_last_move_s,
            owed=dict(self.owed),
            restoring=self.restoring,
            window=self.window,
            proposer=self.proposer,
        )
