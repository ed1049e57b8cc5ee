"""Weight syncs of the reference job: one policy version delivered to engines, as an operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable, ShiftbookError, SyncMustWait
from shiftbook.ledger.events.sync import (
    TargetOutcome,
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncStarted,
)
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.scheduler.channels import Exchange
from shiftbook.scheduler.errors import first_line
from shiftbook.scheduler.fleet import Fleet
from shiftbook.scheduler.recording import Recording
from shiftbook.scheduler.supervision import Brought
from shiftbook.scheduler.workers.transfer import offer

MOVE_LIMIT_S = 60.0
LOOK_AGAIN_S = 0.05
ENCODING = "full"


@dataclass(frozen=True)
class Published:
    """A policy version as it is sent: bfloat16 tensors in the object store, and fingerprints."""

    version: int
    reference: Any
    prints: dict[str, str]
    root: str
    bytes: int

    @classmethod
    def of(cls, weights: Mapping[str, Any], version: int) -> Published:
        """Fingerprint at the source and put into the object store of the loop's node."""
        prints = fingerprint_tensors(weights)
        size = sum(t.nbytes for t in weights.values())
        return cls(version, offer(dict(weights)), prints, root(prints), size)


class Syncer:
    """Begins, delivers and ends weight syncs under the attempt's standing grant."""

    def __init__(
        self, gate: Gate, recording: Recording, fleet: Fleet, job: str, grant: Grant
    ) -> None:
        self._gate, self._recording, self._fleet = gate, recording, fleet
        self._job, self._grant = job, grant
        self._count = 0

    def begin(self, published: Published, targets: Sequence[str], base: int | None) -> str:
        """Record the intent; waits for a move that is quiesced or further. In an outage the
        record is spooled: syncs inside the topology go on."""
        self._count += 1
        operation = f"sync-{self._grant.operation}-{published.version}-{self._count}"
        started = WeightSyncStarted(
            attempt=self._grant.operation,
            version=published.version,
            base_version=base,
            source=published.prints,
            source_root=published.root,
            encoding=ENCODING,
            targets=tuple(targets),
            epoch=self._grant.epoch,
        )
        self._recording.flush()
        deadline = time.monotonic() + MOVE_LIMIT_S
        while True:
            try:
                if self._recording.spooling:
                    raise LedgerUnreachable("records are being spooled")
                return self._gate.begin_sync(self._job, started, operation=operation)
            except SyncMustWait:
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(LOOK_AGAIN_S)
            except LedgerUnreachable:
                self._recording.now([Draft(started, operation=operation)], key=operation)
                return operation

    def sync(
        self,
        published: Published,
        targets: Sequence[str],
        base: int,
        exchange: Exchange,
    ) -> float:
        """Deliver to engines that serve; returns the seconds that they stood still."""
        began_s = time.monotonic()
        operation = self.begin(published, targets, base)
        arguments = {"weights": published.reference, "version": published.version}
        futures = {r: self._fleet.send(r, "call", self._grant, "sync", arguments) for r in targets}
        drafts: list[Draft] = []
        outcomes = []
        for replica, future in futures.items():
            outcome, delivered = self._outcome(replica, future, published)
            outcomes.append(outcome)
            if delivered is not None:
                drafts.append(Draft(delivered, operation=operation))
            if outcome.outcome != "serving":
                exchange.hold(replica)
        stall_s = time.monotonic() - began_s
        drafts.append(Draft(self._ended(published, outcomes, stall_s), operation=operation))
        self._recording.now(drafts, key=f"{operation}/end")
        return stall_s

    def attached(
        self,
        operation: str,
        published: Published,
        targets: Sequence[str],
        brought: Sequence[Brought],
    ) -> None:
        """Record what engines read that took the version as they were brought up."""
        by_name = {b.replica: b for b in brought}
        drafts: list[Draft] = []
        outcomes = []
        for replica in targets:
            b = by_name.get(replica)
            if b is None:
                outcomes.append(
                    TargetOutcome(target=replica, outcome="failed", reason="it was not brought up")
                )
                continue
            prints = {k.removeprefix("model/"): v for k, v in b.loaded.fingerprints.items()}
            event = _delivered(
                replica, b.status["incarnation"], published, prints, b.loaded.moved_bytes, b.start_s
            )
            drafts.append(Draft(event, operation=operation))
            outcomes.append(TargetOutcome(target=replica, outcome="serving"))
        drafts.append(Draft(self._ended(published, outcomes, 0.0), operation=operation))
        self._recording.now(drafts, key=f"{operation}/end")

    def _outcome(
        self, replica: str, future: Any, published: Published
    ) -> tuple[TargetOutcome, WeightSyncDelivered | None]:
        import ray

        try:
            reply = self._fleet.gather({replica: future})[replica]
            incarnation = self._fleet.each([replica], "status")[replica]["incarnation"]
        except (ShiftbookError, ray.exceptions.RayError) as error:
            return TargetOutcome(target=replica, outcome="lost", reason=first_line(error)), None
        event = _delivered(
            replica,
            incarnation,
            published,
            reply["fingerprints"],
            reply["moved_bytes"],
            reply["sync_s"],
        )
        if event.differing:
            reason = f"differing: {', '.join(event.differing[:4])}"
            return TargetOutcome(target=replica, outcome="failed", reason=reason), event
        return TargetOutcome(target=replica, outcome="serving"), event

    @staticmethod
    def _ended(
        published: Published, outcomes: Sequence[TargetOutcome], stall_s: float
    ) -> WeightSyncCommitted:
        return WeightSyncCommitted(
            version=published.version,
            outcomes=tuple(outcomes),
            stall_s=stall_s,
            caches_flushed=("kv",),
        )


def _delivered(
    replica: str,
    incarnation: str,
    published: Published,
    prints: Mapping[str, str],
    moved_bytes: int,
    sync_s: float,
) -> WeightSyncDelivered:
    names = published.prints.keys() | prints.keys()
    differing = sorted(n for n in names if published.prints.get(n) != prints.get(n))
    return WeightSyncDelivered(
        target=replica,
        incarnation=incarnation,
        version=published.version,
        root=root(prints),
        fingerprint_of="resident",
        differing=tuple(differing),
        moved_bytes=moved_bytes,
        full_bytes=published.bytes,
        sync_s=sync_s,
    )
