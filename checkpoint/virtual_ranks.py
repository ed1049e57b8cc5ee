"""Virtual ranks: gradients that add up to the same bits on 1, 2 or 4 trainer processes.

A trainer has V = 2ᵏ virtual ranks. Each owns an aligned run of the iteration's groups and adds
their gradients in declared order, starting from a copy of the first. Virtual ranks are added in one
fixed binary tree: ((0+1)+(2+3))+…. A physical rank owns an aligned block of virtual ranks, which is
a subtree, so the processes need to exchange one partial sum each and finish the same tree. Nothing
depends on the number of processes, on arrival order, or on a move in the middle of an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiftbook.checkpoint.reduction_tree import (
    RankSum,
    VirtualRankError,
    add_sums,
    all_reduce_tree,
    is_power_of_two,
    reduce_tree,
)

__all__ = [
    "GradientAccumulator",
    "RankSum",
    "VirtualRankError",
    "VirtualRankPlan",
    "all_reduce_tree",
    "flatten",
    "reduce_tree",
]

SNAPSHOT_FORMAT = 1


@dataclass(frozen=True)
class VirtualRankPlan:
    """Which group belongs to which virtual rank, and which block of them a physical rank owns."""

    virtual_ranks: int = 4
    groups_per_iteration: int = 32

    def __post_init__(self) -> None:
        if not is_power_of_two(self.virtual_ranks):
            raise VirtualRankError(
                f"expected a power of two of virtual ranks, found {self.virtual_ranks}; "
                "declare 1, 2, 4, 8, …"
            )
        if self.groups_per_iteration < 1 or self.groups_per_iteration % self.virtual_ranks:
            raise VirtualRankError(
                f"expected a multiple of {self.virtual_ranks} groups an iteration, found "
                f"{self.groups_per_iteration}; change the batch or the virtual ranks"
            )

    @property
    def groups_per_rank(self) -> int:
        """Groups that each virtual rank adds in one iteration."""
        return self.groups_per_iteration // self.virtual_ranks

    def rank_of(self, group_index: int) -> int:
        """The virtual rank that owns group ``group_index`` (0-based within the iteration)."""
        if not 0 <= group_index < self.groups_per_iteration:
            raise VirtualRankError(
                f"expected a group index in 0..{self.groups_per_iteration - 1}, found "
                f"{group_index}; count groups within the iteration"
            )
        return group_index // self.groups_per_rank

    def groups_of(self, virtual_rank: int) -> range:
        """The groups of one virtual rank, in the order in which they are added."""
        self._check_rank(virtual_rank)
        start = virtual_rank * self.groups_per_rank
        return range(start, start + self.groups_per_rank)

    def block_of(self, rank: int, world: int) -> range:
        """The virtual ranks that physical rank ``rank`` of ``world`` processes owns."""
        if not is_power_of_two(world) or world > self.virtual_ranks:
            raise VirtualRankError(
                f"expected a power of two of at most {self.virtual_ranks} trainer processes, "
                f"found {world}; resize to another number"
            )
        if not 0 <= rank < world:
            raise VirtualRankError(f"expected a rank in 0..{world - 1}, found {rank}")
        size = self.virtual_ranks // world
        return range(rank * size, (rank + 1) * size)

    def physical_rank_of(self, group_index: int, world: int) -> int:
        """The physical rank to which the gradient of ``group_index`` must go."""
        return self.rank_of(group_index) // len(self.block_of(0, world))

    def _check_rank(self, virtual_rank: int) -> None:
        if not 0 <= virtual_rank < self.virtual_ranks:
            raise VirtualRankError(
                f"expected a virtual rank in 0..{self.virtual_ranks - 1}, found {virtual_rank}"
            )


@dataclass
class _Pending:
    """A gradient that has arrived before its predecessors."""

    flat: Tensor
    tokens: int
    stats: dict[str, float]
    uids: list[str]


class _RankState:
    """One virtual rank's half-done sum."""

    def __init__(self, groups: range) -> None:
        self.groups = groups
        self.sum: RankSum | None = None
        self.added = 0
        self.uids: list[str] = []
        self.pending: dict[int, _Pending] = {}

    def add(self, group: int, item: _Pending) -> None:
        self.pending[group] = item
        while self.added < len(self.groups) and self.groups[self.added] in self.pending:
            self._take(self.pending.pop(self.groups[self.added]))

    def _take(self, item: _Pending) -> None:
        if self.sum is None:
            self.sum = RankSum(item.flat.clone(), item.tokens, dict(item.stats))
        else:
            self.sum = add_sums(
                self.sum, RankSum(item.flat, item.tokens, item.stats), in_place=True
            )
        self.uids += item.uids
        self.added += 1


