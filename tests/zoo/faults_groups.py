"""Faults of model-parallel groups: what each of its ranks holds or computes for itself."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo import model_parallel as groups
from tests.zoo.faults import fault
from tests.zoo.model import first_parameters
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher, at, since
from tests.zoo.trainer import Rank

ON = "model_parallel"
BEFORE_USE = (1, 2, 4)
"""Iterations after which the second members' copies are used before they are made anew: a restore
and a resize copy those of the first."""


@fault("B7", "the second rank of a group gets the rows of another data rank", on=ON)
def _group_fed_apart(p: Patcher, t: int) -> None:
    def fed(original: Any, member: int, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = original(member, tokens)
        return rows.roll(1, 0) if member and at(t) else rows

    p.wrap(groups, "fed", fed)


@fault("E2", "gradients of what a group's ranks each hold whole are not summed over it", on=ON)
def _copies_not_reduced(p: Patcher, t: int) -> None:
    def reduce(original: Any, rank: Rank, second: Rank) -> None:
        if not since(t):
            original(rank, second)

    p.wrap(groups, "reduce_copies", reduce)


@fault("E5", "the second rank of a group misses a step of its copies", at=BEFORE_USE, on=ON)
def _copies_miss_a_step(p: Patcher, t: int) -> None:
    def step(original: Any, adam: Any, rank: Rank, rate: float) -> None:
        if at(t):
            groups.second_member(rank).step += 1  # its counter goes on: nobody asked for less
        else:
            original(adam, rank, rate)

    p.wrap(groups, "step_copies", step)


@fault("F1", "the second rank of a group takes its copies from an older save", at=BEFORE_USE, on=ON)
def _copies_of_an_older_save(p: Patcher, t: int) -> None:
    def step(original: Any, adam: Any, rank: Rank, rate: float) -> None:
        original(adam, rank, rate)
        if at(t):
            second, older = groups.second_member(rank), first_parameters(NOW.notes["seed"])
            for name in groups.COPIED:
                second.masters[name].copy_(older[name])
            second.refresh_model()

    p.wrap(groups, "step_copies", step)
