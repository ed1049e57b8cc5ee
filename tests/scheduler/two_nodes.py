"""Runs a job over two raylets in a process of its own; optionally one raylet dies meanwhile.

The cluster is made by ``ray.cluster_utils``, as somebody else's would be: the job is told its
address and asks the nodes for their slots.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from shiftbook.jobs.config import fleet_spec
from shiftbook.jobs.runner import Place, RunningJob
from shiftbook.ledger.ledger import Ledger
from shiftbook.scheduler import cluster as own
from shiftbook.scheduler.fleet import Fleet, discover_devices
from tests.scheduler.waiting import until


class TwoNodes:
    """Head ``n0`` and node ``n1``, with a slot each."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="sb-", dir="/tmp")
        token = own.token_file()
        # The raylets are children of this process and inherit what it says to them.
        os.environ.update(own.environment(token, folder))
        own.import_ray()
        from ray.cluster_utils import Cluster

        head = self._slot("n0") | {"include_dashboard": False, "temp_dir": f"{folder}/ray"}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._second = self._cluster.add_node(**self._slot("n1"))
        self.file = own.ClusterFile(self._cluster.address, str(token), folder, 1)

    @staticmethod
    def _slot(node: str) -> dict[str, Any]:
        return {
            "num_cpus": 10,
            "num_gpus": 0,
            "resources": {own.SLOT_RESOURCE: 1, f"{own.NODE_PREFIX}{node}": 1},
            "object_store_memory": own.OBJECT_STORE_BYTES,
        }

    def kill_second(self) -> None:
        """SIGKILL to the raylet of ``n1``; its workers may live on."""
        os.kill(self._second.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    def second_comes_back(self) -> None:
        """A new raylet with the slot of the one that died."""
        self._second = self._cluster.add_node(**self._slot("n1"))


def main(folder: str, job: str, values: str, kills: str) -> None:
    """Run the job, and say where it moved."""
    place = Place(Path(folder))
    place.folder.mkdir(parents=True, exist_ok=True)
    Ledger.open(place.ledger_url).close()
    nodes = TwoNodes()
    nodes.file.save(own.cluster_path(place.ledger_url))
    try:
        own.connect(nodes.file)
        devices = until(lambda: found if len(found := discover_devices()) == 2 else None)
        fleet = Fleet(fleet_spec(devices), start=True)
        fleet.each(fleet.hosts, "status", limit_s=120.0)
        running = RunningJob(place.config(job, **ast.literal_eval(values)), devices)
        if kills == "raylet":

            def one_iteration() -> bool:
                status = running.status()
                return status is not None and len(status["iterations"]) >= 1

            until(one_iteration, 150)
            nodes.kill_second()
            nodes.second_comes_back()
        running.wait(200)
        running.end()
    finally:
        own.stop_head(nodes.file)


if __name__ == "__main__":
    main(*sys.argv[1:])
