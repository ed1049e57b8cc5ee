"""A training state with every part of a bundle; run as a program, one of two processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shiftbook.checkpoint.manifest import FIELD_PARTS
from shiftbook.checkpoint.random_streams import RandomStreams
from shiftbook.checkpoint.sharded_bundle import restore_into, save_sharded
from shiftbook.checkpoint.shards import distributed_fingerprints
from tests.checkpoint.process_end import end_process

WEIGHTS = {"embed.weight": (12, 4), "head.weight": (4, 6)}
UIDS = ("000007/0", "000007/1")


def whole_state(seed: int) -> dict[str, dict[str, Tensor]]:
    """Tensors by part: policy, fp32 masters, Adam by parameter, EMA, reference, buffer, …"""
    rng = torch.Generator().manual_seed(seed)
    masters = {name: torch.randn(shape, generator=rng) for name, shape in WEIGHTS.items()}
    moments = {
        f"{name}/{moment}": torch.rand(shape, generator=rng)
        for name, shape in WEIGHTS.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return {
        "model": {name: value.bfloat16() for name, value in masters.items()},
        "masters": masters,
        "optimizer": moments | {"step": torch.tensor(float(seed))},
        "ema": {name: value * 0.99 for name, value in masters.items()},
        "reference": {name: (value + 1).bfloat16() for name, value in masters.items()},
        "normaliser": {"mean": torch.randn(3, generator=rng), "count": torch.tensor(40)},
        "in_flight": {"tokens": torch.arange(8).reshape(2, 4), "empty": torch.empty(0, 4)},
    }


def streams(owner: str, seed: int) -> RandomStreams:
    """The generator of one owner."""
    return RandomStreams({owner: torch.Generator().manual_seed(seed)})


def whole_fields(rng: dict[str, str], **changes: Any) -> dict[str, Any]:
    """Everything that a manifest says; the scaler's as torch's own scaler has it."""
    return {
        "job": "whole",
        "attempt": "a3",
        "parent": "c" * 64,
        "iteration": 9,
        "policy_version": 11,
        "rng": rng,
        "sampler": {"epoch": 2, "position": 17},
        "in_flight_uids": UIDS,
        "config_digest": "a" * 64,
        "data_digest": "b" * 64,
        "scheduler": {"last_epoch": 9.0, "learning_rate": 3e-4},
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 12},
        "controllers": {"kl_coefficient": 0.07, "reward_mean": 0.25, "reward_variance": 1.5},
        **changes,
    }


def declared() -> list[str]:
    """All parts, of tensors and of fields."""
    return [*whole_state(1), *FIELD_PARTS]


def main() -> None:
    """Two processes save with their tensors in shards of rows, and restore into shards of columns.

    Each has a generator of its own, and all that the bundle says must come back.
    """
    rank, store, shelf = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    mesh = init_device_mesh("cpu", (2,))

    def spread(seed: int, axis: int) -> dict[str, dict[str, Any]]:
        return {
            part: {
                name: distribute_tensor(t, mesh, [Shard(axis)]) if t.dim() == 2 else t
                for name, t in members.items()
            }
            for part, members in whole_state(seed).items()
        }

    own = streams(f"rank/{rank}/torch", rank)
    fields = whole_fields(own.states())
    saved = save_sharded(shelf, fields, spread(1, 0), declared=declared())
    fresh = spread(2, 1)
    restore_into(saved.path, fresh)
    flat = {f"{p}/{n}": t for p, members in fresh.items() for n, t in members.items()}
    mine = {owner: saved.manifest.rng[owner] for owner in own.states()}
    own.restore(mine)
    print(json.dumps({"path": str(saved.path), "prints": distributed_fingerprints(flat)}))
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main()
