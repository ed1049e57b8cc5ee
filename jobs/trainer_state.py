"""The reference job's training state: its decoder and Adam inside ``VirtualRanks``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.elastic import Place, Reduction, VirtualRanks
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs.grpo import GrpoLoss
from shiftbook.jobs.model import ModelConfig, PolicyModel, parameter_shapes
from shiftbook.jobs.optimizer import Adam, masters_of

if TYPE_CHECKING:
    from shiftbook.scheduler.workers.component import Layout


def make_trainer(
    policy: Mapping[str, Tensor],
    config: ModelConfig,
    loss: GrpoLoss,
    *,
    virtual_ranks: int,
    groups: int,
    clip_norm: float | None = None,
    place: Place | None = None,
    masters: Mapping[str, Tensor] | None = None,
    moments: Mapping[str, Tensor] | None = None,
    updates: int = 0,
    reduction: Reduction = "tree",
) -> VirtualRanks:
    """Virtual ranks around the decoder with ``policy`` (bfloat16).

    ``masters`` and ``moments`` (as ``Adam.tensors`` gives them) are copied; without them the
    masters are the policy's and the moments zero.
    """
    order = list(parameter_shapes(config))
    own = masters_of({name: (policy if masters is None else masters)[name] for name in order})
    adam = Adam(own)
    if moments is not None:
        adam.load(own, moments, updates)
    return VirtualRanks(
        PolicyModel(config, {name: policy[name] for name in order}),
        adam,
        loss,
        virtual_ranks=virtual_ranks,
        groups=groups,
        clip_norm=clip_norm,
        masters=own,
        precision=torch.bfloat16,
        updates=updates,
        place=place,
        reduction=reduction,
    )


def adam_of(ranks: VirtualRanks) -> Adam:
    """The optimizer of virtual ranks that ``make_trainer`` made."""
    optimizer = ranks.optimizer
    assert isinstance(optimizer, Adam)
    return optimizer


@dataclass
class TrainerState:
    """All that one rank holds."""

    ranks: VirtualRanks
    version: int
    iteration: int
    layout: Layout

    @property
    def adam(self) -> Adam:
        """The optimizer."""
        return adam_of(self.ranks)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by part, as a bundle has them."""
        return self.ranks.parts() | {"optimizer": self.adam.tensors(self.ranks.masters)}

    def roots(self) -> dict[str, str]:
        """Root fingerprint of each part, from the live tensors."""
        return {part: root(fingerprint_tensors(ts)) for part, ts in self.parts().items()}
