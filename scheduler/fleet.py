"""The worker processes of a cluster: one for each component and slot it may stand on, kept warm.

A warm process without a device holds no weights, no KV and no optimizer state, so a move carries
all that it needs. Processes are detached and named after what they are for, so that whoever comes
later (a new controller, recovery, the next attempt) finds the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.cluster import NAMESPACE, NODE_PREFIX, SLOT_RESOURCE, import_ray
from shiftbook.scheduler.errors import WorkerLost, first_line
from shiftbook.scheduler.workers.host import HostSpec, WorkerHost

START_LIMIT_S = 90.0
STEP_LIMIT_S = 20.0
"""Longest wait for one step of a worker."""
HOST_THREADS = 12


@dataclass(frozen=True)
class FleetSpec:
    """Which processes a job may use: ``factories`` by component (``module:callable``), the devices
    that each component may stand on, and the components that take none (with their replicas)."""

    factories: dict[str, str]
    devices: dict[str, tuple[str, ...]]
    without_device: dict[str, int] = field(default_factory=dict)

    def hosts(self) -> list[HostSpec]:
        """One process for each place where a component may stand."""
        specs = [
            HostSpec(
                component,
                replica_name(component, device),
                device,
                device.split("/")[0],
                self.factories[component],
            )
            for component, devices in self.devices.items()
            for device in devices
        ]
        specs += [
            HostSpec(component, f"{component}-{index}", None, "", self.factories[component])
            for component, count in self.without_device.items()
            for index in range(count)
        ]
        return specs


def replica_name(component: str, device: str) -> str:
    """Name of the replica of a component on a device, as Topology.of names it."""
    return f"{component}-{device.replace('/', '.')}"


def discover_devices() -> tuple[str, ...]:
    """Slots of the connected cluster, ``node/index``, in node order."""
    ray = import_ray()
    found = []
    for node in ray.nodes():
        resources = node.get("Resources", {})
        if not node.get("Alive") or SLOT_RESOURCE not in resources:
            continue
        names = [name for name in resources if name.startswith(NODE_PREFIX)]
        for name in names:
            label = name.removeprefix(NODE_PREFIX)
            found += [f"{label}/{index}" for index in range(int(resources[SLOT_RESOURCE]))]
    return tuple(sorted(found, key=lambda d: (d.split("/")[0], int(d.split("/")[1]))))


class Fleet:
    """Handles of the worker processes of one job."""

    def __init__(self, spec: FleetSpec, *, start: bool = False) -> None:
        self.spec = spec
        self.hosts = {host.replica: host for host in spec.hosts()}
        self._handles: dict[str, Any] = {}
        if start:
            self._start()

    def _start(self) -> None:
        """Start the processes that do not run yet, in one placement group for each node."""
        ray = import_ray()
        missing = []
        for host in self.hosts.values():
            try:
                self.handle(host.replica)
            except WorkerLost:
                missing.append(host)
        if not missing:
            return
        from ray.util.placement_group import get_placement_group, placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        groups: dict[str, Any] = {}
        by_node: dict[str, list[str]] = {}
        for host in self.hosts.values():
            if host.device is not None and host.device not in by_node.setdefault(host.node, []):
                by_node[host.node].append(host.device)
        slots = {
            device: i for devices in by_node.values() for i, device in enumerate(sorted(devices))
        }
        for node, devices in by_node.items():
            name = f"slots:{node}:{len(devices)}"
            bundle = {SLOT_RESOURCE: 1, "CPU": 1, f"{NODE_PREFIX}{node}": 0.001}
            try:
                groups[node] = get_placement_group(name)
            except ValueError:
                groups[node] = placement_group(
                    [dict(bundle) for _ in devices],
                    strategy="PACK",
                    name=name,
                    lifetime="detached",
                )
        ray.get([group.ready() for group in groups.values()], timeout=START_LIMIT_S)
        actor = ray.remote(WorkerHost)
        for host in self.hosts.values():
            options: dict[str, Any] = {
                "name": f"host:{host.replica}",
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
                "max_concurrency": HOST_THREADS,
                "num_cpus": 0,
                "max_restarts": -1,
            }
            if host.device is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    groups[host.node], placement_group_bundle_index=slots[host.device]
                )
                options["num_cpus"] = 0.01
            self._handles[host.replica] = actor.options(**options).remote(host)

    def handle(self, replica: str) -> Any:
        """The actor of a replica; WorkerLost where there is none."""
        if replica not in self._handles:
            ray = import_ray()
            try:
                self._handles[replica] = ray.get_actor(f"host:{replica}", namespace=NAMESPACE)
            except ValueError as error:
                raise WorkerLost(f"no process for {replica} in this cluster ({error})") from error
        return self._handles[replica]

    def send(self, replica: str, method: str, *arguments: Any) -> Any:
        """Begin a call; returns its future."""
        return getattr(self.handle(replica), method).remote(*arguments)

    def each(
        self,
        replicas: Iterable[str],
        method: str,
        *arguments: Any,
        limit_s: float = STEP_LIMIT_S,
    ) -> dict[str, Any]:
        """Call a method on several replicas at once; raises the first error."""
        return self.gather({r: self.send(r, method, *arguments) for r in replicas}, limit_s)

    def gather(self, futures: Mapping[str, Any], limit_s: float = STEP_LIMIT_S) -> dict[str, Any]:
        """Answers by replica; WorkerLost where a process ended or kept silent."""
        ray = import_ray()
        try:
            answers = ray.get(list(futures.values()), timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerLost(
                f"expected an answer of {', '.join(futures)} within {limit_s:.0f} s, got none"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise WorkerLost(f"one of {', '.join(futures)} ended: {first_line(error)}") from error
        return dict(zip(futures, answers, strict=True))

    def statuses(self, limit_s: float = 3.0) -> dict[str, dict[str, Any] | None]:
        """Status by replica; None for a process that is gone or silent."""
        return self.roll_call(limit_s)[0]

    def roll_call(
        self, limit_s: float = 3.0
    ) -> tuple[dict[str, dict[str, Any] | None], frozenset[str]]:
        """Status by replica, None where there was none, and which replicas kept silent: their
        process is there, or being made, and has no time to answer; the others are gone."""
        ray = import_ray()
        futures: dict[str, Any] = {}
        answers: dict[str, dict[str, Any] | None] = dict.fromkeys(self.hosts)
        for replica in self.hosts:
            try:
                futures[replica] = self.send(replica, "status")
            except WorkerLost:
                continue
        ready, _ = ray.wait(list(futures.values()), num_returns=len(futures), timeout=limit_s)
        done = set(ready)
        for replica, future in futures.items():
            if future in done:
                try:
                    answers[replica] = ray.get(future)
                except ray.exceptions.RayError:
                    answers[replica] = None
        return answers, frozenset(r for r, future in futures.items() if future not in done)


def topology_of(
    statuses: Mapping[str, Mapping[str, Any] | None],
    components: Sequence[str],
    job: str,
    *,
    states: frozenset[str] = frozenset({"active"}),
) -> Topology:
    """Topology as the processes stand: replicas of a job in one of the given states."""
    placement: dict[str, list[str]] = {component: [] for component in components}
    for status in statuses.values():
        if (
            status is not None
            and status["job"] == job
            and status["state"] in states
            and status["device"] is not None
        ):
            placement[status["component"]].append(status["device"])
    for devices in placement.values():
        devices.sort(key=lambda d: (d.split("/")[0], int(d.split("/")[1])))
    return Topology.of(placement)
