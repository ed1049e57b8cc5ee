"""Commands of the gate on a job as a whole: its life, its plan, its leases and its safe mode."""

from __future__ import annotations

from shiftbook.ledger.amendment import planned
from shiftbook.ledger.doors import Door, abandon_unquiesced
from shiftbook.ledger.envelope import SYSTEM_JOB, Draft
from shiftbook.ledger.errors import IdempotencyConflict, IllegalStep, InvalidInput, UnknownJob
from shiftbook.ledger.events.job import AttemptStarted, JobClosed, JobOpened, PlanAmended
from shiftbook.ledger.events.lease import LeaseExpired, LeaseGranted, LeaseReleased
from shiftbook.ledger.events.safety import (
    QuarantineLifted,
    SafeModeEntered,
    SafeModeLeft,
    ShadowCompared,
)
from shiftbook.ledger.events.state import CheckpointRegistered
from shiftbook.ledger.events.sync import WeightSyncFailed
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.lawful import lawful
from shiftbook.ledger.receipt import Decision, Receipt
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.topology import Topology


class JobDoor(Door):
    """Open, attempt, amend, freeze, thaw and close a job; give devices out and take them back."""

    def open_job(self, job: str, opened: JobOpened) -> Receipt:
        """Declare a job, once: again with the same content gives the first receipt.

        Raise IdempotencyConflict where the job was opened with other content.
        """
        if job == SYSTEM_JOB:
            raise InvalidInput(f"{job!r} names the ledger's own events; give the job another name")
        first: list[JobOpened] = []

        def decide(state: LedgerState) -> Decision | None:
            known = state.job(job).opened
            if known is not None:
                first.append(known)
                return None
            return Decision(job, lawful(state, job, [Draft(opened)]).drafts, key="open")

        receipt = self.ledger.decide(decide)
        if receipt is not None:
            return receipt
        stored = next(self.ledger.read(job=job, types={"JobOpened"}, limit=1))
        if first[-1] != opened:
            raise IdempotencyConflict(
                job, "open", "another JobOpened", "a JobOpened with other content", stored.position
            )
        return Receipt(job, stored.position, stored.position, stored.version, stored.version, True)

    def start_attempt(
        self,
        job: str,
        attempt: str,
        *,
        parent: str | None,
        bundle: str | None,
        iteration: int,
        topology: Topology,
        policy_version: int,
        policy_fingerprint: str,
        pid: int,
    ) -> Grant:
        """Lease the job's devices and start an attempt, in one decision; give its standing grant.

        Every earlier standing grant of the job is stale from here, proposals that were pending
        are abandoned, and a weight sync that was open has failed. Devices in quarantine are not
        leased, and the topology may not use them. Repeating the call gives the same grant.

        Raise IllegalStep where another job owns a device, or a move is open (recover first).
        """
        grants: list[Grant] = []

        def decide(state: LedgerState) -> Decision | None:
            current = _open(state, job)
            assert current.opened is not None
            known = current.current_attempt()
            names = tuple(
                device.name
                for device in current.opened.devices
                if device.name not in state.quarantine
            )
            if known is not None and known.attempt == attempt and known.topology == topology:
                grants.append(Grant(job, attempt, names, known.epoch))
                return None
            drafts = abandon_unquiesced_proposals(current, f"attempt {attempt} starts")
            drafts += fail_open_sync(current, f"attempt {attempt} starts")
            epoch = state.size + len(drafts)
            grants.append(Grant(job, attempt, names, epoch))
            started = AttemptStarted(
                attempt=attempt,
                parent=parent,
                bundle=bundle,
                iteration=iteration,
                epoch=epoch,
                topology=topology,
                policy_version=policy_version,
                policy_fingerprint=policy_fingerprint,
                pid=pid,
            )
            drafts += [
                Draft(LeaseGranted(devices=names, holder=attempt)),
                Draft(started, cause=epoch),
            ]
            return lawful(state, job, drafts)

        self.ledger.decide(decide)
        return grants[-1]

    def close_job(self, job: str, closed: JobClosed) -> Receipt:
        """End a job and give its devices back, in one decision.

        Pending proposals are abandoned. Raise IllegalStep while a move is open. Repeating the
        call with the same content gives the first receipt.
        """

        def decide(state: LedgerState) -> Decision | int:
            current = state.job(job)
            if current.status == "closed":
                return current.closed_position
            drafts = abandon_unquiesced_proposals(current, f"the job is {closed.outcome}")
            drafts += fail_open_sync(current, f"the job is {closed.outcome}")
            drafts.append(Draft(closed))
            drafts += _give_back(state, job, None, f"the job is {closed.outcome}")
            return lawful(state, job, drafts)

        return self._decide_or_repeat(lambda: closed, decide)

    def amend(self, job: str, field: str, value: object, reason: str) -> Receipt:
        """Declare a change of one field of the plan (dotted path).

        Raise InvalidInput where the plan has no such field, IllegalStep where the value is none
        that the field can have.
        """

        def decide(state: LedgerState) -> Decision:
            plan = _open(state, job).plan
            assert plan is not None
            event = PlanAmended(
                field=field, before=planned(plan, field), after=value, reason=reason
            )
            return lawful(state, job, [Draft(event)])

        return self._decide(decide)

    def freeze(self, job: str, *, by: str, reason: str) -> Receipt | None:
        """Enter safe mode: the last valid topology stays, and only restoring moves are allowed.

        Moves that have not begun are abandoned; one that has quiesced finishes or rolls back.
        None where the job was in safe mode already. Raise InvalidInput without a reason.
        """
        _needs_reason(reason)

        def decide(state: LedgerState) -> Decision | None:
            current = _open(state, job)
            if current.safe_mode is not None:
                return None
            drafts = abandon_unquiesced(current, f"safe mode: {reason}")
            return lawful(state, job, [*drafts, enter_safe_mode(current, by, reason)])

        return self.ledger.decide(decide)

    def shadowed(self, job: str, compared: ShadowCompared, *, by: str) -> Receipt | None:
        """Record what a shadow showed; where it disagreed the job enters safe mode with it.

        Both stand or neither. A job that has ended, or is in safe mode already, is only told of.
        None where that window of the record was compared already. Raise UnknownJob, and IllegalStep
        where the job saved no such bundle at that iteration.
        """

        def decide(state: LedgerState) -> Decision | None:
            current = state.job(job)
            if current.status == "unopened":
                raise _not_opened(state, current)
            if current.shadows.get(compared.iteration) == compared.last_update:
                return None
            drafts = [Draft(compared, cause=compared.last_update)]
            if not compared.agreed and current.status == "open" and current.safe_mode is None:
                reason = f"shadow: {difference_text(compared)}"
                drafts += abandon_unquiesced(current, f"safe mode: {reason}")
                drafts.append(enter_safe_mode(current, by, reason))
            return lawful(state, job, drafts)

        return self.ledger.decide(decide)

    def register(self, job: str, registered: CheckpointRegistered) -> Receipt:
        """Record that a job has the state of another program as a bundle, opened or not yet.

        Raise IllegalStep for a job that is closed or has that bundle already, InvalidInput for the
        ledger's own job.
        """
        if job == SYSTEM_JOB:
            raise InvalidInput(f"{job!r} names the ledger's own events; name the job that uses it")
        return self._decide(lambda state: lawful(state, job, [Draft(registered)]))

    def thaw(self, job: str, *, by: str, reason: str) -> Receipt | None:
        """Leave safe mode; ``by`` is ``operator``, ``operator:NAME`` or a rule the plan declares.

        None where the job was not in safe mode. Raise IllegalStep for anybody else, InvalidInput
        without a reason.
        """
        _needs_reason(reason)

        def decide(state: LedgerState) -> Decision | None:
            if _open(state, job).safe_mode is None:
                return None
            return lawful(state, job, [Draft(SafeModeLeft(by=by, reason=reason))])

        return self.ledger.decide(decide)

    def release(self, job: str, *, holder: str, reason: str) -> Receipt | None:
        """Give back what ``holder`` leases for the job; None where it leases nothing."""

        def decide(state: LedgerState) -> Decision | None:
            drafts = _give_back(state, job, holder, reason)
            return lawful(state, job, drafts) if drafts else None

        return self.ledger.decide(decide)

    def expire(self, job: str, *, holder: str, evidence: str) -> Receipt | None:
        """Take back what a dead holder leased for the job; None where it leases nothing.

        ``evidence`` says what shows the death (``fencing.evidence_of_death`` makes it from the
        device locks). Raise IllegalStep without any, or while a move of the job is open.
        """

        def decide(state: LedgerState) -> Decision | None:
            devices = _leased(state, job, holder)
            if not devices:
                return None
            expired = LeaseExpired(devices=devices, holder=holder, evidence=evidence)
            return lawful(state, job, [Draft(expired)])

        return self.ledger.decide(decide)

    def lift_quarantine(self, job: str, operation: str, *, by: str, reason: str) -> Receipt | None:
        """Let the devices that a move poisoned be used again; an operator says why that is safe.

        None where they are in quarantine no more. Raise IllegalStep for anybody but an operator,
        InvalidInput without a reason.
        """
        _needs_reason(reason)

        def decide(state: LedgerState) -> Decision | None:
            devices = tuple(sorted(d for d, by in state.quarantine.items() if by == operation))
            if not devices:
                return None
            lifted = QuarantineLifted(devices=devices, by=by, reason=reason)
            return lawful(state, job, [Draft(lifted, operation=operation)])

        return self.ledger.decide(decide)


