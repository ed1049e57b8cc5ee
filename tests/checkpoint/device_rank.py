"""The only process of a group: an update under FSDP2, over the backend of its device."""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shiftbook.checkpoint.ordered_fsdp import ShardedRanks
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from tests.checkpoint.elastic_rank import GROUPS, Setup, batch_of, loss, make
from tests.checkpoint.process_end import end_process


def main() -> None:
    """Make one update and say how it went."""
    device, store = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        rank=0,
        world_size=1,
        store=dist.FileStore(store, 1),
        timeout=timedelta(seconds=60),
    )
    model = make(Setup()).model.to(device)
    fully_shard(model, mesh=init_device_mesh(device, (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = VirtualRankPlan(4, GROUPS)
    trainer = ShardedRanks(model, optimizer, loss, plan=plan, seed=5, clip_norm=0.5)
    for group in trainer.missing():
        trainer.add(group, tuple(tensor.to(device) for tensor in batch_of(0, group)))
    report = trainer.update()
    print(json.dumps({"update": report.update, "finite": math.isfinite(report.grad_norm)}))
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main()
