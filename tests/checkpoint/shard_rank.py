"""One of four processes of the shard tests: a model under FSDP2 and tensor parallel, over gloo."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shiftbook.checkpoint.errors import FingerprintError
from shiftbook.checkpoint.shards import distributed_fingerprints
from tests.checkpoint.process_end import end_process


def model() -> torch.nn.Sequential:
    """The same parameters in every process; 10 rows do not divide evenly by 4."""
    torch.manual_seed(11)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))


def main() -> None:
    """Shard, take the fingerprints together, then disagree on purpose."""
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = model()
    parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(sharded, mesh=mesh["dp"])
    tensors = dict(sharded.named_parameters())
    found = distributed_fingerprints({**tensors, "plain": torch.ones(3)})
    refused = ""
    try:
        distributed_fingerprints({"plain": torch.ones(3 + (rank == 2))})
    except FingerprintError as error:
        refused = str(error)
    print(json.dumps({"fingerprints": found, "refused": refused}))
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main()
