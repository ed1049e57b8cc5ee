"""Bring every open move of a job to its end after its controller died.

Before ``verified`` a move is undone, after it the move is finished; where that is impossible the
devices are poisoned. Recovery first takes the operation over, so whatever the old controller
still does, or does again when it is continued, is refused. A crash in the middle of recovery
leaves an open operation, which the next recovery takes over in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shiftbook.ledger.errors import (
    DeviceHeld,
    IllegalStep,
    LedgerUnreachable,
    RecoverLater,
    StaleGrant,
    UnknownJob,
)
from shiftbook.ledger.events.reallocation import (
    ReallocationProposed,
    ReallocationQuiesced,
    ReallocationTransferred,
)
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.job_state import OperationState
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mover import Mover, find_mover
from shiftbook.ledger.topology import Topology

__all__ = [
    "Mover",
    "Outcome",
    "end_or_poison",
    "finish_or_poison",
    "recover",
    "restore_or_poison",
]

TRIES = 3
"""How often a way is tried before it counts as impossible: one hiccup must not cost devices."""

UNDOABLE = ("granted", "quiesced", "transferred")
"""Statuses from which a move can be undone."""

PASSING = (LedgerUnreachable, DeviceHeld, RecoverLater)
"""Errors that say nothing about whether a way is possible: the operation stays open for a later
recovery."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How recovery ended an operation."""

    operation: str
    found: str
    """Status in which recovery found it."""
    ended: str
    """Status in which recovery left it."""
    reason: str


def recover(
    ledger: Ledger,
    job: str,
    mover: Mover | None = None,
    *,
    by: str = "recover",
    reason: str = "the controller is presumed dead",
    gate: Gate | None = None,
    leave_asked: bool = False,
) -> list[Outcome]:
    """End every open move of a job; give what became of each, in the order of proposal.

    ``leave_asked`` is for a controller that starts: what an operator proposed and nobody granted
    was no controller's that could have died. It stays open, for the one that starts to decide.

    Without ``mover`` each move's own is opened (see ``find_mover``); a move that names none is
    poisoned, since nobody can say where its processes stand. A move that another recovery takes
    over meanwhile is left to it. Raise UnknownJob, or InvalidInput where a named mover cannot be
    opened; the operation is then open still.
    """
    if job not in ledger.jobs():
        raise UnknownJob(job, ledger.jobs())
    gate = gate or Gate(ledger, by=by)
    opened = [known for known in ledger.state().job(job).operations.values() if known.open]
    if leave_asked:
        opened = [known for known in opened if not _asked(ledger, known)]
    return [
        _end(gate, known, known.status, mover, reason)
        for known in sorted(opened, key=lambda known: known.proposed_position)
    ]


def _asked(ledger: Ledger, known: OperationState) -> bool:
    """True for a proposal of an operator that waits for its decision."""
    if known.status != "proposed":
        return False
    event = ledger.event(known.proposed_position).parsed()
    return isinstance(event, ReallocationProposed) and event.proposer == "operator"


def _end(
    gate: Gate, known: OperationState, found: str, mover: Mover | None, reason: str
) -> Outcome:
    # `found` is kept apart, since the fold of the handle changes `known` as events come in.
    job, operation = known.job, known.operation
    own = None
    try:
        if found == "proposed":
            gate.abandon(job, operation, reason)
        else:
            own = mover or find_mover(gate.ledger, gate.ledger.state().job(job), known)
            grant = gate.take_over(job, operation, reason)
            if own is None:
                gate.poisoned(grant, f"{reason}; no mover is known that could undo or finish it")
            else:
                end_or_poison(gate, grant, own, reason)
    except (StaleGrant, IllegalStep) as error:
        # Somebody else went on with the operation between two decisions; theirs stands.
        reason = f"left to another controller: {error}"
    finally:
        if own is not None and own is not mover:
            own.close()
    ended = gate.ledger.state().job(job).operations[operation].status
    return Outcome(operation, found, ended, reason)


def end_or_poison(gate: Gate, grant: Grant, mover: Mover, cause: str) -> str:
    """Undo a move that is not verified, finish one that is; give the status it ended in.

    This is what a controller calls when a step of its own move failed. Raise StaleGrant where
    another controller has the move, IllegalStep where it is closed; nothing is touched then.
    """
    verified = gate.holds(grant).status == "verified"
    return (finish_or_poison if verified else restore_or_poison)(gate, grant, mover, cause)


