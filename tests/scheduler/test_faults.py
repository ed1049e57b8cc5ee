"""Goal: no process whose death is possible takes samples, state or the policy with it.

Method: real processes are killed with SIGKILL while a job runs on Ray: the controller at each
boundary of a reallocation, workers with requests in flight, a tool worker, a trainer rank in the
middle of its move, the training loop, and everything at once. Afterwards the job must finish, the
verdict must be clean, and samples, log-probabilities, rewards and policy must equal those of a run
that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import Rejected
from shiftbook.ledger.events.reallocation import Interval
from shiftbook.ledger.file_lock import FileLock
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.proposal import Proposal
from shiftbook.ledger.topology import Topology
from tests.one_cluster import OneCluster
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SIZE = {"iterations": 3, "groups": 8}
LIMIT_S = 150.0


def propose(on_ray: Any, job: str, after: Topology, strategy: Any = None) -> str:
    """An operator's move, as ``shiftbook propose`` makes it."""
    from shiftbook.scheduler.moves import strategy_of

    state = on_ray.ledger.state().job(job)
    proposal = Proposal(
        before=state.topology,
        after=after,
        strategy=strategy or strategy_of(state.topology, after),
        sees=state.plan.view(),
        candidates=(),
        bottleneck_before="rollout",
        bottleneck_after="trainer",
        predicted_throughput=0.0,
        predicted_gain_s=0.0,
        gain_interval=Interval(low=0.0, high=0.0),
        predicted_cost_s=0.0,
        horizon_s=0.0,
        model_version=0,
        proposer="operator",
    )
    return Gate(on_ray.ledger, by="operator").propose(job, proposal)


def propose_until(on_ray: Any, job: str, after: Topology, struck: Any, strategy: Any = None) -> str:
    """Propose a move again as long as it is abandoned before the fault could strike, which a
    weight sync or an update that goes first may do; the operation that was struck."""
    while True:
        try:
            operation = propose(on_ray, job, after, strategy)
        except Rejected:
            # The planner's own move came first, or a sync is open: asked again when the ledger
            # has moved on, since each refusal is an event of its own.
            size = on_ray.ledger.head().size
            until(lambda size=size: struck() or on_ray.ledger.head().size > size, 60)
            if struck():
                return ""
            continue

        def seen(name: str = operation) -> Any:
            return struck() or not on_ray.ledger.state().job(job).operations[name].open

        until(seen, 60)
        if struck():
            return operation
        status = on_ray.ledger.state().job(job).operations[operation].status
        assert status in {"abandoned", "committed"}, status


@pytest.fixture(scope="module")
def undisturbed(
    one_cluster: OneCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Any]:
    """The record of a run that nobody disturbed."""
    from tests.scheduler.conftest import OnRay

    jobs = OnRay(tmp_path_factory.mktemp("undisturbed"), one_cluster.shared())
    jobs.run("calm", schedule="static", **SIZE)
    record = jobs.record("calm")
    jobs.close()
    return record


def in_training(on_ray: Any, job: str) -> Any:
    """Wait until a job has turns in flight; its loop's telemetry."""
    import ray

    running = on_ray.running[-1]

    def training() -> Any:
        status = running.status()
        if status is None or status["phase"] != "training":
            return None
        telemetry = ray.get(running.loop.telemetry.remote(), timeout=10)
        progress = telemetry["progress"]
        return telemetry if progress and progress["turns_done"] > 10 else None

    return until(training, 90)


def finish(on_ray: Any, job: str, undisturbed: dict[int, Any]) -> None:
    """The job ends, the verdict is clean, and nothing differs from the run without faults."""
    running = on_ray.running[-1]
    running.wait(LIMIT_S)
    running.end()
    assert on_ray.record(job) == undisturbed
    verdict = on_ray.verdict(job)
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
    for move in on_ray.ledger.state().job(job).operations.values():
        assert not move.open, (move.operation, move.status)
        assert move.status != "poisoned", move.operation


