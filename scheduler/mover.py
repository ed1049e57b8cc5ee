"""What recovery needs of a job on Ray: see where its processes stand, undo a move, or finish it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiftbook.ledger.errors import InvalidInput, RecoverLater
from shiftbook.ledger.events.job import JobOpened
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.cluster import NAMESPACE, ClusterFile, cluster_path, connect, import_ray
from shiftbook.scheduler.errors import LoopLost
from shiftbook.scheduler.fleet import Fleet, FleetSpec, discover_devices, topology_of
from shiftbook.scheduler.workers.host import load_path

CALL_LIMIT_S = 60.0


class LoopClient:
    """The training loop of a job, as the controller and recovery see it."""

    def __init__(self, job: str) -> None:
        self._name = f"loop:{job}"
        self._handle: Any = None

    def call(self, method: str, *arguments: Any, limit_s: float = CALL_LIMIT_S) -> Any:
        """Call the loop; LoopLost when it is gone or silent."""
        ray = import_ray()
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=limit_s)
        except ValueError as error:
            raise LoopLost(f"no training loop {self._name} in this cluster") from error
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            self._handle = None
            raise LoopLost(f"the training loop {self._name} does not answer") from error

    def telemetry(self, seen: int = -1, wait_s: float = 0.0) -> dict[str, Any]:
        """Counts and progress; with ``wait_s`` held open while the iteration is ``seen``."""
        return dict(self.call("telemetry", seen, wait_s, limit_s=wait_s + 5.0))

    def payload(self, component: str) -> dict[str, Any]:
        """What a replica of a component is restored from."""
        return dict(self.call("payload", component))

    def begin_move(self, operation: str, components: list[str]) -> str | None:
        """Keep updates and repairs away while a move runs; why that cannot be, or None."""
        why = self.call("begin_move", operation, components)
        return None if why is None else str(why)

    def end_move(
        self, operation: str, topology: Topology, stalls: Mapping[str, float], *, committed: bool
    ) -> None:
        """Say where the job stands now."""
        self.call("end_move", operation, topology.model_dump(), dict(stalls), committed)

    def await_workers(self) -> None:
        """Wait until every process is there again and serves the job."""
        self.call("await_workers", limit_s=self._patience_s())

    def train_again(self) -> None:
        """Let every group of the iteration go to the trainer again."""
        self.call("train_again")

    def repair(
        self, topology: Topology, move: Grant | None = None, *, forward: bool = False
    ) -> None:
        """Bring up what is missing: under the grant of the move that is being ended, where there
        is one, and the attempt's standing grant.

        Raises RecoverLater where the loop is gone or starts anew: each start of a loop ends the
        moves that are open, with every process brought up from the last bundle.
        """
        try:
            limit_s = self._patience_s()
            self.call("repair", topology.model_dump(), move, forward, limit_s=limit_s)
        except LoopLost as error:
            raise RecoverLater(f"{error}; its next start ends the move, start the job") from error

    def _patience_s(self) -> float:
        """How long the loop may take to bring up what died: an engine takes its time to start. A
        loop that died meanwhile is noticed at once."""
        return CALL_LIMIT_S + float(self.call("start_limit_s"))


class RayMover:
    """Undoes or finishes a move by asking the workers, and the loop for those that died."""

    def __init__(
        self, fleet: Fleet, loop: LoopClient, job: str, components: tuple[str, ...]
    ) -> None:
        self._fleet, self._loop = fleet, loop
        self._job, self._components = job, components

    def inspect(self) -> Topology:
        """Topology of the replicas that work."""
        return topology_of(self._fleet.statuses(), self._components, self._job)

    def restore(self, topology: Topology, grant: Grant) -> None:
        """Everything that was stopped or prepared for the move goes on as before it."""
        touched = [
            replica
            for replica, status in self._fleet.statuses().items()
            if status is not None
            and status["job"] == self._job
            and (status["state"] == "quiesced" or (status["layout"] and status["state"] == "idle"))
        ]
        if touched:
            self._fleet.each(touched, "undo", grant)
        self._loop.repair(topology, grant)
        self._loop.end_move(grant.operation, topology, {}, committed=False)

    def finish(self, topology: Topology, grant: Grant) -> None:
        """What was prepared begins to work, and what has to leave leaves."""
        wanted = {replica.name for _, replica in topology.walk()}
        statuses = self._fleet.statuses()
        prepared = [r for r, s in statuses.items() if s is not None and s["prepared"]]
        leaving = [
            r
            for r, s in statuses.items()
            if s is not None and s["state"] == "quiesced" and r not in wanted
        ]
        if prepared:
            self._fleet.each(prepared, "resume", grant)
        if leaving:
            self._fleet.each(leaving, "drop", grant)
        self._loop.repair(topology, grant, forward=True)
        self._loop.end_move(grant.operation, topology, {}, committed=True)

    def close(self) -> None:
        """The connection is the process's; others may use it."""


def open_mover(ledger: Ledger, job: str) -> RayMover:
    """The mover of a job on Ray; found by recovery under the entry point ``ray``.

    Connects to the cluster that this machine's files of the ledger name. Raises InvalidInput for a
    job that was never opened, ClusterError where there is no cluster or it is gone.
    """
    connect(ClusterFile.load(cluster_path(ledger.url)))
    opened = ledger.state().job(job).opened
    if opened is None:
        raise InvalidInput(f"job {job!r} was never opened; `shiftbook jobs` lists the others")
    return RayMover(job_fleet(opened), LoopClient(job), job, opened.components)


def job_fleet(opened: JobOpened) -> Fleet:
    """Handles of a job's processes; the job's module says which there are, and how slow they are,
    by its configuration."""
    module = opened.job_path.partition(":")[0]
    spec: FleetSpec = load_path(f"{module}:fleet_spec")(discover_devices(), opened.config)
    return Fleet(spec)
