"""Weight syncs of the reference job: one policy version delivered to engines, as an operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from shiftbook.checkpoint.compare import root
from shiftbook.jobs.config import SyncEncoding
from shiftbook.jobs.errors import EngineError
from shiftbook.jobs.probe import Gap
from shiftbook.jobs.published import Published
from shiftbook.jobs.right_of_way import RightOfWay
from shiftbook.jobs.serving import Taken
from shiftbook.jobs.sync_encoding import TRANSPORT
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import (
    LedgerUnreachable,
    ShiftbookError,
    SyncMustWait,
    TopologyChanged,
)
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.probes import LogProbsReplayed
from shiftbook.ledger.events.sync import (
    TargetOutcome,
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncStarted,
)
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.channels import Exchange
from shiftbook.scheduler.errors import first_line
from shiftbook.scheduler.fleet import Fleet
from shiftbook.scheduler.recording import Recording
from shiftbook.scheduler.supervision import Brought

LOOK_AGAIN_S = 0.05
TRIES = 2
"""How often a version is offered to an engine that refuses it."""
Targets = tuple[Topology | None, tuple[str, ...]]
"""Engines, and the topology that they were read from, where they are all of its engines."""


class Syncer:
    """Begins, delivers and ends weight syncs under the attempt's standing grant."""

    def __init__(
        self,
        gate: Gate,
        recording: Recording,
        fleet: Fleet,
        job: str,
        grant: Grant,
        way: RightOfWay,
    ) -> None:
        self._gate, self._recording, self._fleet = gate, recording, fleet
        self._job, self._grant, self._way = job, grant, way
        self._count = 0
        self._held_back: set[str] = set()
        """Replicas that did not take the last version, and are handed no work."""
        self.absent: set[str] = set()
        """Replicas whose processes died and were not brought up again: no sync waits for them."""
        self.alone = threading.RLock()
        """Held from when a version is chosen until its sync has ended: one version at a time."""

    def begin(self, published: Published, targets: Sequence[str], base: int | None) -> str:
        """Record the intent, for engines that a repair brings up; waits for a move that is
        quiesced or further. In an outage the record is spooled: repairs go on."""
        with self._begun(published, base, lambda: (None, tuple(targets)), repair=True) as begun:
            return begun[0]

    @contextmanager
    def _begun(
        self,
        published: Published,
        base: int | None,
        targets: Callable[[], Targets],
        encoding: SyncEncoding = "full",
        *,
        repair: bool = False,
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        """A sync whose intent is recorded: its name, and its targets. They are asked for again
        whenever a move was waited for, and whenever the topology is no longer the one that they
        were read from: engines may have been brought up, with the version before this one.

        Where the gate cannot be asked, since records go to the spool, it is the loop that keeps
        moves and the sync apart: a controller may still reach the ledger, and the records of the
        sync come to stand in it behind those of a move that it grants meanwhile. A `repair` keeps
        moves away itself.
        """
        self._count += 1
        operation = f"sync-{self._grant.operation}-{published.version}-{self._count}"
        self._recording.flush()
        deadline = time.monotonic() + self._way.limit_s
        gated = False
        while not gated:
            topology, asked = targets()
            started = self._started(published, base, asked, encoding)
            try:
                if self._recording.spooling:
                    raise LedgerUnreachable("records are being spooled")
                self._gate.begin_sync(self._job, started, operation=operation, topology=topology)
                gated = True
            except (SyncMustWait, TopologyChanged):
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(LOOK_AGAIN_S)
            except LedgerUnreachable:
                if repair or self._way.begin_sync():
                    break
                # The move that is under way ends when the ledger is back, however long that takes.
                deadline = time.monotonic() + self._way.limit_s
                threading.Event().wait(LOOK_AGAIN_S)
        try:
            if not gated:
                asked = targets()[1]  # no move changes them any more
                started = self._started(published, base, asked, encoding)
                self._recording.now([Draft(started, operation=operation)], key=operation)
            yield operation, asked
        finally:
            if not gated and not repair:
                self._way.end_sync()

    def _started(
        self, published: Published, base: int | None, asked: tuple[str, ...], encoding: SyncEncoding
    ) -> WeightSyncStarted:
        return WeightSyncStarted(
            attempt=self._grant.operation,
            version=published.version,
            base_version=base,
            source=published.source_prints,
            source_root=root(published.source_prints),
            encoding=encoding,
            targets=asked,
            epoch=self._grant.epoch,
            lossy=published.loss,
        )

    def _engines(self) -> Targets:
        """Engines of the topology as the ledger has it now. In an outage those whose processes are
        up: a move that the outage cut short may have left others than any topology names."""
        try:
            topology = self._gate.ledger.state().job(self._job).topology
        except LedgerUnreachable:
            statuses = self._fleet.statuses()
            return None, tuple(
                replica
                for replica, status in sorted(statuses.items())
                if self._fleet.hosts[replica].component == "rollout"
                and status is not None
                and status["state"] != "idle"
            )
        return topology, tuple(replica.name for replica in topology.replicas("rollout"))

    def sync(
        self,
        published: Published,
        base: int,
        exchange: Exchange,
    ) -> float:
        """Deliver to the engines of the topology; returns the seconds that they stood still.

        One that refuses the version is offered it once more, whole, as an operation of its own. An
        engine that the ledger has on the base of the patch is sent that; one that refuses it for
        its base gets the whole weights at once. Raises
        ``EngineError`` where engines refuse it for good and no other serves it.
        """
        began_s = time.monotonic()
        left: list[str] = []
        served: list[str] = []
        reasons: list[str] = []
        asked: Callable[[], Targets] = self._engines
        encoding: SyncEncoding = "full" if published.patch is None else "patch"
        for _ in range(TRIES):
            outcomes = self._deliver(published, asked, base, encoding)
            encoding = "full"
            served += [o.target for o in outcomes if o.outcome == "serving"]
            for outcome in outcomes:
                if outcome.outcome != "serving":
                    exchange.hold(outcome.target)
                elif outcome.target in self._held_back:
                    exchange.feed(outcome.target)
            refused = [o for o in outcomes if o.outcome == "failed"]
            left = [o.target for o in refused]
            lost = [o.target for o in outcomes if o.outcome == "lost"]
            self._held_back = self._held_back.union(left, lost).difference(served)
            reasons = [f"{o.target}: {o.reason}" for o in refused]
            if not left:
                break
            asked = partial(_these, tuple(left))
        if left and not served:
            raise EngineError(
                f"expected an engine to serve version {published.version}, found that none took "
                f"it ({'; '.join(reasons)}); look at its process"
            )
        return time.monotonic() - began_s

    def _on_base(self, published: Published) -> frozenset[str]:
        """Engines that the ledger has on the very base of the patch; none in an outage."""
        patch = published.patch
        if patch is None:
            return frozenset()
        try:
            engines = self._gate.ledger.state().job(self._job).engines
        except LedgerUnreachable:
            return frozenset()
        base = (patch.base_version, patch.base_root)
        return frozenset(n for n, known in engines.items() if (known.version, known.root) == base)

    def _deliver(
        self,
        published: Published,
        asked: Callable[[], Targets],
        base: int,
        encoding: SyncEncoding,
    ) -> list[TargetOutcome]:
        """One operation; what came of it, by target."""
        began_s = time.monotonic()
        with self._begun(published, base, asked, encoding) as (operation, targets):
            return self._delivered_to(operation, targets, published, encoding, began_s)

    def _delivered_to(
        self,
        operation: str,
        targets: Sequence[str],
        published: Published,
        encoding: SyncEncoding,
        began_s: float,
    ) -> list[TargetOutcome]:
        """What came of a sync that began, by target; recorded."""
        on_base = self._on_base(published) if encoding == "patch" else frozenset()
        there = [r for r in targets if r not in self.absent]
        futures = {r: self._send(r, published, "patch" if r in on_base else "full") for r in there}
        drafts: list[Draft] = []
        outcomes = []
        flushed: set[str] = set()
        for replica in targets:
            if replica not in futures:
                outcomes.append(
                    TargetOutcome(
                        target=replica,
                        outcome="lost",
                        reason="its process died; it takes the version as it is brought up",
                    )
                )
                continue
            outcome, taken, incarnation = self._outcome(replica, futures[replica], published)
            outcomes.append(outcome)
            if taken is not None:
                flushed.update(taken.caches_flushed)
                events = self._said(replica, incarnation, published, taken)
                drafts += [Draft(event, operation=operation) for event in events]
        stall_s = time.monotonic() - began_s
        ended = self._ended(published, outcomes, stall_s, flushed)
        drafts.append(Draft(ended, operation=operation))
        self._recording.now(drafts, key=f"{operation}/end")
        return outcomes

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
        flushed: set[str] = set()
        for replica in targets:
            b = by_name.get(replica)
            if b is None:
                outcomes.append(
                    TargetOutcome(target=replica, outcome="failed", reason="it was not brought up")
                )
                continue
            taken = Taken(
                fingerprints={
                    k.removeprefix("model/"): v for k, v in b.loaded.fingerprints.items()
                },
                moved_bytes=b.loaded.moved_bytes,
                sync_s=b.start_s,
                **b.loaded.said,
            )
            flushed.update(taken.caches_flushed)
            events = self._said(replica, b.status["incarnation"], published, taken)
            drafts += [Draft(event, operation=operation) for event in events]
            outcomes.append(TargetOutcome(target=replica, outcome="serving"))
        drafts.append(Draft(self._ended(published, outcomes, 0.0, flushed), operation=operation))
        self._recording.now(drafts, key=f"{operation}/end")

    def _send(self, replica: str, published: Published, encoding: SyncEncoding) -> Any:
        return self._fleet.send(replica, "call", self._grant, "sync", published.offered(encoding))

    def _outcome(
        self, replica: str, future: Any, published: Published
    ) -> tuple[TargetOutcome, Taken | None, str]:
        import ray

        refused: str | None = None
        try:
            taken: Taken = self._fleet.gather({replica: future}, gone=self.absent)[replica]
            if taken.base_refused is not None:
                refused = f"the patch was refused, the whole weights sent: {taken.base_refused}"
                whole = self._send(replica, published, "full")
                taken = self._fleet.gather({replica: whole}, gone=self.absent)[replica]
            incarnation = self._fleet.each([replica], "status")[replica]["incarnation"]
        except (ShiftbookError, ray.exceptions.RayError) as error:
            lost = TargetOutcome(target=replica, outcome="lost", reason=first_line(error))
            return lost, None, ""
        if taken.failure is None:
            serving = TargetOutcome(target=replica, outcome="serving", reason=refused)
            return serving, taken, incarnation
        back = taken.rolled_back_to
        then = "it serves nothing" if back is None else f"it went back to version {back}"
        reason = f"{taken.failure}; {then}"
        return TargetOutcome(target=replica, outcome="failed", reason=reason), taken, incarnation

    def _said(
        self, replica: str, incarnation: str, published: Published, taken: Taken
    ) -> list[Event]:
        """The delivery and the probe of one engine; nothing where the load itself failed."""
        if not taken.fingerprints:
            return []
        events: list[Event] = [_delivered(replica, incarnation, published, taken)]
        if taken.gap is not None:
            attempt = self._grant.operation
            events.append(probed(attempt, replica, published.version, taken.gap))
        return events

    @staticmethod
    def _ended(
        published: Published,
        outcomes: Sequence[TargetOutcome],
        stall_s: float,
        flushed: Iterable[str],
    ) -> WeightSyncCommitted:
        return WeightSyncCommitted(
            version=published.version,
            outcomes=tuple(outcomes),
            stall_s=stall_s,
            caches_flushed=tuple(sorted(flushed)),
        )


def _these(targets: tuple[str, ...]) -> Targets:
    """Engines that are offered a version again; it is theirs, whatever else was brought up."""
    return None, targets


def probed(attempt: str, replica: str, version: int, gap: Gap) -> LogProbsReplayed:
    """The probe of an engine under a version; it generates the iteration of that number."""
    return LogProbsReplayed(
        attempt=attempt,
        iteration=version,
        what="behaviour",
        replica=replica,
        version=version,
        samples=gap.prompts,
        tokens=gap.tokens,
        mean_gap=gap.mean,
        largest_gap=gap.largest,
    )


def _delivered(
    replica: str, incarnation: str, published: Published, taken: Taken
) -> WeightSyncDelivered:
    prints = taken.fingerprints
    names = published.prints.keys() | prints.keys()
    differing = sorted(n for n in names if published.prints.get(n) != prints.get(n))
    return WeightSyncDelivered(
        target=replica,
        incarnation=incarnation,
        version=published.version,
        root=root(prints),
        fingerprint_of=taken.fingerprint_of,
        differing=tuple(differing),
        moved_bytes=taken.moved_bytes,
        full_bytes=published.bytes,
        sync_s=taken.sync_s,
        encoding=taken.encoding,
        transport=TRANSPORT,
    )