def restore_or_poison(gate: Gate, grant: Grant, mover: Mover, cause: str) -> str:
    """Undo a move that is not verified; give the status it ended in.

    A granted move whose processes stand where they stood is restored all the same, since a source
    may have stopped taking work without anybody having recorded it, and is then abandoned. The
    end is written only after ``inspect`` confirms the topology before.

    Raise StaleGrant where another controller has the operation, IllegalStep where it is closed
    or verified; nothing is touched then.
    """
    known = gate.holds(grant)
    if known.status not in UNDOABLE:
        found = f"{grant.operation} is {known.status}"
        raise IllegalStep("sequence", f"a move that is {', '.join(UNDOABLE)}", found)
    before, granted = known.before, known.status == "granted"
    untouched = granted and _stands(mover, before) is None
    failure = _try(gate, grant, mover, before, lambda: mover.restore(before, grant))
    if failure is not None:
        gate.poisoned(grant, f"{cause}; restoring failed: {failure}")
        return "poisoned"
    if untouched:
        gate.abandon(grant.job, grant.operation, cause)
        return "abandoned"
    gate.rolled_back(grant, cause, before)
    return "rolled_back"


def finish_or_poison(gate: Gate, grant: Grant, mover: Mover, cause: str) -> str:
    """Finish a verified move; give the status it ended in.

    The move is taken over first, unless it was: finishing has no time limit, and places that
    died may be filled again. The commit is written only after ``inspect`` confirms the topology
    after. Raise StaleGrant where another controller has the operation, IllegalStep where it is
    closed or not verified; nothing is touched then.
    """
    known = gate.holds(grant)
    if known.status != "verified":
        found = f"{grant.operation} is {known.status}"
        raise IllegalStep("sequence", "a verified move", found)
    after = known.after
    if not known.taken_over:
        grant = gate.take_over(grant.job, grant.operation, cause, held=grant)
    failure = _try(gate, grant, mover, after, lambda: mover.finish(after, grant))
    if failure is not None:
        gate.poisoned(grant, f"{cause}; finishing failed: {failure}")
        return "poisoned"
    moved_bytes, kv_tokens_lost, quiesced_ns = _so_far(gate.ledger, grant)
    gate.committed(
        grant,
        moved_bytes=moved_bytes,
        stall_s=max(0.0, (gate.now_ns() - quiesced_ns) / 1e9),
        kv_tokens_lost=kv_tokens_lost,
        stalls={},
    )
    return "committed"


def _try(
    gate: Gate, grant: Grant, mover: Mover, wanted: Topology, act: Callable[[], None]
) -> str | None:
    """Act until the mover confirms the topology; say what stood in the way where it never does.

    Raise StaleGrant as soon as another controller has the operation: it must not be disturbed.
    """
    failure: str | None = None
    for _ in range(TRIES):
        gate.holds(grant)
        try:
            act()
        except PASSING:
            raise
        except Exception as error:  # a mover is other people's code: any failure of it counts
            failure = f"{type(error).__name__}: {error}"
            continue
        failure = _stands(mover, wanted)
        if failure is None:
            return None
    return failure


def _stands(mover: Mover, wanted: Topology) -> str | None:
    """None when the mover sees the processes in a topology, else what it sees."""
    try:
        seen = mover.inspect()
    except PASSING:
        raise
    except Exception as error:  # other people's code, as above
        return f"inspect failed: {type(error).__name__}: {error}"
    if seen.matches(wanted):
        return None
    return f"expected {wanted.text()}, the mover sees {seen.text()}"


def _so_far(ledger: Ledger, grant: Grant) -> tuple[int, int, int]:
    """Bytes moved, tokens of KV lost, and when the sources stopped, from the recorded steps."""
    moved_bytes, kv_tokens_lost, quiesced_ns = 0, 0, 0
    for stored in ledger.read(job=grant.job, operation=grant.operation):
        event = stored.parsed()
        if isinstance(event, ReallocationQuiesced):
            kv_tokens_lost, quiesced_ns = event.kv_tokens_lost, stored.recorded_ns
        elif isinstance(event, ReallocationTransferred):
            moved_bytes = event.moved_bytes
    return moved_bytes, kv_tokens_lost, quiesced_ns
