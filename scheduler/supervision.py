"""Keeps the processes of a job as its topology says, under the attempt's standing grant.

Bringing up, tearing down and repairing are one act: look at what every process holds, and change
what differs from the topology. It is used when an attempt starts, when a process died, and by
recovery after a move was undone or finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shiftbook.ledger.grant import Grant
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.cluster import import_ray
from shiftbook.scheduler.errors import WorkerLost
from shiftbook.scheduler.fleet import STATUS_LIMIT_S, Fleet, topology_of
from shiftbook.scheduler.workers.component import Layout, Loaded
from shiftbook.scheduler.workers.host import Assignment

RESTART_LIMIT_S = 60.0
"""How long a process that died may take to be there again, and usually to be ready to serve."""
LOOK_AGAIN_S = 0.1
TELL_S = 10.0
"""Pause between two words about processes that are waited for."""


@dataclass(frozen=True)
class Brought:
    """A replica that was brought up, and what it holds."""

    component: str
    replica: str
    status: dict[str, Any]
    loaded: Loaded
    start_s: float


class _Waiting:
    """Which replicas are waited for, since when, and what was told of it."""

    def __init__(self, tell: Callable[[str | None], None], leaving: Callable[[], bool]) -> None:
        self._tell, self._leaving = tell, leaving
        self._since_s: dict[str, float] = {}
        self._told_s = time.monotonic()
        self._told = False

    def on(self, replica: str, what: str, limit_s: float) -> None:
        """Wait on; raises WorkerLost where that took longer than ``limit_s``, or is in vain."""
        if self._leaving():
            raise WorkerLost(f"{replica}: expected {what}, found that the job is about to end")
        now_s = time.monotonic()
        waited_s = now_s - self._since_s.setdefault(replica, now_s)
        if waited_s > limit_s:
            raise WorkerLost(
                f"{replica}: expected {what} within {limit_s:.0f} s, found none; look at its node "
                "and at what its process wrote, or give it longer (start_limit_s)"
            )
        if now_s - self._told_s >= TELL_S:
            self._told_s, self._told = now_s, True
            self._tell(
                f"{replica}: waited {waited_s:.0f} s for {what}, at most {limit_s:.0f} s; "
                f"{len(self._since_s)} to go"
            )

    def done(self, replica: str) -> None:
        """It is there; if it has to be waited for again, that counts from then."""
        self._since_s.pop(replica, None)

    def over(self) -> None:
        """Nobody waits any more."""
        if self._told:
            self._tell(None)


class Supervisor:
    """Makes the processes match a topology.

    ``payload`` gives what a component is restored from; ``resharded`` names the components whose
    replicas hold parts of one state, so that they are restored together or not at all.
    How long a process may take to be ready to serve is what the fleet's spec says of its component,
    else ``RESTART_LIMIT_S``; whoever waits is told what for by ``tell``, and by ``None`` when
    nobody waits any more. A process that ends is noticed at once.
    """

    def __init__(
        self,
        fleet: Fleet,
        assignment: Assignment,
        payload: Callable[[str], dict[str, Any]],
        resharded: frozenset[str] = frozenset({"trainer"}),
        tell: Callable[[str | None], None] = lambda text: None,
    ) -> None:
        self.fleet = fleet
        self.assignment = assignment
        self._payload = payload
        self._resharded = resharded
        self._tell = tell
        self._lock = threading.Lock()
        self._generation = 0
        self._unreported: set[str] = set()
        """Replicas of a bring-up that failed half-way: some may serve, and nobody was told."""

    def wanted(self, topology: Topology) -> dict[str, Layout]:
        """Layout of every replica that must work: those of the topology, and those without a
        device."""
        wanted: dict[str, Layout] = {}
        for replicas in topology.components.values():
            for rank, replica in enumerate(replicas):
                wanted[replica.name] = Layout(rank, len(replicas), "")
        for host in self.fleet.hosts.values():
            if host.device is None:
                wanted[host.replica] = Layout(0, 1, "")
        return wanted

    def present(self) -> dict[str, dict[str, Any]]:
        """Status of every process, all attached; raises WorkerLost where one is not there now."""
        statuses = self.fleet.statuses()
        there = {r: status for r, status in statuses.items() if status is not None}
        missing = sorted({*(statuses.keys() - there.keys()), *self._strangers(there)})
        if missing:
            raise WorkerLost(
                f"expected every process to be there and to serve the job, found {missing[0]} "
                "gone, silent or anew; wait for it, then repair again"
            )
        return there

    def _strangers(self, statuses: Mapping[str, dict[str, Any]]) -> list[str]:
        """Replicas whose processes serve another job, or none, or are not ready to."""
        mine = (self.assignment.job, self.assignment.ledger_url)
        return [
            replica
            for replica, status in statuses.items()
            if (status["job"], status["ledger_url"]) != mine or not status["ready"]
        ]

    def living(self, leaving: Callable[[], bool] = lambda: False) -> dict[str, dict[str, Any]]:
        """Status of every process, all attached; waits for those that are being restarted, and for
        engines that start, unless the job is ``leaving``.

        Raises WorkerLost for one that ends meanwhile, and for one that takes longer than it may.
        """
        waiting = _Waiting(self._tell, leaving)
        try:
            while True:
                statuses = self._answered(waiting)
                strangers = self._strangers(statuses)
                if not strangers:
                    return statuses
                self._attach(strangers, waiting)
        finally:
            waiting.over()

    def _limit_s(self, replica: str) -> float:
        component = self.fleet.hosts[replica].component
        return self.fleet.spec.start_limit_s.get(component, RESTART_LIMIT_S)

    def _answered(self, waiting: _Waiting) -> dict[str, dict[str, Any]]:
        """Status of every process. One that is gone comes again within a minute or not at all; one
        that keeps silent may be busy with its start."""
        while True:
            statuses, silent = self.fleet.roll_call(STATUS_LIMIT_S)
            there = {r: status for r, status in statuses.items() if status is not None}
            if len(there) == len(statuses):
                return there
            for replica in there:
                waiting.done(replica)
            for replica in statuses.keys() - there.keys():
                if replica in silent:
                    waiting.on(replica, "an answer", self._limit_s(replica))
                else:
                    waiting.on(replica, "a process", RESTART_LIMIT_S)
            threading.Event().wait(LOOK_AGAIN_S)

    def _attach(self, replicas: Iterable[str], waiting: _Waiting) -> None:
        """Let processes serve the job; there an engine is made, which takes what it takes."""
        ray = import_ray()
        pending = {self.fleet.send(r, "attach", self.assignment): r for r in replicas}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK_AGAIN_S)
            for future in ready:
                replica = pending.pop(future)
                self.fleet.gather({replica: future})
                waiting.done(replica)
            for replica in pending.values():
                waiting.on(replica, "it to be ready", self._limit_s(replica))

    def repair(
        self,
        topology: Topology,
        grant: Grant,
        *,
        fresh: bool = False,
        anew: frozenset[str] = frozenset(),
        move: Grant | None = None,
        forward: bool = False,
    ) -> list[Brought]:
        """Change what differs; returns the replicas that were brought up, in their order.

        Waits for no process to start: ``living`` does, before. Raises WorkerLost where one is not
        there, or dies meanwhile.

        ``fresh`` drops everything first, as a new attempt must: nobody knows what the processes
        of the attempt before hold. ``anew`` names components whose state is in doubt. ``move`` is
        the grant of a move that is being ended: its devices obey that one alone; ``forward`` says
        that the move is finished, not undone.
        """
        grants = _Grants(grant, move, self.fleet)
        with self._lock:
            self._generation += 1
            statuses = self.present()
            wanted = self.wanted(topology)
            stopped = [r for r in wanted if statuses[r]["state"] == "quiesced"]
            if stopped and not fresh and not forward:
                # Left behind by a move that was closed under its controller: they go on as before.
                grants.each(stopped, "undo")
                statuses = self.present()
            leaving = [
                replica
                for replica, status in statuses.items()
                if _holds_something(status) and (fresh or replica not in wanted)
            ]
            broken = self._broken(statuses, wanted) if not fresh else set(wanted)
            broken |= {r for r in wanted if self.fleet.hosts[r].component in anew}
            broken |= self._unreported & wanted.keys()
            leaving += [r for r in broken if _holds_something(statuses[r]) and r not in leaving]
            if leaving:
                grants.each(leaving, "drop")
            if not broken:
                return []
            return self._bring_up({r: wanted[r] for r in wanted if r in broken}, grants)

    def _broken(
        self, statuses: Mapping[str, dict[str, Any]], wanted: Mapping[str, Layout]
    ) -> set[str]:
        """Wanted replicas that do not work, with all those that share their state."""
        broken = {
            replica
            for replica, layout in wanted.items()
            if statuses[replica]["state"] != "active"
            or statuses[replica]["prepared"]
            or not _same_place(statuses[replica]["layout"], layout, self._shared(replica))
        }
        for component in self._resharded:
            ranks = {r for r in wanted if self.fleet.hosts[r].component == component}
            generations = {
                statuses[r]["layout"].generation for r in ranks if statuses[r]["layout"] is not None
            }
            if ranks & broken or len(generations) > 1:
                broken |= ranks
        return broken

    def _shared(self, replica: str) -> bool:
        return self.fleet.hosts[replica].component in self._resharded

    def _bring_up(self, layouts: Mapping[str, Layout], grants: _Grants) -> list[Brought]:
        began_s = time.monotonic()
        generation = f"{grants.standing.operation}.{self._generation}.{time.monotonic_ns()}"
        payloads = {
            component: self._payload(component)
            for component in {self.fleet.hosts[r].component for r in layouts}
        }
        places = {r: Layout(at.rank, at.world, generation) for r, at in layouts.items()}
        self._unreported |= layouts.keys()
        grants.each(layouts, "place", lambda r: places[r])
        loaded: dict[str, Loaded] = grants.each(
            layouts, "restore", lambda r: payloads[self.fleet.hosts[r].component]
        )
        statuses = grants.each(layouts, "resume")
        took_s = time.monotonic() - began_s
        self._unreported -= layouts.keys()
        return [
            Brought(self.fleet.hosts[r].component, r, statuses[r], loaded[r], took_s)
            for r in layouts
        ]

    def inspect(self, components: tuple[str, ...]) -> Topology:
        """Topology as the processes stand."""
        return topology_of(self.fleet.statuses(), components, self.assignment.job)


@dataclass(frozen=True)
class _Grants:
    """Which grant a replica obeys: a move's on its devices, else the attempt's standing one."""

    standing: Grant
    move: Grant | None
    fleet: Fleet

    def of(self, replica: str) -> Grant:
        """The grant for one replica."""
        device = self.fleet.hosts[replica].device
        covered = self.move is not None and device is not None and device in self.move.devices
        return self.move if covered and self.move is not None else self.standing

    def each(
        self,
        replicas: Iterable[str],
        method: str,
        argument: Callable[[str], Any] | None = None,
    ) -> dict[str, Any]:
        """Call a method on several replicas at once, each under its grant."""
        return self.fleet.gather(
            {
                r: self.fleet.send(
                    r, method, self.of(r), *(() if argument is None else (argument(r),))
                )
                for r in replicas
            }
        )


def _holds_something(status: Mapping[str, Any]) -> bool:
    return bool(status["state"] != "idle" or status["prepared"] or status["resident_bytes"])


def _same_place(found: Layout | None, wanted: Layout, shared: bool) -> bool:
    """Ranks matter only to components whose replicas share one state."""
    if found is None:
        return False
    return not shared or (found.rank, found.world) == (wanted.rank, wanted.world)
