"""The fast mode of the virtual ranks: one plain sum a process and one all-reduce, in no order.

A process keeps one gradient instead of one for each of its virtual ranks, adds whatever comes when
it comes, and leaves the order of the processes to the network's library. So another arrival order
or another number of processes gives other last bits; a plan that uses this declares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shiftbook.checkpoint.reduction_tree import RankSum, VirtualRankError, on_device_of
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan, flatten

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SNAPSHOT_FORMAT = "unordered-1"


class UnorderedAccumulator:
    """Adds gradients as they come; the calls are those of ``GradientAccumulator``."""

    def __init__(self, plan: VirtualRankPlan, world: int = 1, rank: int = 0) -> None:
        self.plan, self.world, self.rank = plan, world, rank
        self._block = plan.block_of(rank, world)
        self.reset()

    def reset(self) -> None:
        """Begin the next iteration: nothing is in."""
        self._sum: RankSum | None = None
        self._groups: set[int] = set()
        """Groups in the sum of this process."""
        self._elsewhere: set[int] = set()
        """Groups of this process that came in at another one, before a move."""
        self.uids: list[str] = []

    @property
    def groups_in(self) -> list[int]:
        """Group indices in the sum of this process, ascending."""
        return sorted(self._groups)

    def owns(self, group_index: int) -> bool:
        """Whether the gradient of ``group_index`` is to be added here."""
        return self.plan.rank_of(group_index) in self._block

    def expects(self, group_index: int) -> None:
        """Raise VirtualRankError unless this group may be added here now."""
        if not self.owns(group_index):
            raise VirtualRankError(
                f"group {group_index} belongs to rank "
                f"{self.plan.physical_rank_of(group_index, self.world)} of {self.world}, expected "
                f"one of rank {self.rank}; send it there"
            )
        if group_index in self._groups or group_index in self._elsewhere:
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
        """Add one group's summed gradient at once."""
        self.expects(group_index)
        self._take(RankSum(flatten(grads), int(tokens), dict(stats)))
        self._groups.add(group_index)
        self.uids += uids

    def _take(self, more: RankSum) -> None:
        if self._sum is None:
            self._sum = RankSum(more.flat.clone(), more.tokens, dict(more.stats))
            return
        mine = self._sum
        if mine.flat.numel() != more.flat.numel() or mine.stats.keys() != more.stats.keys():
            raise VirtualRankError(
                f"expected {mine.flat.numel()} gradient elements and statistics "
                f"{sorted(mine.stats)}, found {more.flat.numel()} and {sorted(more.stats)}"
            )
        mine.flat = mine.flat.to(more.flat.device).add_(more.flat)
        mine.tokens += more.tokens
        for name, value in more.stats.items():
            mine.stats[name] += value

    def missing(self) -> list[int]:
        """Groups of this process that have not arrived."""
        owned = [g for v in self._block for g in self.plan.groups_of(v)]
        return [g for g in owned if g not in self._groups and g not in self._elsewhere]

    def ready(self) -> bool:
        """True once every group of this process is in."""
        return not self.missing()

    def added(self) -> dict[int, tuple[int, int]]:
        """Samples in this process's one sum, and their weight, under its first virtual rank."""
        return {self._block[0]: (len(self.uids), 0 if self._sum is None else self._sum.tokens)}

    def resident_bytes(self) -> int:
        """Bytes of gradients held."""
        return 0 if self._sum is None else self._sum.flat.numel() * 4

    def total(self, group: ProcessGroup | None) -> RankSum:
        """The sum over all processes by one plain all-reduce. Collective."""
        if not self.ready() or self._sum is None:
            raise VirtualRankError(
                f"expected all groups to be in, still missing {self.missing()}; "
                "wait for them before the update"
            )
        if group is None or group.size() == 1:
            return self._sum
        names = sorted(self._sum.stats)
        numbers = [float(self._sum.tokens), *(self._sum.stats[name] for name in names)]
        flat = on_device_of(group, self._sum.flat)
        table = on_device_of(group, torch.tensor(numbers, dtype=torch.float64))
        group.allreduce([flat]).wait()
        group.allreduce([table]).wait()
        tokens, *values = table.tolist()
        return RankSum(
            flat.to(self._sum.flat.device), int(tokens), dict(zip(names, values, strict=True))
        )

    def snapshot(self) -> dict[str, Any]:
        """The half-done update of this process, with tensors of its own."""
        done = self._sum
        return {
            "format": SNAPSHOT_FORMAT,
            "plan": [self.plan.virtual_ranks, self.plan.groups_per_iteration],
            "rank": self.rank,
            "groups": self.groups_in,
            "uids": list(self.uids),
            "flat": None if done is None else done.flat.clone(),
            "size": 0 if done is None else done.flat.numel(),
            "tokens": 0 if done is None else done.tokens,
            "stats": {} if done is None else dict(done.stats),
        }

    def handed_over(self, rank: int, world: int) -> dict[str, Any]:
        """What the others need of this process when the world becomes ``world``."""
        snapshot = self.snapshot()
        if self.rank == rank and rank < world:
            snapshot["flat"] = None  # it stays; which groups are in it is news all the same
        return snapshot

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Take over the sums of ``snapshots``, one from each process of one world.

        The sum of rank r goes to rank r mod world. Raises VirtualRankError for snapshots of
        another plan or of the ordered mode, or a group that is in two of them.
        """
        expected = (
            SNAPSHOT_FORMAT,
            [self.plan.virtual_ranks, self.plan.groups_per_iteration],
        )
        everywhere: set[int] = set()
        for snapshot in snapshots:
            if (snapshot.get("format"), snapshot.get("plan")) != expected:
                raise VirtualRankError(
                    f"expected snapshots of {expected}, found {snapshot.get('format')} of "
                    f"{snapshot.get('plan')}; a plan cannot change in the middle of an update"
                )
            if everywhere & set(snapshot["groups"]):
                raise VirtualRankError(
                    f"groups {sorted(everywhere & set(snapshot['groups']))} are in two snapshots; "
                    "collect one from each process of one world"
                )
            everywhere |= set(snapshot["groups"])
        self.reset()
        for snapshot in snapshots:
            if snapshot["rank"] % self.world != self.rank:
                continue
            if snapshot["flat"] is not None:
                self._take(RankSum(snapshot["flat"], snapshot["tokens"], dict(snapshot["stats"])))
            self._groups |= set(snapshot["groups"])
            self.uids += snapshot["uids"]
        self._elsewhere = everywhere - self._groups
        sized = next((s for s in snapshots if s["size"]), None)
        if self._sum is None and sized is not None:
            # A process whose groups were all added elsewhere takes part in the sum all the same.
            self._sum = RankSum(torch.zeros(sized["size"]), 0, dict.fromkeys(sized["stats"], 0.0))
