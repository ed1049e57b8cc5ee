"""Goal: weight syncs that may lose something give one policy, whatever moves or dies meanwhile.

Method: the same seed runs with lossy patches on Ray: undisturbed, with an engine killed between
two versions, with the training loop or the trainer killed, which go on from a bundle, and with
devices that move at random. Samples, rewards and policies of every iteration are the same bits,
and all engines held one policy of each version. The verifier judges the ledger. The replay in one
process is held against itself in `tests/jobs/test_lossy_sync.py`.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from shiftbook.ledger.events.sync import WeightSyncDelivered, WeightSyncStarted
from tests.scheduler.conftest import OnRay
from tests.scheduler.test_patched_syncs import clean, deliveries, killed_in_between
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

BOUND = 1e-4
SIZE: dict[str, Any] = {
    "slots": 2,
    "schedule": "static",
    "iterations": 4,
    "groups": 4,
    "sync_encoding": "lossy",
    "max_error": BOUND,
}


def killed_at_version_2(on_ray: OnRay, job: str, what: str, **values: Any) -> None:
    """Kill the training loop or the trainer in the iteration that version 2 generates; the next
    life of either goes on from a bundle."""
    running = on_ray.start(job, **values)

    def victim() -> int | None:
        state = on_ray.ledger.state().job(job)
        if not on_ray.record(job).get(1, ("", "", ""))[2]:  # the last record of that iteration
            return None
        if what == "loop":
            return int(running.status()["pid"])
        return next(one.pid for one in state.replicas.values() if one.component == "trainer")

    os.kill(until(victim, 180), signal.SIGKILL)
    running.wait(240)
    running.end()
    attempts = len(on_ray.ledger.state().job(job).attempts)
    assert attempts == (2 if what == "loop" else 1)
    served = [s.body["parts"] for s in on_ray.ledger.read(types={"CheckpointRestored"}, job=job)]
    assert len(served) >= 2
    assert all("served" in parts for parts in served)


def starts(on_ray: OnRay, job: str) -> list[WeightSyncStarted]:
    parsed = [s.parsed() for s in on_ray.ledger.read(types={"WeightSyncStarted"}, job=job)]
    return [event for event in parsed if isinstance(event, WeightSyncStarted)]


def test_lossy_syncs_give_one_policy(on_ray: OnRay) -> None:
    on_ray.run("lossy", **SIZE)
    killed_in_between(on_ray, "killed", **SIZE)
    for what in ("loop", "trainer"):
        killed_at_version_2(on_ray, f"{what}-killed", what, **SIZE)
    moved_about = SIZE | {"slots": 4, "schedule": "dynamic", "random_moves": 20261}
    on_ray.run("moved", **moved_about)
    expected = on_ray.record("lossy")
    assert len({policy for _, _, policy in expected.values()}) == 4, "the policy never changed"
    jobs = ("lossy", "killed", "loop-killed", "trainer-killed", "moved")
    for job in jobs:
        assert on_ray.record(job) == expected, job

    roots: dict[int, set[str]] = {}
    for job in jobs:
        lost = {e.version: e.lossy for e in starts(on_ray, job) if e.lossy is not None}
        assert set(lost) == {1, 2, 3, 4}
        assert all(0 < e.largest_error <= e.max_error == BOUND for e in lost.values())
        for event in deliveries(on_ray, job):
            roots.setdefault(event.version, set()).add(event.root)
    assert all(len(held) == 1 for held in roots.values()), "engines held two policies"
    how = [(e.version, e.encoding) for e in deliveries(on_ray, "lossy")]
    assert how == [(0, "whole"), *((n, "patch") for n in range(1, 5))]
    # Who is brought up anew takes what the others hold, whole.
    assert (2, "whole") in [(e.version, e.encoding) for e in deliveries(on_ray, "killed")]
    patched: list[WeightSyncDelivered] = [e for e in deliveries(on_ray, "lossy") if e.version]
    assert all(e.moved_bytes < 0.25 * e.full_bytes for e in patched)
    clean(on_ray)
