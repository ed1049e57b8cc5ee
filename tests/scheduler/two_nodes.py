"""Runs a job over two raylets in a process of its own; optionally one raylet dies meanwhile."""

from __future__ import annotations

import ast
import os
import signal
import sys
from pathlib import Path

from shiftbook.jobs.config import fleet_spec
from shiftbook.jobs.runner import Place, RunningJob
from shiftbook.ledger.ledger import Ledger
from shiftbook.scheduler.cluster import (
    cluster_path,
    connect,
    processes,
    start_head,
    start_node,
    stop_head,
)
from shiftbook.scheduler.fleet import Fleet, discover_devices
from tests.scheduler.waiting import until


def main(folder: str, job: str, values: str, kills: str) -> None:
    """Start head ``n0`` and node ``n1`` with a slot each, run the job, and say where it moved."""
    place = Place(Path(folder))
    place.folder.mkdir(parents=True, exist_ok=True)
    Ledger.open(place.ledger_url).close()
    cluster = start_head(1, node="n0")
    cluster.save(cluster_path(place.ledger_url))
    try:
        before = set(processes(cluster))
        start_node(cluster, 1, node="n1")
        raylets = [p for p in set(processes(cluster)) - before if _is_raylet(p)]
        connect(cluster)
        devices = until(lambda: found if len(found := discover_devices()) == 2 else None)
        fleet = Fleet(fleet_spec(devices), start=True)
        fleet.each(fleet.hosts, "status", limit_s=120.0)
        running = RunningJob(place.config(job, **ast.literal_eval(values)), devices)
        if kills == "raylet":

            def one_iteration() -> bool:
                status = running.status()
                return status is not None and len(status["iterations"]) >= 1

            until(one_iteration, 150)
            for pid in raylets:
                os.kill(pid, signal.SIGKILL)
            start_node(cluster, 1, node="n1")
        running.wait(200)
        running.end()
    finally:
        stop_head(cluster)


def _is_raylet(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return command.endswith(b"/raylet")


if __name__ == "__main__":
    main(*sys.argv[1:])