def abandon_unquiesced_proposals(job: JobState, reason: str) -> list[Draft]:
    """Events that give up proposals; a granted move stays, and makes the decision illegal."""
    return [
        draft
        for draft in abandon_unquiesced(job, reason)
        if job.operations[draft.operation or ""].status == "proposed"
    ]


def fail_open_sync(job: JobState, reason: str) -> list[Draft]:
    """Event that closes a weight sync which nobody will finish."""
    if job.open_sync is None:
        return []
    current = job.syncs[job.open_sync]
    failed = WeightSyncFailed(version=current.version, reason=reason)
    return [Draft(failed, operation=current.operation, cause=current.started_position)]


def enter_safe_mode(job: JobState, by: str, reason: str) -> Draft:
    """Event that freezes the topology in force."""
    return Draft(SafeModeEntered(reason=reason, by=by, topology=job.topology))


def difference_text(compared: ShadowCompared) -> str:
    """The first difference between a live run and its shadow, in a line."""
    found = compared.difference
    if found is None:
        return f"iterations from {compared.iteration} came out otherwise"
    where = f"iteration {found.iteration}, component {found.component}"
    return f"{where}: {found.kind} {found.name}: {found.what}"


def _needs_reason(reason: str) -> None:
    if not reason.strip():
        raise InvalidInput('expected a reason, found none; say why: --reason "..."')


def _open(state: LedgerState, job: str) -> JobState:
    current = state.job(job)
    if current.status == "unopened":
        raise _not_opened(state, current)
    if current.status == "closed":
        raise IllegalStep("sequence", f"job {job} open", "it is closed")
    return current


def _not_opened(state: LedgerState, current: JobState) -> UnknownJob | IllegalStep:
    if current.registered:
        found = "it was never opened, bundles were registered for it and nothing else"
        return IllegalStep("sequence", f"job {current.name} open", found)
    return UnknownJob(current.name, list(state.jobs))


def _leased(state: LedgerState, job: str, holder: str | None) -> tuple[str, ...]:
    return tuple(
        sorted(
            device
            for device, held in state.leases.items()
            if held.job == job and holder in (None, held.holder)
        )
    )


def _give_back(state: LedgerState, job: str, holder: str | None, reason: str) -> list[Draft]:
    """Events that release what a job leases, one for each holder."""
    holders = sorted({held.holder for held in state.leases.values() if held.job == job})
    return [
        Draft(LeaseReleased(devices=_leased(state, job, name), holder=name, reason=reason))
        for name in holders
        if holder in (None, name)
    ]
