"""The fixed binary tree in which virtual ranks are added, over the processes of one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shiftbook.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class VirtualRankError(CheckpointError):
    """A gradient, snapshot or world size does not fit the declared virtual ranks."""


def is_power_of_two(value: int) -> bool:
    """True for 1, 2, 4, 8, …"""
    return value >= 1 and value & (value - 1) == 0


@dataclass
class RankSum:
    """What one virtual rank, or a subtree of them, has added up: the flat float32 gradient, the
    tokens that it was summed over, and float64 statistics by name."""

    flat: Tensor
    tokens: int
    stats: dict[str, float] = field(default_factory=dict)


def reduce_tree(per_vrank_sums: Mapping[int, RankSum] | Sequence[RankSum]) -> RankSum:
    """The sum in the fixed binary tree ((0+1)+(2+3))+… of an aligned block of virtual ranks.

    The number of sums must be a power of two, and a mapping's ranks consecutive and aligned.
    """
    if isinstance(per_vrank_sums, Mapping):
        ranks = sorted(per_vrank_sums)
        start = ranks[0] if ranks else 0
        if ranks != list(range(start, start + len(ranks))) or (ranks and start % len(ranks)):
            raise VirtualRankError(
                f"expected an aligned block of virtual ranks, found {ranks}; reduce whole blocks"
            )
        level = [per_vrank_sums[rank] for rank in ranks]
    else:
        level = list(per_vrank_sums)
    if not is_power_of_two(len(level)):
        raise VirtualRankError(
            f"expected a power of two of sums, found {len(level)}; give one for each virtual rank"
        )
    while len(level) > 1:
        level = [add_sums(level[i], level[i + 1], in_place=False) for i in range(0, len(level), 2)]
    return level[0]


def all_reduce_tree(local_sums: Mapping[int, RankSum], group: ProcessGroup | None) -> RankSum:
    """The whole tree's sum, the same bits on every process of ``group`` (None: one process).

    Each process reduces its own block, all gather the blocks' sums in rank order, and each finishes
    the tree. Collective: every process of the group must call it, with the same statistics' names.
    """
    block = reduce_tree(local_sums)
    if group is None or group.size() == 1:
        return block
    world = group.size()
    if sorted(local_sums)[0] != group.rank() * len(local_sums):
        raise VirtualRankError(
            f"process {group.rank()} of {world}: expected the block of virtual ranks that starts "
            f"at {group.rank() * len(local_sums)}, found {sorted(local_sums)}; "
            "place blocks in rank order"
        )
    names = sorted(block.stats)
    numbers = torch.tensor([block.stats[name] for name in names], dtype=torch.float64)
    counts = torch.tensor([block.tokens, len(names)], dtype=torch.int64)
    flats = _gather(block.flat.contiguous(), group)
    all_counts = _gather(counts, group)
    if any(int(other[1]) != len(names) for other in all_counts):
        raise VirtualRankError(
            "expected the same statistics on every process, found "
            f"{[int(other[1]) for other in all_counts]} names; add the same ones everywhere"
        )
    all_numbers = _gather(numbers, group) if names else [numbers] * world
    return reduce_tree(
        [
            RankSum(
                flats[rank],
                int(all_counts[rank][0]),
                dict(zip(names, all_numbers[rank].tolist(), strict=True)),
            )
            for rank in range(world)
        ]
    )


def on_device_of(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` where ``group`` can send it: on the current GPU for NCCL, else host."""
    nccl = group.name() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return tensor.to(device, copy=True)


def _must_travel(group: ProcessGroup, tensor: Tensor) -> bool:
    return (group.name() == "nccl") != (tensor.device.type == "cuda")


def _gather(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The tensors of all processes in rank order, on this one's device."""
    sent = on_device_of(group, tensor) if _must_travel(group, tensor) else tensor
    outputs = [torch.empty_like(sent) for _ in range(group.size())]
    group.allgather([outputs], [sent]).wait()
    return [output.to(tensor.device) for output in outputs]


def add_sums(left: RankSum, right: RankSum, in_place: bool) -> RankSum:
    """left + right; ``in_place`` writes the gradient into ``left``."""
    if left.stats.keys() != right.stats.keys():
        raise VirtualRankError(
            f"expected the statistics {sorted(left.stats)}, found {sorted(right.stats)}; "
            "give every group the same ones"
        )
    flat = left.flat.add_(right.flat) if in_place else left.flat + right.flat
    stats = {name: left.stats[name] + right.stats[name] for name in left.stats}
    return RankSum(flat, left.tokens + right.tokens, stats)
