"""The worker processes of a cluster: one for each component and slot it may stand on, kept warm.

A warm process without a device holds no weights, no KV and no optimizer state, so a move carries
all that it needs. Processes are detached and named after what they are for, so that whoever comes
later (a new controller, recovery, the next attempt) finds the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.cluster import NAMESPACE, NODE_PREFIX, SLOT_RESOURCE, import_ray
from shiftbook.scheduler.errors import WorkerLost, first_line
from shiftbook.scheduler.workers.host import HostSpec, WorkerHost

START_LIMIT_S = 90.0
STEP_LIMIT_S = 20.0
"""Longest wait for one step of a worker whose component is quick to start."""
STATUS_LIMIT_S = 3.0
"""Longest wait for its status."""
STEPS_PER_START = 3.0
STATUSES_PER_START = 20.0
"""Steps, and answers, that may take as long together as a start: a component that is slow to start
(large weights, kernels to compile) is slow to load, to be probed, and to answer meanwhile."""
LOOK_AGAIN_S = 0.05
HOST_THREADS = 12


@dataclass(frozen=True)
class FleetSpec:
    """Which processes a job may use: ``factories`` by component (``module:callable``), the devices
    that each component may stand on, and the components that take none (with their replicas)."""

    factories: dict[str, str]
    devices: dict[str, tuple[str, ...]]
    without_device: dict[str, int] = field(default_factory=dict)
    start_limit_s: dict[str, float] = field(default_factory=dict)
    """By component, how long a process may take until it can serve, where that is not what is
    usual; what a step and an answer may take follows from it."""

    def step_limit_s(self, component: str) -> float:
        """How long one step of a worker of this component may take."""
        return step_limit_s(self.start_limit_s.get(component, 0.0))

    def status_limit_s(self, component: str) -> float:
        """How long a worker of this component may keep silent while it works."""
        return max(STATUS_LIMIT_S, self.start_limit_s.get(component, 0.0) / STATUSES_PER_START)

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


def step_limit_s(start_limit_s: float) -> float:
    """How long one step of a worker may take that may take so long to start."""
    return max(STEP_LIMIT_S, start_limit_s / STEPS_PER_START)


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
        limit_s: float | None = None,
    ) -> dict[str, Any]:
        """Call a method on several replicas at once; raises the first error."""
        return self.gather({r: self.send(r, method, *arguments) for r in replicas}, limit_s)

    def gather(
        self,
        futures: Mapping[str, Any],
        limit_s: float | None = None,
        *,
        gone: Collection[str] = (),
    ) -> dict[str, Any]:
        """Answers by replica; WorkerLost where a process ended or kept silent.

        Waits for as long as a step of the slowest of these replicas may take, or ``limit_s``; for
        one that comes to be in ``gone`` meanwhile no longer. (Ray keeps a call for a process that
        is to come in the place of one that ended.)
        """
        ray = import_ray()
        if limit_s is None:
            steps_s = (self.spec.step_limit_s(self.hosts[r].component) for r in futures)
            limit_s = max(steps_s, default=STEP_LIMIT_S)
        until_s = time.monotonic() + limit_s
        asked = list(futures.values())
        try:
            while len(ray.wait(asked, num_returns=len(asked), timeout=LOOK_AGAIN_S)[0]) < len(
                asked
            ):
                if lost := [replica for replica in futures if replica in gone]:
                    raise WorkerLost(f"expected an answer of {lost[0]}, its process ended")
                if time.monotonic() > until_s:
                    break
            answers = ray.get(asked, timeout=max(0.0, until_s - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerLost(
                f"expected an answer of {', '.join(futures)} within {limit_s:.0f} s, got none"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise WorkerLost(f"one of {', '.join(futures)} ended: {first_line(error)}") from error
        return dict(zip(futures, answers, strict=True))

    def statuses(self, limit_s: float | None = None) -> dict[str, dict[str, Any] | None]:
        """Status by replica; None for a process that is gone or silent."""
        return self.roll_call(limit_s)[0]

    def roll_call(
        self, limit_s: float | None = None
    ) -> tuple[dict[str, dict[str, Any] | None], frozenset[str]]:
        """Status by replica, None where there was none, and which replicas kept silent: their
        process is there, or being made, and has no time to answer; the others are gone.

        Each is waited for as long as its component may keep silent, or ``limit_s``.
        """
        ray = import_ray()
        futures: dict[Any, str] = {}
        answers: dict[str, dict[str, Any] | None] = dict.fromkeys(self.hosts)
        limits_s: dict[str, float] = {}
        for replica, host in self.hosts.items():
            try:
                futures[self.send(replica, "status")] = replica
            except WorkerLost:
                continue
            usual_s = self.spec.status_limit_s(host.component)
            limits_s[replica] = usual_s if limit_s is None else limit_s
        began_s = time.monotonic()
        silent: set[str] = set()
        for until_s in sorted(set(limits_s.values())):
            left_s = max(0.0, began_s + until_s - time.monotonic())
            ready, _ = ray.wait(list(futures), num_returns=len(futures), timeout=left_s)
            for future in ready:
                replica = futures.pop(future)
                try:
                    answers[replica] = ray.get(future)
                except ray.exceptions.RayError:
                    answers[replica] = None
            for future in [f for f, replica in futures.items() if limits_s[replica] <= until_s]:
                silent.add(futures.pop(future))
            if not futures:
                break
        return answers, frozenset(silent)


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
