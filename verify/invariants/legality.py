"""Legality: each event may follow the state before it, by the table that the gate uses."""

from __future__ import annotations

from shiftbook.ledger.events.base import Event, UnknownEvent
from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.reallocation import ReallocationVerified
from shiftbook.ledger.events.training import BatchConsumed, SamplesDrawn, UpdateApplied
from shiftbook.ledger.legality import Violation, check
from shiftbook.verify.invariants.base import Invariant, Step, listed

LEASE_RULES = frozenset({"lease", "quarantine"})
"""Violations that the lease invariant reports."""

_GO_ON = "Read the events around it with `shiftbook log`; whoever wrote it did not ask the gate."


class Legality(Invariant):
    """No event stands where the state machine of jobs, operations and syncs forbids it.

    A job begins with JobOpened, an operation goes through its states in order, an attempt names a
    known parent, a move starts from the topology in force and ends in the one proposed (or, rolled
    back, in the one before). Unknown events are legal: they are kept and shown.
    """

    id = "legality"
    title = "each event may follow the one before"
    needs = "events of the job"

    def feed(self, step: Step) -> None:
        if step.problem is not None:
            self.expect(
                False,
                step.at,
                expected=f"a body of type {step.stored.type}",
                found=step.problem,
                cause="the writer is of another version, or wrote the event by hand",
                action="Verify with the version that wrote it; the event was left out of the fold.",
            )
            return
        if isinstance(step.event, UnknownEvent):
            return
        violation = check(step.state, step.stored.job, step.stored.operation, step.event)
        if violation is None or self._judged_elsewhere(violation, step.event):
            self.passed()
        else:
            self.expect(
                False,
                step.at,
                expected=violation.expected,
                found=f"{step.stored.type} while {violation.found}",
                cause="a controller acted without the gate, or two did at once",
                action=_GO_ON,
                others=self._known_positions(step),
            )
        if isinstance(step.event, AttemptStarted) and step.event.topology.devices():
            self._standing_grant(step, step.event)
        if isinstance(step.event, SamplesDrawn | BatchConsumed | UpdateApplied):
            self.expect(
                step.job.status == "open",
                step.at,
                expected="training events while the job is open",
                found=f"{step.stored.type} while the job is {step.job.status}",
                cause="the loop went on after it closed the job, or never opened it",
                action="Open the job before training, and close it after the last record.",
            )

    def _judged_elsewhere(self, violation: Violation, event: Event) -> bool:
        if isinstance(event, ReallocationVerified) and event.before:
            return violation.rule == "fingerprints"  # move-equality names the parts
        return violation.rule in LEASE_RULES

    def _known_positions(self, step: Step) -> tuple[int, ...]:
        operation = step.job.operations.get(step.stored.operation or "")
        if operation is not None:
            return (operation.last_position,)
        sync = step.job.syncs.get(step.stored.operation or "")
        return (sync.started_position,) if sync is not None else ()

    def _standing_grant(self, step: Step, event: AttemptStarted) -> None:
        # The lease was granted right before, so it is among the last; others' leases are many.
        leases = step.state.leases.values()
        held = any(lease.epoch == event.epoch for lease in reversed(leases))
        epochs = () if held else sorted({lease.epoch for lease in leases})
        self.expect(
            held,
            step.at,
            expected=f"a lease in force that was granted at {event.epoch}",
            found=f"leases in force granted at {listed(epochs) or 'no position'}",
            cause="the attempt began without a standing grant, or with an old one",
            action=_GO_ON,
        )
