"""Executes one granted move, step by step through the gate; any failure undoes it.

    quiesce sources -> (quiesced) -> snapshot, place, restore -> (transferred) -> compare
    fingerprints -> (verified) -> resume, drop -> (committed)

Each step's event is written before the next act begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import GateError, LedgerUnreachable, ShiftbookError
from shiftbook.ledger.events.life import ReplicaStarted
from shiftbook.ledger.events.reallocation import Custody, Strategy
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.recovery import end_or_poison
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.cluster import import_ray
from shiftbook.scheduler.errors import MoveFailed, WorkerLost
from shiftbook.scheduler.fleet import Fleet
from shiftbook.scheduler.mover import LoopClient, RayMover
from shiftbook.scheduler.workers.component import Layout, Loaded

FIRST_UNIT_LIMIT_S = 0.25
"""How long the end of a move waits to see its components work again."""
RESHARDED = frozenset({"trainer"})
"""Components whose replicas hold parts of one state."""


@dataclass(frozen=True)
class Change:
    """What a move does to one component."""

    component: str
    leaving: tuple[str, ...]
    arriving: tuple[str, ...]
    staying: tuple[str, ...]
    resharded: bool
    """True where the replicas hold parts of one state, so that those that stay change too."""

    @property
    def quiesced(self) -> tuple[str, ...]:
        """Replicas that must stop."""
        return (*self.leaving, *self.staying) if self.resharded else self.leaving

    @property
    def filled(self) -> tuple[str, ...]:
        """Replicas that get state for a new layout."""
        return (*self.arriving, *self.staying) if self.resharded else self.arriving


def changes(
    before: Topology, after: Topology, resharded: frozenset[str] = RESHARDED
) -> list[Change]:
    """Components that a move touches, in the order of the topology after."""
    found = []
    for component in after.components:
        was = [r.name for r in before.replicas(component)]
        will = [r.name for r in after.replicas(component)]
        if was == will:
            continue
        found.append(
            Change(
                component,
                leaving=tuple(r for r in was if r not in will),
                arriving=tuple(r for r in will if r not in was),
                staying=tuple(r for r in will if r in was),
                resharded=component in resharded,
            )
        )
    return found


def rebooted(before: Topology, after: Topology) -> list[Change]:
    """Components that a reboot touches, all their replicas; every one where nothing changes."""
    names = [c.component for c in changes(before, after)] or list(after.components)
    found = []
    for component in names:
        was = [r.name for r in before.replicas(component)]
        will = [r.name for r in after.replicas(component)]
        if was or will:
            found.append(
                Change(
                    component,
                    leaving=tuple(r for r in was if r not in will),
                    arriving=tuple(r for r in will if r not in was),
                    staying=tuple(r for r in will if r in was),
                    resharded=True,
                )
            )
    return found


def strategy_of(before: Topology, after: Topology) -> Strategy:
    """``reshard`` where a component with shared state changes, else ``pause``."""
    return "reshard" if any(c.resharded for c in changes(before, after)) else "pause"


@dataclass
class Report:
    """What a committed move was."""

    operation: str
    began_s: float
    ended_s: float
    moved_bytes: int
    stall_s: float
    stalls: dict[str, float] = field(default_factory=dict)

    @property
    def cost_s(self) -> float:
        """Seconds from the grant to the commit, without those spent watching the first unit."""
        return self.ended_s - self.began_s


class MoveRunner:
    """Runs moves of one job; holds no state between them."""

    def __init__(self, gate: Gate, fleet: Fleet, loop: LoopClient, mover: RayMover) -> None:
        self._gate, self._fleet, self._loop, self._mover = gate, fleet, loop, mover
        self.at_boundary: Any = None
        """Called with the name of each boundary that was passed; tests stop the process there."""

    def run(
        self, grant: Grant, before: Topology, after: Topology, strategy: Strategy | None = None
    ) -> Report:
        """Carry a granted move out. Raises MoveFailed after it was rolled back or abandoned.

        ``strategy`` is the one that was proposed; pause and reshard follow from the topologies.
        """
        reboot = strategy == "reboot"
        touched = rebooted(before, after) if reboot else changes(before, after)
        why = self._loop.begin_move(grant.operation, [c.component for c in touched])
        if why is not None:
            self._gate.abandon(grant.job, grant.operation, why)
            raise MoveFailed(f"{grant.operation}: abandoned, {why}")
        try:
            report = self._steps(grant, after, touched, reboot)
        except LedgerUnreachable:
            # Nothing may move now, and nothing can be written. The processes stand still until
            # the ledger is back, when recovery ends the move.
            raise
        except (ShiftbookError, import_ray().exceptions.RayError) as error:
            cause = str(error).strip().splitlines()[0][:300]
            self._undo(grant, cause)
            raise MoveFailed(f"{grant.operation}: {cause}") from error
        self._loop.end_move(grant.operation, after, report.stalls, committed=True)
        return report

    def _passed(self, boundary: str) -> None:
        if self.at_boundary is not None:
            self.at_boundary(boundary)

    def _steps(
        self, grant: Grant, after: Topology, touched: Sequence[Change], reboot: bool
    ) -> Report:
        began_s = time.monotonic()
        self._passed("granted")
        stopped = self._quiesce(grant, touched)
        quiesced_s = time.monotonic()
        last_s = {r: quiesced_s - answer["idle_s"] for r, answer in stopped.items()}
        custody = [
            Custody(
                replica=replica,
                incarnation=answer["incarnation"],
                requests=tuple(answer["keys"]),
                partial_tokens=answer["partial_tokens"],
                receiver=f"channel:{self._fleet.hosts[replica].component}",
            )
            for replica, answer in stopped.items()
        ]
        lost = sum(answer["replay_tokens"] for answer in stopped.values())
        self._gate.quiesced(grant, custody, kv_tokens_lost=lost, quiesce_s=quiesced_s - began_s)
        self._passed("quiesced")
        if reboot:
            self._restart(touched)
        before_prints, after_prints, parts = self._transfer(grant, after, touched, reboot)
        requests = sum(answer["moved_bytes"] for answer in stopped.values())
        if requests:
            parts["requests"] = requests
        moved = sum(parts.values())
        self._gate.transferred(
            grant, moved_bytes=moved, transfer_s=time.monotonic() - quiesced_s, parts=parts
        )
        self._passed("transferred")
        self._gate.verified(grant, before_prints, after_prints)
        self._passed("verified")
        self._tell_arrivals(grant, touched, reboot)
        self._resume(grant, touched, reboot)
        ready_s = time.monotonic()
        stalls = self._stalls(touched, last_s, began_s)
        watched_s = time.monotonic() - ready_s
        self._gate.committed(
            grant,
            moved_bytes=moved,
            stall_s=max(stalls.values(), default=0.0),
            kv_tokens_lost=lost,
            stalls=stalls,
        )
        self._passed("committed")
        return Report(
            grant.operation,
            began_s,
            time.monotonic() - watched_s,
            moved,
            max(stalls.values(), default=0.0),
            stalls,
        )

    def _quiesce(self, grant: Grant, touched: Sequence[Change]) -> dict[str, Any]:
        stopping = [replica for change in touched for replica in change.quiesced]
        return self._fleet.each(stopping, "quiesce", grant)

    def _restart(self, touched: Sequence[Change]) -> None:
        """End the processes of a reboot and wait for new ones: what they held is in the bundle."""
        ray = import_ray()
        for change in touched:
            for replica in {*change.quiesced, *change.filled}:
                ray.kill(self._fleet.handle(replica), no_restart=False)
        self._loop.await_workers()

    def _tell_arrivals(self, grant: Grant, touched: Sequence[Change], reboot: bool) -> None:
        """Record the processes that serve a replica from here, before they do."""
        attempt = self._gate.ledger.state().job(grant.job).attempt
        arriving = [r for c in touched for r in (c.filled if reboot else c.arriving)]
        if not arriving or attempt is None:
            return
        statuses = self._fleet.each(arriving, "status")
        drafts = [
            Draft(
                ReplicaStarted(
                    attempt=attempt,
                    component=status["component"],
                    replica=replica,
                    incarnation=status["incarnation"],
                    devices=(status["device"],),
                    pid=status["pid"],
                    node=status["node"],
                ),
                operation=grant.operation,
            )
            for replica, status in statuses.items()
        ]
        self._gate.ledger.append(grant.job, drafts, key=f"{grant.operation}/arrivals")

    def _transfer(
        self, grant: Grant, after: Topology, touched: Sequence[Change], reboot: bool
    ) -> tuple[dict[str, str], dict[str, str], dict[str, int]]:
        """Fill the new places; fingerprints at the sources and as the targets hold them."""
        before: dict[str, str] = {}
        found: dict[str, str] = {}
        parts: dict[str, int] = {}
        for change in touched:
            if not change.filled:
                continue
            payload = self._loop.payload(change.component) | {"reboot": reboot}
            if change.resharded and not reboot:
                snapshots = self._fleet.each(change.quiesced, "snapshot", grant)
                payload = {"store": payload["store"], "snapshots": snapshots}
                for answer in snapshots.values():
                    before |= _prefixed(change.component, answer["fingerprints"])
            names = [r.name for r in after.replicas(change.component)]
            layouts = {
                r: Layout(names.index(r), len(names), grant.operation) for r in change.filled
            }
            self._fleet.gather(
                {r: self._fleet.send(r, "place", grant, layout) for r, layout in layouts.items()}
            )
            loaded: Mapping[str, Loaded] = self._fleet.gather(
                {r: self._fleet.send(r, "restore", grant, payload) for r in layouts}
            )
            if not change.resharded or reboot:
                before |= _prefixed(change.component, payload.get("fingerprints", {}))
            for replica, state in loaded.items():
                prints = _prefixed(change.component, state.fingerprints)
                for name, value in prints.items():
                    if found.setdefault(name, value) != value:
                        raise MoveFailed(
                            f"expected one state on all replicas, {replica} holds another {name}"
                        )
                for part, size in state.parts.items():
                    parts[part] = parts.get(part, 0) + size
        return before, {n: found[n] for n in found if n in before or not before}, parts

    def _resume(self, grant: Grant, touched: Sequence[Change], reboot: bool) -> None:
        if reboot and any(change.component in RESHARDED for change in touched):
            # The half-done update died with its processes: its groups are due again.
            self._loop.train_again()
        filled = [replica for change in touched for replica in change.filled]
        leaving = [r for change in touched for r in change.leaving if not reboot]
        futures = {r: self._fleet.send(r, "resume", grant) for r in filled}
        futures |= {r: self._fleet.send(r, "drop", grant) for r in leaving}
        self._fleet.gather(futures)

    def _stalls(
        self, touched: Sequence[Change], last_s: Mapping[str, float], began_s: float
    ) -> dict[str, float]:
        """By component, seconds from the last unit before to the first one after the move.

        A component of which a replica went on did not stall. Where no work waits after the move,
        or another component has the devices, the time until its replicas were ready counts.
        ``last_s`` is on this process's clock.
        """
        ready_s = time.monotonic()
        stalls: dict[str, float] = {}
        for change in touched:
            if not change.resharded and change.staying:
                stalls[change.component] = 0.0
                continue
            since_s = self._fleet.each(change.filled, "first_unit", FIRST_UNIT_LIMIT_S)
            now_s = time.monotonic()
            working_s = min(
                (now_s - ago_s for ago_s in since_s.values() if ago_s is not None), default=ready_s
            )
            stopped_s = max((last_s[r] for r in change.quiesced if r in last_s), default=0.0)
            # Idle time before the move is none of its doing.
            stalls[change.component] = max(0.0, working_s - max(stopped_s, began_s))
        return stalls

    def _undo(self, grant: Grant, cause: str) -> None:
        """End the move whose step failed: undone before it was verified, finished after."""
        try:
            # From here on this is recovery, which may bring up a source that died meanwhile.
            own = self._gate.take_over(grant.job, grant.operation, cause, held=grant)
            end_or_poison(self._gate, own, self._mover, cause)
        except GateError:
            # The operation was closed under us: a weight sync went first, or recovery has it.
            self._loop.repair(self._loop_topology(grant))
        self._loop.end_move(grant.operation, self._loop_topology(grant), {}, committed=False)

    def _loop_topology(self, grant: Grant) -> Topology:
        return self._gate.ledger.state().job(grant.job).topology


def _prefixed(component: str, prints: Mapping[str, str]) -> dict[str, str]:
    return {f"{component}/{name}": value for name, value in prints.items()}


__all__ = ["Change", "MoveRunner", "Report", "WorkerLost", "changes", "strategy_of"]
