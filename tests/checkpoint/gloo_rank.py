"""One trainer process of the virtual-rank tests: obeys JSON lines on stdin, answers on stdout.

The process outlives its process groups, as a trainer does: each update names a generation, and the
group is built anew over one lasting store.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shiftbook.checkpoint.virtual_ranks import (
    GradientAccumulator,
    VirtualRankPlan,
    all_reduce_tree,
)
from tests.checkpoint.process_end import end_process

SIZE = 20_011
GROUPS = 16


def gradient(group: int) -> tuple[torch.Tensor, int, dict[str, float], list[str]]:
    """The synthetic gradient of one group: large and small numbers, so that order shows."""
    generator = torch.Generator().manual_seed(7_000 + group)
    flat = torch.randn(SIZE, generator=generator)
    flat *= torch.pow(10.0, torch.randint(-4, 4, (SIZE,), generator=generator).float())
    stats = {"loss_sum": float(flat[0]) * 0.1, "kl_sum": float(flat[1]) / 3.0}
    return flat, 400 + 7 * group, stats, [f"{group:06d}/{member}" for member in range(8)]


def run(command: dict[str, Any], store: dist.Store) -> None:
    """Restore, add and then either snapshot or reduce, as the command says."""
    world, rank = command["world"], command["rank"]
    accumulator = GradientAccumulator(VirtualRankPlan(4, GROUPS), world, rank)
    if command.get("restore"):
        accumulator.restore([torch.load(path) for path in command["restore"]])
    for group in command["add"]:
        if accumulator.owns(group):
            accumulator.add(group, *gradient(group))
    if command.get("snapshot"):
        torch.save(accumulator.snapshot(), command["snapshot"])
        return
    process_group = dist.ProcessGroupGloo(
        dist.PrefixStore(f"generation-{command['generation']}", store),
        rank,
        world,
        timedelta(seconds=30),
    )
    total = all_reduce_tree(accumulator.local_sums(), process_group)
    result = {"flat": total.flat, "tokens": total.tokens, "stats": total.stats}
    torch.save({**result, "uids": accumulator.uids}, command["out"])


def main() -> None:
    """Serve commands until stdin ends."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    for line in sys.stdin:
        run(json.loads(line), store)
        sys.stdout.write("done\n")
        sys.stdout.flush()
    end_process()


if __name__ == "__main__":
    main()
