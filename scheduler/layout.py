"""Which component may stand where: numbers of replicas to a topology and back, and kinds of move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.events.reallocation import Strategy
from shiftbook.ledger.topology import Device, Replica, Topology
from shiftbook.scheduler.errors import PlanningError

COMBINED = "combined"


@dataclass(frozen=True)
class Roles:
    """What each component is to the planner, by the job's own names."""

    source: str = "rollout"
    """Makes the episodes; has priority on a device that it shares."""
    trainer: str = "trainer"
    """Works on complete groups and updates; its replicas are a power of two."""
    stacked: tuple[str, ...] = ("inference",)
    """Work on complete groups before the trainer does, on the trainer's devices."""
    slotless: tuple[str, ...] = ("tool",)
    """Take no device."""

    def kind_of_move(self, before: Topology, after: Topology) -> str | None:
        """Name under which the cost of a move is learned; None where nothing changes.

        ``rollout-shrink``, ``rollout-grow``, ``trainer-reshard`` and so on by the components'
        names, or ``combined`` where several change. Stacked components go with the trainer.
        """
        changed = [
            name
            for name in {**before.components, **after.components}
            if name not in self.stacked and _places(before, name) != _places(after, name)
        ]
        if not changed:
            return None
        return self.kind(
            {name: len(after.replicas(name)) - len(before.replicas(name)) for name in changed}
        )

    def kind(self, changes: Mapping[str, int]) -> str:
        """Kind of a move from the change of each changed component's number of replicas."""
        if len(changes) > 1:
            return COMBINED
        ((name, change),) = changes.items()
        if name == self.trainer:
            return f"{name}-reshard"
        return f"{name}-grow" if change > 0 else f"{name}-shrink"

    def strategy(self, before: Topology, after: Topology) -> Strategy:
        """``reshard`` where the trainer's replicas change, else ``pause``."""
        same = _places(before, self.trainer) == _places(after, self.trainer)
        return "pause" if same else "reshard"


def _places(topology: Topology, component: str) -> set[tuple[str, ...]]:
    return {replica.devices for replica in topology.replicas(component)}


