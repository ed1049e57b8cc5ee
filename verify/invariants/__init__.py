"""One small module for each invariant or family of them."""

from __future__ import annotations

from shiftbook.verify.invariants.advantages import AdvantageRecomputes
from shiftbook.verify.invariants.base import End, Invariant, Step
from shiftbook.verify.invariants.cache import CacheFreshness
from shiftbook.verify.invariants.consumption import ExactlyOnce, NoLoss
from shiftbook.verify.invariants.data import DataIdentity
from shiftbook.verify.invariants.durable import FileEquality
from shiftbook.verify.invariants.lease import Lease
from shiftbook.verify.invariants.legality import Legality
from shiftbook.verify.invariants.linkage import RewardLink, TokenIdentity
from shiftbook.verify.invariants.logprobs import LogProbsReplay
from shiftbook.verify.invariants.loss import (
    Controllers,
    LiveTerms,
    Recomputed,
    RecomputedMasks,
)
from shiftbook.verify.invariants.operations import MoveEquality, Operations
from shiftbook.verify.invariants.order import CursorContinuity, DeclaredOrder
from shiftbook.verify.invariants.partition import Partition
from shiftbook.verify.invariants.randomness import DistinctStreams, RandomLineage
from shiftbook.verify.invariants.ranks import CastEqual, RanksEqual
from shiftbook.verify.invariants.record import RecordMatchesRows
from shiftbook.verify.invariants.replay import Replay
from shiftbook.verify.invariants.restore import FirstUse, ReferenceConstant, RestoreEquality
from shiftbook.verify.invariants.selection import SelectionAudit
from shiftbook.verify.invariants.shadow import ShadowAgrees
from shiftbook.verify.invariants.sync import SyncEquality
from shiftbook.verify.invariants.update import (
    Effect,
    GradientTokens,
    LearningRate,
    OneStep,
    UpdateChain,
)
from shiftbook.verify.invariants.versions import Staleness, VersionIsPolicy, VersionsMonotone

INVARIANTS: tuple[type[Invariant], ...] = (
    Legality,
    Lease,
    Operations,
    MoveEquality,
    RestoreEquality,
    FileEquality,
    CursorContinuity,
    DeclaredOrder,
    DataIdentity,
    Partition,
    SyncEquality,
    CacheFreshness,
    VersionIsPolicy,
    DistinctStreams,
    RandomLineage,
    ExactlyOnce,
    NoLoss,
    TokenIdentity,
    RewardLink,
    AdvantageRecomputes,
    Staleness,
    ReferenceConstant,
    VersionsMonotone,
    LogProbsReplay,
    UpdateChain,
    FirstUse,
    LearningRate,
    OneStep,
    RanksEqual,
    GradientTokens,
    CastEqual,
    Effect,
    Controllers,
    RecomputedMasks,
    LiveTerms,
    SelectionAudit,
    Recomputed,
    RecordMatchesRows,
    Replay,
    ShadowAgrees,
)
"""Every invariant that is judged, in the order of the coverage table."""

NOT_JUDGED: dict[str, tuple[str, str]] = {}
"""Known invariants that this build does not judge: title, and why not."""

__all__ = ["INVARIANTS", "NOT_JUDGED", "End", "Invariant", "Step"]
