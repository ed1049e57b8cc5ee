"""Which replicas of which component stand on which devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

DeviceName = Annotated[str, StringConstraints(pattern=r"^[^/\s]+/\d+$")]
"""A device as ``node/index``."""


class Device(BaseModel):
    """One GPU or slot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: DeviceName
    kind: str = "core"
    hardware_id: str | None = None


class Replica(BaseModel):
    """The smallest unit of a component that can be moved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    devices: tuple[DeviceName, ...]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1


class Topology(BaseModel):
    """Replicas of every component, in declared order; a component may stand on no device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    components: dict[str, tuple[Replica, ...]] = Field(default_factory=dict)

    @classmethod
    def of(cls, placement: Mapping[str, list[str]]) -> Topology:
        """Build from ``{component: [device, ...]}``, one device a replica.

        A replica is named after its component and its device's index, so the same place has
        the same name in every topology.
        """
        return cls(
            components={
                component: tuple(
                    Replica(name=f"{component}-{device.replace('/', '.')}", devices=(device,))
                    for device in devices
                )
                for component, devices in placement.items()
            }
        )

    def placement(self) -> dict[str, list[str]]:
        """Return ``{component: [device, ...]}``."""
        return {
            component: [device for replica in replicas for device in replica.devices]
            for component, replicas in self.components.items()
        }

    def replicas(self, component: str) -> tuple[Replica, ...]:
        """Replicas of one component; empty where it stands nowhere."""
        return self.components.get(component, ())

    def devices(self) -> tuple[str, ...]:
        """Every device in use, sorted, each once."""
        return tuple(sorted({device for _, replica in self.walk() for device in replica.devices}))

    def walk(self) -> Iterator[tuple[str, Replica]]:
        """Every (component, replica)."""
        for component, replicas in self.components.items():
            for replica in replicas:
                yield component, replica

    def tenants(self, device: str) -> tuple[str, ...]:
        """Components that share a device, in declared order."""
        return tuple(component for component, replica in self.walk() if device in replica.devices)

    def changed_devices(self, other: Topology) -> tuple[str, ...]:
        """Devices whose tenants differ between this topology and another, sorted."""
        devices = sorted({*self.devices(), *other.devices()})
        return tuple(d for d in devices if set(self.tenants(d)) != set(other.tenants(d)))

    def matches(self, other: Topology) -> bool:
        """True when the same replicas stand in the same places.

        The order of replicas says nothing, and neither does it whether a component that stands
        nowhere is named.
        """
        return self._places() == other._places()

    def _places(self) -> dict[str, list[Replica]]:
        return {
            component: sorted(replicas, key=lambda replica: (replica.name, replica.devices))
            for component, replicas in self.components.items()
            if replicas
        }

    def text(self) -> str:
        """Short form for people: ``rollout[n/0 n/1] trainer[n/1]``."""
        return " ".join(
            f"{component}[{' '.join(devices)}]" for component, devices in self.placement().items()
        )
