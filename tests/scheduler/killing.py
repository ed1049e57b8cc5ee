"""Runs a job in a process of its own, with a cluster of its own, and kills all of it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from shiftbook.jobs.runner import Cluster, Place, RunningJob
from shiftbook.ledger.ledger import Ledger
from shiftbook.scheduler.cluster import ClusterFile, cluster_path, processes, stop_head
from tests.scheduler.waiting import until

JOB = "phoenix"


def run_and_kill_everything(place: Place, size: dict[str, Any]) -> None:
    """Start a job in a subprocess and, after its first iteration, SIGKILL every process at once."""
    child = _child(place, size)

    def one_iteration() -> bool:
        if not place.ledger_file.exists():
            return False
        with Ledger.open(place.ledger_url, read_only=True) as ledger:
            return ledger.state().job(JOB).iteration >= 1

    until(one_iteration, 150)
    cluster = ClusterFile.load(cluster_path(place.ledger_url))
    for pid in [child.pid, *processes(cluster)]:
        os.kill(pid, signal.SIGKILL)
    child.wait()
    stop_head(cluster)


def run_to_the_end(place: Place, size: dict[str, Any]) -> None:
    """Take the job up again in another subprocess, until it ends."""
    child = _child(place, size)
    assert child.wait(timeout=200) == 0


def _child(place: Place, size: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.scheduler.killing", str(place.folder), repr(size)],
        cwd=Path(__file__).parents[2],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
    )


if __name__ == "__main__":
    import ast

    here = Place(Path(sys.argv[1]))
    with Cluster(here, 2) as running_cluster:
        job = RunningJob(
            here.config(JOB, schedule="dynamic", **ast.literal_eval(sys.argv[2])),
            running_cluster.devices,
        )
        job.wait(150)
        job.end()
