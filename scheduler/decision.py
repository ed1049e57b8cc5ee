"""What the planner asks of a move, what it weighed, and what it decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shiftbook.ledger.events.reallocation import Candidate, Interval, Strategy
from shiftbook.ledger.plan import TrainingView
from shiftbook.ledger.proposal import Proposal
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.prediction import Prediction


@dataclass(frozen=True)
class Thresholds:
    """What the planner asks of a move beyond the plan's own limits."""

    use_low: float = 0.8
    """Use of its replicas under or at which a component counts as over-provisioned, 0 to 1."""
    lasting_s: float = 0.05
    """For how long it must have, so that no single noisy window gives devices away."""
    probability: float = 0.7
    """Least probability that the move beats staying."""
    least_gain_s: float = 0.01
    """Least net gain; the plan's margin counts where it is larger."""
    cost_share: float = 0.25
    """Least net gain as a share of the move's cost, so that two moves cannot undo each other for
    the noise of an estimate."""
    retry_s: float = 1.0
    """Before a move that was decided and not carried out is decided again."""
    tie_s: float = 0.002
    """Candidates this near the best count as equal; then the one that moves least wins."""
    listed: int = 4
    """Candidates of a large system that are scored in full."""
    exact: int = 256
    """Combinations up to which every one is scored in full."""


@dataclass(frozen=True)
class Decision:
    """A move that is worth it, with everything that its proposal records.

    ``predicted_gain_s`` and its interval are before the cost; the net is the difference.
    """

    before: Topology
    after: Topology
    strategy: Strategy
    kind: str
    """Kind of move, under which its cost is learned."""
    candidates: tuple[Candidate, ...]
    bottleneck_before: str
    bottleneck_after: str
    predicted_throughput: float
    predicted_gain_s: float
    gain_interval: Interval
    predicted_cost_s: float
    horizon_s: float
    model_version: int
    owed: Mapping[str, int]
    probability: float
    stay: Prediction
    move: Prediction

    @property
    def net_gain_s(self) -> float:
        """Predicted seconds saved, the move's cost taken off."""
        return self.predicted_gain_s - self.predicted_cost_s

    def proposal(self, sees: TrainingView, *, window: int | None = None) -> Proposal:
        """The decision as what the gate takes; ``window`` is the position of the window's event."""
        return Proposal(
            before=self.before,
            after=self.after,
            strategy=self.strategy,
            sees=sees,
            candidates=self.candidates,
            bottleneck_before=self.bottleneck_before,
            bottleneck_after=self.bottleneck_after,
            predicted_throughput=self.predicted_throughput,
            predicted_gain_s=self.predicted_gain_s,
            gain_interval=self.gain_interval,
            predicted_cost_s=self.predicted_cost_s,
            horizon_s=self.horizon_s,
            model_version=self.model_version,
            owed=dict(self.owed),
            window=window,
        )


@dataclass(frozen=True)
class Deliberation:
    """What was weighed, whether or not it led to a decision."""

    stay: Prediction
    candidates: tuple[Candidate, ...]
    donors: tuple[str, ...]
    decision: Decision | None
    because: str
    """Why this and no other, in words."""
