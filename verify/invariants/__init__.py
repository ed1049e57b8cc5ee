"""One small module for each invariant or family of them."""

from __future__ import annotations

from shiftbook.verify.invariants.base import End, Invariant, Step
from shiftbook.verify.invariants.consumption import ExactlyOnce, NoLoss
from shiftbook.verify.invariants.lease import Lease
from shiftbook.verify.invariants.legality import Legality
from shiftbook.verify.invariants.linkage import AdvantageRecomputes, RewardLink, TokenIdentity
from shiftbook.verify.invariants.operations import MoveEquality, Operations
from shiftbook.verify.invariants.order import CursorContinuity, DeclaredOrder
from shiftbook.verify.invariants.partition import Partition
from shiftbook.verify.invariants.record import RecordMatchesRows
from shiftbook.verify.invariants.replay import Replay
from shiftbook.verify.invariants.restore import FirstUse, ReferenceConstant, RestoreEquality
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
    CursorContinuity,
    DeclaredOrder,
    Partition,
    SyncEquality,
    VersionIsPolicy,
    ExactlyOnce,
    NoLoss,
    TokenIdentity,
    RewardLink,
    AdvantageRecomputes,
    Staleness,
    ReferenceConstant,
    VersionsMonotone,
    UpdateChain,
    FirstUse,
    LearningRate,
    OneStep,
    GradientTokens,
    Effect,
    RecordMatchesRows,
    Replay,
)
"""Every invariant that is judged, in the order of the coverage table."""

NOT_JUDGED: dict[str, tuple[str, str]] = {
    "I1b": ("bundle on disk equals the state at the save call", "is checked by restoring it"),
    "I4": ("data fed equals the declared data set", "no event carries digests of fed prompts"),
    "I7": ("caches as fresh as the weights", "no event carries versions of cache blocks"),
    "I9": ("random streams pairwise distinct", "no event carries random-state digests"),
    "I9b": ("random states continue at first use", "no event carries random-state digests"),
    "I16": ("log-probabilities replay", "needs a forward pass of the model"),
    "I20": ("replicas of the trainer equal", "no event carries fingerprints by rank"),
    "I22": ("model equals its cast masters", "no event carries both casts"),
    "I24": ("controllers follow their recurrence", "no event carries controller values"),
    "I25": ("recomputed forward draws the same mask", "no event carries mask digests"),
    "I26": ("declared loss terms are live", "no event carries terms' shares of the gradient"),
    "I27": ("selection audit", "no event carries counts by length"),
}
"""Known invariants that this build does not judge: title, and why not."""

__all__ = ["INVARIANTS", "NOT_JUDGED", "End", "Invariant", "Step"]