@pytest.mark.parametrize(
    "boundary",
    [
        "granted",
        "quiesced",
        pytest.param("transferred", marks=pytest.mark.first),
        "verified",
        "committed",
    ],
)
def test_killed_controller(on_ray: Any, undisturbed: dict[int, Any], boundary: str) -> None:
    """The loop goes on, and what starts again ends the move with the same processes."""
    import ray

    job = f"at-{boundary}"
    running = on_ray.start(job, schedule="dynamic", proposer="operator", **SIZE)
    ray.get(running.controller.pause.remote(), timeout=30)
    telemetry = in_training(on_ray, job)
    before = {r: s["pid"] for r, s in on_ray.statuses().items()}
    first = ray.get(running.controller.status.remote(), timeout=30)["pid"]
    ray.get(running.controller.die_at.remote(boundary), timeout=30)
    first_slot, last_slot = on_ray.devices[:2]
    after = Topology.of(
        {
            "rollout": [first_slot],
            "tool": [],
            "inference": [first_slot, last_slot],
            "trainer": [first_slot, last_slot],
        }
    )
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(running.controller.resume.remote(), timeout=30)

    def controller_is_new() -> bool:
        try:
            return bool(ray.get(running.controller.status.remote(), timeout=10)["pid"] != first)
        except ray.exceptions.RayError:
            return True

    operation = propose_until(on_ray, job, after, controller_is_new)
    until(lambda: not on_ray.ledger.state().job(job).operations[operation].open, 60)
    status = on_ray.ledger.state().job(job).operations[operation].status
    expected = {"verified": {"committed"}, "committed": {"committed"}}
    assert status in expected.get(boundary, {"rolled_back", "abandoned"}), status
    same = {r: s["pid"] for r, s in on_ray.statuses().items()}
    assert same == before, "recovery must find the same processes"
    assert telemetry["progress"]["turns_done"] > 0
    finish(on_ray, job, undisturbed)


@pytest.mark.parametrize("component", ["rollout", "tool", "trainer", "inference"])
def test_killed_worker(on_ray: Any, undisturbed: dict[int, Any], component: str) -> None:
    """A worker with work in hand dies; what it owed is done by others or by its successor."""
    job = f"without-{component}"
    on_ray.start(job, schedule="static", **SIZE)
    in_training(on_ray, job)

    def busy() -> Any:
        found = [
            status
            for status in on_ray.statuses().values()
            if status["component"] == component
            and status["state"] == "active"
            and (component == "tool" or status["units"] > 0)
        ]
        return found[0] if found else None

    victim = until(busy, 60)
    os.kill(victim["pid"], signal.SIGKILL)
    finish(on_ray, job, undisturbed)
    lost = list(on_ray.ledger.read(job=job, types={"ReplicaLost"}))
    assert [stored.body["replica"] for stored in lost] == [victim["replica"]]
    assert lost[0].body["incarnation"] == victim["incarnation"]


def test_killed_trainer_rank_in_the_middle_of_its_move(
    on_ray: Any, undisturbed: dict[int, Any]
) -> None:
    """The move is rolled back, and the iteration is computed again from the last bundle."""
    import ray

    job = "mid-reshard"
    running = on_ray.start(job, schedule="dynamic", proposer="operator", **SIZE)
    ray.get(running.controller.pause.remote(), timeout=30)
    in_training(on_ray, job)
    first_slot, last_slot = on_ray.devices[:2]
    victim = on_ray.statuses()[f"trainer-{first_slot.replace('/', '.')}"]
    ray.get(running.controller.kill_at.remote("quiesced", victim["pid"]), timeout=30)
    after = Topology.of(
        {
            "rollout": [first_slot, last_slot],
            "tool": [],
            "inference": [first_slot, last_slot],
            "trainer": [first_slot, last_slot],
        }
    )
    ray.get(running.controller.resume.remote(), timeout=30)

    def struck() -> bool:
        status = on_ray.statuses().get(victim["replica"])
        return status is None or status["pid"] != victim["pid"]

    operation = propose_until(on_ray, job, after, struck)
    until(lambda: not on_ray.ledger.state().job(job).operations[operation].open, 90)
    assert on_ray.ledger.state().job(job).operations[operation].status == "rolled_back"
    finish(on_ray, job, undisturbed)


