"""Goal: where a job runs, and how it moves, changes neither samples nor policy, to the bit.

Method: the same seed runs with 1, 2 and 4 rollout workers, with 1, 2 and 4 trainer processes, with
time-shared phases, and with lawful moves drawn at random, unfinished turns and half-done updates
included. The digests over tokens and log-probabilities, over rewards and over the policy of every
iteration are compared, and each ledger must be judged clean.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from shiftbook.ledger.events.reallocation import ReallocationQuiesced
from shiftbook.ledger.events.training import UpdateApplied
from shiftbook.ledger.topology import Topology
from tests.scheduler.conftest import OnRay
from tests.scheduler.test_faults import in_training, propose_until
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
MOVE_SEED = 20261


def test_every_schedule_gives_the_same_samples_and_the_same_policy(on_ray: OnRay) -> None:
    print(f"seed of the random moves: {MOVE_SEED}")
    size = {"iterations": 4}
    on_ray.run("one-one", slots=2, schedule="static", **size)
    on_ray.run("two-two", slots=4, schedule="static", rollout_slots=2, **size)
    on_ray.run("phases", slots=4, schedule="timeshared", **size)
    on_ray.run("random", slots=4, schedule="dynamic", random_moves=MOVE_SEED, **size)
    interrupt(on_ray, "interrupted", **size)
    jobs = ("one-one", "two-two", "phases", "random", "interrupted")
    records = {job: on_ray.record(job) for job in jobs}
    for job, record in records.items():
        assert record == records["one-one"], job
        assert all(all(entry) for entry in record.values()), job

    verdict = on_ray.verdict()
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not

    moves = on_ray.ledger.state().job("random").operations.values()
    print("moves:", [(move.strategy, move.status) for move in moves])
    assert {m.strategy for m in moves if m.status == "committed"} == {"pause", "reshard"}

    ranks = [
        event.virtual_ranks
        for stored in on_ray.ledger.read(job="phases", types={"UpdateApplied"})
        if isinstance(event := stored.parsed(), UpdateApplied)
    ]
    assert ranks
    for places in ranks:
        assert [place.virtual_rank for place in places] == [0, 1, 2, 3]
        assert len({place.pid for place in places}) == 4
        assert {place.device for place in places} == set(on_ray.devices)


def interrupt(on_ray: OnRay, job: str, **size: Any) -> None:
    """Run a job and take devices from engines whose lanes are all decoding, until a move has met
    an unfinished turn: whether one that is drawn at random does is left to chance."""
    import ray

    first, last = on_ray.devices[:2]
    both = {"tool": [], "inference": [first, last]}
    layouts = [
        Topology.of(both | {"rollout": [first], "trainer": [first, last]}),
        Topology.of(both | {"rollout": [first, last], "trainer": [first]}),
    ]
    running = on_ray.start(job, slots=2, schedule="dynamic", proposer="operator", **size)

    def decoding() -> bool:
        telemetry = ray.get(running.loop.telemetry.remote(), timeout=30)
        assert telemetry["phase"] != "ended", "no move met an unfinished turn"
        return any(figures.get("running", 0) > 1 for figures in telemetry["figures"].values())

    in_training(on_ray, job)
    while not met_unfinished_turns(on_ray, job):
        until(decoding, 60)
        before = on_ray.ledger.state().job(job).topology
        after = layouts[len(before.placement()["trainer"]) - 1]
        propose_until(on_ray, job, after, partial(moved_since, on_ray, job, before))
    running.wait(120)
    running.end()


def moved_since(on_ray: OnRay, job: str, before: Topology) -> bool:
    """True once the topology is another one."""
    return not on_ray.ledger.state().job(job).topology.matches(before)


def met_unfinished_turns(on_ray: OnRay, job: str) -> bool:
    """True once a move that was committed handed over turns with some of their tokens."""
    committed = {
        name
        for name, move in on_ray.ledger.state().job(job).operations.items()
        if move.status == "committed"
    }
    return any(
        handed.partial_tokens
        for stored in on_ray.ledger.read(job=job, types={"ReallocationQuiesced"})
        if stored.operation in committed
        if isinstance(event := stored.parsed(), ReallocationQuiesced)
        for handed in event.custody
    )


def test_a_warm_process_without_a_device_holds_nothing(on_ray: OnRay) -> None:
    on_ray.run("short", slots=2, schedule="static", iterations=1)
    for replica, status in on_ray.statuses().items():
        assert status["state"] == "idle", replica
        assert status["resident_bytes"] == 0, replica
    running = on_ray.start("live", slots=2, schedule="static", iterations=3)
    until(lambda: (running.status() or {}).get("phase") == "training")
    statuses = on_ray.statuses()
    placed = {replica.name for _, replica in on_ray.ledger.state().job("live").topology.walk()}
    for replica, status in statuses.items():
        if status["device"] is not None:
            assert (status["resident_bytes"] > 0) == (replica in placed), replica
    running.wait(120)
    running.end()


def test_many_callers_that_died_leave_a_worker_able_to_answer(on_ray: OnRay) -> None:
    """A loop watches every worker; attempts and jobs that ended must not use up its threads."""
    import ray

    from shiftbook.scheduler.fleet import HOST_THREADS
    from shiftbook.scheduler.workers.host import WATCH_S

    replica, status = next(iter(on_ray.statuses().items()))
    handle = ray.get_actor(f"host:{replica}", namespace="shiftbook")

    @ray.remote(num_cpus=0)
    def watch_and_die() -> None:
        handle.watch.remote()

    ray.get([watch_and_die.remote() for _ in range(2 * HOST_THREADS)], timeout=60)
    answer = ray.get(handle.status.remote(), timeout=4 * WATCH_S)
    assert answer["incarnation"] == status["incarnation"]