class Layout:
    """The devices of a job in order, and where its components go for given numbers of replicas.

    The source grows from the front and the trainer from the back, so the two overlap only where
    their numbers add up to more than there is (with ``colocate``); a source that shrinks leaves
    the trainer's devices first. Any other component keeps its devices, gives up its last ones, and
    grows into devices of its own node first.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        elastic: Mapping[str, ElasticRange],
        roles: Roles,
        *,
        colocate: bool = True,
        largest_trainer: int | None = None,
    ) -> None:
        if not devices:
            raise PlanningError("expected at least one device to plan with, found none")
        self.devices = tuple(devices)
        self.names = [device.name for device in devices]
        self.nodes = [name.rsplit("/", 1)[0] for name in self.names]
        self.index = {name: position for position, name in enumerate(self.names)}
        self.elastic = dict(elastic)
        self.roles = roles
        self.colocate = colocate
        self.largest_trainer = largest_trainer
        self._pool: dict[tuple[str, int], dict[int, Replica]] = {}
        self._adopted: Topology | None = None

    def adopt(self, topology: Topology) -> None:
        """Know the replicas that stand: the same place stays the same replica.

        Raises PlanningError for a device that is not the job's.
        """
        if topology is self._adopted:
            return
        for component, replica in topology.walk():
            position = self.index.get(replica.devices[0]) if replica.devices else None
            if position is None:
                raise PlanningError(
                    f"{component} stands on {' '.join(replica.devices) or 'no device'}, which is "
                    f"none of the {len(self.names)} devices to plan with; declare it or move away"
                )
            self._pool.setdefault((component, len(replica.devices)), {})[position] = replica
        self._adopted = topology

    def sizes(self, topology: Topology) -> dict[str, int]:
        """Devices of one replica, by component with devices; 1 for one that stands nowhere."""
        return {
            name: len(replicas[0].devices) if replicas else 1
            for name, replicas in topology.components.items()
            if name not in self.roles.slotless and name not in self.roles.stacked
        }

    def range_of(self, component: str, count: int, size: int) -> tuple[int, int]:
        """Fewest and most replicas; a component without a declared range keeps its number."""
        declared = self.elastic.get(component)
        if declared is None:
            return count, count
        most = min(declared.maximum, len(self.devices) // size)
        if component == self.roles.trainer and self.largest_trainer is not None:
            most = min(most, self.largest_trainer)
        return declared.minimum, max(most, declared.minimum)

    def trainer_sizes(self, count: int, size: int) -> list[int]:
        """Powers of two in the trainer's range, and the number it has."""
        low, high = self.range_of(self.roles.trainer, count, size)
        powers = [1 << k for k in range(max(high, 1).bit_length()) if low <= 1 << k <= high]
        for stacked in self.roles.stacked:
            if stacked in self.elastic:
                declared = self.elastic[stacked]
                powers = [p for p in powers if declared.minimum <= p <= declared.maximum]
        return sorted({*powers, count})

    def place(self, before: Topology, counts: Mapping[str, int]) -> Topology:
        """Topology with these numbers of replicas, near ``before``; stacked ones follow the trainer.

        A component whose number stays keeps its devices. Raises PlanningError when they do not fit.
        """
        self.adopt(before)
        roles, sizes = self.roles, self.sizes(before)
        now = {name: self._positions(before, name) for name in sizes}
        order = [n for n in sizes if n not in (roles.source, roles.trainer)]
        held: dict[str, list[int]] = {}
        # Those that give devices up come first, so that the others can take them.
        order.sort(key=lambda name: counts[name] > len(now[name]))
        # What stays elsewhere is not free; the source and the trainer are placed after the others.
        taken: set[int] = set()
        for name in order:
            held[name] = now[name][: counts[name]]
            taken.update(p + k for p in held[name] for k in range(sizes[name]))
        for name in order:
            missing = counts[name] - len(held[name])
            if missing > 0:
                front = set(self._spread(now[roles.source][: counts[roles.source]], roles.source, sizes))
                back = now[roles.trainer][-counts[roles.trainer] :] if counts[roles.trainer] else []
                avoid = front | set(self._spread(back, roles.trainer, sizes))
                near = {self.nodes[p] for p in held[name]}
                free = self._starts(sizes[name], taken)
                free.sort(key=lambda p: (p in avoid, self.nodes[p] not in near))
                held[name] += self._enough(name, free[:missing], missing)
                taken.update(self._spread(held[name], name, sizes))
        held[roles.trainer] = self._trainer(now, counts, sizes, taken)
        shared = set(self._spread(held[roles.trainer], roles.trainer, sizes))
        held[roles.source] = self._source(now, counts, sizes, taken, shared)
        components: dict[str, tuple[Replica, ...]] = {}
        for name, replicas in before.components.items():
            if name in roles.stacked and replicas:
                positions, size = held[roles.trainer], sizes[roles.trainer]
            elif name in held:
                positions, size = held[name], sizes[name]
            else:
                components[name] = replicas
                continue
            components[name] = self._replicas(name, positions, size, replicas)
        return Topology.model_construct(components=components)

    def _positions(self, topology: Topology, name: str) -> list[int]:
        """Where the replicas of a component begin, in declared order of the devices."""
        index = self.index
        return sorted(index[replica.devices[0]] for replica in topology.replicas(name))

    def _spread(self, starts: Sequence[int], name: str, sizes: Mapping[str, int]) -> list[int]:
        size = sizes[name]
        return list(starts) if size == 1 else [p + k for p in starts for k in range(size)]

    def _starts(self, size: int, taken: set[int]) -> list[int]:
        """Positions where a new replica of ``size`` devices could begin, aligned, on one node."""
        if size == 1:
            return [p for p in range(len(self.names)) if p not in taken]
        return [
            p
            for p in range(0, len(self.names) - size + 1, size)
            if self.nodes[p] == self.nodes[p + size - 1] and taken.isdisjoint(range(p, p + size))
        ]

    def _enough(self, name: str, found: list[int], wanted: int) -> list[int]:
        if len(found) < wanted:
            raise PlanningError(
                f"expected free devices for {wanted} more replicas of {name}, found {len(found)}"
            )
        return found

    def _trainer(
        self,
        now: Mapping[str, list[int]],
        counts: Mapping[str, int],
        sizes: Mapping[str, int],
        taken: set[int],
    ) -> list[int]:
        name = self.roles.trainer
        count, size = counts[name], sizes[name]
        kept = [p for p in now[name] if taken.isdisjoint(range(p, p + size))]
        if count <= len(kept):
            return kept[len(kept) - count :]
        own = {*self._spread(kept, name, sizes), *taken}
        free = self._starts(size, own)
        if not self.colocate:
            source = self.roles.source
            stays = set(self._spread(now[source][: counts[source]], source, sizes))
            free = [p for p in free if stays.isdisjoint(range(p, p + size))]
        missing = count - len(kept)
        return sorted(kept + self._enough(name, free[len(free) - missing :], missing))

    def _source(
        self,
        now: Mapping[str, list[int]],
        counts: Mapping[str, int],
        sizes: Mapping[str, int],
        taken: set[int],
        shared: set[int],
    ) -> list[int]:
        name = self.roles.source
        count, size = counts[name], sizes[name]

        def alone_first(positions: list[int]) -> list[int]:
            if size == 1:
                alone = [p for p in positions if p not in shared]
                return alone + ([p for p in positions if p in shared] if self.colocate else [])
            alone = [p for p in positions if shared.isdisjoint(range(p, p + size))]
            rest = [p for p in positions if not shared.isdisjoint(range(p, p + size))]
            return alone + (rest if self.colocate else [])

        kept = [p for p in now[name] if taken.isdisjoint(range(p, p + size))]
        # A number that stays keeps its devices, shared or not; fewer leave the shared ones first.
        if count == len(kept) and (self.colocate or shared.isdisjoint(self._spread(kept, name, sizes))):
            return kept
        kept = alone_first(kept)[:count]
        if len(kept) < count:
            own = {*self._spread(kept, name, sizes), *taken}
            free = alone_first(self._starts(size, own))
            kept += self._enough(name, free[: count - len(kept)], count - len(kept))
        return sorted(kept)

    def _replicas(
        self, name: str, positions: Sequence[int], size: int, before: tuple[Replica, ...]
    ) -> tuple[Replica, ...]:
        # The same place is the same object: building and comparing large topologies stays cheap.
        pool = self._pool.setdefault((name, size), {})
        for position in positions:
            if position not in pool:
                devices = tuple(self.names[position : position + size])
                pool[position] = Replica(
                    name=f"{name}-{devices[0].replace('/', '.')}",
                    devices=devices,
                    tensor_parallel=size,
                )
        placed = tuple(pool[position] for position in positions)
        # Order is no difference: what stands where it stood is what stood.
        return before if len(placed) == len(before) and set(map(id, placed)) == set(map(id, before)) else placed
