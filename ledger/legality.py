"""Which event may follow which: the gate refuses what this table forbids, the verifier finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shiftbook.ledger.amendment import amended, planned
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import lease, observation, reallocation, safety, sync, training
from shiftbook.ledger.events import state as state_events
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.job_state import JobState, OperationState
from shiftbook.ledger.state import LedgerState

OPERATOR = "operator"
"""Who may always end safe mode; ``operator:NAME`` is one of them."""


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
        known = current.operations.get(operation or "")
        if known is None or known.status not in PREDECESSORS[name]:
            expected = f"{name} after {' or '.join(sorted(PREDECESSORS[name]))}"
            found = f"operation {operation} is {known.status}" if known else f"no {operation}"
            return Violation("sequence", expected, found)
        content = _CONTENT.get(name)
        return content(state, current, known, event) if content else None
    rule = _RULES.get(name)
    return rule(state, current, operation, event) if rule else None


Content = Callable[[LedgerState, JobState, OperationState, Event], Violation | None]
"""What a step must say, given that it comes in its order."""


def _granted(
    state: LedgerState, job: JobState, known: OperationState, event: Event
) -> Violation | None:
    assert isinstance(event, reallocation.ReallocationGranted)
    if job.status != "open" or job.plan is None:
        return Violation("sequence", "an open job", f"the job is {job.status}")
    if job.open_operation is not None:
        return Violation("one-operation", "no other granted move", f"{job.open_operation} is open")
    if job.plan.moves.mode != "act":
        return Violation("mode", "mode act", f"mode {job.plan.moves.mode}")
    if job.safe_mode is not None and not known.restoring:
        return Violation("safe-mode", "only restoring moves", f"safe mode: {job.safe_mode}")
    if job.open_sync is not None:
        return Violation("sync-priority", "no open weight sync", f"{job.open_sync} is open")
    if known.attempt != job.attempt:
        return Violation("attempt", f"a move of attempt {job.attempt}", f"one of {known.attempt}")
    if not known.before.matches(job.topology):
        return Violation("stale-topology", job.topology.text(), known.before.text())
    missing = {*known.before.changed_devices(known.after)} - set(event.devices)
    if missing:
        return Violation("grant", "every device that the move touches", f"no {sorted(missing)}")
    return _usable(state, job, event.devices)


def _usable(state: LedgerState, job: JobState, devices: tuple[str, ...]) -> Violation | None:
    """Say whether the job leases every device and none is in quarantine."""
    for device in devices:
        held = state.leases.get(device)
        if held is None or held.job != job.name:
            found = f"leased by {held.job}" if held else "leased by nobody"
            return Violation("lease", f"{device} leased by {job.name}", found)
        if device in state.quarantine:
            found = f"poisoned by {state.quarantine[device]}"
            return Violation("quarantine", f"{device} usable", found)
    return None


def _taken_over(
    state: LedgerState, job: JobState, known: OperationState, event: Event
) -> Violation | None:
    assert isinstance(event, reallocation.OperationTakenOver)
    if event.previous_epoch != known.epoch or event.devices != known.devices:
        expected = f"the grant at {known.epoch} for {', '.join(known.devices)}"
        found = f"{event.previous_epoch} for {', '.join(event.devices)}"
        return Violation("grant", expected, found)
    return None


def _verified(
    state: LedgerState, job: JobState, known: OperationState, event: Event
) -> Violation | None:
    assert isinstance(event, reallocation.ReallocationVerified)
    for part in sorted({*event.before, *event.after}):
        before, after = event.before.get(part), event.after.get(part)
        if before != after:
            return Violation("fingerprints", f"{part} {before}", f"{after}")
    if not event.before and known.strategy != "pause":
        return Violation("fingerprints", f"fingerprints of what a {known.strategy} moved", "none")
    return None


def _committed(
    state: LedgerState, job: JobState, known: OperationState, event: Event
) -> Violation | None:
    assert isinstance(event, reallocation.ReallocationCommitted)
    if not event.after.matches(known.after):
        return Violation("topology", known.after.text(), event.after.text())
    return None


def _rolled_back(
    state: LedgerState, job: JobState, known: OperationState, event: Event
) -> Violation | None:
    assert isinstance(event, reallocation.ReallocationRolledBack)
    if not event.restored.matches(known.before):
        return Violation("topology", known.before.text(), event.restored.text())
    return None


def _gain(
    state: LedgerState, job: JobState, known: OperationState, event: Event
) -> Violation | None:
    if known.adjusted_gain_s is not None:
        return Violation("sequence", "one GainRealized", f"another at {known.gain_position}")
    return None


_CONTENT: dict[str, Content] = {
    "ReallocationGranted": _granted,
    "OperationTakenOver": _taken_over,
    "ReallocationVerified": _verified,
    "ReallocationCommitted": _committed,
    "ReallocationRolledBack": _rolled_back,
    "GainRealized": _gain,
}


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
    if job.open_operation is not None:
        return Violation("sequence", "no open move; recover first", f"{job.open_operation} is open")
    if event.attempt in job.attempts:
        return Violation("attempt", "a new attempt id", f"{event.attempt} was used before")
    if event.parent is not None and event.parent not in job.attempts:
        return Violation("attempt", "a known parent attempt", f"{event.parent} is unknown")
    for device in event.topology.devices():
        if device in state.quarantine:
            found = f"poisoned by {state.quarantine[device]}"
            return Violation("quarantine", f"{device} usable", found)
        held = state.leases.get(device)
        if held is None or held.job != job.name or held.epoch != event.epoch:
            found = (
                f"{device} is leased by {held.job} at {held.epoch}" if held else f"{device} free"
            )
            return Violation("lease", f"devices leased by {job.name} at {event.epoch}", found)
    return None


def _amended(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, job_events.PlanAmended)
    if job.plan is None or job.status != "open":
        return Violation("sequence", "an open job", f"the job is {job.status}")
    try:
        found = planned(job.plan, event.field)
        amended(job.plan, event.field, event.after)
    except InvalidInput as error:
        return Violation("amendment", "a field of the plan and a valid value", str(error))
    if event.plain().get("before") != found:
        return Violation("amendment", f"{event.field} from {found!r}", f"from {event.before!r}")
    return None


def _proposal(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, reallocation.ReallocationProposed)
    if job.status != "open" or operation is None:
        return Violation(
            "sequence", "an open job and an operation id", f"{job.status}, {operation}"
        )
    if operation in job.operations or operation in job.syncs:
        return Violation("operation", "a new operation id", f"{operation} was used before")
    if job.attempt is None or event.attempt != job.attempt:
        return Violation("attempt", f"the current attempt {job.attempt}", f"{event.attempt}")
    if not event.before.matches(job.topology):
        return Violation("stale-topology", job.topology.text(), event.before.text())
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
    if job.open_operation is not None:
        return Violation("sequence", "no open move; recover first", f"{job.open_operation} is open")
    if isinstance(event, lease.LeaseExpired) and not event.evidence.strip():
        return Violation("evidence", "what shows that the holder is dead", "nothing")
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
    if operation in job.operations or job.open_sync is not None:
        found = f"{job.open_sync} is open" if job.open_sync else f"{operation} is a move"
        return Violation("sequence", "one weight sync at a time, with its own id", found)
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
    if isinstance(event, sync.WeightSyncDelivered) and event.target not in known.targets:
        return Violation("sync-target", f"one of {', '.join(known.targets)}", event.target)
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
    rules = job.plan.moves.rules_may_thaw if job.plan else ()
    if not is_operator(event.by) and event.by not in rules:
        declared = ", ".join(rules) or "none"
        return Violation("thaw", f"an operator or a declared rule ({declared})", event.by)
    return None


def is_operator(by: str) -> bool:
    """True for ``operator`` and ``operator:NAME``."""
    return by == OPERATOR or by.startswith(f"{OPERATOR}:")


def _lifted(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, safety.QuarantineLifted)
    if not is_operator(event.by):
        return Violation("quarantine", "an operator", event.by)
    for device in event.devices:
        if device not in state.quarantine:
            return Violation("quarantine", f"{device} in quarantine", "it is not")
    return None


def _shadowed(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, safety.ShadowCompared)
    saved = job.bundles.get(event.bundle)
    if saved is None or saved.iteration != event.iteration:
        found = "one that nobody saved" if saved is None else f"one of {saved.iteration}"
        return Violation("bundle", f"a bundle saved at iteration {event.iteration}", found)
    if job.shadows.get(event.iteration) == event.last_update:
        return Violation("repeated", "a window compared once", f"{event.iteration} again")
    return None


def _registered(
    state: LedgerState, job: JobState, operation: str | None, event: Event
) -> Violation | None:
    assert isinstance(event, state_events.CheckpointRegistered)
    if job.status == "closed":
        return Violation("sequence", "a job that is not closed", "it is closed")
    if event.bundle in job.bundles or event.bundle in job.registered:
        how = "saved by an attempt" if event.bundle in job.bundles else "registered before"
        return Violation("repeated", "a bundle that is new to the job", f"one {how}")
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
    "PlanAmended": _amended,
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
    "QuarantineLifted": _lifted,
    "ShadowCompared": _shadowed,
    "CheckpointRegistered": _registered,
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
