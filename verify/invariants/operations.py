"""Operations: every move and sync comes to an end, and no move ends in quarantine."""

from __future__ import annotations

from shiftbook.ledger.events.reallocation import (
    ReallocationPoisoned,
    ReallocationTransferred,
    ReallocationVerified,
)
from shiftbook.ledger.job_state import JobState
from shiftbook.verify.invariants.base import End, Invariant, Step, listed


def open_operations(job: JobState) -> list[str]:
    """What is still open, in words: moves by their status, and the sync of the current attempt."""
    moves = [f"{o.operation} ({o.status})" for o in job.operations.values() if o.open]
    return moves + ([f"{job.open_sync} (sync started)"] if job.open_sync else [])


class Operations(Invariant):
    """At the end of a closed job every operation is closed; none is poisoned.

    At the head of a live job open operations are no finding; the verdict lists them. A sync that a
    dead attempt left behind is closed by the attempt after it, which starts with its own.
    """

    id = "operations"
    title = "every operation closed, none poisoned"
    needs = "ReallocationProposed or WeightSyncStarted, and how each ended"
    sees = (ReallocationPoisoned,)

    def feed(self, step: Step) -> None:
        if isinstance(step.event, ReallocationPoisoned):
            known = step.job.operations.get(step.stored.operation or "")
            self.expect(
                False,
                step.at,
                expected="the move committed or rolled back",
                found=f"poisoned: {step.event.cause}",
                cause="neither finishing nor restoring was possible",
                action=f"Look at {listed(step.event.devices)} before the next lease of them.",
                others=(known.proposed_position,) if known else (),
            )

    def close(self, end: End) -> None:
        if not end.closed:
            self.passed(sum(not o.open for o in end.job.operations.values()))
            return
        for operation in end.job.operations.values():
            if operation.status == "poisoned":
                continue  # reported where it happened
            self.expect(
                not operation.open,
                operation.last_position,
                expected=f"{operation.operation} closed before the job",
                found=f"{operation.status} when the job closed at {end.job.closed_position}",
                cause="the controller died, and nobody ran recovery before the job was closed",
                action="Run `shiftbook recover` before the job closes; it ends what is open.",
                others=(operation.proposed_position, end.job.closed_position),
                # A proposal that nobody answered moved nothing.
                severity="warn" if operation.status == "proposed" else "stop",
            )
        sync = end.job.syncs.get(end.job.open_sync or "")
        self.expect(
            sync is None,
            sync.started_position if sync else end.position,
            expected="the last weight sync committed or failed",
            found=f"{sync.operation if sync else ''} is still started",
            cause="the loop closed the job in the middle of a sync",
            action="Write WeightSyncCommitted or WeightSyncFailed before JobClosed.",
        )

    def idle_because(self, end: End) -> str | None:
        if not end.job.operations and not end.job.syncs:
            return "no operation was proposed"
        return "no operation has ended yet"


class MoveEquality(Invariant):
    """State is the same before and after a move: same names, same fingerprints."""

    id = "move-equality"
    title = "fingerprints before a move equal those after it"
    needs = "ReallocationVerified.before and .after, by tensor or part"
    sees = (
        ReallocationTransferred,
        ReallocationVerified,
    )

    def begin(self) -> None:
        self._moved: dict[str, tuple[int, bool]] = {}

    def feed(self, step: Step) -> None:
        operation = step.stored.operation or ""
        event = step.event
        if isinstance(event, ReallocationTransferred):
            kinds = [name for name, size in event.parts.items() if size]
            only_requests = bool(kinds) and all(name == "requests" for name in kinds)
            self._moved[operation] = (step.at, event.moved_bytes > 0 and not only_requests)
        elif isinstance(event, ReallocationVerified):
            transferred, carries_state = self._moved.pop(operation, (-1, False))
            self._compare(step, event, transferred, carries_state)

    def _compare(
        self, step: Step, event: ReallocationVerified, transferred: int, carries_state: bool
    ) -> None:
        if not event.before and not event.after:
            if carries_state:
                self.missing("ReallocationVerified of a move with moved_bytes has no fingerprints")
            else:
                self.passed()
            return
        names = sorted(event.before.keys() | event.after.keys())
        wrong = [n for n in names if event.before.get(n) != event.after.get(n)]
        self.expect(
            not wrong,
            step.at,
            expected=f"{len(event.before)} fingerprints as before the move",
            found=f"other ones for {listed(wrong)}",
            cause="state was lost, cut wrongly or overwritten on its way",
            action="Do not train on: restore the last bundle, and read the move's events.",
            others=(transferred,),
        )

    def idle_because(self, end: End) -> str | None:
        done = [o for o in end.job.operations.values() if o.status in ("verified", "committed")]
        return None if done else "no move was verified"
