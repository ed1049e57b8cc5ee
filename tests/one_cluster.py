"""A process knows one Ray cluster at a time: that of all tests, or one of a module's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SLOTS = 4


class OneCluster:
    """The cluster that tests share; started when first asked for, and again after it had to end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cluster: Any = None

    def shared(self) -> Any:
        """A head of its own with 4 slots on this machine, and all worker processes warm."""
        if self._cluster is None:
            from shiftbook.jobs.runner import Cluster, Place

            cluster = Cluster(Place(self._folder), SLOTS)
            cluster.__enter__()
            self._cluster = cluster
            cluster.warm()
        return self._cluster

    def close(self) -> None:
        """End it: for a module that starts a cluster of its own, and after a test that failed."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()