def kill_an_engine_in_a_move(on_ray: Any, job: str, boundary: str) -> tuple[str, str]:
    """Kill the controller as a move passes a boundary, and the engine that leaves (``quiesced``) or
    arrives (``verified``); the operation, and the replica that recovery has to bring up again."""
    import ray

    running = on_ray.running[-1]
    first_slot, last_slot = on_ray.devices[:2]
    both = {"tool": [], "inference": [last_slot], "trainer": [last_slot]}
    narrow = Topology.of(both | {"rollout": [first_slot]})
    wide = Topology.of(both | {"rollout": [first_slot, last_slot]})
    if boundary == "verified":
        now = on_ray.ledger.state
        propose_until(on_ray, job, narrow, lambda: now().job(job).topology.matches(narrow))
    victim = on_ray.statuses()[f"rollout-{last_slot.replace('/', '.')}"]
    controller = ray.get(running.controller.status.remote(), timeout=30)["pid"]
    ray.get(running.controller.die_at.remote(boundary), timeout=30)

    def struck() -> bool:
        return not Path(f"/proc/{controller}").exists()

    operation = propose_until(on_ray, job, wide if boundary == "verified" else narrow, struck)
    # The next controller takes seconds to start, so it finds the engine gone.
    os.kill(victim["pid"], signal.SIGKILL)
    assert on_ray.ledger.state().job(job).operations[operation].status == boundary
    until(lambda: not on_ray.ledger.state().job(job).operations[operation].open, 90)
    return operation, victim["replica"]


@pytest.mark.parametrize(
    ("boundary", "ended"), [("quiesced", "rolled_back"), ("verified", "committed")]
)
def test_killed_controller_and_engine_in_the_middle_of_a_move(
    on_ray: Any, undisturbed: dict[int, Any], boundary: str, ended: str
) -> None:
    """Recovery brings it up again, and its probe stands in the ledger beside its start."""
    job = f"engine-at-{boundary}"
    on_ray.start(job, schedule="dynamic", proposer="operator", **SIZE)
    in_training(on_ray, job)
    operation, replica = kill_an_engine_in_a_move(on_ray, job, boundary)
    assert on_ray.ledger.state().job(job).operations[operation].status == ended
    finish(on_ray, job, undisturbed)
    probes = list(on_ray.ledger.read(job=job, operation=operation, types={"LogProbsReplayed"}))
    assert [stored.body["replica"] for stored in probes] == [replica]
    said = probes[0].body
    assert (said["what"], said["version"] >= 0) == ("behaviour", True)
    assert 0 < said["mean_gap"] < 2e-5, "another code's sums, so equal but for the last bits"
    taken = next(on_ray.ledger.read(job=job, operation=operation, types={"OperationTakenOver"}))
    end = list(on_ray.ledger.read(job=job, operation=operation))[-1]
    assert taken.position < probes[0].position < end.position


def test_a_proposal_waits_for_the_controller(on_ray: Any) -> None:
    """``shiftbook propose`` while no controller runs: the one that starts decides it. Only what
    goes before any move (a sync, an update that is under way) may abandon it, and says so."""
    import ray
    from click.testing import CliRunner

    from shiftbook.jobs.runner import RunningJob
    from shiftbook.ledger.cli import main

    job = "asked-before"
    # Iterations that are long beside the start of a controller: few syncs come in between.
    running = on_ray.start(job, schedule="dynamic", proposer="operator", iterations=6, groups=24)
    in_training(on_ray, job)
    first_slot = on_ray.devices[0]
    asked = ["propose", "--ledger", on_ray.place.ledger_url, "--job", job, "--strategy", "pause"]
    ended: list[tuple[str, str]] = []

    def known(operation: str) -> Any:
        return on_ray.ledger.state().job(job).operations[operation]

    while not ended or ended[-1][0] == "abandoned":
        ray.kill(running.controller, no_restart=True)
        # No sync is open right after one ended, so the gate takes the proposal.
        done = on_ray.ledger.state().job(job).iteration
        until(lambda done=done: on_ray.ledger.state().job(job).iteration > done, 90)
        made = CliRunner().invoke(
            main, [*asked, "--after", f"rollout={first_slot}", "--format", "json"]
        )
        told = json.loads(made.stdout or "{}")
        assert told.get("status") == "proposed", made.output
        running = RunningJob(running.config, on_ray.devices[:2])
        on_ray.running.append(running)
        until(lambda name=told["operation"]: not known(name).open, 90)
        last = list(on_ray.ledger.read(job=job, operation=told["operation"]))[-1]
        ended.append((known(told["operation"]).status, last.body.get("reason", "")))
    assert ended[-1][0] == "committed", ended
    assert [why for _, why in ended if "dead" in why] == []


