"""A weight sync over the wire as an operation of the ledger: begun, delivered per target, ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import TransferRefused
from shiftbook.checkpoint.transfer.catalogue import Catalogue
from shiftbook.checkpoint.transfer.desk import Desk, Outcome
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.sync import (
    TargetOutcome,
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncFailed,
    WeightSyncStarted,
)
from shiftbook.ledger.gate import Gate

MAX_NAMED = 400
"""Tensors whose fingerprints stand in the event one by one; of more only their root does."""
ENCODING = "pull"
"""Each target takes whole weights or a patch; its delivery says which."""


class LedgeredSync:
    """Opens the desk under an operation, and writes what it hears from the targets.

    Receivers are answered by the desk, so they need not wait for the ledger. What cannot be written
    while the ledger is out of reach stands in `unwritten`, in order, for the spool.
    """

    def __init__(self, gate: Gate, job: str, *, attempt: str, epoch: int, desk: Desk) -> None:
        self._gate, self._job = gate, job
        self._attempt, self._epoch, self._desk = attempt, epoch, desk
        self._catalogue: Catalogue | None = None
        self._targets: Mapping[str, int] = {}
        self._began_s = 0.0
        self.operation: str | None = None
        self.unwritten: list[Draft] = []

    def begin(
        self,
        catalogue: Catalogue,
        targets: Mapping[str, int],
        *,
        limit_s: float,
        operation: str | None = None,
    ) -> str:
        """Record the intent, and let targets (with so many ranks each) take the version.

        Raises what the gate raises (SyncMustWait, StaleGrant, LossNotDeclared, LedgerUnreachable);
        nobody gets a verdict then. With an `operation` of one's own a sync begins while the ledger
        is away too.
        """
        source = catalogue.source_fingerprints
        started = WeightSyncStarted(
            attempt=self._attempt,
            version=catalogue.version,
            base_version=catalogue.base_version,
            source=source if len(source) <= MAX_NAMED else {},
            source_root=root(source),
            encoding=ENCODING,
            targets=tuple(targets),
            epoch=self._epoch,
            lossy=catalogue.sync_loss,
        )
        self.unwritten = []
        try:
            self.operation = self._gate.begin_sync(self._job, started, operation=operation)
        except LedgerUnreachable:
            if operation is None:
                raise
            self.operation = operation
            self.unwritten.append(Draft(started, operation=operation))
        self._catalogue, self._targets = catalogue, dict(targets)
        self._began_s = time.monotonic()
        self._desk.open(catalogue, targets, limit_s=limit_s)
        return self.operation

    def finish(
        self, *, stall_s: float | None = None, caches_flushed: Sequence[str] = ()
    ) -> tuple[Outcome, ...]:
        """Write each delivery as it is heard of, and the end when all targets have an outcome.

        `stall_s` is what the engines stood still, by default the time since the sync began.
        """
        if self._catalogue is None:
            raise TransferRefused("expected a sync that was begun, found none; call begin first")
        outcomes = []
        for outcome in self._desk.each():
            outcomes.append(outcome)
            if outcome.outcome == "serving":
                self._write(self._delivered(self._catalogue, outcome))
        if not any(one.outcome == "serving" for one in outcomes):
            reasons = "; ".join(f"{one.target}: {one.reason}" for one in outcomes)
            self._write(WeightSyncFailed(version=self._catalogue.version, reason=reasons[:2000]))
            return tuple(outcomes)
        took_s = time.monotonic() - self._began_s
        self._write(
            WeightSyncCommitted(
                version=self._catalogue.version,
                outcomes=tuple(
                    TargetOutcome(target=one.target, outcome=one.outcome, reason=one.reason)
                    for one in sorted(outcomes, key=lambda one: one.target)
                ),
                stall_s=took_s if stall_s is None else stall_s,
                caches_flushed=tuple(caches_flushed),
            )
        )
        return tuple(outcomes)

    @staticmethod
    def _delivered(catalogue: Catalogue, outcome: Outcome) -> WeightSyncDelivered:
        return WeightSyncDelivered(
            target=outcome.target,
            incarnation=outcome.incarnation or "",
            version=outcome.version,
            root=outcome.root or "",
            fingerprint_of="handed_over" if outcome.loaded else "resident",
            moved_bytes=outcome.moved_bytes,
            full_bytes=outcome.full_bytes,
            sync_s=outcome.sync_s,
            encoding=outcome.encoding,
            transport=outcome.transport,
            nan=catalogue.nan,
        )

    def _write(self, event: Event) -> None:
        assert self.operation is not None
        if self.unwritten:  # in order, so nothing after what is not there
            self.unwritten.append(Draft(event, operation=self.operation))
            return
        try:
            if isinstance(event, WeightSyncDelivered):
                self._gate.sync_delivered(self._job, self.operation, event)
            elif isinstance(event, WeightSyncCommitted):
                self._gate.sync_committed(self._job, self.operation, event)
            elif isinstance(event, WeightSyncFailed):
                self._gate.sync_failed(self._job, self.operation, event)
        except LedgerUnreachable:
            self.unwritten.append(Draft(event, operation=self.operation))
