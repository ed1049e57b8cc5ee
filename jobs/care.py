"""Care for the processes of a job: learns that one died, brings it up again, and records both."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from shiftbook.jobs.desk import Desk
from shiftbook.jobs.right_of_way import RightOfWay
from shiftbook.jobs.standing import Standing
from shiftbook.jobs.state_records import restored, started
from shiftbook.jobs.syncing import Syncer, probed
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerError, ShiftbookError
from shiftbook.ledger.events.life import ReplicaLost
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.errors import WorkerLost, first_line
from shiftbook.scheduler.recording import Recording
from shiftbook.scheduler.supervision import Brought, Supervisor

WATCH_S = 0.25
"""Pause between two looks at the processes, and at a move that is under way."""
SUCCESSOR_LIMIT_S = 0.5
TRIES = 5
"""How often processes are brought up that die meanwhile, before it is given up."""


class Care:
    """Repairs what died, under the attempt's standing grant, when no move is under way.

    ``training`` is set while the job trains; ``done`` ends the watching.
    """

    def __init__(
        self,
        ledger: Ledger,
        supervisor: Supervisor,
        syncer: Syncer,
        recording: Recording,
        standing: Standing,
        desk: Desk,
        way: RightOfWay,
        training: threading.Event,
        done: threading.Event,
    ) -> None:
        self._ledger, self._recording = ledger, recording
        self._supervisor, self._syncer, self._fleet = supervisor, syncer, supervisor.fleet
        self._job = supervisor.assignment.job
        self._standing, self._desk, self._way = standing, desk, way
        self._training, self._done = training, done
        self._mending = threading.Lock()
        """Held while processes that died are brought up again."""
        self._leaving = threading.Event()
        self._look = threading.Event()
        self._unrepaired: list[str] = []
        """Replicas whose processes died, until that is mended."""
        self._left = False

    def start(self) -> None:
        """Watch, in threads of its own."""
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._mend, daemon=True).start()
        threading.Thread(target=self._notice_ended_moves, daemon=True).start()

    def leave(self) -> None:
        """Let every process drop what it holds; one that died holds nothing. From here on nothing
        is brought up: the job is about to give its devices back."""
        import ray

        self._leaving.set()  # a repair that waits for a process gives up
        with self._mending:
            self._left = True
        for replica, status in self._fleet.statuses().items():
            if status is None or status["state"] == "idle":
                continue
            try:
                self._fleet.each([replica], "drop", self._standing.grant)
            except (WorkerLost, ray.exceptions.RayActorError):
                continue

    def await_workers(self) -> None:
        """Wait until every process is there and attached, those that are being restarted too."""
        self._supervisor.living()

    def repair(
        self,
        topology: Topology,
        *,
        fresh: bool = False,
        anew: frozenset[str] = frozenset(),
        move: Grant | None = None,
        forward: bool = False,
    ) -> None:
        """Make the processes match, and record what was brought up and what it read.

        The arguments are those of ``Supervisor.repair``.
        """
        import ray

        with self._way.repair():
            # An engine takes its time to start, and the syncs of the others do not wait for that.
            absent = frozenset(self._syncer.absent)
            self._supervisor.living(self._leaving.is_set)
            for left in reversed(range(TRIES)):
                try:
                    # A sync waits for a move under way, so ending a move must wait for no sync.
                    with self._syncer.alone if move is None else nullcontext():
                        self._make_match(topology, fresh, anew, move, forward)
                        self._syncer.absent.difference_update(absent)
                    break
                except (WorkerLost, ray.exceptions.RayError) as error:
                    if not left:
                        raise
                    os.write(2, f"bringing up workers again: {first_line(error)}\n".encode())
                    self._supervisor.living(self._leaving.is_set)
        self._desk.wake()

    def _make_match(
        self,
        topology: Topology,
        fresh: bool,
        anew: frozenset[str],
        move: Grant | None,
        forward: bool,
    ) -> None:
        """One try; nothing here waits for a process to start."""
        wanted = [r.name for r in topology.replicas("rollout")]
        alive = self._supervisor.present()
        cold = [r for r in wanted if fresh or alive[r]["state"] == "idle"]
        published = self._standing.last_published
        # A sync waits for a move that is under way, so an engine that is brought up to end one
        # takes the version with the move: its probe is told here, what it read at its first use.
        syncs = bool(cold) and move is None
        operation = self._syncer.begin(published, cold, base=None) if syncs else None
        try:
            brought = self._supervisor.repair(
                topology,
                self._standing.grant,
                fresh=fresh,
                anew=anew,
                move=move,
                forward=forward,
            )
        except BaseException:
            if operation is not None:
                self._syncer.attached(operation, published, cold, ())
            raise
        self._standing.topology = topology
        self._record_brought(brought, move)
        if operation is not None:
            self._syncer.attached(operation, published, cold, brought)
        if any(b.component == "trainer" for b in brought):
            self._desk.train_again()

    def _record_brought(self, brought: Sequence[Brought], move: Grant | None) -> None:
        standing = self._standing
        for b in brought:
            if b.component == "inference":
                standing.reference_prints = b.loaded.fingerprints
        attempt = standing.grant.operation
        drafts = [Draft(started(attempt, b)) for b in brought]
        if move is not None:
            drafts += _probes(attempt, brought, move)
        trainer = next((b for b in brought if b.component == "trainer"), None)
        if trainer is not None:
            event = restored(
                attempt,
                standing.bundle,
                standing.saved,
                trainer,
                standing.reference_prints,
                standing.served_root(standing.saved.policy_version),
            )
            drafts.append(Draft(event))
        if drafts:
            self._recording.now(drafts)

    def _notice_ended_moves(self) -> None:
        """A controller that died after its last event cannot say that the move is over."""
        while not self._done.wait(WATCH_S):
            moving = self._way.moving
            if moving is None:
                continue
            try:
                job = self._ledger.state().job(self._job)
            except LedgerError:
                continue  # out of reach: asked again
            known = job.operations.get(moving)
            if known is not None and not known.open:
                self._way.end_move(moving, job.topology, {}, known.status == "committed")

    def _watch(self) -> None:
        """Learn at once when a worker's process dies; repairing takes longer, and is another's."""
        import ray

        watches = {self._fleet.send(r, "watch"): r for r in self._fleet.hosts}
        while not self._done.is_set():
            ready, _ = ray.wait(list(watches), num_returns=1, timeout=WATCH_S)
            for future in ready:
                replica = watches.pop(future)
                try:
                    ray.get(future)
                except ray.exceptions.RayError as error:
                    if not self._done.is_set() and self._training.is_set():
                        self._lost(replica, first_line(error))
                        self._unrepaired.append(replica)
                        self._look.set()
                if self._done.is_set():
                    return
                watches[self._fleet.send(replica, "watch")] = replica

    def _mend(self) -> None:
        """Repair what was lost, when no move is under way."""
        while not self._done.is_set():
            self._look.wait(WATCH_S)
            self._look.clear()
            for replica in list(self._unrepaired):
                if self._repaired(replica):
                    self._unrepaired.remove(replica)

    def _lost(self, replica: str, cause: str) -> None:
        component = self._fleet.hosts[replica].component
        self._syncer.absent.add(replica)  # until it is repaired
        successor = self._successor(replica)
        owed = self._desk.lose(component, replica, successor)
        try:
            known = self._ledger.state().job(self._job).replicas.get(replica)
        except LedgerError:
            known = None  # out of reach: the start of its successor says that it was replaced
        # A successor whose start is recorded already has said that the one before is gone.
        if known is not None and known.incarnation != successor:
            event = ReplicaLost(
                attempt=self._standing.grant.operation,
                component=component,
                replica=replica,
                incarnation=known.incarnation,
                cause=cause,
                owed=owed,
            )
            self._recording.later([Draft(event)])
        self._desk.wake()

    def _successor(self, replica: str) -> str | None:
        """Incarnation of the process that took over, where it is there; a repair after another
        loss may have brought it up already."""
        try:
            status = self._fleet.each([replica], "status", limit_s=SUCCESSOR_LIMIT_S)[replica]
        except ShiftbookError:
            return None
        return str(status["incarnation"])

    def _repaired(self, replica: str) -> bool:
        """Bring the processes into the topology again; False when that must be tried again."""
        import ray

        self._way.await_move()
        with self._mending:
            if self._left:
                return True
            try:
                if self._fleet.hosts[replica].component == "trainer":
                    with self._way.trainer():
                        self.repair(self._standing.topology)
                else:
                    self.repair(self._standing.topology)
            except (ShiftbookError, ray.exceptions.RayError) as error:
                line = f"repair after the loss of {replica}, again: {first_line(error)}\n"
                os.write(2, line.encode())
                return False
        return True


def _probes(attempt: str, brought: Sequence[Brought], move: Grant) -> Iterator[Draft]:
    """The probe of each engine that was brought up to end a move, under the version it serves."""
    for b in brought:
        gap = b.loaded.said.get("gap")
        if gap is not None:
            event = probed(attempt, b.replica, b.loaded.said["version"], gap)
            yield Draft(event, operation=move.operation)