def test_reboot(on_ray: Any, undisturbed: dict[int, Any]) -> None:
    """No native path: the trainer's processes end, and new ones load the last bundle."""
    import ray

    job = "rebooted"
    running = on_ray.start(job, schedule="dynamic", proposer="operator", **SIZE)
    ray.get(running.controller.pause.remote(), timeout=30)
    in_training(on_ray, job)
    before = {r: s["pid"] for r, s in on_ray.statuses().items()}
    first_slot, last_slot = on_ray.devices[:2]
    after = Topology.of(
        {
            "rollout": [first_slot, last_slot],
            "tool": [],
            "inference": [first_slot, last_slot],
            "trainer": [first_slot, last_slot],
        }
    )

    def committed() -> Any:
        moves = on_ray.ledger.state().job(job).operations.values()
        return [m for m in moves if m.strategy == "reboot" and m.status == "committed"]

    ray.get(running.controller.resume.remote(), timeout=30)
    propose_until(on_ray, job, after, committed, strategy="reboot")
    pids = {r: s["pid"] for r, s in on_ray.statuses().items()}
    for slot in (first_slot, last_slot):
        name = f"trainer-{slot.replace('/', '.')}"
        assert pids[name] != before[name], name
    finish(on_ray, job, undisturbed)


def test_killed_loop(on_ray: Any, undisturbed: dict[int, Any]) -> None:
    """A new attempt goes on from the last bundle."""
    job = "without-loop"
    running = on_ray.start(job, schedule="dynamic", **SIZE)
    in_training(on_ray, job)
    pid = until(lambda: (running.status() or {}).get("pid"), 30)
    until(lambda: on_ray.ledger.state().job(job).iteration >= 1, 90)
    os.kill(pid, signal.SIGKILL)
    finish(on_ray, job, undisturbed)
    attempts = on_ray.ledger.state().job(job).attempts
    assert [a.parent for a in attempts.values()] == [None, f"{job}-a0"]


@pytest.mark.parametrize("boundary", ["quiesced", "verified"])
def test_killed_loop_in_the_middle_of_a_move(
    on_ray: Any, undisturbed: dict[int, Any], boundary: str
) -> None:
    """The controller, which lives on, poisons nothing: the next attempt ends the move."""
    import ray

    job = f"without-loop-{boundary}"
    running = on_ray.start(job, schedule="dynamic", proposer="operator", **SIZE)
    ray.get(running.controller.pause.remote(), timeout=30)
    in_training(on_ray, job)
    loop_pid = until(lambda: (running.status() or {}).get("pid"), 30)
    ray.get(running.controller.kill_at.remote(boundary, loop_pid), timeout=30)
    first_slot, last_slot = on_ray.devices[:2]
    after = Topology.of(
        {
            "rollout": [first_slot],
            "tool": [],
            "inference": [first_slot, last_slot],
            "trainer": [first_slot, last_slot],
        }
    )
    ray.get(running.controller.resume.remote(), timeout=30)

    def struck() -> bool:
        return not Path(f"/proc/{loop_pid}").exists()

    operation = propose_until(on_ray, job, after, struck)
    until(lambda: not on_ray.ledger.state().job(job).operations[operation].open, 90)
    ended = on_ray.ledger.state().job(job).operations[operation].status
    assert ended == ("committed" if boundary == "verified" else "rolled_back")
    finish(on_ray, job, undisturbed)
    attempts = on_ray.ledger.state().job(job).attempts
    assert [a.parent for a in attempts.values()] == [None, f"{job}-a0"]


