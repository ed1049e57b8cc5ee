"""One Ray cluster for all tests of the scheduler, and small jobs that run on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.ledger import Ledger
from tests.one_cluster import OneCluster
from tests.scheduler.waiting import until

JOB_LIMIT_S = 180.0


class OnRay:
    """A ledger of its own and small jobs on the shared cluster."""

    def __init__(self, folder: Path, cluster: Any, url: str | None = None) -> None:
        from shiftbook.jobs.runner import Place
        from shiftbook.scheduler.cluster import cluster_path

        self.place = Place(folder, url)
        self.cluster = cluster
        self.devices: tuple[str, ...] = cluster.devices
        self.ledger = Ledger.open(self.place.ledger_url)
        cluster.file.save(cluster_path(self.place.ledger_url))
        self.running: list[Any] = []

    def start(self, job: str, *, slots: int = 2, **values: Any) -> Any:
        """Start a job of 8 groups an iteration on the first slots."""
        from shiftbook.jobs.runner import RunningJob

        values = {"iterations": 2, "groups": 8} | values
        config = self.place.config(job, **values)
        running = RunningJob(config, self.devices[:slots])
        self.running.append(running)
        return running

    def run(self, job: str, **values: Any) -> dict[str, Any]:
        """Run a job to its end."""
        running = self.start(job, **values)
        status = running.wait(JOB_LIMIT_S)
        running.end()
        return dict(status)

    def record(self, job: str) -> dict[int, tuple[str, str, str]]:
        """By iteration: digest over tokens and log-probabilities, digest over rewards, policy."""
        found: dict[int, list[str]] = {}
        wanted = {"SamplesGenerated": "digest", "SamplesRewarded": "digest",
                  "IterationCompleted": "policy_fingerprint"}  # fmt: skip
        for stored in self.ledger.read(job=job, types=set(wanted)):
            entry = found.setdefault(stored.body["iteration"], ["", "", ""])
            entry[list(wanted).index(stored.type)] = stored.body[wanted[stored.type]]
        return {number: (a, b, c) for number, (a, b, c) in found.items()}

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Status of every worker process of the slots in use."""
        from shiftbook.jobs.config import fleet_spec
        from shiftbook.scheduler.fleet import Fleet

        found = Fleet(fleet_spec(self.devices)).statuses()
        return {replica: status for replica, status in found.items() if status is not None}

    def verdict(self, job: str | None = None) -> Any:
        """What the verifier says of the ledger."""
        from shiftbook.verify.verdict import verify

        return verify(self.place.ledger_url, job)

    def close(self) -> None:
        """End what a failed test left running."""
        import ray

        for running in self.running:
            for handle in (running.controller, running.loop):
                if handle is not None:
                    ray.kill(handle, no_restart=True)
        for replica, status in self.statuses().items():
            if status["state"] != "idle" or status["prepared"]:
                # Its job is gone: the process starts anew for the next test.
                os.kill(status["pid"], signal.SIGKILL)
                until(partial(self._replaced, replica, status["pid"]), 60)
        self.ledger.close()

    def _replaced(self, replica: str, pid: int) -> bool:
        status = self.statuses().get(replica)
        return status is not None and status["pid"] != pid


@pytest.fixture
def ray_cluster(one_cluster: OneCluster) -> Any:
    """A head of its own with 4 slots on this machine, and all worker processes warm."""
    return one_cluster.shared()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Remember that a test failed, so that its fixtures know."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def on_ray(
    request: pytest.FixtureRequest, one_cluster: OneCluster, tmp_path: Path
) -> Iterator[OnRay]:
    """A fresh ledger on the shared cluster; a test that failed ends the cluster."""
    jobs = OnRay(tmp_path, one_cluster.shared())
    yield jobs
    if request.node.stash.get(FAILED, False):
        jobs.ledger.close()
        one_cluster.close()
    else:
        jobs.close()
