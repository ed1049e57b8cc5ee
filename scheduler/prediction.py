"""What the throughput model is told and what it says: measurements, placements, predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shiftbook.scheduler.makespan import Array


@dataclass(frozen=True)
class Priors:
    """What is assumed before anything was measured (of the order of the reference job)."""

    turn_s: float = 0.006
    follower_s: float = 0.03
    turns_per_episode: float = 4.5
    tail_s: float = 0.15
    lane_share: float = 0.8
    update_s: float = 0.05
    shrink_s: float = 0.03
    grow_s: float = 0.05
    reshard_s: float = 0.10
    spread: float = 0.5
    """Relative standard deviation of every prior."""


@dataclass(frozen=True)
class IterationMeasured:
    """What an iteration took, stage by stage; None where it was not seen."""

    episodes: int
    turns: int
    update_s: float | None = None
    tail_s: float | None = None
    """From when ``tail_episodes`` were left and fitted in the lanes, to the end of the last."""
    tail_episodes: int | None = None


@dataclass(frozen=True)
class Prediction:
    """Time to the end of an iteration; the interval holds 80 %."""

    mean_s: float
    low_s: float
    high_s: float
    bottleneck: str
    throughput: float
    """Verified samples a second over the whole iteration."""
    source_end_s: float
    model_version: int


@dataclass(frozen=True)
class Score:
    """A prediction against what came."""

    predicted_s: float
    observed_s: float
    error_s: float
    """Observed minus predicted: positive where it took longer."""
    within: bool
    """Inside the prediction's interval."""


@dataclass(frozen=True)
class Placements:
    """C placements as numbers; every array has shape (C, 1) and counts by device speed."""

    source: Array
    source_before: Array
    trainer: Array
    trainer_free: Array
    trainer_moved: Array
    """1.0 where the trainer's devices, or who else has work on them, change."""
    others: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    """(replicas, those without the source) of followers with devices of their own."""
    kinds: Sequence[str | None] = ()
    """Kind of the move to each; None for staying."""
    paused: Array | None = None
    """Source replicas once it has left the devices that it shares; 0 where it cannot."""
    paused_free: Array | None = None
    """Trainer replicas without the source on their device after that."""
    sizes: Sequence[float] = ()
    """Numbers of trainer replicas for a later change."""
