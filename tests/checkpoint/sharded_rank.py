"""One process of the tests of sharded bundles: saves under FSDP2, loads under another layout."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shiftbook.checkpoint import pending_bundle
from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.pending_bundle import save_sharded_async
from shiftbook.checkpoint.sharded_bundle import restore_into, save_sharded
from shiftbook.checkpoint.shards import distributed_fingerprints
from tests.checkpoint.bundle_states import fields
from tests.checkpoint.process_end import end_process


def model(seed: int) -> torch.nn.Sequential:
    """10 rows do not divide evenly by 4."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)).double()


def parts_of(sharded: torch.nn.Module, at: float) -> dict[str, dict[str, Any]]:
    """Parameters, a moment of each in the same layout, and a plain tensor that all have."""
    parameters = dict(sharded.named_parameters())
    return {
        "model": parameters,
        "optimizer": {f"{n}/exp_avg": p.detach() * at for n, p in parameters.items()},
        "counts": {"steps": torch.full((3,), at)},
    }


def refusal(act: Any, *arguments: Any, **how: Any) -> str:
    """What a BundleError says."""
    try:
        act(*arguments, **how)
    except BundleError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def die(*_: Any) -> Any:
    """What a process does instead of writing its shards."""
    os.kill(os.getpid(), signal.SIGKILL)


def save_in_the_background(rank: int, shelf: str, sharded: torch.nn.Module) -> dict[str, Any]:
    """Three saves under way at once, and the model trained meanwhile; then those that fail."""
    batch = torch.ones(2, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    pending, expected = [], []
    for number in (1, 2, 3):
        parts = parts_of(sharded, float(number))
        flat = {f"{p}/{n}": t for p, members in parts.items() for n, t in members.items()}
        expected.append(distributed_fingerprints(flat))
        own = {f"rank/{rank}": f"0{number}"}
        pending.append(save_sharded_async(shelf, fields(number, rng=own), parts))
        sharded(batch).square().sum().backward()
        optimizer.step()
        parts["counts"]["steps"].zero_()
    saved = [one.result(120) for one in pending]
    parts = parts_of(sharded, 4.0)
    unfit = fields(-1 if rank == 1 else 4)
    answer = {
        "paths": [str(one.path) for one in saved],
        "expected": expected,
        "rng": saved[-1].manifest.rng,
        "done": [one.done for one in pending],
        "unfit": refusal(save_sharded_async, shelf, unfit, parts),
        "blocked": refusal(
            save_sharded_async(Path(shelf) / "file" / "shelf", fields(4), parts).result
        ),
    }
    copied = pending_bundle._copied

    def torn(members: Any) -> Any:
        copies = copied(members)
        for tensor in copies.values():
            tensor += 1
        return copies

    if rank == 1:
        pending_bundle._copied = torn
    answer["torn"] = refusal(save_sharded_async(shelf, fields(4), parts).result, 120)
    return answer


def main() -> None:
    """`save` by 2 processes under FSDP2, or `load` by 4 under tensor parallel and FSDP2.

    `killed` saves once, and then again while one process is killed as it begins to write.
    `background` saves while training goes on.
    """
    act, rank, world, store, shelf = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:6]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    answer: dict[str, Any] = {}
    if act in ("save", "killed", "background"):
        sharded = model(11)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        parts = parts_of(sharded, 3.0)
    if act == "killed":
        save_sharded(shelf, fields(1), parts)
        if rank == int(sys.argv[6]):
            dcp.FileSystemWriter.write_data = die  # type: ignore[method-assign]
        answer["said"] = refusal(save_sharded, shelf, fields(2), parts)
        print(json.dumps(answer))
        end_process()  # the group cannot be left in order: one is gone
    elif act == "background":
        answer = save_in_the_background(rank, shelf, sharded)
    elif act == "save":
        answer["undeclared"] = refusal(
            save_sharded, shelf, fields(1), parts, declared=["model", "optimizer"]
        )
        blocked = Path(shelf) / "file"
        answer["blocked"] = refusal(save_sharded, blocked / "shelf", fields(1), parts)
        saved = save_sharded(shelf, fields(1), parts)
        answer["path"], answer["bundle"] = str(saved.path), saved.bundle_id
    else:
        sharded = model(12)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(sharded, mesh=mesh["dp"])
        parts = parts_of(sharded, 0.0)
        path = sys.argv[6]
        answer["absent"] = refusal(restore_into, path, {**parts, "ema": parts["counts"]})
        if len(sys.argv) > 7:
            answer["damaged"] = refusal(restore_into, path, parts)
        else:
            restore_into(path, parts)
        flat = {f"{p}/{n}": t for p, members in parts.items() for n, t in members.items()}
        answer["fingerprints"] = distributed_fingerprints(flat)
    print(json.dumps(answer))
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main()
