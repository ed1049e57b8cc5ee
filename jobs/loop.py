"""The training loop: a Ray actor of its own that outlives the controller and the workers.

It draws prompts, feeds the channels, waits for the update's groups, updates, saves, syncs the new
weights, and records all of it. It moves nothing: the controller does, through the gate. The loop
repairs what died, under the attempt's standing grant, and goes on when the ledger or the controller
cannot be reached.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.sampler import HASH_SORT, Sampler
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from shiftbook.jobs.care import Care
from shiftbook.jobs.config import (
    DATASET_SIZE,
    GROUP_SIZE,
    JobConfig,
    fleet_spec,
    opened,
    start_topology,
)
from shiftbook.jobs.desk import Desk
from shiftbook.jobs.iteration import Iteration
from shiftbook.jobs.lossy_sync import LossySource
from shiftbook.jobs.open_moves import close_open_moves
from shiftbook.jobs.records import begun, consumed, drawn, generated, updated
from shiftbook.jobs.reports import IterationTimes
from shiftbook.jobs.right_of_way import RightOfWay
from shiftbook.jobs.standing import Standing
from shiftbook.jobs.start import Start, first_bundle, resume_point
from shiftbook.jobs.state_records import first_updated, first_used, saved_bundle
from shiftbook.jobs.sync_encoding import PatchSource
from shiftbook.jobs.syncing import Syncer, probed
from shiftbook.jobs.updating import Reports, Updater
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable, RecoverLater
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.events.observation import IterationCompleted
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.evidence import writable_place
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.segment_spool import refuse_wrong_place
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.channels import Worker
from shiftbook.scheduler.cluster import node_address
from shiftbook.scheduler.errors import MoveFailed, WorkerLost
from shiftbook.scheduler.fleet import Fleet
from shiftbook.scheduler.recording import Recording
from shiftbook.scheduler.supervision import Supervisor
from shiftbook.scheduler.workers.host import Assignment
from shiftbook.scheduler.workers.line import Address, LineServer

BY = "training-loop"
"""The loop's name in the records."""
CLOSE_WAIT_S = 0.25
"""Pause between two tries to close the job."""
MOVE_WAIT_S = 0.05
LOCK_LIMIT_S = 2.0
"""How long the loop waits for the ledger before it goes on without."""
CLOSE_LIMIT_S = 600.0
"""How long a job waits for the ledger: to go on after its loop died, and to say that it ended."""
MOST_ATTEMPTS = 6
"""Attempts after which a job whose processes keep dying has failed."""
LATEST = 4
"""Iterations that telemetry shows."""