class GradientAccumulator:
    """Adds the gradients of one iteration for the virtual ranks that one physical rank owns.

    Gradients may arrive in any order; one that is early waits. ``snapshot`` and ``restore`` carry
    the half-done update to another world size.
    """

    def __init__(self, plan: VirtualRankPlan, world: int = 1, rank: int = 0) -> None:
        self.plan = plan
        self.world = world
        self.rank = rank
        self._states = {v: _RankState(plan.groups_of(v)) for v in plan.block_of(rank, world)}

    @property
    def groups_in(self) -> list[int]:
        """Group indices that have arrived (added or waiting), ascending."""
        arrived: list[int] = []
        for state in self._states.values():
            arrived += [*state.groups[: state.added], *sorted(state.pending)]
        return arrived

    @property
    def uids(self) -> list[str]:
        """Uids of the samples that have arrived, added ones first within each virtual rank."""
        uids: list[str] = []
        for state in self._states.values():
            uids += state.uids
            for group in sorted(state.pending):
                uids += state.pending[group].uids
        return uids

    def owns(self, group_index: int) -> bool:
        """Whether the gradient of ``group_index`` belongs to this physical rank."""
        return self.plan.rank_of(group_index) in self._states

    def expects(self, group_index: int) -> None:
        """Raise VirtualRankError unless this group may be added here now."""
        virtual_rank = self.plan.rank_of(group_index)
        if virtual_rank not in self._states:
            raise VirtualRankError(
                f"group {group_index} belongs to virtual rank {virtual_rank}, expected one of "
                f"{sorted(self._states)} here (rank {self.rank} of {self.world}); send it to rank "
                f"{self.plan.physical_rank_of(group_index, self.world)}"
            )
        state = self._states[virtual_rank]
        if group_index in state.pending or group_index in state.groups[: state.added]:
            raise VirtualRankError(
                f"group {group_index} is in the update already; a group is consumed exactly once"
            )

    def add(
        self,
        group_index: int,
        grads: Tensor | Mapping[str, Tensor],
        tokens: int,
        stats: Mapping[str, float],
        uids: Sequence[str],
    ) -> None:
        """Take one group's summed gradient: a flat float32 vector, or tensors in declared order.

        The tensor is kept without a copy while it waits; do not write to it. Raises
        ``VirtualRankError`` for a group of another rank, one that is in already, and a shape or
        dtype that differs from the others.
        """
        self.expects(group_index)
        state = self._states[self.plan.rank_of(group_index)]
        flat = flatten(grads)
        self._check_alike(group_index, flat, stats)
        state.add(group_index, _Pending(flat, int(tokens), dict(stats), list(uids)))

    def ready(self) -> bool:
        """True once every group of the owned virtual ranks has been added."""
        return all(state.added == len(state.groups) for state in self._states.values())

    def missing(self) -> list[int]:
        """Group indices of the owned virtual ranks that have not arrived."""
        arrived = set(self.groups_in)
        return [g for s in self._states.values() for g in s.groups if g not in arrived]

    def local_sums(self) -> dict[int, RankSum]:
        """The finished sums by virtual rank; raises ``VirtualRankError`` before ``ready``."""
        if not self.ready():
            raise VirtualRankError(
                f"expected all groups to be in, still missing {self.missing()}; "
                "wait for them before the update"
            )
        return {v: state.sum for v, state in self._states.items() if state.sum is not None}

    def added(self) -> dict[int, tuple[int, int]]:
        """By virtual rank: samples whose gradients are added, and their weight."""
        sums = {v: (len(s.uids), s.sum) for v, s in self._states.items()}
        return {v: (n, 0 if held is None else held.tokens) for v, (n, held) in sums.items()}

    def reset(self) -> None:
        """Begin the next iteration: nothing is in."""
        self._states = {v: _RankState(self.plan.groups_of(v)) for v in self._states}

    def resident_bytes(self) -> int:
        """Bytes of gradients held, added and waiting."""
        held = [s.sum.flat for s in self._states.values() if s.sum is not None]
        held += [item.flat for s in self._states.values() for item in s.pending.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def snapshot(self) -> dict[str, Any]:
        """The half-done update by virtual rank, as plain containers and tensors of its own."""
        ranks: dict[int, dict[str, Any]] = {}
        for virtual_rank, state in self._states.items():
            done = state.sum
            ranks[virtual_rank] = {
                "flat": None if done is None else done.flat.clone(),
                "tokens": 0 if done is None else done.tokens,
                "stats": {} if done is None else dict(done.stats),
                "groups": list(state.groups[: state.added]),
                "uids": list(state.uids),
                "pending": {
                    group: {
                        "flat": item.flat.clone(),
                        "tokens": item.tokens,
                        "stats": dict(item.stats),
                        "uids": list(item.uids),
                    }
                    for group, item in sorted(state.pending.items())
                },
            }
        return {
            "format": SNAPSHOT_FORMAT,
            "virtual_ranks": self.plan.virtual_ranks,
            "groups_per_iteration": self.plan.groups_per_iteration,
            "ranks": ranks,
        }

    def handed_over(self, rank: int, world: int) -> dict[str, Any]:
        """The part of ``snapshot`` that process ``rank`` of a new ``world`` does not own."""
        kept = self.plan.block_of(rank, world) if rank < world else range(0)
        snapshot = self.snapshot()
        snapshot["ranks"] = {v: c for v, c in snapshot["ranks"].items() if v not in kept}
        return snapshot

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Take over the owned virtual ranks from ``snapshots`` of any world size.

        Replaces what is here. Raises ``VirtualRankError`` when an owned virtual rank is in none of
        them or in two, or when they were taken under another plan; nothing is changed then.
        """
        found: dict[int, Mapping[str, Any]] = {}
        for snapshot in snapshots:
            self._check_snapshot(snapshot)
            for virtual_rank, content in snapshot["ranks"].items():
                if int(virtual_rank) in found:
                    raise VirtualRankError(
                        f"virtual rank {virtual_rank} is in two snapshots; expected each once: "
                        "collect one snapshot from each process of one world"
                    )
                found[int(virtual_rank)] = content
        lacking = [v for v in self._states if v not in found]
        if lacking:
            raise VirtualRankError(
                f"expected virtual ranks {sorted(self._states)} in the snapshots, missing "
                f"{lacking}; collect the snapshots of all processes"
            )
        self._states = {v: self._restored(v, found[v]) for v in self._states}

    def _restored(self, virtual_rank: int, content: Mapping[str, Any]) -> _RankState:
        state = _RankState(self.plan.groups_of(virtual_rank))
        state.added = len(content["groups"])
        if list(content["groups"]) != list(state.groups[: state.added]):
            raise VirtualRankError(
                f"virtual rank {virtual_rank}: expected groups {list(state.groups)} in declared "
                f"order, found {list(content['groups'])}; the snapshot is damaged"
            )
        if content["flat"] is not None:
            state.sum = RankSum(
                _own(content["flat"]), int(content["tokens"]), dict(content["stats"])
            )
        state.uids = list(content["uids"])
        for group, item in content["pending"].items():
            state.pending[int(group)] = _Pending(
                _own(item["flat"]), int(item["tokens"]), dict(item["stats"]), list(item["uids"])
            )
        return state

    def _check_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        expected = (SNAPSHOT_FORMAT, self.plan.virtual_ranks, self.plan.groups_per_iteration)
        found = (
            snapshot.get("format"),
            snapshot.get("virtual_ranks"),
            snapshot.get("groups_per_iteration"),
        )
        if found != expected:
            raise VirtualRankError(
                f"expected a snapshot with (format, virtual ranks, groups) = {expected}, found "
                f"{found}; a plan cannot change in the middle of an update"
            )

    def _check_alike(self, group_index: int, flat: Tensor, stats: Mapping[str, float]) -> None:
        """Refuse a gradient that could not be added to those that are here."""
        here: list[RankSum | _Pending] = [s.sum for s in self._states.values() if s.sum is not None]
        here += [item for state in self._states.values() for item in state.pending.values()]
        if not here:
            return
        if flat.numel() != here[0].flat.numel():
            raise VirtualRankError(
                f"group {group_index}: expected {here[0].flat.numel()} gradient elements like the "
                f"other groups, found {flat.numel()}; use one parameter layout"
            )
        if stats.keys() != here[0].stats.keys():
            raise VirtualRankError(
                f"group {group_index}: expected the statistics {sorted(here[0].stats)}, found "
                f"{sorted(stats)}; give every group the same ones"
            )


def flatten(grads: Tensor | Mapping[str, Tensor]) -> Tensor:
    """One flat float32 vector: a vector as it is, or named tensors concatenated in their order."""
    if not isinstance(grads, Tensor):
        grads = torch.cat([tensor.reshape(-1) for tensor in grads.values()])
    if grads.dtype != torch.float32 or grads.dim() != 1:
        raise VirtualRankError(
            f"expected a flat float32 gradient, found {grads.dtype} of shape {tuple(grads.shape)}; "
            "pass named tensors or concatenate them in declared order"
        )
    return grads


def _own(flat: Any) -> Tensor:
    """A copy in fresh, aligned memory, from a tensor or a numpy array."""
    return torch.as_tensor(flat).clone()
