"""The one door: every move is proposed, granted, recorded step by step, and ended through it.

::

    proposed -> rejected | abandoned | granted -> quiesced -> transferred -> verified -> committed
                                          +----------+------------+-> rolled_back | poisoned

Each step records the act just done and allows the next one. All decisions fall under the append
lock of the ledger, so they hold across jobs and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from shiftbook.ledger.doors import abandon_unquiesced
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import IllegalStep, Rejected, StaleGrant, StepTimeout, UnknownOperation
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.reallocation import (
    Custody,
    GainRealized,
    OperationTakenOver,
    ReallocationAbandoned,
    ReallocationCommitted,
    ReallocationGranted,
    ReallocationPoisoned,
    ReallocationProposed,
    ReallocationQuiesced,
    ReallocationRejected,
    ReallocationRolledBack,
    ReallocationTransferred,
    ReallocationVerified,
)
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.job_door import JobDoor, enter_safe_mode
from shiftbook.ledger.job_state import JobState, OperationState, OperationStatus
from shiftbook.ledger.lawful import lawful
from shiftbook.ledger.proposal import Proposal
from shiftbook.ledger.receipt import Decision, Receipt
from shiftbook.ledger.rules import Case, involved_devices, judge
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.sync_door import SyncDoor
from shiftbook.ledger.topology import Topology

if TYPE_CHECKING:
    from shiftbook.ledger.mover import Mover
    from shiftbook.ledger.reallocation import Details, Reallocation

__all__ = ["Gate", "Proposal"]

UNLIMITED: frozenset[OperationStatus] = frozenset({"rolled_back", "poisoned"})
"""Steps that may come at any time, since a missed time limit leads to them."""


class Gate(JobDoor, SyncDoor):
    """Decides about moves and records them.

    Steps are idempotent: the step that stands last, again with the same content, gives its first
    receipt. A step has a time limit (``plan.moves.step_limit_s``), counted on the boot clock of
    this process from the last step of the operation that this gate wrote; a step of an operation
    that another process advanced is counted from the first step here. Rolling back is never too
    late, and neither is what recovery does after it took an operation over.
    """

    def propose(self, job: str, proposal: Proposal, *, operation: str | None = None) -> str:
        """Record a proposal and judge it; give the operation's id (``move-POSITION``).

        Raise Rejected where a rule refuses it (the rejection stands in the ledger), IllegalStep
        in mode ``observe`` (nothing is recorded) or without an attempt. An id that stands already
        gives the same answer again where the move is the same.
        """
        rejected: list[tuple[str, str] | None] = []
        names: list[str] = []

        def decide(state: LedgerState) -> Decision | None:
            current = state.job(job)
            if operation is not None and operation in current.operations:
                known = current.operations[operation]
                if (known.after, known.strategy) != (proposal.after, proposal.strategy):
                    offered = f"{proposal.strategy} to {proposal.after.text()}"
                    raise IllegalStep(
                        "repeated", f"{known.strategy} to {known.after.text()}", offered
                    )
                return None
            if current.status != "open" or current.attempt is None or current.plan is None:
                found = f"a job that is {current.status}, attempt {current.attempt}"
                raise IllegalStep("sequence", "an open job with an attempt", found)
            if current.plan.moves.mode == "observe":
                raise IllegalStep("mode", "mode advise or act", "observe: moves are only recorded")
            name = operation or f"move-{state.size}"
            since_s = self._since_last_move_s(current)
            event = proposal.event(
                attempt=current.attempt, before=current.topology, since_last_move_s=since_s
            )
            drafts = [Draft(event, operation=name, cause=proposal.window)]
            case = Case(
                state,
                current,
                current.plan,
                name,
                event,
                proposal.before or current.topology,
                since_s,
            )
            refused = judge(case)
            if refused is not None:
                drafts.append(self._rejection(refused, name, state.size))
            names.append(name)
            rejected.append(refused)
            return lawful(state, job, drafts)

        if self.ledger.decide(decide) is None:
            assert operation is not None
            self._raise_rejection(job, operation)
            return operation
        refused = rejected[-1]
        if refused is not None:
            raise Rejected(names[-1], *refused)
        return names[-1]

    def grant(self, job: str, operation: str, *, mover: str | None = None) -> Grant:
        """Judge a proposal again, on what stands now, and give permission to run it.

        ``mover`` says how recovery finds the mover: the name of an entry point of
        ``shiftbook.movers``, or ``module:function``. Raise Rejected where a rule refuses by now.
        """
        known = self._known(self.ledger.state(), job, operation)
        proposed = self.ledger.event(known.proposed_position).parsed()
        assert isinstance(proposed, ReallocationProposed)
        given: list[Grant | tuple[str, str]] = []

        def decide(state: LedgerState) -> Decision | None:
            known = self._known(state, job, operation)
            current = state.job(job)
            if known.status == "granted" and known.controller == self.controller:
                given.append(Grant(job, operation, known.devices, known.epoch))
                return None
            assert current.plan is not None
            if known.status == "proposed":
                since_s = self._since_last_move_s(current)
                case = Case(
                    state, current, current.plan, operation, proposed, proposed.before, since_s
                )
                refused = judge(case)
                if refused is not None:
                    given.append(refused)
                    rejection = self._rejection(refused, operation, known.last_position)
                    return lawful(state, job, [rejection])
            devices = involved_devices(known.before, known.after)
            event = ReallocationGranted(
                devices=devices,
                step_limit_s=current.plan.moves.limit_s(known.strategy),
                controller=self.controller,
                mover=mover,
            )
            given.append(Grant(job, operation, devices, state.size))
            return lawful(
                state, job, [Draft(event, operation=operation, cause=known.last_position)]
            )

        receipt = self.ledger.decide(decide)
        answer = given[-1]
        if not isinstance(answer, Grant):
            raise Rejected(operation, *answer)
        if receipt is not None:
            self._steps_s[job, operation] = self.boottime_s()
        return answer

    def abandon(self, job: str, operation: str, reason: str) -> Receipt:
        """Give up a move before anything was quiesced.

        Raise StaleGrant where it is granted to another controller.
        """
        event = ReallocationAbandoned(reason=reason)

        def decide(state: LedgerState) -> Decision | int:
            known = self._known(state, job, operation)
            if known.status == "abandoned":
                return known.last_position
            if known.status == "granted" and known.controller != self.controller:
                raise StaleGrant(
                    f"{operation} is granted to {known.controller}, not to {self.controller}; "
                    "take it over first"
                )
            draft = Draft(event, operation=operation, cause=known.last_position)
            return lawful(state, job, [draft])

        return self._decide_or_repeat(lambda: event, decide)

    def quiesced(
        self, grant: Grant, custody: Sequence[Custody], *, kv_tokens_lost: int, quiesce_s: float
    ) -> Grant:
        """The sources stopped and handed over what they owed; state may be copied now."""
        event = ReallocationQuiesced(
            custody=tuple(custody), kv_tokens_lost=kv_tokens_lost, quiesce_s=quiesce_s
        )
        self._step(grant, "quiesced", lambda known: event)
        return grant

    def transferred(
        self, grant: Grant, *, moved_bytes: int, transfer_s: float, parts: Mapping[str, int]
    ) -> Grant:
        """State arrived at its new place; it may be fingerprinted there now."""
        self._step(
            grant,
            "transferred",
            lambda known: ReallocationTransferred(
                moved_bytes=moved_bytes,
                transfer_s=transfer_s,
                strategy=known.strategy,
                parts=dict(parts),
            ),
        )
        return grant

    def verified(self, grant: Grant, before: Mapping[str, str], after: Mapping[str, str]) -> Grant:
        """Fingerprints agree: the point of no return. Work may resume now.

        Raise IllegalStep naming the first part whose fingerprints differ; then roll back.
        """
        event = ReallocationVerified(before=dict(before), after=dict(after))
        self._step(grant, "verified", lambda known: event)
        return grant

    def committed(
        self,
        grant: Grant,
        *,
        moved_bytes: int,
        stall_s: float,
        kv_tokens_lost: int,
        stalls: Mapping[str, float],
    ) -> Receipt:
        """The new topology is in force."""
        receipt = self._step(
            grant,
            "committed",
            lambda known: ReallocationCommitted(
                after=known.after,
                moved_bytes=moved_bytes,
                stall_s=stall_s,
                kv_tokens_lost=kv_tokens_lost,
                stalls=dict(stalls),
            ),
        )
        return self._ended(grant, receipt)

    def rolled_back(
        self, grant: Grant, cause: str, restored: Topology, *, stall_s: float | None = None
    ) -> Receipt:
        """The move was undone; call it only after the processes were seen in the old topology."""
        event = ReallocationRolledBack(cause=cause, restored=restored, stall_s=stall_s)
        return self._ended(grant, self._step(grant, "rolled_back", lambda known: event))

    def poisoned(self, grant: Grant, cause: str) -> Receipt:
        """Neither finishing nor restoring was possible; the devices are in quarantine."""
        event = ReallocationPoisoned(devices=grant.devices, cause=cause)
        return self._step(grant, "poisoned", lambda known: event)

    def take_over(
        self, job: str, operation: str, reason: str, *, held: Grant | None = None
    ) -> Grant:
        """Take an open move from a controller presumed dead: every earlier grant is stale.

        With ``held`` only as long as that grant is in force, else StaleGrant: so a controller
        turns to recovering its own move, which has no time limit, unless another one has it.
        """
        given: list[Grant] = []

        def decide(state: LedgerState) -> Decision:
            known = self._known(state, job, operation) if held is None else _held(state, held)
            event = OperationTakenOver(
                devices=known.devices,
                previous_epoch=max(known.epoch, 0),
                reason=reason,
                controller=self.controller,
            )
            given.append(Grant(job, operation, known.devices, state.size))
            return lawful(
                state, job, [Draft(event, operation=operation, cause=known.last_position)]
            )

        self._decide(decide)
        return given[-1]

    def gain_realized(self, job: str, operation: str, gain: GainRealized) -> Receipt:
        """Record what a committed move brought.

        After ``plan.moves.max_losing_moves`` losing moves in a row, or as many gains outside
        their interval as ``max_missed_predictions``, the job enters safe mode in the same decision.
        """

        def decide(state: LedgerState) -> Decision | int:
            known = self._known(state, job, operation)
            if known.gain_position >= 0:
                return known.gain_position
            drafts = [Draft(gain, operation=operation, cause=known.last_position)]
            current = state.job(job)
            reason = losing_streak(current, known, gain)
            if reason is not None and current.status == "open" and current.safe_mode is None:
                drafts += abandon_unquiesced(current, f"safe mode: {reason}")
                drafts.append(enter_safe_mode(current, self.by, reason))
            return lawful(state, job, drafts)

        return self._decide_or_repeat(lambda: gain, decide)

    def holds(self, grant: Grant) -> OperationState:
        """Say how far the operation of a grant is; StaleGrant where the grant is not in force."""
        return _held(self.ledger.state(), grant)

    def reallocation(
        self,
        job: str,
        *,
        after: Topology,
        bottleneck: str,
        expected_gain_s: float,
        mover: Mover | None = None,
        **details: Unpack[Details],
    ) -> Reallocation:
        """Run a move of one's own as a context manager; see ``ledger/reallocation.py``."""
        from shiftbook.ledger.reallocation import Reallocation

        return Reallocation(
            self,
            job,
            after=after,
            bottleneck=bottleneck,
            expected_gain_s=expected_gain_s,
            mover=mover,
            details=details,
        )

    def _step(
        self,
        grant: Grant,
        status: OperationStatus,
        event_for: Callable[[OperationState], Event],
    ) -> Receipt:
        """Append a step under a grant that is in force, in its order and in its time."""
        events: list[Event] = []

        def decide(state: LedgerState) -> Decision | int:
            known = _held(state, grant)
            events.append(event_for(known))
            if known.status == status:
                return known.last_position
            drafts = [Draft(events[-1], operation=grant.operation, cause=known.last_position)]
            decision = lawful(state, grant.job, drafts)
            if status not in UNLIMITED and not known.taken_over:
                self._require_in_time(known, status)
            return decision

        receipt = self._decide_or_repeat(lambda: events[-1], decide)
        if not receipt.repeated:
            self._steps_s[grant.job, grant.operation] = self.boottime_s()
        return receipt

    def _require_in_time(self, known: OperationState, status: str) -> None:
        last_s = self._steps_s.get((known.job, known.operation))
        if last_s is None:
            return
        elapsed_s = self.boottime_s() - last_s
        if elapsed_s > known.step_limit_s:
            raise StepTimeout(
                f"{known.operation}: expected {status} within {known.step_limit_s:g} s of "
                f"{known.status}, found {elapsed_s:.3f} s; "
                + (
                    "let recover finish it"
                    if known.status == "verified"
                    else "roll it back, or let recover do so"
                )
            )

    def _ended(self, grant: Grant, receipt: Receipt) -> Receipt:
        self._steps_s.pop((grant.job, grant.operation), None)
        self._moves_s.setdefault((grant.job, receipt.last), self.boottime_s())
        return receipt

    def _since_last_move_s(self, job: JobState) -> float | None:
        """Seconds since the job's last move ended, on the boot clock where this gate ended it.

        A move that another process ended is dated by the wall clock, so a jump of that clock can
        lengthen or shorten a cooldown; nothing that must be safe depends on it.
        """
        if job.last_move_ns is None:
            return None
        ended_s = self._moves_s.get((job.name, job.last_move_position))
        if ended_s is not None:
            return self.boottime_s() - ended_s
        return max(0.0, (self.now_ns() - job.last_move_ns) / 1e9)

    def _rejection(self, refused: tuple[str, str], operation: str, cause: int) -> Draft:
        rule, reason = refused
        event = ReallocationRejected(by=self.by, rule=rule, reason=reason)
        return Draft(event, operation=operation, cause=cause)

    def _raise_rejection(self, job: str, operation: str) -> None:
        """Raise what was raised when the operation was rejected, where it was."""
        known = self._known(self.ledger.state(), job, operation)
        if known.status == "rejected":
            event = self.ledger.event(known.last_position).parsed()
            assert isinstance(event, ReallocationRejected)
            raise Rejected(operation, event.rule, event.reason)

    def _known(self, state: LedgerState, job: str, operation: str) -> OperationState:
        known = state.job(job).operations.get(operation)
        if known is None:
            raise UnknownOperation(operation)
        return known