class TrainingLoop:
    """The actor. Its methods are called from many threads; the training runs in one of its own."""

    def __init__(self, config: dict[str, Any], devices: tuple[str, ...]) -> None:
        self.config = JobConfig.model_validate(config)
        self.devices = devices
        self._ranks = VirtualRankPlan(self.config.virtual_ranks, self.config.groups)
        self._standing = Standing(
            Path(self.config.base_policy),
            self.config.tolerance,
            PatchSource.declared(self.config),
            LossySource.declared(self.config),
        )
        self._desk = Desk(
            self._ranks,
            lanes=self.config.lanes,
            phases=self.config.schedule == "timeshared",
            generated=self._generated,
            first_use=self._first_use,
        )
        self._line = LineServer(
            {
                method.__name__: method
                for method in (
                    self._desk.take,
                    self._desk.deliver,
                    self._desk.give_back,
                    self._desk.hold,
                    self._desk.feed,
                )
            },
            node_address(),
        )
        self._way = RightOfWay(
            self.config.job, self._standing, self._desk.wake, self.config.engine_start_s
        )
        self._phase = "starting"
        self._error: str | None = None
        self._waits_for: str | None = None
        self._training = threading.Event()
        self._done = threading.Event()
        self._stopping = threading.Event()
        self._iteration_began_s = 0.0
        self._times: list[dict[str, Any]] = []
        threading.Thread(target=self._guarded, daemon=True).start()

    # ---- what workers ask ----------------------------------------------------------------

    def line(self) -> Address:
        """Where workers take work and bring answers."""
        return self._line.address

    # ---- what the controller and recovery ask --------------------------------------------

    def telemetry(self, seen: int = -1, wait_s: float = 0.0) -> dict[str, Any]:
        """Cumulative counts and present progress, for windows and predictions.

        With ``wait_s``, held open for that long while the present iteration is ``seen``.
        """
        if wait_s:
            self._desk.await_next(seen, wait_s)
        iteration = self._desk.iteration
        traffic = self._desk.traffic()
        progress: dict[str, Any] = {}
        if iteration is not None:
            more = iteration.number + 1 < self.config.iterations
            progress = {**iteration.progress(), "more": more}
        return {
            "now_ns": time.time_ns(),
            "now_s": time.monotonic(),
            "iteration": -1 if iteration is None else iteration.number,
            "iteration_began_s": self._iteration_began_s,
            "phase": self._phase,
            **traffic,
            "figures": dict(self._desk.figures),
            "progress": progress,
            "moving": self._way.moving,
            "updating": self._way.updating,
            "iterations": list(self._times[-LATEST:]),
        }

    def status(self) -> dict[str, Any]:
        """For whoever waits for the job: how far it is, and what went wrong."""
        return {
            "pid": os.getpid(),
            "phase": self._phase,
            "error": self._error,
            "waits_for": self._waits_for,
            "done": self._done.is_set(),
            "iterations": list(self._times),
            "attempt": self._standing.attempt,
        }

    def payload(self, component: str) -> dict[str, Any]:
        """What a replica of a component is restored from."""
        return self._standing.payload(component)

    def begin_move(self, operation: str, components: list[str]) -> str | None:
        """A move is about to quiesce: None where it may, else what is in its way, in words.

        Besides what `RightOfWay` says, records that wait in the spool are in its way: of what they
        tell, the gate knows nothing yet.
        """
        if self._phase != "training":
            return f"the job is {self._phase}, not training"
        if self._recording.spooling:
            return "records of the training wait for the ledger"
        return self._way.begin_move(operation, components)

    def end_move(
        self, operation: str, topology: dict[str, Any], stalls: dict[str, float], committed: bool
    ) -> None:
        """The move is over, one way or another."""
        self._way.end_move(operation, Topology.model_validate(topology), stalls, committed)

    def start_limit_s(self) -> float:
        """How long an engine may take to start."""
        return self.config.engine_start_s

    def await_workers(self) -> None:
        """Wait until every worker process is there and serves the job."""
        self._care.await_workers()

    def train_again(self) -> None:
        """Every group of the iteration goes to the trainer again."""
        self._desk.train_again()

    def repair(
        self, topology: dict[str, Any], move: Grant | None = None, forward: bool = False
    ) -> None:
        """Bring the processes into a topology, at the end of a move or after one was closed.

        Raises RecoverLater while an attempt starts, which itself ends what is open.
        """
        if self._phase == "starting":
            raise RecoverLater(f"the training loop of {self.config.job} starts; try again")
        self._care.repair(Topology.model_validate(topology), move=move, forward=forward)

    def stop(self) -> None:
        """End after the present iteration."""
        self._stopping.set()

    # ---- the training thread -------------------------------------------------------------

    def _guarded(self) -> None:
        import ray

        try:
            self._attempt()
        except (WorkerLost, ray.exceptions.RayError) as error:
            # Too many processes died for this attempt to mend. Its own process ends as well, and
            # the next attempt goes on from the last bundle.
            os.write(2, traceback.format_exc().encode())
            if len(self._ledger.state().job(self.config.job).attempts) < MOST_ATTEMPTS:
                os._exit(1)
            self._error = f"{type(error).__name__}: {error}"
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            os.write(2, traceback.format_exc().encode())
        finally:
            self._phase = "ended"
            self._training.clear()
            self._done.set()

    def _attempt(self) -> None:
        config = self.config
        self._ledger = self._await_ledger()
        self._gate = Gate(self._ledger, by=BY)
        self._gate.open_job(config.job, opened(config, self.devices))
        if self._ledger.state().job(config.job).status == "closed":
            return
        self._fleet = Fleet(fleet_spec(self.devices, config), start=True)
        assignment = Assignment(
            config.job, config.ledger_url, f"loop:{config.job}", config.worker_config()
        )
        supervisor = Supervisor(
            self._fleet,
            assignment,
            self._standing.payload,
            tell=self._tell,
        )
        self._recording = self._await_recording()
        close_open_moves(self._ledger, config, supervisor, self._standing, BY)
        start = resume_point(self._ledger, config)
        self._start(start, supervisor)
        self._care.start()
        self._phase = "training"
        self._training.set()
        for number in range(start.iteration, config.iterations):
            if self._stopping.is_set():
                return
            self._one_iteration(number)
        self._finish()

    def _tell(self, waits_for: str | None) -> None:
        """Say which processes are waited for, to whoever asks and in this process's log."""
        self._waits_for = waits_for
        if waits_for is not None:
            os.write(2, f"{waits_for}\n".encode())

    def _await_ledger(self) -> Ledger:
        """Open the ledger, for as long as its server is away.

        A loop that died in an outage is started again within it, and only the ledger says where
        the attempt before had come to. Whoever starts a job has opened the ledger before.
        """
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while True:
            try:
                return Ledger.open(self.config.ledger_url, lock_timeout_s=LOCK_LIMIT_S)
            except LedgerUnreachable:
                if self._stopping.is_set() or time.monotonic() > deadline:
                    raise
            self._done.wait(CLOSE_WAIT_S)

    def _await_recording(self) -> Recording:
        """Take up what earlier attempts left spooled, for as long as that has to wait.

        An attempt's record comes after that of the one before it.
        """
        config, deadline = self.config, time.monotonic() + CLOSE_LIMIT_S
        place = writable_place(config.evidence or self._ledger.beside(".evidence"))
        refuse_wrong_place(place)
        while True:
            try:
                return Recording(config.ledger_url, config.job, place)
            except LedgerUnreachable:
                if self._stopping.is_set() or time.monotonic() > deadline:
                    raise
            self._done.wait(CLOSE_WAIT_S)

    def _start(self, start: Start, supervisor: Supervisor) -> None:
        """Begin an attempt: its grant, its first bundle, and all its processes."""
        config, standing = self.config, self._standing
        standing.topology = start_topology(config, self.devices)
        attempts = self._ledger.state().job(config.job).attempts
        name = f"{config.job}-a{len(attempts)}"
        standing.publish(start)
        standing.grant = self._gate.start_attempt(
            config.job,
            name,
            parent=start.parent,
            bundle=start.bundle,
            iteration=start.iteration,
            topology=standing.topology,
            policy_version=start.version,
            policy_fingerprint=root(standing.last_published.source_prints),
            pid=os.getpid(),
        )
        self._syncer = Syncer(
            self._gate, self._recording, self._fleet, config.job, standing.grant, self._way
        )
        self._sampler = Sampler(DATASET_SIZE, config.seed, rule=HASH_SORT)
        self._sampler.seek(*divmod(start.cursor, DATASET_SIZE))
        self._care = Care(
            self._ledger,
            supervisor,
            self._syncer,
            self._recording,
            standing,
            self._desk,
            self._way,
            self._training,
            self._done,
        )
        self._updater = Updater(
            config, self._fleet, self._sampler, standing, self._desk, self._way, self._care
        )
        standing.version = start.version

        def make() -> list[Draft]:
            made = begun(name, start.iteration, config.seed, self._recording.segments)
            return [Draft(event) for event in made]

        self._recording.later(make, key=f"{name}/begun")
        if start.saved is None:
            event = self._saved(first_bundle(config, name), 0)
            self._recording.now([Draft(event)], key=f"{name}/bundle-0")
        else:
            standing.take_saved(start.saved)
        self._care.repair(standing.topology, fresh=True)

    def _saved(self, saved: dict[str, Any], iteration: int) -> CheckpointSaved:
        """Take a bundle as the last one; its event."""
        event = saved_bundle(
            self._standing.grant.operation,
            saved,
            iteration=iteration,
            version=self._standing.version,
            cursor=self._sampler.state().ordinal,
        )
        self._standing.take_saved(event)
        return event

    def _one_iteration(self, number: int) -> None:
        config, standing, began_s = self.config, self._standing, time.monotonic()
        self._iteration_began_s = began_s
        standing.begin_iteration()
        times = IterationTimes(self._fleet, standing.topology)
        draws = self._sampler.draw(config.groups)
        iteration = Iteration(number, config.seed, draws, GROUP_SIZE, standing.version)
        name = standing.grant.operation
        self._recording.later([Draft(drawn(name, iteration, HASH_SORT, config.seed))])
        self._desk.begin(iteration)
        reports = self._updater.update(iteration)
        first = reports[0][0]
        standing.version += 1
        self._record_update(iteration, reports)
        base = standing.last_published
        with self._syncer.alone:  # nothing that is brought up meanwhile takes the version before
            published = standing.put_out(first["weights"], standing.version)
            stall_s = self._syncer.sync(published, base.version, self._desk.exchange)
        wall_s = time.monotonic() - began_s
        standing.add_stalls({"rollout": stall_s})
        event = times.event(
            attempt=name,
            iteration=iteration,
            wall_s=wall_s,
            stalls=standing.stalls,
            version=standing.version,
            fingerprint=first["after"]["model"],
            moves=standing.moves,
            schedule=config.schedule,
            devices=len(self.devices),
        )
        self._recording.later([Draft(event)])
        self._times.append(_times_of(event, began_s, iteration.turns_done, standing.moves))

    def _record_update(self, iteration: Iteration, reports: Reports) -> None:
        """Say what the update took in, made and saved; durable on return."""
        name, version, number = (
            self._standing.grant.operation,
            self._standing.version,
            iteration.number,
        )
        first = reports[0][0]
        saved = self._saved(first["saved"], number + 1)
        per_rank = self._ranks.groups_per_rank
        drafts = [
            Draft(consumed(name, iteration, version - 1, self._ranks, self._recording.segments)),
            *(
                Draft(first_updated(name, report, status, version - 1))
                for report, status in reports
                if report["first_use_after"]
            ),
            Draft(updated(name, number, version, first, reports, per_rank)),
            Draft(saved),
        ]
        self._recording.now(drafts, key=f"{name}/{number}/update")

    def _generated(self, iteration: Iteration) -> None:
        """All samples are there: their record is made while the training goes on."""
        version, name = self._standing.version, self._standing.grant.operation
        place = self._recording.segments

        def make() -> list[Draft]:
            return [Draft(event) for event in generated(name, iteration, version, place)]

        self._recording.later(make)

    def _first_use(self, component: str, worker: Worker, use: dict[str, Any]) -> None:
        attempt = self._standing.grant.operation
        drafts = [Draft(first_used(attempt, component, worker, use))]
        if use.get("gap") is not None:
            drafts.append(Draft(probed(attempt, worker[0], use["version"], use["gap"])))
        self._recording.later(drafts)

    def _await_closed_moves(self) -> None:
        """A move that was granted and did not begin is abandoned by its controller."""
        deadline = time.monotonic() + self._way.limit_s
        while True:
            operations = self._ledger.state().job(self.config.job).operations.values()
            left = [o.operation for o in operations if o.open and o.status != "proposed"]
            if not left:
                return
            if time.monotonic() > deadline:
                raise MoveFailed(
                    f"expected {', '.join(left)} to be closed within {self._way.limit_s:.0f} s "
                    f"of the last iteration; run `shiftbook recover {self.config.job}`"
                )
            self._done.wait(MOVE_WAIT_S)

    def _finish(self) -> None:
        """Leave all devices and close the job, when its last move and its records are through."""
        self._recording.flush()
        self._way.close()
        while self._way.moving is not None:
            self._done.wait(MOVE_WAIT_S)
        while self._recording.spooling:
            self._done.wait(CLOSE_WAIT_S)
        self._await_closed_moves()
        self._care.leave()
        closed = JobClosed(
            outcome="finished",
            iterations=self.config.iterations,
            policy_version=self._standing.version,
            policy_fingerprint=root(self._standing.last_published.source_prints),
        )
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while True:
            try:
                # What was spooled comes first: the end of a job is its last event.
                if not self._recording.spooling:
                    self._gate.close_job(self.config.job, closed)
                    return
            except LedgerUnreachable:
                if time.monotonic() > deadline:
                    raise
            self._done.wait(CLOSE_WAIT_S)


def _times_of(event: IterationCompleted, began_s: float, turns: int, moves: int) -> dict[str, Any]:
    """An iteration as status and telemetry show it."""
    return {
        "iteration": event.iteration,
        "began_s": began_s,
        "wall_s": event.wall_s,
        "turns": turns,
        "reward_mean": event.reward_mean,
        "fingerprint": event.policy_fingerprint,
        "busy_s": {c: t.busy_s for c, t in event.components.items()},
        "moves": moves,
    }


__all__ = ["TrainingLoop", "fleet_spec"]
