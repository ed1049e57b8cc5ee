"""Adam on float32 masters: one deterministic update, and the bfloat16 policy that is published.

Source: Kingma and Ba, "Adam", arXiv 1412.6980, algorithm 1 with bias correction. Every step is
element by element in float32; the clipping norm is summed in float64 over the one flat gradient in
declared order. The same masters, state and gradient sum give the same bits in every process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiftbook.jobs.errors import TrainingError

BETA1 = 0.9
BETA2 = 0.95
EPSILON = 1e-8


@dataclass
class AdamState:
    """First and second moments by parameter name (float32) and the number of updates done."""

    step: int
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]

    @classmethod
    def fresh(cls, masters: Mapping[str, Tensor]) -> AdamState:
        """Zero moments for ``masters``."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
        return cls(0, zeros, {name: tensor.clone() for name, tensor in zeros.items()})

    def to_dict(self) -> dict[str, Any]:
        """The state by name, for a bundle or a live snapshot (tensors are not copied)."""
        return {"step": self.step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> AdamState:
        """The state that ``to_dict`` gave, with tensors of its own."""
        return cls(
            int(plain["step"]),
            {name: tensor.clone() for name, tensor in plain["exp_avg"].items()},
            {name: tensor.clone() for name, tensor in plain["exp_avg_sq"].items()},
        )


@dataclass(frozen=True)
class UpdateInfo:
    """One update: ``step`` counts from 1; ``grad_norm`` is the norm before clipping, after the
    division; ``scale`` is what each element of the sum was multiplied by."""

    step: int
    grad_norm: float
    scale: float
    lr: float


def masters_of(policy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float32 masters that publish to exactly ``policy``."""
    return {name: tensor.to(torch.float32, copy=True) for name, tensor in policy.items()}


def publish(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The bfloat16 policy of ``masters`` (round to nearest even), fresh tensors, same order."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}


def apply_update(
    masters: Mapping[str, Tensor],
    opt_state: AdamState,
    grad_sum: Tensor | Mapping[str, Tensor],
    divisor: int,
    lr: float,
    clip_norm: float,
) -> UpdateInfo:
    """Divide ``grad_sum`` once by ``divisor``, clip its norm, and update in place.

    ``grad_sum`` is the flat float32 vector in the masters' order, or tensors by name. Raises
    ``TrainingError`` for a divisor below 1, a vector of another length or a norm that is not
    finite; the masters are untouched then.
    """
    size = sum(tensor.numel() for tensor in masters.values())
    if isinstance(grad_sum, Tensor):
        flat = grad_sum
    else:
        flat = torch.cat([grad_sum[name].reshape(-1) for name in masters])
    if divisor < 1 or flat.numel() != size:
        raise TrainingError(
            f"expected {size} gradient elements and a divisor of at least 1, found "
            f"{flat.numel()} and {divisor}; sum the gradients of this model's sampled tokens"
        )
    norm = math.sqrt(flat.double().square_().sum().item()) / divisor
    if not math.isfinite(norm):
        raise TrainingError(
            f"update {opt_state.step + 1}: expected a finite gradient norm, found {norm}; "
            "look for the group whose loss is not finite and drop it with a declared reason"
        )
    scale = min(1.0, clip_norm / norm) / divisor if norm > 0.0 else 1.0 / divisor
    opt_state.step += 1
    correction1 = 1.0 - BETA1**opt_state.step
    correction2 = math.sqrt(1.0 - BETA2**opt_state.step)
    start = 0
    with torch.no_grad():
        for name, master in masters.items():
            part = flat[start : start + master.numel()].view(master.shape)
            start += master.numel()
            gradient = part * scale
            mean, square = opt_state.exp_avg[name], opt_state.exp_avg_sq[name]
            mean.mul_(BETA1).add_(gradient, alpha=1.0 - BETA1)
            square.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
            denominator = square.sqrt().div_(correction2).add_(EPSILON)
            master.addcdiv_(mean, denominator, value=-lr / correction1)
    return UpdateInfo(opt_state.step, norm, scale, lr)
