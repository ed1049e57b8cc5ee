"""A Ray cluster whose rollout processes run vLLM, and small jobs on it, with a fault or without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.faulty import FACTORY, FILE
from tests.one_cluster import OneCluster
from tests.scheduler.conftest import OnRay

SLOTS = 2
JOB_LIMIT_S = 240.0
TOLERANCE = 2e-5


class OnVllm(OnRay):
    """A ledger of its own and small jobs whose engine is vLLM."""

    def begin(self, job: str, fault: str = "", **values: Any) -> Any:
        """Start a job: static and of two iterations, where ``values`` do not say otherwise."""
        from shiftbook.jobs.runner import RunningJob

        config = self.place.config(job, iterations=2, groups=4, schedule="static", engine="vllm")
        base = self.place.folder / "base" / job
        base.mkdir(parents=True)
        policy = shutil.copy(config.base_policy, base)
        if fault:
            (base / FILE).write_text(fault, encoding="utf-8")
        settled = {"base_policy": str(policy), "tolerance": TOLERANCE} | values
        running = RunningJob(config.model_copy(update=settled), self.devices)
        self.running.append(running)
        return running

    def finish(self, job: str, fault: str = "", **values: Any) -> None:
        """Run a job to its end."""
        running = self.begin(job, fault, **values)
        running.wait(JOB_LIMIT_S)
        running.end()


@pytest.fixture(scope="session")
def vllm_cluster(
    one_cluster: OneCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A head of its own with two slots; its rollout processes may have a fault."""
    from shiftbook.jobs import config
    from shiftbook.jobs.runner import Cluster, Place

    one_cluster.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.FACTORIES, "rollout", FACTORY)
        with Cluster(Place(tmp_path_factory.mktemp("vllm")), SLOTS) as cluster:
            cluster.warm()
            yield cluster


@pytest.fixture
def on_vllm(vllm_cluster: Any, tmp_path: Path) -> Iterator[OnVllm]:
    """A fresh ledger on the cluster."""
    jobs = OnVllm(tmp_path, vllm_cluster)
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def engine_process(vllm_cluster: Any) -> Iterator[Any]:
    """One process with vLLM in it, for all tests of the engine itself."""
    import ray

    from tests.engines.engine_actor import EngineActor

    actor = ray.remote(EngineActor).options(num_cpus=0).remote()
    yield lambda method, *arguments: ray.get(getattr(actor, method).remote(*arguments))
    ray.kill(actor)


Call = Callable[..., Any]