def _held(state: LedgerState, grant: Grant) -> OperationState:
    """Operation of a grant that is in force; StaleGrant names both epochs where it is not."""
    known = state.job(grant.job).operations.get(grant.operation)
    if known is None:
        raise StaleGrant(f"a grant for {grant.operation} of job {grant.job}; no such operation")
    if grant.epoch != known.epoch or grant.devices != known.devices:
        now = f"epoch {known.epoch} for {', '.join(known.devices)}"
        raise StaleGrant(
            f"{grant.operation}: the grant has epoch {grant.epoch} for "
            f"{', '.join(grant.devices)}, in force is {now}. "
            "Another controller has the operation; do nothing more."
        )
    return known


def losing_streak(job: JobState, known: OperationState, gain: GainRealized) -> str | None:
    """Say why this gain, after the ones before it, is one too many; None where it is not."""
    if job.plan is None:
        return None
    moves = job.plan.moves
    gain_s = gain.adjusted_gain_s
    if gain_s < 0 and job.losing_moves + 1 >= moves.max_losing_moves:
        return f"{job.losing_moves + 1} losing moves in a row"
    within = known.gain_interval.low <= gain_s <= known.gain_interval.high
    if not within and job.missed_predictions + 1 >= moves.max_missed_predictions:
        return f"{job.missed_predictions + 1} gains in a row outside their predicted interval"
    return None
