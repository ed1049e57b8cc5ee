"""The training loop: a Ray actor of its own that outlives the controller and the workers.

It draws prompts, feeds the channels, waits for the update's groups, updates, saves, syncs the new
weights, and records all of it. It moves nothing: the controller does, through the gate. The loop
repairs what died, under the attempt's standing grant, and goes on when the ledger or the controller
cannot be reached.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
import traceback
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.bundle import restore_bundle
from shiftbook.checkpoint.sampler import HASH_SORT, Sampler
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from shiftbook.jobs.config import (
    COMPONENTS,
    DATASET_SIZE,
    GROUP_SIZE,
    JobConfig,
    fleet_spec,
    opened,
    start_topology,
)
from shiftbook.jobs.iteration import Iteration
from shiftbook.jobs.model import ModelConfig, parameter_shapes
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.records import consumed, drawn, generated, updated
from shiftbook.jobs.reports import IterationTimes
from shiftbook.jobs.start import Start, first_bundle, resume_point
from shiftbook.jobs.syncing import Published, Syncer
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerError, LedgerUnreachable
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.events.life import ReplicaLost, ReplicaStarted
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved, StateFirstUsed
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.recovery import recover
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.channels import Channel, Exchange, Work, Worker
from shiftbook.scheduler.errors import MoveFailed, WorkerLost
from shiftbook.scheduler.fleet import Fleet
from shiftbook.scheduler.recording import Recording
from shiftbook.scheduler.supervision import Brought, Supervisor
from shiftbook.scheduler.workers.component import Answer, Parcel
from shiftbook.scheduler.workers.host import Assignment

WATCH_S = 0.25
TRAINER_GATE_LIMIT_S = 60.0
TOOL_LINGER_S = (0.002, 0.015)
MANY = 32
"""Episodes outstanding above which nothing is urgent."""
LOCK_LIMIT_S = 2.0
"""How long the loop waits for the ledger before it goes on without."""
CLOSE_LIMIT_S = 600.0
"""How long a job that has ended waits for the ledger, to say so."""


class TrainingLoop:
    """The actor. Work is exchanged in the event loop; the training runs in a thread."""

    def __init__(self, config: dict[str, Any], devices: tuple[str, ...]) -> None:
        self.config = JobConfig.model_validate(config)
        self.devices = devices
        self.exchange = Exchange(
            [
                Channel("trainer", "rollout"),
                Channel("rollout", "tool"),
                Channel("rollout", "inference"),
                Channel("inference", "trainer"),
            ]
        )
        self._ranks = VirtualRankPlan(self.config.virtual_ranks, self.config.groups)
        self._iteration: Iteration | None = None
        self._changed = threading.Event()
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._figures: dict[str, dict[str, Any]] = {}
        self._phase = "starting"
        self._error: str | None = None
        self._done = threading.Event()
        self._trainer_owner: str | None = None
        self._trainer_free = threading.Condition()
        self._moving: str | None = None
        self._stalls: dict[str, float] = {}
        self._moves = 0
        self._iteration_began_s = 0.0
        self._published: Published | None = None
        self._times: list[dict[str, Any]] = []
        self._progress = 0
        self._stopping = threading.Event()
        self._repairing = 0
        self._reference_prints: dict[str, str] = {}
        """Of the reference policy, as inference read it."""
        threading.Thread(target=self._guarded, daemon=True).start()

    # ---- channels ------------------------------------------------------------------------

    async def take(
        self,
        component: str,
        worker: Worker,
        limit: int,
        lanes: list[int] | None,
        wait_s: float,
    ) -> bytes:
        """Hand out work, pickled; holds the call open for a while when there is none."""
        self._events = asyncio.get_running_loop()
        works = self.exchange.take(component, worker, limit, lanes)
        waiters = self._waiters.setdefault(component, set())
        deadline = self._events.time() + wait_s
        while not works and not self.exchange.is_held(worker[0]):
            left_s = deadline - self._events.time()
            if left_s <= 0:
                break
            waiter = self._events.create_future()
            waiters.add(waiter)
            await asyncio.wait({waiter}, timeout=left_s)
            waiters.discard(waiter)
            if component == "tool":
                # Calls come one by one and travel together, but for the last ones.
                await asyncio.sleep(TOOL_LINGER_S[self._outstanding() > MANY])
            works = self.exchange.take(component, worker, limit, lanes)
        return pickle.dumps(works)

    async def deliver(self, pickled: bytes) -> bytes:
        """Take in a Parcel of finished work, and hand out work in exchange."""
        parcel: Parcel = pickle.loads(pickled)
        component, worker = parcel.component, parcel.worker
        self._figures[worker[0]] = parcel.figures
        if parcel.first_use is not None:
            self._record_first_use(component, worker, parcel.first_use)
        for answer in parcel.answers:
            with self.exchange.lock:
                work = self.exchange.by_target[component].answer(worker, answer.key)
            if work is not None:
                self._absorb(component, worker, answer)
        works = []
        if parcel.limit:
            works = self.exchange.take(component, worker, parcel.limit, parcel.lanes)
        return pickle.dumps(works)

    async def give_back(
        self, component: str, worker: Worker, items: list[tuple[Hashable, Any]]
    ) -> list[str]:
        """Take back what a worker owes, as it stands."""
        with self.exchange.lock:
            keys = self.exchange.by_target[component].give_back(worker, items)
        self._wake()
        return [_key_text(key) for key in keys]

    async def hold(self, replica: str) -> None:
        """Hand a replica no more work."""
        self.exchange.hold(replica)
        self._wake()

    async def feed(self, replica: str) -> None:
        """Hand a replica work again."""
        self.exchange.feed(replica)
        self._wake()

    def _wake(self, component: str | None = None) -> None:
        """Let every take of a component (or of all) that is held open look again; any thread."""
        loop = self._events
        if loop is None:
            return

        def fire() -> None:
            for name in self._waiters if component is None else (component,):
                for waiter in self._waiters.get(name, ()):
                    if not waiter.done():
                        waiter.set_result(None)

        loop.call_soon_threadsafe(fire)

    def _outstanding(self) -> int:
        iteration = self._iteration
        return 0 if iteration is None else iteration.outstanding

    def _put(self, component: str, work: Work) -> None:
        with self.exchange.lock:
            self.exchange.by_target[component].put(work)
        if self._waiters.get(component):
            self._wake(component)

    def _absorb(self, component: str, worker: Worker, answer: Answer) -> None:
        iteration = self._iteration
        if iteration is None:
            return
        if component == "rollout":
            self._route(iteration, iteration.turn_done(answer.value, worker))
        elif component == "tool":
            self._route(iteration, iteration.tool_done(answer.key, answer.value))
        elif component == "inference":
            self._referenced(iteration, answer)
        elif component == "trainer":
            with iteration.lock:
                assert isinstance(answer.key, tuple)
                iteration.trained.add(int(answer.key[1]))
                if iteration.complete:
                    self._changed.set()

    def _route(self, iteration: Iteration, step: tuple[str, Work | int] | None) -> None:
        if step is None:
            return
        where, what = step
        if where != "group":
            assert isinstance(what, Work)
            self._put(where, what)
            return
        assert isinstance(what, int)
        phases = self.config.schedule == "timeshared"
        if iteration.generated:
            self._generated(iteration)
        if not phases:
            self._put("inference", Work((iteration.number, what), iteration.batches[what]))
        elif iteration.generated:
            for group in sorted(iteration.batches):
                self._put("inference", Work((iteration.number, group), iteration.batches[group]))

    def _referenced(self, iteration: Iteration, answer: Answer) -> None:
        assert isinstance(answer.key, tuple)
        with iteration.lock:
            group = int(answer.key[1])
            iteration.referenced[group] = answer.value
            if self.config.schedule != "timeshared":
                groups = [group]
            elif len(iteration.referenced) == len(iteration.draws):
                groups = sorted(iteration.referenced)
            else:
                groups = []
            for ready in groups:
                self._put_training(iteration, ready)

    def _put_training(self, iteration: Iteration, group: int) -> None:
        self._put(
            "trainer",
            Work(
                (iteration.number, group),
                iteration.referenced[group],
                lane=self._ranks.rank_of(group),
            ),
        )

    # ---- what the controller and recovery ask --------------------------------------------

    async def telemetry(self) -> dict[str, Any]:
        """Cumulative counts and present progress, for windows and predictions."""
        iteration = self._iteration
        with self.exchange.lock:
            channels = {
                target: {
                    "depth": channel.depth,
                    "in_hand": channel.in_hand(),
                    "answered": channel.counts.answered,
                    "last_answer_s": channel.counts.last_answer_s,
                }
                for target, channel in self.exchange.by_target.items()
            }
            edges = {f"{a}>{b}": n for (a, b), n in self.exchange.edges().items()}
        progress: dict[str, Any] = {}
        if iteration is not None:
            with iteration.lock:
                progress = {
                    "groups": len(iteration.draws),
                    "outstanding": iteration.outstanding,
                    "turns_done": iteration.turns_done,
                    "completed": len(iteration.batches),
                    "referenced": len(iteration.referenced),
                    "trained": len(iteration.trained),
                    "samples": len(iteration.samples),
                    "more": iteration.number + 1 < self.config.iterations,
                }
        return {
            "now_ns": time.time_ns(),
            "now_s": time.monotonic(),
            "iteration": -1 if iteration is None else iteration.number,
            "iteration_began_s": self._iteration_began_s,
            "phase": self._phase,
            "channels": channels,
            "edges": edges,
            "figures": dict(self._figures),
            "progress": progress,
            "moving": self._moving,
            "updating": self._trainer_owner == "update",
            "iterations": list(self._times[-4:]),
        }

    async def status(self) -> dict[str, Any]:
        """For whoever waits for the job: how far it is, and what went wrong."""
        return {
            "pid": os.getpid(),
            "phase": self._phase,
            "error": self._error,
            "done": self._done.is_set(),
            "iterations": list(self._times),
            "attempt": self._attempt_id(),
        }

    async def payload(self, component: str) -> dict[str, Any]:
        """What a replica of a component is restored from."""
        return self._payload(component)

    async def begin_move(self, operation: str, components: list[str]) -> bool:
        """A move is about to quiesce; False when the trainer is in the middle of an update."""
        with self._trainer_free:
            if self._repairing:
                return False
            if "trainer" in components:
                if self._trainer_owner not in (None, operation):
                    return False
                self._trainer_owner = operation
            self._moving = operation
        return True

    async def end_move(self, operation: str, topology: dict[str, Any], stalls: dict[str, float],
                       committed: bool) -> None:  # fmt: skip
        """The move is over, one way or another."""
        self._move_ended(operation, Topology.model_validate(topology), stalls, committed)

    def _move_ended(
        self, operation: str, topology: Topology, stalls: dict[str, float], committed: bool
    ) -> None:
        with self._trainer_free:
            if operation not in (self._moving, self._trainer_owner):
                return
        self._topology = topology
        for component, stall_s in stalls.items():
            self._stalls[component] = self._stalls.get(component, 0.0) + stall_s
        self._moves += committed
        with self._trainer_free:
            if self._trainer_owner == operation:
                self._trainer_owner = None
            if self._moving == operation:
                self._moving = None
            self._trainer_free.notify_all()
        self._wake()

    async def repair(
        self, topology: dict[str, Any], move: Grant | None = None, forward: bool = False
    ) -> None:
        """Bring the processes into a topology, at the end of a move or after one was closed."""
        wanted = Topology.model_validate(topology)
        await asyncio.to_thread(self._repair, wanted, move=move, forward=forward)

    async def stop(self) -> None:
        """End after the present iteration."""
        self._stopping.set()

    # ---- the training thread -------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._attempt()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            self._trace = traceback.format_exc()
            os.write(2, self._trace.encode())
        finally:
            self._phase = "ended"
            self._done.set()

    def _attempt(self) -> None:
        config = self.config
        self._ledger = Ledger.open(config.ledger_url, lock_timeout_s=LOCK_LIMIT_S)
        assert self._ledger.path is not None
        self._evidence = self._ledger.path.with_name(self._ledger.path.name + ".evidence")
        self._gate = Gate(self._ledger, by="training-loop")
        self._gate.open_job(config.job, opened(config, self.devices))
        if self._ledger.state().job(config.job).status == "closed":
            return
        self._fleet = Fleet(fleet_spec(self.devices), start=True)
        assignment = Assignment(
            config.job, config.ledger_url, f"loop:{config.job}", config.worker_config()
        )
        self._supervisor = Supervisor(self._fleet, assignment, self._payload)
        self._recording = Recording(config.ledger_url, config.job, self._ledger.path)
        self._close_open_moves()
        start = resume_point(self._ledger, config)
        self._start(start)
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._notice_ended_moves, daemon=True).start()
        self._phase = "training"
        for number in range(start.iteration, config.iterations):
            if self._stopping.is_set():
                return
            self._one_iteration(number)
        self._finish()

    def _attempt_id(self) -> str | None:
        grant = getattr(self, "_grant", None)
        return grant.operation if grant is not None else None

    def _close_open_moves(self) -> None:
        """Moves that the processes of the attempt before left open end before this one starts."""
        job = self._ledger.state().job(self.config.job)
        attempt = job.current_attempt()
        if attempt is None or not any(operation.open for operation in job.operations.values()):
            return
        lease = self._ledger.event(attempt.epoch)
        old = Grant(job.name, attempt.attempt, tuple(lease.body["devices"]), attempt.epoch)
        start = resume_point(self._ledger, self.config)
        self._bundle_path = start.path
        self._publish(start)
        recover(
            self._ledger,
            self.config.job,
            _FreshMover(self._supervisor, old, COMPONENTS),
            by="training-loop",
            reason="the attempt before ended",
        )

    def _start(self, start: Start) -> None:
        config = self.config
        self._topology = start_topology(config, self.devices)
        attempts = self._ledger.state().job(config.job).attempts
        name = f"{config.job}-a{len(attempts)}"
        self._publish(start)
        published = self._published
        assert published is not None
        self._grant = self._gate.start_attempt(
            config.job,
            name,
            parent=start.parent,
            bundle=start.bundle,
            iteration=start.iteration,
            topology=self._topology,
            policy_version=start.version,
            policy_fingerprint=published.root,
            pid=os.getpid(),
        )
        self._syncer = Syncer(self._gate, self._recording, self._fleet, config.job, self._grant)
        self._sampler = Sampler(DATASET_SIZE, config.seed, rule=HASH_SORT)
        self._sampler.seek(*divmod(start.cursor, DATASET_SIZE))
        self._version = start.version
        if start.saved is None:
            saved = first_bundle(config, name)
            self._bundle, self._bundle_path = saved["bundle"], saved["path"]
            self._recording.now([Draft(self._saved_event(saved, 0))], key=f"{name}/bundle-0")
        else:
            self._saved = start.saved
            self._bundle, self._bundle_path = start.saved.bundle, start.saved.path
        self._repair(self._topology, fresh=True)

    def _publish(self, start: Start) -> None:
        """Weights of the version that the attempt starts with."""
        if start.path is None:
            weights = load_policy(Path(self.config.base_policy))
        else:
            stored = restore_bundle(start.path, ["model"])["model"]
            weights = {name: stored[name] for name in parameter_shapes(ModelConfig())}
        self._published = Published.of(weights, start.version)

    def _payload(self, component: str) -> dict[str, Any]:
        if component == "rollout":
            assert self._published is not None
            published = self._published
            return {
                "weights": published.reference,
                "version": published.version,
                "fingerprints": {f"model/{k}": v for k, v in published.prints.items()},
            }
        if component == "trainer":
            return {"store": self._store(), "bundle": self._bundle_path}
        if component == "inference":
            return {"fingerprints": self._reference_prints}
        return {}

    def _store(self) -> tuple[str, int]:
        """The lasting rendezvous of the trainer's groups lives here, outside of its ranks."""
        store = getattr(self, "_rendezvous", None)
        if store is None:
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._rendezvous = store
        return "127.0.0.1", int(store.port)

    def _repair(
        self,
        topology: Topology,
        *,
        fresh: bool = False,
        anew: frozenset[str] = frozenset(),
        move: Grant | None = None,
        forward: bool = False,
    ) -> None:
        """Make the processes match, and record what was brought up and what it read."""
        with self._trainer_free:
            self._repairing += 1
        try:
            self._make_match(topology, fresh, anew, move, forward)
        finally:
            with self._trainer_free:
                self._repairing -= 1
        self._wake()

    def _make_match(
        self,
        topology: Topology,
        fresh: bool,
        anew: frozenset[str],
        move: Grant | None,
        forward: bool,
    ) -> None:
        wanted = [r.name for r in topology.replicas("rollout")]
        alive = self._supervisor.living()
        cold = [r for r in wanted if fresh or alive[r]["state"] == "idle"]
        published = self._published
        assert published is not None
        # A sync waits for a move that is under way, so an engine that is brought up to end one
        # takes the version with the move, and says what it read at its first use.
        syncs = bool(cold) and move is None
        operation = self._syncer.begin(published, cold, base=None) if syncs else None
        brought = self._supervisor.repair(
            topology, self._grant, fresh=fresh, anew=anew, move=move, forward=forward
        )
        self._topology = topology
        self._record_brought(brought)
        if operation is not None:
            self._syncer.attached(operation, published, cold, brought)
        if any(b.component == "trainer" for b in brought):
            self._train_again()

    def _record_brought(self, brought: list[Brought]) -> None:
        for b in brought:
            if b.component == "inference":
                self._reference_prints = b.loaded.fingerprints
        drafts = [
            Draft(
                ReplicaStarted(
                    attempt=self._grant.operation,
                    component=b.component,
                    replica=b.replica,
                    incarnation=b.status["incarnation"],
                    devices=() if b.status["device"] is None else (b.status["device"],),
                    pid=b.status["pid"],
                    node=b.status["node"],
                    start_s=b.start_s,
                )
            )
            for b in brought
        ]
        trainer = next((b for b in brought if b.component == "trainer"), None)
        if trainer is not None:
            parts = {
                name: value
                for name, value in trainer.loaded.fingerprints.items()
                if "/" not in name
            }
            parts["reference"] = _root_of(self._reference_prints)
            saved = self._saved
            drafts.append(
                Draft(
                    CheckpointRestored(
                        attempt=self._grant.operation,
                        bundle=self._bundle,
                        kind="resume",
                        iteration=saved.iteration,
                        policy_version=saved.policy_version,
                        parts=parts,
                        cursor=saved.cursor,
                        restore_s=trainer.start_s,
                    )
                )
            )
        if drafts:
            self._recording.now(drafts)

    def _saved_event(self, saved: dict[str, Any], iteration: int) -> CheckpointSaved:
        self._saved = CheckpointSaved(
            attempt=self._grant.operation,
            bundle=saved["bundle"],
            parent=saved.get("parent"),
            path=saved["path"],
            iteration=iteration,
            policy_version=self._version,
            parts=saved["parts"],
            cursor=self._sampler.state().ordinal if hasattr(self, "_sampler") else 0,
            bytes=saved["bytes"],
            save_s=saved["save_s"],
        )
        return self._saved

    def _train_again(self) -> None:
        """The trainer stands at the last bundle: every group of the iteration is due again."""
        iteration = self._iteration
        if iteration is None:
            return
        with iteration.lock, self.exchange.lock:
            channel = self.exchange.by_target["trainer"]
            channel.clear()
            iteration.trained.clear()
            if self.config.schedule != "timeshared" or len(iteration.referenced) == len(
                iteration.draws
            ):
                for group in sorted(iteration.referenced):
                    self._put_training(iteration, group)

    def _one_iteration(self, number: int) -> None:
        config, began_s = self.config, time.monotonic()
        self._iteration_began_s = began_s
        self._stalls, self._moves = {}, 0
        times = IterationTimes(self._fleet, self._topology)
        draws = self._sampler.draw(config.groups)
        iteration = Iteration(number, config.seed, draws, GROUP_SIZE)
        name = self._grant.operation
        self._recording.later([Draft(drawn(name, iteration, HASH_SORT, config.seed))])
        self._changed.clear()
        self._iteration = iteration
        for work in iteration.first_turns():
            self._put("rollout", work)
        self._wake()
        reports = self._update(iteration)
        first = reports[0][0]
        self._version += 1
        saved = first["saved"]
        self._bundle, self._bundle_path = saved["bundle"], saved["path"]
        drafts = [
            Draft(consumed(name, iteration, self._version - 1, self._ranks, self._evidence)),
            *self._first_update(reports),
            Draft(
                updated(name, number, self._version, first, reports, self._ranks.groups_per_rank)
            ),
            Draft(self._saved_event(saved, number + 1)),
        ]
        self._recording.now(drafts, key=f"{name}/{number}/update")
        base = self._published
        assert base is not None
        self._published = Published.of(first["weights"], self._version)
        targets = [r.name for r in self._topology.replicas("rollout")]
        stall_s = self._syncer.sync(self._published, targets, base.version, self.exchange)
        wall_s = time.monotonic() - began_s
        self._stalls["rollout"] = self._stalls.get("rollout", 0.0) + stall_s
        event = times.event(
            attempt=name,
            iteration=iteration,
            wall_s=wall_s,
            stalls=self._stalls,
            version=self._version,
            fingerprint=first["after"]["model"],
            moves=self._moves,
            schedule=config.schedule,
            devices=len(self.devices),
        )
        self._recording.later([Draft(event)])
        self._times.append(
            {
                "iteration": number,
                "began_s": began_s,
                "wall_s": wall_s,
                "turns": iteration.turns_done,
                "reward_mean": event.reward_mean,
                "fingerprint": event.policy_fingerprint,
                "busy_s": {c: t.busy_s for c, t in event.components.items()},
                "moves": self._moves,
            }
        )

    def _generated(self, iteration: Iteration) -> None:
        """All samples are there: their record is made while the training goes on."""
        version, name = self._version, self._grant.operation

        def make() -> list[Draft]:
            return [Draft(event) for event in generated(name, iteration, version, self._evidence)]

        self._recording.later(make)

    def _update(self, iteration: Iteration) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Wait for all groups, then reduce, step, publish and save, on every rank at once."""
        import ray

        while True:
            self._changed.wait(0.5)
            if not iteration.complete:
                self._changed.clear()
                continue
            self._trainer_begin()
            try:
                if not iteration.complete:
                    continue
                return self._update_once(iteration)
            except (WorkerLost, MoveFailed, ray.exceptions.RayError) as error:
                os.write(2, f"update of iteration {iteration.number} again: {error}\n".encode())
                self._repair(self._topology, anew=frozenset({"trainer"}))
            finally:
                self._trainer_end()

    def _update_once(self, iteration: Iteration) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        ranks = [r.name for r in self._topology.replicas("trainer")]
        arguments = {
            "learning_rate": self.config.learning_rate,
            "clip_norm": self.config.clip_norm,
            "version": self._version + 1,
        }
        reports = self._fleet.each(ranks, "call", self._grant, "update", arguments)
        first = reports[ranks[0]]
        for replica in ranks[1:]:
            if reports[replica]["after"] != first["after"]:
                raise MoveFailed(
                    f"expected the same parameters on every rank after the update, found others "
                    f"on {replica} than on {ranks[0]}"
                )
        fields = {
            "job": self.config.job,
            "attempt": self._grant.operation,
            "parent": self._bundle,
            "iteration": iteration.number + 1,
            "sampler": dict(zip(("epoch", "position"), self._cursor(), strict=True)),
        }
        saved = self._fleet.each(
            ranks[:1],
            "call",
            self._grant,
            "save",
            {"root_dir": self.config.bundles, "fields": fields},
        )[ranks[0]]
        first["saved"] = {**saved, "parent": self._bundle}
        statuses = self._fleet.each(ranks, "status")
        return [(reports[r], statuses[r]) for r in ranks]

    def _cursor(self) -> tuple[int, int]:
        return divmod(self._sampler.state().ordinal, DATASET_SIZE)

    def _first_update(self, reports: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Draft]:
        return [
            Draft(
                StateFirstUsed(
                    attempt=self._grant.operation,
                    component="trainer",
                    replica=status["replica"],
                    incarnation=status["incarnation"],
                    after=report["first_use_after"],
                    use="update",
                    policy_version=self._version - 1,
                    parts=report["before"],
                )
            )
            for report, status in reports
            if report["first_use_after"]
        ]

    def _record_first_use(self, component: str, worker: Worker, use: dict[str, Any]) -> None:
        event = StateFirstUsed(
            attempt=self._grant.operation,
            component=component,
            replica=worker[0],
            incarnation=worker[1],
            after=use["after"],
            use=use["use"],
            policy_version=use["version"],
            parts=use["parts"],
        )
        self._recording.later([Draft(event)])

    def _trainer_begin(self) -> None:
        with self._trainer_free:
            free = self._trainer_free.wait_for(
                lambda: self._trainer_owner is None, TRAINER_GATE_LIMIT_S
            )
            if not free:
                raise MoveFailed(
                    f"expected move {self._trainer_owner} to end within "
                    f"{TRAINER_GATE_LIMIT_S:.0f} s; run `shiftbook recover {self.config.job}`"
                )
            self._trainer_owner = "update"

    def _trainer_end(self) -> None:
        with self._trainer_free:
            if self._trainer_owner == "update":
                self._trainer_owner = None
            self._trainer_free.notify_all()

    def _finish(self) -> None:
        self._recording.flush()
        published = self._published
        assert published is not None
        while self._moving is not None:
            self._changed.wait(0.05)
        while self._recording.spooling:
            self._done.wait(WATCH_S)
        job = self._ledger.state().job(self.config.job)
        if any(operation.status != "proposed" and operation.open
               for operation in job.operations.values()):  # fmt: skip
            raise MoveFailed("a move is open at the end of the job; run `shiftbook recover`")
        holding = [
            r
            for r, status in self._fleet.statuses().items()
            if status is not None and status["state"] != "idle"
        ]
        self._fleet.each(holding, "drop", self._grant)
        closed = JobClosed(
            outcome="finished",
            iterations=self.config.iterations,
            policy_version=self._version,
            policy_fingerprint=published.root,
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
            self._done.wait(WATCH_S)

    # ---- supervision ---------------------------------------------------------------------

    def _notice_ended_moves(self) -> None:
        """A controller that died after its last event cannot say that the move is over."""
        while not self._done.wait(WATCH_S):
            moving = self._moving
            if moving is None:
                continue
            try:
                job = self._ledger.state().job(self.config.job)
            except LedgerError:
                continue  # out of reach: asked again
            known = job.operations.get(moving)
            if known is not None and not known.open:
                self._move_ended(moving, job.topology, {}, known.status == "committed")

    def _watch(self) -> None:
        """Learn at once when a worker's process dies, and repair when no move is under way."""
        import ray

        watches = {self._fleet.send(r, "watch"): r for r in self._fleet.hosts}
        while not self._done.is_set():
            ready, _ = ray.wait(list(watches), num_returns=1, timeout=WATCH_S)
            for future in ready:
                replica = watches.pop(future)
                try:
                    ray.get(future)
                except ray.exceptions.RayError as error:
                    if not self._done.is_set() and self._phase == "training":
                        self._lost(replica, str(error).splitlines()[0][:200])
                if self._done.is_set():
                    return
                watches[self._fleet.send(replica, "watch")] = replica

    def _lost(self, replica: str, cause: str) -> None:
        host = self._fleet.hosts[replica]
        with self.exchange.lock:
            channel = self.exchange.by_target[host.component]
            owed = [
                _key_text(key)
                for worker in channel.workers(replica)
                for key in channel.lose(worker)
            ]
        known = self._ledger.state().job(self.config.job).replicas.get(replica)
        if known is not None:
            event = ReplicaLost(
                attempt=self._grant.operation,
                component=host.component,
                replica=replica,
                incarnation=known.incarnation,
                cause=cause,
                owed=tuple(owed),
            )
            self._recording.later([Draft(event)])
        self._wake()
        with self._trainer_free:
            self._trainer_free.wait_for(lambda: self._moving is None, TRAINER_GATE_LIMIT_S)
        if host.component == "trainer":
            self._trainer_begin()
            try:
                self._repair(self._topology)
            finally:
                self._trainer_end()
        else:
            self._repair(self._topology)


class _FreshMover:
    """Ends a move of a dead attempt: everything is brought up anew from the last bundle."""

    def __init__(self, supervisor: Supervisor, grant: Grant, components: tuple[str, ...]) -> None:
        self._supervisor, self._grant, self._components = supervisor, grant, components

    def inspect(self) -> Topology:
        """Where the processes stand."""
        return self._supervisor.inspect(self._components)

    def restore(self, topology: Topology, grant: Grant) -> None:
        """All processes in a topology, from the last bundle."""
        self._supervisor.repair(topology, self._grant, fresh=True, move=grant)

    def finish(self, topology: Topology, grant: Grant) -> None:
        """The same: what was moved in memory died with its attempt."""
        self._supervisor.repair(topology, self._grant, fresh=True, move=grant, forward=True)

    def close(self) -> None:
        """Nothing to let go."""


def _key_text(key: Hashable) -> str:
    """``uid#turn`` of a request, ``iteration#group`` of a group."""
    return "#".join(str(part) for part in key) if isinstance(key, tuple) else str(key)


def _root_of(prints: dict[str, str]) -> str:
    from shiftbook.checkpoint.compare import root

    return root({name.split("/", 1)[1]: value for name, value in prints.items()})
