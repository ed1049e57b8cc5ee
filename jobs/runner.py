"""Starts the reference job on a cluster, waits for it, and reports how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiftbook.jobs.config import JobConfig, base_policy, fleet_spec
from shiftbook.jobs.errors import JobError
from shiftbook.ledger.dialect import public_url
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.file_lock import FileLock
from shiftbook.ledger.ledger import Ledger
from shiftbook.scheduler.cluster import (
    NAMESPACE,
    ClusterFile,
    cluster_path,
    connect,
    import_ray,
    left_behind,
    start_head,
    stop_head,
)
from shiftbook.scheduler.errors import ClusterError
from shiftbook.scheduler.fleet import Fleet, discover_devices

POLL_S = 0.1
LOOP_THREADS = 64
CONTROLLER_LIMIT_S = 10.0
CLAIM_LIMIT_S = 5.0
"""How long a run waits for the end of one that is just stopping its cluster."""


@dataclass(frozen=True)
class Place:
    """Where a job writes: one ledger, its bundles beside it; ``url`` names a ledger elsewhere."""

    folder: Path
    url: str | None = None

    @property
    def ledger_file(self) -> Path:
        """The ledger's file."""
        return self.folder / "ledger.db"

    @property
    def ledger_url(self) -> str:
        """The ledger's URL."""
        return self.url or f"sqlite:///{self.ledger_file.resolve()}"

    def config(self, job: str, **values: Any) -> JobConfig:
        """A job of this place."""
        return JobConfig(
            job=job,
            bundles=str((self.folder / "bundles" / job).resolve()),
            base_policy=str(base_policy()),
            ledger_url=self.ledger_url,
            **values,
        )


class Cluster:
    """A Ray head of one's own with warm worker processes; stopped at the end of the block.

    One run at a time has a ledger's cluster: raises ClusterError while another process does. What
    a process left behind that could not stop its own (``kill -9``) is stopped first.
    """

    def __init__(self, place: Place, slots: int) -> None:
        self._place = place
        self._slots = slots
        self._lock: FileLock | None = None
        self.file: ClusterFile | None = None

    def __enter__(self) -> Cluster:
        Ledger.open(self._place.ledger_url).close()
        self._claim()
        try:
            left = left_behind(self._place.ledger_url)
            if left is not None:
                stop_head(left)
            self.file = start_head(self._slots)
            self.file.save(cluster_path(self._place.ledger_url))
            connect(self.file)
            self.devices = discover_devices()
        except BaseException:
            self.close()
            raise
        return self

    def _claim(self) -> None:
        lock = FileLock(cluster_path(self._place.ledger_url).with_suffix(".lock"), CLAIM_LIMIT_S)
        try:
            lock.acquire()
        except LedgerUnreachable as error:
            lock.close()
            raise ClusterError(
                f"expected no other run on {public_url(self._place.ledger_url)}, found one: {error}"
            ) from error
        self._lock = lock

    def warm(self) -> None:
        """Start every worker process and wait until it answers."""
        fleet = Fleet(fleet_spec(self.devices), start=True)
        fleet.each(fleet.hosts, "status", limit_s=120.0)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the head and all its processes."""
        if self.file is not None:
            stop_head(self.file)
            cluster_path(self._place.ledger_url).unlink(missing_ok=True)
            self.file = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class RunningJob:
    """A job whose loop and controller were started; they live on when this object does not."""

    def __init__(self, config: JobConfig, devices: tuple[str, ...]) -> None:
        ray = import_ray()
        from shiftbook.jobs.loop import TrainingLoop
        from shiftbook.scheduler.controller import Controller

        self.config = config
        self.loop = (
            ray.remote(TrainingLoop)
            .options(
                name=f"loop:{config.job}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_concurrency=LOOP_THREADS,
                num_cpus=0,
                max_restarts=5,
            )
            .remote(config.model_dump(mode="json"), devices)
        )
        self.controller: Any = None
        if config.schedule == "dynamic":
            self.controller = (
                ray.remote(Controller)
                .options(
                    name=f"controller:{config.job}",
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    max_concurrency=4,
                    num_cpus=0,
                    max_restarts=-1,
                )
                .remote(
                    config.job,
                    config.ledger_url,
                    config.lanes,
                    random_moves=config.random_moves,
                    proposer=config.proposer,
                )
            )

    def status(self) -> dict[str, Any] | None:
        """Status of the loop; None while its process is being replaced."""
        ray = import_ray()
        try:
            return dict(ray.get(self.loop.status.remote(), timeout=10))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None

    def wait(
        self, limit_s: float, seen: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Wait until the job ends; its last status. Raises JobError when it failed or is late."""
        deadline = time.monotonic() + limit_s
        status: dict[str, Any] | None = None
        while time.monotonic() < deadline:
            status = self.status() or status
            if status is not None:
                if seen is not None:
                    seen(status)
                if status["done"]:
                    break
            threading.Event().wait(POLL_S)
        if status is None or not status["done"]:
            waits_for = None if status is None else status["waits_for"]
            why = "" if waits_for is None else f" ({waits_for})"
            raise JobError(
                f"expected job {self.config.job} to end within {limit_s:.0f} s, it did not{why}; "
                f"`shiftbook log --job {self.config.job}` shows how far it came"
            )
        if status["error"]:
            raise JobError(f"job {self.config.job} failed: {status['error']}")
        return status

    def end(self) -> None:
        """End the loop and the controller; the workers stay warm for the next job."""
        ray = import_ray()
        deadline = time.monotonic() + CONTROLLER_LIMIT_S
        while self.controller is not None and time.monotonic() < deadline:
            # Its last act is to tell what the moves of the last iteration brought.
            if ray.get(self.controller.status.remote(), timeout=10)["finished"]:
                break
            threading.Event().wait(POLL_S)
        for handle in (self.controller, self.loop):
            if handle is not None:
                ray.kill(handle, no_restart=True)


__all__ = ["Cluster", "ClusterError", "Place", "RunningJob"]
