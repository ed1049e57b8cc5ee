"""Commands of the gate on weight syncs, which go before moves that have not quiesced."""

from __future__ import annotations

from dataclasses import replace

from shiftbook.ledger.canonical import encode, leaf_hash
from shiftbook.ledger.doors import Door, abandon_unquiesced
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import (
    LossNotDeclared,
    StaleGrant,
    SyncMustWait,
    TopologyChanged,
)
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.sync import (
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncFailed,
    WeightSyncStarted,
)
from shiftbook.ledger.lawful import lawful
from shiftbook.ledger.plan import SyncPlan
from shiftbook.ledger.receipt import Decision, Receipt
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.topology import Topology


class SyncDoor(Door):
    """Begin a weight sync, record its deliveries, and end it."""

    def begin_sync(
        self,
        job: str,
        started: WeightSyncStarted,
        *,
        operation: str | None = None,
        topology: Topology | None = None,
    ) -> str:
        """Begin to deliver a policy version; give the operation's id (``sync-POSITION``).

        A move that is proposed, or granted and not quiesced, is abandoned in the same decision.
        ``topology`` is the one that the targets were read from: no engine that a move brought up
        since is left out.

        Raise SyncMustWait while a move is quiesced or further, TopologyChanged where ``topology``
        is no longer in force, StaleGrant where the event's epoch is not that of the current
        attempt, LossNotDeclared where the sync loses something that the plan does not allow.
        """
        names: list[str] = []

        def decide(state: LedgerState) -> Decision | int:
            current = state.job(job)
            known = current.syncs.get(operation or "")
            if known is not None:
                names.append(known.operation)
                return known.started_position
            attempt = current.current_attempt()
            if attempt is None or (started.attempt, started.epoch) != (
                attempt.attempt,
                attempt.epoch,
            ):
                now = f"{attempt.attempt} at epoch {attempt.epoch}" if attempt else "no attempt"
                raise StaleGrant(
                    f"weight sync of attempt {started.attempt} at epoch {started.epoch}; "
                    f"current is {now}. The attempt that holds the standing grant syncs."
                )
            if started.lossy is not None:
                declared = current.plan.syncs if current.plan is not None else SyncPlan()
                loss = started.lossy
                objection = declared.objection(loss.encoding, loss.max_error, loss.largest_error)
                if objection is not None:
                    raise LossNotDeclared(started.version, objection)
            running = current.operation_running()
            if running is not None and running.status != "granted":
                raise SyncMustWait(running.operation, running.status)
            if topology is not None and not topology.matches(current.topology):
                raise TopologyChanged(topology.text(), current.topology.text())
            version = started.version
            drafts = abandon_unquiesced(current, f"weight sync of version {version} goes first")
            names.append(operation or f"sync-{state.size + len(drafts)}")
            return lawful(state, job, [*drafts, Draft(started, operation=names[-1])])

        self._decide_or_repeat(lambda: started, decide)
        return names[-1]

    def sync_delivered(self, job: str, operation: str, event: WeightSyncDelivered) -> Receipt:
        """Record that one engine holds the version."""
        return self._sync_step(job, operation, event)

    def sync_committed(self, job: str, operation: str, event: WeightSyncCommitted) -> Receipt:
        """End a sync; an engine without the version does not serve."""
        return self._sync_step(job, operation, event)

    def sync_failed(self, job: str, operation: str, event: WeightSyncFailed) -> Receipt:
        """End a sync that no engine took."""
        return self._sync_step(job, operation, event)

    def _sync_step(self, job: str, operation: str, event: Event) -> Receipt:
        """Append a step of a sync, once: with the same content again it gives the first receipt."""
        # An engine may take a version twice (the first came damaged), so the content is the key.
        key = f"{operation}:{event.type_()}:{leaf_hash(encode(event.plain())).hex()[:32]}"

        def decide(state: LedgerState) -> Decision | int:
            known = state.job(job).syncs.get(operation)
            if known is not None and known.ended_position >= 0:
                return known.ended_position
            cause = known.started_position if known is not None else None
            drafts = [Draft(event, operation=operation, cause=cause)]
            return replace(lawful(state, job, drafts), key=key)

        return self._decide_or_repeat(lambda: event, decide)
