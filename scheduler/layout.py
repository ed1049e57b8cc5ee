"""Which component may stand where: from numbers of replicas to a topology, and kinds of move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.events.reallocation import Strategy
from shiftbook.ledger.topology import Device, Replica, Topology
from shiftbook.scheduler.errors import PlanningError

COMBINED = "combined"

Positions = NDArray[np.int64]
"""Where replicas begin, as positions in the declared order of the devices."""

Mask = NDArray[np.bool_]
"""One flag a device."""


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
        here, there = before.replicas(self.trainer), after.replicas(self.trainer)
        if len(here) != len(there):
            return "reshard"
        same = here == there or _places(before, self.trainer) == _places(after, self.trainer)
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
        self.kinds = sorted({device.kind for device in devices})
        self.names = [device.name for device in devices]
        self.index = {name: position for position, name in enumerate(self.names)}
        nodes = [name.rsplit("/", 1)[0] for name in self.names]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        self.nodes = len(numbers)
        self.node = np.array([numbers[node] for node in nodes])
        self.elastic = dict(elastic)
        self.roles = roles
        self.colocate = colocate
        self.largest_trainer = largest_trainer
        self._pool: dict[tuple[str, int], dict[int, Replica]] = {}
        self._adopted: Topology | None = None
        self._now: dict[str, Positions] = {}

    def adopt(self, topology: Topology) -> None:
        """Know the replicas that stand: the same place stays the same replica.

        Raises PlanningError for a device that is not the job's.
        """
        if topology is self._adopted:
            return
        index, now = self.index, {}
        for component, replicas in topology.components.items():
            starts = []
            for replica in replicas:
                position = index.get(replica.devices[0]) if replica.devices else None
                if position is None:
                    raise PlanningError(
                        f"{component} stands on {' '.join(replica.devices) or 'no device'}, which "
                        f"is none of the {len(self.names)} devices to plan with; declare it or "
                        "move away"
                    )
                self._pool.setdefault((component, len(replica.devices)), {})[position] = replica
                starts.append(position)
            now[component] = np.array(sorted(starts), dtype=np.int64)
        self._now, self._adopted = now, topology

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
        """Topology with these numbers of replicas, near ``before``.

        Stacked components follow the trainer. A component whose number stays keeps its devices.
        Raises PlanningError when they do not fit.
        """
        self.adopt(before)
        roles, sizes, now = self.roles, self.sizes(before), self._now
        held: dict[str, Positions] = {}
        taken = np.zeros(len(self.names), dtype=bool)
        others = [name for name in sizes if name not in (roles.source, roles.trainer)]
        # Those that give devices up come first, so that the others can take them.
        others.sort(key=lambda name: counts[name] > len(now[name]))
        for name in others:
            held[name] = now[name][: counts[name]]
            taken |= self._mask(held[name], sizes[name])
        # The source and the trainer are placed last: what they keep is taken only where needed.
        front = self._mask(now[roles.source][: counts[roles.source]], sizes[roles.source])
        kept = len(now[roles.trainer]) - counts[roles.trainer]
        back = self._mask(now[roles.trainer][max(0, kept) :], sizes[roles.trainer])
        for name in others:
            missing = counts[name] - len(held[name])
            if missing > 0:
                free = self._starts(taken, sizes[name])
                near = np.zeros(self.nodes, dtype=bool)
                near[self.node[held[name]]] = True
                foreign = ~near[self.node[free]]
                order = np.lexsort((free, foreign, (front | back)[free]))
                fresh = self._enough(name, free[order], missing)
                held[name] = np.sort(np.concatenate([held[name], fresh[:missing]]))
                taken |= self._mask(fresh[:missing], sizes[name])
        held[roles.trainer] = self._trainer(counts, sizes, taken)
        shared = self._mask(held[roles.trainer], sizes[roles.trainer])
        held[roles.source] = self._source(counts, sizes, taken, shared)
        components: dict[str, tuple[Replica, ...]] = {}
        for name, replicas in before.components.items():
            like = roles.trainer if name in roles.stacked and replicas else name
            stands = like in held and not np.array_equal(held[like], now[name])
            components[name] = self._replicas(name, held[like], sizes[like]) if stands else replicas
        return Topology.model_construct(components=components)

    def _mask(self, starts: Positions, size: int) -> Mask:
        """Devices of replicas that begin at ``starts``."""
        mask = np.zeros(len(self.names), dtype=bool)
        for offset in range(size):
            mask[starts + offset] = True
        return mask

    def _clear(self, starts: Positions, size: int, mask: Mask) -> Mask:
        """Which of the replicas at ``starts`` touch no device of ``mask``."""
        clear = np.ones(len(starts), dtype=bool)
        for offset in range(size):
            clear &= ~mask[starts + offset]
        return clear

    def _starts(self, taken: Mask, size: int) -> Positions:
        """Positions where a new replica of ``size`` devices could begin, aligned, on one node."""
        starts = np.arange(0, len(self.names) - size + 1, size)
        one_node = self.node[starts] == self.node[starts + size - 1]
        return np.asarray(starts[one_node & self._clear(starts, size, taken)])

    def _enough(self, name: str, found: Positions, wanted: int) -> Positions:
        if len(found) < wanted:
            raise PlanningError(
                f"expected free devices for {wanted} more replicas of {name}, found {len(found)}"
            )
        return found

    def _trainer(
        self, counts: Mapping[str, int], sizes: Mapping[str, int], taken: Mask
    ) -> Positions:
        name, source = self.roles.trainer, self.roles.source
        count, size = counts[name], sizes[name]
        kept = self._now[name][self._clear(self._now[name], size, taken)]
        if count <= len(kept):
            return kept[len(kept) - count :]
        free = self._starts(taken | self._mask(kept, size), size)
        if not self.colocate:
            stays = self._mask(self._now[source][: counts[source]], sizes[source])
            free = free[self._clear(free, size, stays)]
        missing = count - len(kept)
        fresh = self._enough(name, free, missing)[len(free) - missing :]
        return np.sort(np.concatenate([kept, fresh]))

    def _source(
        self, counts: Mapping[str, int], sizes: Mapping[str, int], taken: Mask, shared: Mask
    ) -> Positions:
        name = self.roles.source
        count, size = counts[name], sizes[name]

        def alone_first(starts: Positions) -> Positions:
            alone = self._clear(starts, size, shared)
            rest = starts[~alone] if self.colocate else starts[:0]
            return np.concatenate([starts[alone], rest])

        kept = self._now[name][self._clear(self._now[name], size, taken)]
        # A number that stays keeps its devices, shared or not; fewer leave the shared ones first.
        if count == len(kept) and (self.colocate or self._clear(kept, size, shared).all()):
            return kept
        kept = alone_first(kept)[:count]
        missing = count - len(kept)
        if missing > 0:
            free = alone_first(self._starts(taken | self._mask(kept, size), size))
            kept = np.concatenate([kept, self._enough(name, free, missing)[:missing]])
        return np.sort(kept)

    def _replicas(self, name: str, starts: Positions, size: int) -> tuple[Replica, ...]:
        # The same place is the same object: building and comparing large topologies stays cheap.
        pool = self._pool.setdefault((name, size), {})
        positions = starts.tolist()
        for position in positions:
            if position not in pool:
                devices = tuple(self.names[position : position + size])
                pool[position] = Replica(
                    name=f"{name}-{devices[0].replace('/', '.')}",
                    devices=devices,
                    tensor_parallel=size,
                )
        return tuple([pool[position] for position in positions])
