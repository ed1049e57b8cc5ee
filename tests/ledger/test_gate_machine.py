"""Random commands, crashes at every point, and clocks that jump, against the real gate.

Goal, whatever happens:

- no device is leased twice;
- nothing is done that the last event does not allow, and no event stands where it may not;
- after ``recover`` every operation is committed, rolled back, abandoned, rejected or, only where
  both ways were made to fail, poisoned; and the real processes stand in the folded topology;
- the state folded step by step equals the state folded from scratch.

Method: a hypothesis state machine over two jobs that want one device in common. Each job has a
simulated cluster whose workers check every grant as real ones do. A fuse burns down through every
decision (before and after its commit) and every act of a cluster (before, in its middle, after),
and kills whoever runs then. What the machine asserts, it reads from the events alone, with tables
of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import (
    GateError,
    IllegalStep,
    Rejected,
    StaleGrant,
    StepTimeout,
    SyncMustWait,
    TopologyChanged,
)
from shiftbook.ledger.events.sync import WeightSyncFailed
from shiftbook.ledger.fencing import GrantChecker
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.job_state import JobState, OperationState
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Decision, Receipt
from shiftbook.ledger.recovery import recover
from shiftbook.ledger.state import LedgerState, fold
from shiftbook.ledger.topology import Topology
from tests.ledger.gate_cases import Clock, gain, opened, proposal, start, step, sync_started
from tests.ledger.stores import new_url

LIMIT_S = 20.0
DEVICES = {"j": ("n/0", "n/1"), "k": ("n/1", "n/2")}

FOLLOWS: dict[str, set[str]] = {
    "ReallocationProposed": set(),
    "ReallocationRejected": {"ReallocationProposed"},
    "ReallocationAbandoned": {"ReallocationProposed", "ReallocationGranted"},
    "ReallocationGranted": {"ReallocationProposed"},
    "ReallocationQuiesced": {"ReallocationGranted"},
    "ReallocationTransferred": {"ReallocationQuiesced"},
    "ReallocationVerified": {"ReallocationTransferred"},
    "ReallocationCommitted": {"ReallocationVerified"},
    "ReallocationRolledBack": {
        "ReallocationGranted",
        "ReallocationQuiesced",
        "ReallocationTransferred",
    },
    "ReallocationPoisoned": {
        "ReallocationGranted",
        "ReallocationQuiesced",
        "ReallocationTransferred",
        "ReallocationVerified",
    },
}
"""Step event to the step events it may follow, from the drawing in the design."""

PERMITS: dict[str, set[str]] = {
    "ReallocationGranted": {"quiesce", "undo"},
    "ReallocationQuiesced": {"snapshot", "place", "restore", "undo"},
    "ReallocationTransferred": {"restore", "probe", "undo"},
    "ReallocationVerified": {"resume", "drop"},
}
"""Last step event of a move to the acts it allows."""

ENDED = {"committed", "rolled_back", "abandoned", "rejected", "poisoned"}


def placements(job: str) -> tuple[Topology, ...]:
    """Every topology that the job moves between."""
    first, second = DEVICES[job]
    return (
        Topology.of({"rollout": [first], "trainer": [second]}),
        Topology.of({"rollout": [first, second], "trainer": [second]}),
        Topology.of({"rollout": [second], "trainer": [first, second]}),
    )


class Crash(BaseException):
    """The process that runs dies here."""


class Fuse:
    """Kills the running process at its n-th point; never where ``left`` is None."""

    def __init__(self) -> None:
        self.left: int | None = None

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Crash


class Mortal:
    """A ledger handle whose user may die right before or right after each commit."""

    def __init__(self, ledger: Ledger, fuse: Fuse) -> None:
        self._ledger, self._fuse = ledger, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def decide(self, fn: Callable[[LedgerState], Decision | None]) -> Receipt | None:
        self._fuse.burn()
        receipt = self._ledger.decide(fn)
        self._fuse.burn()
        return receipt


class Cluster:
    """The real processes of a job: where they stand and whether they take work.

    Every act asks the worker of each device first, which checks the grant against the ledger.
    """

    def __init__(self, job: str, ledger: Ledger, fuse: Fuse) -> None:
        self.job, self._ledger, self._fuse = job, ledger, fuse
        self.topology = Topology()
        self.working = True
        self.broken = False
        self.hiccups = 0
        self.checkers: dict[str, GrantChecker] = {}
        for device in DEVICES[job]:
            self.restart(device)

    def restart(self, device: str) -> None:
        """The worker of a device dies and is started again."""
        old = self.checkers.get(device)
        if old is not None:
            old.close()
        url = self._ledger.url
        self.checkers[device] = GrantChecker(
            lambda: Ledger.open(url, read_only=True), self.job, device
        )

    def ask(self, grant: Grant, method: str) -> None:
        """Every worker that the move touches checks the grant; the machine checks the workers."""
        for device in grant.devices:
            self.checkers[device].check(grant, method)
        steps = list(self._ledger.read(job=self.job, operation=grant.operation))
        epochs = [
            e.position for e in steps if e.type in ("ReallocationGranted", "OperationTakenOver")
        ]
        acts = [e.type for e in steps if e.type in FOLLOWS]
        permitted = PERMITS.get(acts[-1], set())
        if acts[-1] == "ReallocationVerified" and len(epochs) > 1:
            permitted = permitted | {"place", "restore", "probe"}
        assert grant.epoch == epochs[-1], f"{method} was done under a stale grant"
        assert method in permitted, f"{method} was done after {acts[-1]}"

    def change(self, topology: Topology, *, working: bool) -> None:
        """Move processes; a crash may leave them between two topologies."""
        self._fuse.burn()
        if not topology.matches(self.topology):
            self.topology = Topology.of({"rollout": [], "trainer": [DEVICES[self.job][0]]})
            self.working = False
        self._fuse.burn()
        self.topology, self.working = topology, working
        self._fuse.burn()

    def inspect(self) -> Topology:
        self._fuse.burn()
        return self.topology

    def restore(self, topology: Topology, grant: Grant) -> None:
        self._fail()
        self.ask(grant, "undo")
        self.change(topology, working=True)

    def finish(self, topology: Topology, grant: Grant) -> None:
        self._fail()
        self.ask(grant, "restore")
        self.ask(grant, "resume")
        self.change(topology, working=True)

    def _fail(self) -> None:
        if self.broken:
            raise OSError("the cluster does not answer")
        if self.hiccups:
            self.hiccups -= 1
            raise OSError("a hiccup")

    def close(self) -> None:
        """The processes live on."""


class Controller:
    """One life of a controller process: its gate, its grant, and when it last took a step."""

    def __init__(self, ledger: Mortal, clock: Clock, number: int) -> None:
        self.gate = Gate(
            ledger,  # type: ignore[arg-type]
            by=f"controller-{number}",
            boottime_s=clock.boottime_s,
            now_ns=clock.now_ns,
        )
        self.grant: Grant | None = None
        self.last_s = 0.0


JOBS = st.sampled_from(sorted(DEVICES))
FUSES = st.one_of(st.none(), st.integers(0, 14))


class GateMachine(RuleBasedStateMachine):
    """Drives the gate as controllers, operators, training loops and recoveries do."""

    store = "sqlite"

    @initialize()
    def begin(self) -> None:
        # In memory where there is such a place: the machine tests decisions, not disks.
        memory = Path("/dev/shm")
        self.folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.clock = Clock()
        self.fuse = Fuse()
        self.url = new_url(self.store, Path(self.folder.name))
        self.ledger = Ledger.open(self.url, now_ns=self.clock.now_ns)
        self.mortal = Mortal(self.ledger, self.fuse)
        self.lives = 0
        self.controllers = {name: self.new_controller() for name in DEVICES}
        self.zombies: list[tuple[str, Controller]] = []
        self.standing: dict[str, Grant] = {}
        self.topologies: dict[str, list[Topology]] = {}
        self.operator = Gate(self.ledger, by="operator", now_ns=self.clock.now_ns)
        self.clusters = {name: Cluster(name, self.ledger, self.fuse) for name in DEVICES}
        self.broken_once: set[str] = set()
        self.seen = -1
        self.owners: dict[str, str] = {}
        self.steps: dict[str, str] = {}
        self.stepwise = LedgerState()
        for name, devices in DEVICES.items():
            topology = placements(name)[0]
            self.operator.open_job(
                name,
                opened(devices, topology, step_limit_s=LIMIT_S, max_losing_moves=2),
            )
        self.start_attempt("j", 0)

    def new_controller(self) -> Controller:
        self.lives += 1
        return Controller(self.mortal, self.clock, self.lives)

    def job(self, name: str) -> JobState:
        return self.ledger.state().job(name)

    def lives_on(self, name: str, fuse: int | None, act: Callable[[], None]) -> bool:
        """Let a job's controller act; where the fuse kills it, the next one takes its place."""
        self.fuse.left = fuse
        try:
            act()
        except Crash:
            self.zombies.append((name, self.controllers[name]))
            self.controllers[name] = self.new_controller()
            return False
        finally:
            self.fuse.left = None
        return True

    # Jobs and leases.

    @rule(name=JOBS, choice=st.integers(0, 2))
    def start_attempt(self, name: str, choice: int) -> None:
        topology = placements(name)[choice]
        state = self.ledger.state()
        free = all(
            state.leases[device].job == name if device in state.leases else True
            for device in DEVICES[name]
        )
        usable = not set(DEVICES[name]) & set(state.quarantine)
        expected = free and usable and self.job(name).open_operation is None
        try:
            grant = start(self.operator, name, f"a{state.size}", topology)
        except IllegalStep:
            assert not expected
            return
        assert expected
        self.standing[name] = grant
        self.clusters[name].topology, self.clusters[name].working = topology, True

    @precondition(lambda self: self.standing)
    @rule(data=st.data(), dead=st.booleans())
    def give_back(self, data: st.DataObject, dead: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.standing)))
        holder = self.standing[name].operation
        was_open = self.job(name).open_operation is not None
        try:
            if dead:
                self.operator.expire(name, holder=holder, evidence="the locks are free")
            else:
                self.operator.release(name, holder=holder, reason="x")
        except IllegalStep:
            assert was_open
            return
        assert name not in {held.job for held in self.ledger.state().leases.values()}
        del self.standing[name]

    # Moves.

    def idle(self) -> list[str]:
        """Jobs with an attempt, whose controller has no open move."""
        return [name for name in sorted(self.standing) if self.job(name).open_operation is None]

    def busy(self) -> list[str]:
        """Jobs whose living controller has been granted a move that is still open."""
        return [
            name
            for name, controller in sorted(self.controllers.items())
            if controller.grant is not None
            and self.job(name).open_operation == controller.grant.operation
        ]

    @precondition(lambda self: self.idle())
    @rule(
        data=st.data(),
        turn=st.integers(1, 2),
        restoring=st.booleans(),
        steps=st.integers(0, 4),
        fuse=FUSES,
    )
    def moves(
        self, data: st.DataObject, turn: int, restoring: bool, steps: int, fuse: int | None
    ) -> None:
        """Propose a move to another topology, and take some of its steps."""
        name = data.draw(st.sampled_from(self.idle()))
        places = placements(name)
        here = next(i for i, t in enumerate(places) if t.matches(self.job(name).topology))
        offered = proposal(places[(here + turn) % 3], restoring=restoring)
        controller = self.controllers[name]

        def act() -> None:
            try:
                operation = controller.gate.propose(name, offered)
                controller.grant = controller.gate.grant(name, operation)
            except Rejected as error:
                self.allowed_rejections(error)
                return
            controller.last_s = self.clock.boot_s
            for _ in range(steps):
                self.act_and_record(name, controller)

        self.lives_on(name, fuse, act)

    def allowed_rejections(self, rejected: Rejected) -> None:
        assert rejected.rule in ("safe-mode", "quarantine")

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), change=st.sampled_from(["gain", "owed", "stale"]), fuse=FUSES)
    def bad_proposal(self, data: st.DataObject, change: str, fuse: int | None) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        after = placements(name)[1]
        offered = {
            "gain": proposal(after, predicted_gain_s=0.5),
            "owed": proposal(Topology.of({"trainer": [DEVICES[name][0]]}), owed={"rollout": 2}),
            "stale": proposal(after, before=Topology()),
        }[change]
        controller = self.controllers[name]

        def act() -> None:
            with pytest.raises(Rejected):
                controller.gate.propose(name, offered)

        self.lives_on(name, fuse, act)

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def second_proposal(self, data: st.DataObject) -> None:
        """While a move is open, another one is rejected and changes nothing."""
        name = data.draw(st.sampled_from(self.busy()))
        running = self.job(name).open_operation
        with pytest.raises(Rejected):
            self.operator.propose(name, proposal(placements(name)[1]))
        assert self.job(name).open_operation == running

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), grants=st.booleans())
    def proposes_only(self, data: st.DataObject, grants: bool) -> None:
        """A proposal that waits, or is granted by another controller that then dies."""
        name = data.draw(st.sampled_from(self.idle()))
        other = self.new_controller()
        places = placements(name)
        here = next(i for i, t in enumerate(places) if t.matches(self.job(name).topology))
        try:
            operation = other.gate.propose(name, proposal(places[(here + 1) % 3]))
        except Rejected:
            return
        if grants:
            other.grant = other.gate.grant(name, operation)
            other.last_s = self.clock.boot_s
            self.zombies.append((name, other))

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), fuse=FUSES, gap_s=st.sampled_from([0.0, LIMIT_S, LIMIT_S + 1.0]))
    def advance(self, data: st.DataObject, fuse: int | None, gap_s: float) -> None:
        """Do the next act of a move and record it."""
        name = data.draw(st.sampled_from(self.busy()))
        controller = self.controllers[name]
        self.clock.forward(gap_s)
        self.lives_on(name, fuse, lambda: self.act_and_record(name, controller))

    @precondition(lambda self: any(zombie.grant for _, zombie in self.zombies))
    @rule(data=st.data(), fuse=FUSES)
    def zombie(self, data: st.DataObject, fuse: int | None) -> None:
        """A controller that was presumed dead goes on where it stopped."""
        name, controller = data.draw(
            st.sampled_from([(name, zombie) for name, zombie in self.zombies if zombie.grant])
        )
        self.fuse.left = fuse
        try:
            self.act_and_record(name, controller)
        except Crash:
            return
        finally:
            self.fuse.left = None

    def act_and_record(self, name: str, controller: Controller) -> None:
        grant, cluster = controller.grant, self.clusters[name]
        assert grant is not None
        known = self.job(name).operations[grant.operation]
        status, stale = known.status, known.epoch != grant.epoch
        acts: dict[str, tuple[str, Callable[[], None], str]] = {
            "granted": ("quiesce", self.stop(name), "quiesced"),
            "quiesced": ("place", self.move(name, known), "transferred"),
            "transferred": ("probe", lambda: None, "verified"),
            "verified": ("resume", self.resume(name, known), "committed"),
        }
        if status not in acts:
            for late in ("quiesced", "transferred", "rolled_back"):
                if late != status:
                    with pytest.raises(GateError):
                        step(controller.gate, grant, late)
            with pytest.raises(StaleGrant):
                cluster.ask(grant, "undo")
            return
        method, act, next_ = acts[status]
        try:
            cluster.ask(grant, method)
        except StaleGrant:
            assert stale
            with pytest.raises(StaleGrant):
                step(controller.gate, grant, next_)
            return
        assert not stale
        act()
        late = self.clock.boot_s - controller.last_s > LIMIT_S
        try:
            step(controller.gate, grant, next_)
        except StepTimeout:
            assert late
            return
        assert not late
        controller.last_s = self.clock.boot_s

    def stop(self, name: str) -> Callable[[], None]:
        cluster = self.clusters[name]
        return lambda: cluster.change(cluster.topology, working=False)

    def move(self, name: str, known: OperationState) -> Callable[[], None]:
        after = known.after
        return lambda: self.clusters[name].change(after, working=False)

    def resume(self, name: str, known: OperationState) -> Callable[[], None]:
        after = known.after
        return lambda: self.clusters[name].change(after, working=True)

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), fuse=FUSES)
    def roll_back(self, data: st.DataObject, fuse: int | None) -> None:
        """A controller gives up its own move."""
        name = data.draw(st.sampled_from(self.busy()))
        controller, cluster = self.controllers[name], self.clusters[name]
        grant = controller.grant
        assert grant is not None
        known = self.job(name).operations[grant.operation]
        before, undoable = known.before, known.status in ("granted", "quiesced", "transferred")
        undoable = undoable and known.epoch == grant.epoch

        def act() -> None:
            try:
                cluster.ask(grant, "undo")
            except StaleGrant:
                assert not undoable
                return
            assert undoable
            cluster.change(before, working=True)
            controller.gate.rolled_back(grant, "given up", before)

        self.lives_on(name, fuse, act)

    @precondition(lambda self: self.busy())
    @rule(name=JOBS)
    def controller_dies(self, name: str) -> None:
        self.zombies.append((name, self.controllers[name]))
        self.controllers[name] = self.new_controller()

    @rule(name=JOBS, which=st.integers(0, 1))
    def worker_restarts(self, name: str, which: int) -> None:
        self.clusters[name].restart(DEVICES[name][which])

    @rule(name=JOBS, adjusted_s=st.sampled_from([-1.0, 1.0, 4.0]))
    def record_gain(self, name: str, adjusted_s: float) -> None:
        for known in list(self.job(name).operations.values()):
            if known.status == "committed" and known.adjusted_gain_s is None:
                self.operator.gain_realized(name, known.operation, gain(adjusted_s))
                return

    # Weight syncs and safe mode.

    @precondition(lambda self: self.standing)
    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.standing)))
        running = self.job(name).operation_running()
        status = running.status if running else None
        # What a training loop saw some time ago, or just now, or nothing.
        seen = data.draw(
            st.sampled_from([None, self.job(name).topology, *self.topologies.get(name, [])])
        )
        self.topologies.setdefault(name, []).append(self.job(name).topology)
        started = sync_started(self.standing[name])
        try:
            operation = self.operator.begin_sync(name, started, topology=seen)
        except SyncMustWait:
            assert status in ("quiesced", "transferred", "verified")
            return
        except TopologyChanged:
            assert seen is not None
            assert not seen.matches(self.job(name).topology)
            return
        assert status in (None, "granted")
        assert seen is None or seen.matches(self.job(name).topology)
        self.clusters[name].working = True  # what a sync found stopped takes work again
        failed = WeightSyncFailed(version=1, reason="x")
        self.operator.sync_failed(name, operation, failed)

    @rule(name=JOBS, number=st.integers(0, 3))
    def freeze(self, name: str, number: int) -> None:
        if number:  # a frozen job makes no moves, so it is frozen seldom
            return
        self.operator.freeze(name, by="verifier", reason="x")

    @precondition(lambda self: any(self.job(name).safe_mode for name in DEVICES))
    @rule()
    def thaw(self) -> None:
        for name in DEVICES:
            self.operator.thaw(name, by="operator", reason="x")

    # Clocks.

    @rule(seconds=st.floats(0.0, 1e6))
    def boot_clock_jumps(self, seconds: float) -> None:
        self.clock.boot_s += seconds

    @rule(ns=st.integers(-(10**17), 10**17))
    def wall_clock_jumps(self, ns: int) -> None:
        self.clock.wall_ns += ns

    # Recovery.

    @rule(
        name=JOBS,
        fuse=FUSES,
        fault=st.sampled_from(["none", "none", "hiccup", "both ways fail"]),
    )
    def recovers(self, name: str, fuse: int | None, fault: str) -> None:
        cluster = self.clusters[name]
        cluster.broken, cluster.hiccups = fault == "both ways fail", int(fault == "hiccup")
        if cluster.broken:
            self.broken_once.update(
                known.operation for known in self.job(name).operations.values() if known.open
            )
        self.fuse.left = fuse
        try:
            recover(self.mortal, name, cluster)  # type: ignore[arg-type]
        except Crash:
            return
        finally:
            self.fuse.left = None
            cluster.broken, cluster.hiccups = False, 0
        self.is_recovered(name)

    def is_recovered(self, name: str) -> None:
        state = self.ledger.state()
        job, cluster = state.job(name), self.clusters[name]
        assert {known.status for known in job.operations.values()} <= ENDED
        poisoned = {o for o, known in job.operations.items() if known.status == "poisoned"}
        assert poisoned <= self.broken_once
        declared = {device.name for device in job.opened.devices} if job.opened else set()
        if name in self.standing and declared.isdisjoint(state.quarantine):
            assert cluster.topology.matches(job.topology)

    @precondition(lambda self: self.ledger.state().quarantine)
    @rule(name=JOBS)
    def operator_acts(self, name: str) -> None:
        """An operator resets poisoned devices by hand and lifts their quarantine."""
        for operation in sorted(set(self.ledger.state().quarantine.values())):
            if operation in self.job(name).operations:
                self.operator.lift_quarantine(name, operation, by="operator", reason="reset")
                self.clusters[name].topology = self.job(name).topology
                self.clusters[name].working = True

    # What holds, always.

    @invariant()
    def events_are_lawful(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for stored in self.ledger.read(self.seen):
            self.seen = stored.position
            self.follow_lease(stored)
            self.follow_step(stored)
            self.stepwise.apply(stored)

    def follow_lease(self, stored: StoredEvent) -> None:
        devices = stored.body.get("devices", [])
        if stored.type == "LeaseGranted":
            for device in devices:
                assert self.owners.get(device, stored.job) == stored.job, "two owners"
                self.owners[device] = stored.job
        elif stored.type in ("LeaseReleased", "LeaseExpired"):
            for device in devices:
                assert self.owners.pop(device) == stored.job

    def follow_step(self, stored: StoredEvent) -> None:
        if stored.type not in FOLLOWS or stored.operation is None:
            return
        before = self.steps.get(stored.operation)
        if before is None:
            assert stored.type == "ReallocationProposed"
        else:
            assert before in FOLLOWS[stored.type], f"{stored.type} after {before}"
        self.steps[stored.operation] = stored.type
        if stored.type == "ReallocationGranted":
            for device in stored.body["devices"]:
                assert self.owners.get(device) == stored.job

    @invariant()
    def fold_is_one(self) -> None:
        if not hasattr(self, "ledger"):
            return
        state = self.ledger.state()
        assert state == self.stepwise

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        try:
            for name in DEVICES:
                recover(self.ledger, name, self.clusters[name])
                self.is_recovered(name)
            self.events_are_lawful()
            assert fold(self.ledger.read()) == self.ledger.state() == self.stepwise
        finally:
            for cluster in self.clusters.values():
                for checker in cluster.checkers.values():
                    checker.close()
            self.ledger.close()
            self.folder.cleanup()


COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


class TestGateMachine(GateMachine.TestCase):  # type: ignore[name-defined,misc]
    """A short run, with the same examples each time."""

    settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, **COMMON)


class PostgresGateMachine(GateMachine):
    store = "postgresql"


class TestPostgresGateMachine(PostgresGateMachine.TestCase):  # type: ignore[name-defined,misc]
    """The same on the other store; fewer examples, since the decisions are the same code."""

    settings = settings(max_examples=15, stateful_step_count=40, derandomize=True, **COMMON)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestGateMachineLong(GateMachine.TestCase):  # type: ignore[name-defined,misc]
    """A long run with new examples each time; a failure prints the blob that repeats it."""

    settings = settings(max_examples=400, stateful_step_count=60, **COMMON)
