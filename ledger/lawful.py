"""Check the events of a decision, one after another, before any of them is appended."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace

from shiftbook.ledger.envelope import Draft, seal
from shiftbook.ledger.errors import IllegalStep
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.legality import check
from shiftbook.ledger.receipt import Decision
from shiftbook.ledger.state import LedgerState

STANDS_STILL = frozenset({"SafeModeEntered", "ReallocationAbandoned"})
"""Types that only keep things as they are, which is right whatever a newer version wrote."""


def lawful(state: LedgerState, job: str, drafts: Sequence[Draft]) -> Decision:
    """Give the decision back when every event may follow the one before; raise IllegalStep.

    The state is not changed: events after the first are checked on a copy of what they touch.
    """
    _refuse_newer(state, job, drafts)
    folded = state
    for index, draft in enumerate(drafts):
        violation = check(folded, job, draft.operation, draft.event)
        if violation is not None:
            raise IllegalStep(violation.rule, violation.expected, violation.found)
        if index + 1 == len(drafts):
            break
        if folded is state:
            folded = _sketch(state, job, {draft.operation for draft in drafts})
        folded.apply(
            seal(
                draft,
                position=folded.size,
                job=job,
                version=folded.job(job).version + 1,
                recorded_ns=folded.job(job).last_event_ns,
                writer="",
                sequence=0,
                actor="",
                key=None,
            )
        )
    return Decision(job, tuple(drafts))


def _refuse_newer(state: LedgerState, job: str, drafts: Sequence[Draft]) -> None:
    """Raise IllegalStep where a newer version wrote what this decision would rest upon."""
    newer = state.newer or state.job(job).newer
    if newer is not None and not all(draft.event.type_() in STANDS_STILL for draft in drafts):
        raise IllegalStep(
            "newer-version",
            "events that this version knows, to decide upon",
            f"{newer}; act with the version that wrote it",
        )


def _sketch(state: LedgerState, name: str, touched: set[str | None]) -> LedgerState:
    """Copy a state as deep as events of one job that name these operations can change it."""
    # Only this job is copied: the others are not even looked at, which could mean folding them.
    jobs = ChainMap[str, JobState]({}, state.jobs)
    job = state.jobs.get(name)
    if job is not None:
        jobs[name] = replace(
            job,
            attempts=dict(job.attempts),
            epochs=dict(job.epochs),
            operations={k: replace(v) if k in touched else v for k, v in job.operations.items()},
            syncs={
                k: replace(v, delivered=dict(v.delivered)) if k in touched else v
                for k, v in job.syncs.items()
            },
            replicas={k: replace(v) for k, v in job.replicas.items()},
            engines=dict(job.engines),
            synced_components=set(job.synced_components),
            bundles=dict(job.bundles),
            registered=dict(job.registered),
            shadows=dict(job.shadows),
            pending_amendments=set(job.pending_amendments),
        )
    return LedgerState(state.position, jobs, dict(state.leases), dict(state.quarantine))
