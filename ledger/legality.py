"""Which event may follow which: the gate refuses what this table forbids, the verifier finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import lease, observation, safety, sync, training
from shiftbook.ledger.events import state as state_events
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.state import JobState, LedgerState


@dataclass(frozen=True, slots=True)
class Violation:
    """An event that may not stand where it stands."""

    rule: str
    expected: str
    found: str


PREDECESSORS: dict[str, frozenset[str]] = {
    "ReallocationRejected": frozenset({"proposed"}),
    "ReallocationAbandoned": frozenset({"proposed", "granted"}),
    "ReallocationGranted": frozenset({"proposed"}),
    "ReallocationQuiesced": frozenset({"granted"}),
    "ReallocationTransferred": frozenset({"quiesced"}),
    "ReallocationVerified": frozenset({"transferred"}),
    "ReallocationCommitted": frozenset({"verified"}),
    # After `verified` recovery finishes; a move that was verified is never undone.
    "ReallocationRolledBack": frozenset({"granted", "quiesced", "transferred"}),
    "ReallocationPoisoned": frozenset({"granted", "quiesced", "transferred", "verified"}),
    "OperationTakenOver": frozenset({"granted", "quiesced", "transferred", "verified"}),
    "GainRealized": frozenset({"committed"}),
}
"""Status that a reallocation must have for the event to follow."""


def check(state: LedgerState, job: str, operation: str | None, event: Event) -> Violation | None:
    """Say whether an event of a job may follow the folded state; None where it may."""
    current = state.job(job)
    name = event.type_()
    if name in PREDECESSORS:
        return _check_operation(current, name, operation)
    rule = _RULES.get(name)
    return rule(state, current, operation, event) if rule else None


def _check_operation(job: JobState, name: str, operation: str | None) -> Violation | None:
    allowed = PREDECESSORS[name]
    known = job.operations.get(operation or "")
    found = f"operation {operation} is {known.status}" if known else f"no operation {operation}"
    if known is None or known.status not in allowed:
        return Violation("sequence", f"{name} after {' or '.join(sorted(allowed))}", found)
    running = job.open_operation
    if name == "ReallocationGranted" and running is not None:
        return Violation("one-operation", "no other granted move", f"{running} is open")
    return None


Rule = Callable[[LedgerState, JobState, str | None, Event], Violation | None]


def _opened(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    if job.status != "unopened":
        return Violation("sequence", "JobOpened once, first", f"the job is {job.status}")
    return None


def _attempt(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, job_events.AttemptStarted)
    if job.status != "open":
        return Violation("sequence", "an open job", f"the job is {job.status}")
    if event.attempt in job.attempts:
        return Violation("attempt", "a new attempt id", f"{event.attempt} was used before")
    if event.parent is not None and event.parent not in job.attempts:
        return Violation("attempt", "a known parent attempt", f"{event.parent} is unknown")
    for device in event.topology.devices():
        held = state.leases.get(device)
        if held is None or held.job != job.name or held.epoch > event.epoch:
            found = (
                f"{device} is leased by {held.job} at {held.epoch}" if held else f"{device} free"
            )
            return Violation("lease", f"devices leased by {job.name} at {event.epoch}", found)
    return None


def _proposal(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    if job.status != "open" or operation is None:
        return Violation(
            "sequence", "an open job and an operation id", f"{job.status}, {operation}"
        )
    if operation in job.operations or operation in job.syncs:
        return Violation("operation", "a new operation id", f"{operation} was used before")
    return None


def _lease_granted(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, lease.LeaseGranted)
    for device in event.devices:
        held = state.leases.get(device)
        if held is not None and held.job != job.name:
            return Violation("lease", f"{device} free", f"leased by {held.job} at {held.epoch}")
        if device in state.quarantine:
            return Violation(
                "quarantine", f"{device} usable", f"poisoned by {state.quarantine[device]}"
            )
    return None


def _lease_ended(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, lease.LeaseReleased | lease.LeaseExpired)
    for device in event.devices:
        held = state.leases.get(device)
        if held is None or held.job != job.name:
            return Violation(
                "lease", f"{device} leased by {job.name}", f"{held.job if held else 'nobody'}"
            )
    return None


def _sync_started(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, sync.WeightSyncStarted)
    if job.status != "open" or operation is None or operation in job.syncs:
        return Violation("sequence", "an open job and a new operation id", f"{operation}")
    attempt = job.current_attempt()
    if attempt is None or event.epoch != attempt.epoch:
        found = "no attempt" if attempt is None else f"epoch {attempt.epoch}"
        return Violation("standing-grant", f"epoch {event.epoch} of the current attempt", found)
    running = job.operation_running()
    if running is not None and running.status != "granted":
        return Violation(
            "sync-order", "no move past quiesced", f"{running.operation} is {running.status}"
        )
    return None


def _sync_step(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    known = job.syncs.get(operation or "")
    if known is None or known.status != "started":
        found = f"it is {known.status}" if known else "no such sync"
        return Violation("sequence", f"an open weight sync {operation}", found)
    assert isinstance(
        event, sync.WeightSyncDelivered | sync.WeightSyncCommitted | sync.WeightSyncFailed
    )
    if event.version != known.version:
        return Violation("sync-version", f"version {known.version}", f"version {event.version}")
    return None


def _update(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, training.UpdateApplied)
    if event.policy_version != job.policy_version + 1:
        return Violation(
            "version", f"policy version {job.policy_version + 1}", f"{event.policy_version}"
        )
    return None


def _safe_entered(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    if job.safe_mode is not None:
        return Violation("sequence", "a job not in safe mode", f"safe mode: {job.safe_mode}")
    return None


def _safe_left(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, safety.SafeModeLeft)
    if job.safe_mode is None:
        return Violation("sequence", "a job in safe mode", "it is not in safe mode")
    return None


def _of_attempt(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    named = getattr(event, "attempt", None)
    if named not in job.attempts:
        return Violation("attempt", "an attempt that was started", f"{named}")
    return None


def _closed(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    if job.status != "open" or job.open_operation is not None:
        found = f"{job.status}, open operation {job.open_operation}"
        return Violation("sequence", "an open job without an open operation", found)
    return None


_RULES: dict[str, Rule] = {
    "JobOpened": _opened,
    "AttemptStarted": _attempt,
    "JobClosed": _closed,
    "ReallocationProposed": _proposal,
    "LeaseGranted": _lease_granted,
    "LeaseReleased": _lease_ended,
    "LeaseExpired": _lease_ended,
    "WeightSyncStarted": _sync_started,
    "WeightSyncDelivered": _sync_step,
    "WeightSyncCommitted": _sync_step,
    "WeightSyncFailed": _sync_step,
    "UpdateApplied": _update,
    "SafeModeEntered": _safe_entered,
    "SafeModeLeft": _safe_left,
    **{
        model.__name__: _of_attempt
        for model in (
            training.SamplesDrawn,
            training.SamplesGenerated,
            training.SamplesRewarded,
            training.SamplesDropped,
            training.BatchConsumed,
            observation.IterationCompleted,
            observation.WindowObserved,
            state_events.CheckpointSaved,
            state_events.CheckpointRestored,
            state_events.StateFirstUsed,
        )
    },
}
"""Rules of the events that are no step of a reallocation."""