def test_ledger_out_of_reach(on_ray: Any, undisturbed: dict[int, Any]) -> None:
    """Training and weight syncs go on for 20 s; their records stand in the ledger afterwards."""
    import subprocess
    import sys

    job = "in-the-dark"
    on_ray.start(job, schedule="static", iterations=SIZE["iterations"], groups=SIZE["groups"])
    in_training(on_ray, job)
    lock = Path(f"{on_ray.place.ledger_file}.lock")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time\n"
            "held = open(sys.argv[1], 'a')\n"
            "fcntl.flock(held, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\n"
            "time.sleep(20)\n",
            str(lock),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    began_s = time.monotonic()
    running = on_ray.running[-1]
    done_before = len((running.status() or {})["iterations"])
    progressed = until(lambda: len((running.status() or {})["iterations"]) > done_before, 60)
    assert progressed
    in_the_dark = time.monotonic() - began_s < 20.0
    holder.wait()
    assert in_the_dark, "an iteration, its sync included, must end while the ledger is away"
    finish(on_ray, job, undisturbed)
    types = [stored.type for stored in on_ray.ledger.read(job=job)]
    assert "LedgerUnreachable" in types
    assert "LedgerRestored" in types


@pytest.mark.first
def test_no_move_begins_while_the_writer_stands_still(
    on_ray: Any, undisturbed: dict[int, Any]
) -> None:
    """The controller reaches the ledger, the loop spools its records: the gate knows nothing of the
    syncs that they tell, so the loop lets no move begin, and no sync begins within one."""
    import ray

    from shiftbook.scheduler.writer import start_writer

    job = "writer-away"
    on_ray.start(job, schedule="dynamic", proposer="operator", **SIZE)
    in_training(on_ray, job)
    first_slot, last_slot = on_ray.devices[:2]
    both = {"tool": [], "inference": [first_slot, last_slot], "trainer": [first_slot, last_slot]}
    after = Topology.of(both | {"rollout": [first_slot]})
    spool = Path(f"{on_ray.place.ledger_file}.spool")

    def refused() -> bool:
        abandoned = on_ray.ledger.read(job=job, types={"ReallocationAbandoned"})
        return any("wait for the ledger" in stored.body["reason"] for stored in abandoned)

    pid = ray.get(start_writer(on_ray.place.ledger_url).pid.remote(), timeout=30)
    lock = FileLock(Path(f"{on_ray.place.ledger_file}.lock"), 30)
    lock.acquire()  # not while it holds the lock, which would keep the ledger from everybody
    os.kill(pid, signal.SIGSTOP)
    lock.release()
    try:
        until(lambda: any(file.stat().st_size for file in spool.glob("*.spool")), 90)
        propose_until(on_ray, job, after, refused)
    finally:
        os.kill(pid, signal.SIGCONT)
    finish(on_ray, job, undisturbed)
    outages = [
        (stored.body["since_ns"], stored.body["since_ns"] + stored.body["outage_s"] * 1e9)
        for stored in on_ray.ledger.read(job=job, types={"LedgerRestored"})
    ]
    quiesced = on_ray.ledger.read(job=job, types={"ReallocationQuiesced"})
    begun_ns = [stored.occurred_ns for stored in quiesced]
    assert outages
    assert not [at for at in begun_ns if any(since <= at <= back for since, back in outages)]


def test_everything_killed_at_once(undisturbed: dict[int, Any], tmp_path: Path) -> None:
    """Head, workers, loop and controller die together; the same command takes the job up again."""
    from shiftbook.jobs.runner import Place
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.verify.verdict import verify
    from tests.scheduler.killing import run_and_kill_everything, run_to_the_end

    place = Place(tmp_path)
    run_and_kill_everything(place, SIZE)
    with Ledger.open(place.ledger_url) as ledger:
        state = ledger.state().job("phoenix")
        assert state.status == "open"
        done = state.iteration
    assert done >= 1
    run_to_the_end(place, SIZE)
    with Ledger.open(place.ledger_url) as ledger:
        state = ledger.state().job("phoenix")
        assert state.status == "closed"
        prints = {
            stored.body["iteration"]: stored.body["policy_fingerprint"]
            for stored in ledger.read(job="phoenix", types={"IterationCompleted"})
        }
    assert prints == {number: entry[2] for number, entry in undisturbed.items()}
    verdict = verify(place.ledger_url)
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
