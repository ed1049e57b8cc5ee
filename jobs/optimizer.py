"""Adam on float32 masters, one deterministic step, and the bfloat16 policy that is published.

Source: Kingma and Ba, "Adam", arXiv 1412.6980, algorithm 1 with bias correction. Every step is
element by element in float32. The same masters, state and gradients give the same bits in every
process; the gradient is summed, divided and clipped by ``VirtualRanks``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

BETA1 = 0.9
BETA2 = 0.95
EPSILON = 1e-8


def _root(values: Tensor) -> Tensor:
    """Square roots, in a new tensor.

    On a CPU numpy's, which is the processor's own, rounded as IEEE 754 says. torch's is of MKL's
    vector library there: its last bits differ between processors, MKL_CBWR or not.
    """
    return torch.from_numpy(np.sqrt(values.numpy())) if values.is_cpu else values.sqrt()


class Adam(torch.optim.Optimizer):
    """Moments by master (float32), zero at first, and one count of the updates done."""

    def __init__(self, masters: Mapping[str, Tensor], lr: float = 0.0, step: int = 0) -> None:
        super().__init__(list(masters.values()), {"lr": lr, "step": step})
        for master in masters.values():
            self.state[master] = {
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @property
    def updates(self) -> int:
        """Updates done."""
        return int(self.param_groups[0]["step"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every master from its ``grad``."""
        settings = self.param_groups[0]
        settings["step"] += 1
        correction1 = 1.0 - BETA1 ** settings["step"]
        correction2 = math.sqrt(1.0 - BETA2 ** settings["step"])
        for master in settings["params"]:
            gradient = master.grad
            mean, square = self.state[master]["exp_avg"], self.state[master]["exp_avg_sq"]
            mean.mul_(BETA1).add_(gradient, alpha=1.0 - BETA1)
            square.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
            denominator = _root(square).div_(correction2).add_(EPSILON)
            master.addcdiv_(mean, denominator, value=-settings["lr"] / correction1)

    def tensors(self, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Moments by ``exp_avg.NAME`` and ``exp_avg_sq.NAME``, as bundles hold them."""
        return {
            f"{key}.{name}": self.state[master][key]
            for key in ("exp_avg", "exp_avg_sq")
            for name, master in masters.items()
        }

    def load(self, masters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], step: int) -> None:
        """Take over copies of the moments that ``tensors`` gave."""
        for name, master in masters.items():
            for key in ("exp_avg", "exp_avg_sq"):
                self.state[master][key].copy_(tensors[f"{key}.{name}"])
        self.param_groups[0]["step"] = step


def masters_of(policy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float32 masters that publish to exactly ``policy``."""
    return {name: tensor.to(torch.float32, copy=True) for name, tensor in policy.items()}


def publish(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The bfloat16 policy of ``masters`` (round to nearest even), fresh tensors, same order."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}
