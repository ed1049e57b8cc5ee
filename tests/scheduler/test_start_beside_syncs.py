"""Goal: while an engine starts anew, the others take each version and the training goes on.

Method: a job with two engines on a cluster whose engines can be held as they start. One is killed
and its successor held; iterations must end and versions be taken meanwhile, with the dead engine
named as lost, and nothing of it may serve. Then it is let go: it takes the version of that moment
as a sync of its own, and works again. Or the job ends first, and must not wait for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.one_cluster import OneCluster
from tests.scheduler.conftest import OnRay
from tests.scheduler.slow_start import HOLDS
from tests.scheduler.test_faults import in_training
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SLOTS = 3
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def holds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose file lies here is not ready."""
    return tmp_path_factory.mktemp("holds")


@pytest.fixture(scope="module")
def cluster(
    one_cluster: OneCluster, holds: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from shiftbook.jobs import config
    from shiftbook.jobs.runner import Cluster, Place

    one_cluster.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOLDS, str(holds))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setitem(config.FACTORIES, "rollout", "tests.scheduler.slow_start:HeldRollout")
        with Cluster(Place(tmp_path_factory.mktemp("held")), SLOTS) as made:
            made.warm()
            yield made


@pytest.mark.parametrize("ends_first", [False, True])
def test_syncs_go_on_while_an_engine_starts(
    cluster: Any, holds: Path, tmp_path: Path, ends_first: bool
) -> None:
    on_ray = OnRay(tmp_path, cluster)
    job = "held"
    iterations = 4 if ends_first else 9
    running = on_ray.start(
        job, slots=SLOTS, schedule="static", rollout_slots=2, iterations=iterations, groups=4
    )
    in_training(on_ray, job)
    first = f"rollout-{on_ray.devices[0].replace('/', '.')}"
    hold = holds / f"{first}.hold"
    hold.touch()

    def known() -> Any:
        return on_ray.ledger.state().job(job)

    until(lambda: known().iteration >= 1, LIMIT_S)
    victim = on_ray.statuses()[first]
    os.kill(victim["pid"], signal.SIGKILL)
    until((holds / f"{first}.begun").exists, LIMIT_S)
    held_at = known().iteration
    until(lambda: known().iteration >= min(iterations, held_at + 2), LIMIT_S)
    ends = list(on_ray.ledger.read(job=job, types={"WeightSyncCommitted"}))
    outcomes = [{o["target"]: o["outcome"] for o in stored.body["outcomes"]} for stored in ends]
    assert outcomes[-1][first] == "lost"
    assert sorted(outcomes[-1].values()) == ["lost", "serving"]
    if ends_first:
        status = running.wait(LIMIT_S)
        running.end()
        hold.unlink()
    else:
        hold.unlink()

        def taken() -> bool:
            return bool(known().engines[first].standing == "serving")

        until(taken, LIMIT_S)
        status = running.wait(LIMIT_S)
        running.end()
        own = [
            stored.position
            for stored in on_ray.ledger.read(job=job, types={"WeightSyncStarted"})
            if stored.body["targets"] == [first]
        ]
        assert own, "it took its version as a sync of its own"
        used = [
            stored.position
            for stored in on_ray.ledger.read(job=job, types={"StateFirstUsed"})
            if stored.body["replica"] == first
            and stored.body["incarnation"] != victim["incarnation"]
        ]
        assert used
        assert min(used) > min(own)
    assert status["error"] is None
    verdict = on_ray.verdict(job)
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
    (holds / f"{first}.begun").unlink()
    on_ray.close()
