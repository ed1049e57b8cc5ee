"""Watches one optimizer step of a trainer rank: its gradient, and the step computed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.elastic import UpdateReport
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.recorder_step import Adam as AdamRule
from shiftbook.checkpoint.recorder_step import StepProbe
from shiftbook.jobs.loss_watch import live_terms, residuals
from shiftbook.jobs.optimizer import BETA1, BETA2, EPSILON
from shiftbook.jobs.trainer_state import TrainerState

RULE = AdamRule(beta_1=BETA1, beta_2=BETA2, epsilon=EPSILON)


def cast_root(state: TrainerState) -> str:
    """Root of the masters in the policy's dtype."""
    masters = state.ranks.masters
    return root(fingerprint_tensors({n: m.detach().bfloat16() for n, m in masters.items()}))


@dataclass
class UpdateWatch:
    """Around ``update`` of a rank; reads what the optimizer is given when its step begins.

    With ``probed`` a few elements of each parameter are computed again, by other code.
    """

    state: TrainerState
    clip_norm: float
    kl_coefficient: float
    probed: bool
    gradient: dict[str, Tensor] = field(default_factory=dict)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _probe: StepProbe | None = None

    def __enter__(self) -> UpdateWatch:
        self.cast_before = cast_root(self.state)
        self._hook = self.state.adam.register_step_pre_hook(self._begins)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()

    @torch.no_grad()
    def _begins(self, optimizer: Any, *_: Any) -> None:
        masters = self.state.ranks.masters
        self.gradient = {n: m.grad for n, m in masters.items() if m.grad is not None}
        if not self.probed:
            return
        self._before = {name: master.clone() for name, master in masters.items()}
        moments = self.state.adam.state
        self._probe = StepProbe(RULE, clip_norm=self.clip_norm)
        self._probe.begin(
            masters,
            {name: moments[master]["exp_avg"] for name, master in masters.items()},
            {name: moments[master]["exp_avg_sq"] for name, master in masters.items()},
        )

    def said(self, report: UpdateReport, learning_rate: float) -> dict[str, Any]:
        """What an update's record has of it, after the step."""
        told: dict[str, Any] = {
            "gradient": root(fingerprint_tensors(self.gradient)),
            "cast": (self.cast_before, cast_root(self.state)),
        }
        if self._probe is None:
            return told
        self._probe.reduced(self.gradient, report.grad_norm)
        step = self.state.adam.updates
        masters = self.state.ranks.masters
        told["recomputed"] = {
            **residuals(report.stats),
            **self._probe.residuals(learning_rate, step),
        }
        told["loss_terms"] = live_terms(report.stats, report.weight, self.kl_coefficient)
        told["unmoved"] = tuple(
            name
            for name, before in self._before.items()
            if name in self.gradient
            and torch.equal(masters[name], before)
            and bool(self.gradient[name].any())
        )
        told["moved_frozen"] = tuple(
            name
            for name, before in self._before.items()
            if name not in self.gradient and not torch.equal(masters[name], before)
        )
        return told
