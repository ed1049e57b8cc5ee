"""Which version each engine holds and whether it may serve: what the weight syncs of a job say,
and what an engine read first that was brought up without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shiftbook.ledger.events.life import ReplicaStarted
from shiftbook.ledger.events.state import StateFirstUsed
from shiftbook.ledger.events.sync import (
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncFailed,
    WeightSyncStarted,
)

POLICY_PART = "model"
"""Part of a state that is the policy; absent where resident weights cannot be read."""

STARTED = "it was started and has no version yet"
"""Why an engine is held until a sync reaches it or it is used for the first time."""


@dataclass(frozen=True)
class EngineState:
    """One target of weight syncs. States are replaced, never changed."""

    target: str
    standing: Literal["syncing", "serving", "held", "lost"] = "syncing"
    """`held`: the last sync did not reach it, and it serves nothing before one does."""
    version: int | None = None
    """What it holds and was verified to hold; None where that is not known."""
    root: str | None = None
    incarnation: str | None = None
    reason: str | None = None
    """Why it is held or lost; of one that serves, what went otherwise on the way."""
    position: int = -1
    """Of the event that says so."""


Engines = dict[str, EngineState]


def begun(engines: Engines, event: WeightSyncStarted, position: int) -> None:
    """Targets wait for the version; they hold what they held."""
    for target in event.targets:
        known = engines.get(target) or EngineState(target)
        # Spelled out: `replace` takes as long as the rest of a sync's events.
        engines[target] = EngineState(
            target, "syncing", known.version, known.root, known.incarnation, None, position
        )


def delivered(engines: Engines, event: WeightSyncDelivered, position: int) -> None:
    """One target holds the version, or, where fingerprints differ, nobody knows what."""
    known = engines.get(event.target) or EngineState(event.target)
    good = not event.differing
    engines[event.target] = replace(
        known,
        version=event.version if good else None,
        root=event.root if good else None,
        incarnation=event.incarnation,
        position=position,
    )


def committed(engines: Engines, event: WeightSyncCommitted, position: int) -> None:
    """Each target serves, or is held out, as its outcome says."""
    for outcome in event.outcomes:
        known = engines.get(outcome.target) or EngineState(outcome.target)
        standing: Mapping[str, Literal["serving", "held", "lost"]] = {
            "serving": "serving",
            "failed": "held",
            "lost": "lost",
        }
        engines[outcome.target] = replace(
            known, standing=standing[outcome.outcome], reason=outcome.reason, position=position
        )


def failed(
    engines: Engines, event: WeightSyncFailed, targets: tuple[str, ...], position: int
) -> None:
    """No target took the version."""
    for target in targets:
        known = engines.get(target) or EngineState(target)
        engines[target] = replace(known, standing="held", reason=event.reason, position=position)


def started(engines: Engines, event: ReplicaStarted, position: int, *, synced: bool) -> None:
    """A new process holds no version yet; ``synced`` says that its component takes syncs."""
    known = engines.get(event.replica)
    if (known is None and synced) or (known and known.incarnation != event.incarnation):
        engines[event.replica] = EngineState(
            event.replica,
            "held",
            incarnation=event.incarnation,
            reason=STARTED,
            position=position,
        )


def used(engines: Engines, event: StateFirstUsed, position: int, *, synced: bool) -> None:
    """What an engine read before its first work: one that was just started, by a move, a restart
    or a restore, holds that version and serves without a sync.

    Of any other it says nothing new: it may be told late, when the engine is already left out.
    """
    known = engines.get(event.replica)
    if known is None:
        fresh = synced
    else:
        fresh = (known.reason, known.incarnation) == (STARTED, event.incarnation)
    if fresh:
        engines[event.replica] = EngineState(
            event.replica,
            "serving",
            event.policy_version,
            event.parts.get(POLICY_PART),
            event.incarnation,
            position=position,
        )


def lost(engines: Engines, replica: str, cause: str, position: int) -> None:
    """A process is gone, and what it held with it."""
    known = engines.get(replica)
    if known is not None:
        engines[replica] = EngineState(
            replica, "lost", incarnation=known.incarnation, reason=cause, position=position
        )
