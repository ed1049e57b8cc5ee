"""Small training states that the tests of bundles and snapshots save and restore."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

UIDS = ("7/0", "7/1", "8/0")


def state(seed: int, *, width: int = 16) -> dict[str, dict[str, Tensor]]:
    """Model, masters, optimizer and buffer, with the values that break naive copies."""
    rng = torch.Generator().manual_seed(seed)
    masters = {f"layer.{k}.weight": torch.randn(width, 8, generator=rng) for k in range(3)}
    masters["layer.0.weight"][0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    model = {name: value.bfloat16() for name, value in masters.items()}
    model["head"] = model["layer.2.weight"].t()  # tied and transposed: a view, not contiguous
    optimizer = {
        f"{name}/{moment}": torch.rand(width, 8, generator=rng)
        for name in masters
        for moment in ("exp_avg", "exp_avg_sq")
    }
    optimizer["layer.0.weight/step"] = torch.tensor(float(seed))
    buffer = {
        "tokens": torch.randint(0, 24, (5, 7), generator=rng),
        "done": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "log_probs": torch.randn(5, dtype=torch.float64, generator=rng),
    }
    return {"model": model, "masters": masters, "optimizer": optimizer, "buffer": buffer}


def fields(iteration: int, **changes: Any) -> dict[str, Any]:
    """What a trainer says about the state of an iteration."""
    return {
        "job": "arithmetic",
        "attempt": "a0",
        "iteration": iteration,
        "policy_version": iteration,
        "rng": {"trainer/0": "00ff10", "sampler": "abcd"},
        "sampler": {"epoch": 1, "position": 40},
        "in_flight_uids": UIDS,
        "scheduler": {"step": float(iteration), "learning_rate": 1e-4},
        "controllers": {"kl_coefficient": 0.05},
        **changes,
    }


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bits; NaNs with one payload are equal, 0.0 and -0.0 are not."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bool(
        torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8),
            right.contiguous().reshape(-1).view(torch.uint8),
        )
    )
