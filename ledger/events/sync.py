"""Events of a weight sync: one policy version delivered to engines."""

from __future__ import annotations

from typing import Literal

from shiftbook.ledger.events.base import Count, Event, Hex128, Part


class SyncLoss(Part):
    """A lossy encoding of a sync: its bound, and what it came to."""

    encoding: Literal["int8-difference"]
    max_error: float
    """As the sender states it: no element of a receiver is further from the source's."""
    largest_error: float
    """As the sender measured it, over all elements."""
    root: Hex128
    """Root over the fingerprints of what receivers hold then; that of the source is another."""
    whole: Literal["decoded"] | None = None
    """What who takes the version whole gets: `decoded` is what the patches lead to, so that all
    hold one policy; absent where it is the source's weights."""


class WeightSyncStarted(Event):
    """A policy version is about to be delivered under the attempt's standing grant."""

    attempt: str
    version: Count
    base_version: Count | None = None
    source: dict[str, Hex128]
    source_root: Hex128
    """Root over the source's fingerprints."""
    encoding: str
    targets: tuple[str, ...]
    epoch: Count
    lossy: SyncLoss | None = None
    """Present where patches of this sync may lose something, which the plan must declare."""


class WeightSyncDelivered(Event):
    """One engine holds the version; fingerprints as it first read them."""

    target: str
    incarnation: str
    version: Count
    root: Hex128
    fingerprint_of: Literal["resident", "handed_over"]
    differing: tuple[str, ...] = ()
    """Names of tensors whose fingerprint differs from the source's; empty when all are equal."""
    moved_bytes: Count
    full_bytes: Count
    sync_s: float
    encoding: Literal["whole", "patch"] | None = None
    """How the version came to this target, where targets differ in it."""
    transport: str | None = None
    nan: Count | None = None
    """Elements of the version that are no number; absent where nobody counted them."""


class TargetOutcome(Part):
    """How the sync ended for one engine."""

    target: str
    outcome: Literal["serving", "failed", "lost"]
    reason: str | None = None


class WeightSyncCommitted(Event):
    """The sync ended; an engine without the version does not serve."""

    version: Count
    outcomes: tuple[TargetOutcome, ...]
    stall_s: float
    caches_flushed: tuple[str, ...]


class WeightSyncFailed(Event):
    """No engine took the version."""

    version: Count
    reason: str
