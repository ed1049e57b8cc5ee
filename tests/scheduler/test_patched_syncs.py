"""Goal: weight syncs by patch give the samples and the policies of whole weights, in fewer bytes.

Method: the same seed runs with whole weights and with patches on Ray, and with patches while an
engine is killed and comes back in between, and while devices move at random; samples, rewards and
policies of every iteration are compared, and what the ledger says of each delivery is read.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from shiftbook.ledger.events.sync import WeightSyncDelivered
from tests.scheduler.conftest import OnRay
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

MOVE_SEED = 20261
RATE = 3e-6
"""A small step, as in real jobs: few elements of the bfloat16 policy change."""
SIZE = {"slots": 2, "schedule": "static", "iterations": 4, "learning_rate": RATE}


def deliveries(on_ray: OnRay, job: str) -> list[WeightSyncDelivered]:
    parsed = [
        stored.parsed() for stored in on_ray.ledger.read(types={"WeightSyncDelivered"}, job=job)
    ]
    return [event for event in parsed if isinstance(event, WeightSyncDelivered)]


def encodings(on_ray: OnRay, job: str) -> list[tuple[int, str | None]]:
    return [(event.version, event.encoding) for event in deliveries(on_ray, job)]


def clean(on_ray: OnRay) -> None:
    verdict = on_ray.verdict()
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not


def killed_in_between(on_ray: OnRay, job: str, **values: Any) -> None:
    """Kill the engine once it serves version 2."""
    running = on_ray.start(job, **values)

    def serves() -> bool:
        (engine,) = on_ray.ledger.state().job(job).engines.values() or (None,)
        return engine is not None and (engine.version, engine.standing) == (2, "serving")

    until(serves, 120)
    (target,) = on_ray.ledger.state().job(job).engines
    os.kill(on_ray.ledger.state().job(job).replicas[target].pid, signal.SIGKILL)
    running.wait(180)
    running.end()


def test_patches_give_the_same_policies_in_fewer_bytes(on_ray: OnRay) -> None:
    on_ray.run("whole", **SIZE)
    on_ray.run("patches", sync_encoding="patch", **SIZE)
    on_ray.run("anchors", sync_encoding="patch", anchor_every=2, **SIZE)
    killed_in_between(on_ray, "killed", sync_encoding="patch", **SIZE)
    moved_about = SIZE | {"slots": 4, "schedule": "dynamic", "random_moves": MOVE_SEED}
    on_ray.run("moved", sync_encoding="patch", **moved_about)
    expected = on_ray.record("whole")
    assert all(all(entry) for entry in expected.values())
    assert len({policy for _, _, policy in expected.values()}) == 4, "the policy never changed"
    for job in ("patches", "anchors", "killed", "moved"):
        assert on_ray.record(job) == expected, job

    assert encodings(on_ray, "whole") == [(n, "whole") for n in range(5)]
    assert encodings(on_ray, "patches") == [(0, "whole"), *((n, "patch") for n in range(1, 5))]
    assert [how for _, how in encodings(on_ray, "anchors")] == [
        "whole", "patch", "whole", "patch", "whole",
    ]  # fmt: skip
    # The engine that was brought up anew took version 2 whole, and later ones as patches again.
    assert encodings(on_ray, "killed") == [
        (0, "whole"), (1, "patch"), (2, "patch"), (2, "whole"), (3, "patch"), (4, "patch"),
    ]  # fmt: skip
    assert "patch" in {how for _, how in encodings(on_ray, "moved")}
    moved = {
        job: sum(event.moved_bytes for event in deliveries(on_ray, job) if event.version)
        for job in ("whole", "patches")
    }
    print(f"bytes of 4 syncs: {moved}")
    assert moved["patches"] < 0.2 * moved["whole"]
    for event in deliveries(on_ray, "patches"):
        assert event.transport == "ray"
        assert (event.moved_bytes < event.full_bytes) == (event.encoding == "patch")
    clean(on_ray)
