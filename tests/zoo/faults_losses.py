"""Faults of kinds J and K in what the loss computes: its own forward, advantages, its ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo import legitimate, packing
from tests.zoo import model as model_module
from tests.zoo.faults import fault
from tests.zoo.job import FLOOR, Job
from tests.zoo.legitimate_losses import deviation, mean
from tests.zoo.now import NOW
from tests.zoo.packing import Layout
from tests.zoo.patching import Patcher, at
from tests.zoo.trainer import Batch, Trainer

# -- the forward whose loss goes backward, and no other one --------------------------------------


@fault("K5", "the labels inside the loss are shifted by one", on="without_dropout")
def _loss_labels_shifted(p: Patcher, t: int) -> None:
    def logps(original: Any, self: Trainer, *args: Any) -> Any:
        new, *masks = original(self, *args)
        return (new.roll(1, dims=1) if at(t) else new, *masks)

    p.wrap(Trainer, "policy_logps", logps)


@fault("K2", "the loss takes its logits at another temperature", on="without_dropout")
def _loss_temperature(p: Patcher, t: int) -> None:
    def distribution(original: Any, logits: torch.Tensor) -> Any:
        return original(logits / 0.7 if logits.requires_grad and at(t) else logits)

    p.wrap(model_module, "distribution", distribution)


@fault("K5", "samples of a packed row see each other inside the loss", on="packed_without_dropout")
def _loss_packs_leak(p: Patcher, t: int) -> None:
    def layout(original: Any, lengths: list[int]) -> Layout:
        where: Layout = original(lengths)
        if torch.is_grad_enabled() and at(t):
            for row, offset in zip(where.row, where.offset, strict=True):
                where.begins[row, offset] = offset == 0
        return where

    p.wrap(packing, "layout", layout)


@fault("K8", "a second pass over a batch is scored by the policy of the first", on="two_passes")
def _scored_between_passes(p: Patcher, t: int) -> None:
    def between(original: Any, job: Job, batches: dict[int, list[Batch]]) -> None:
        if at(t):
            for batch in (b for micro in batches.values() for b in micro):
                batch.old = job.trainer.score(job.trainer.ranks[0].model, batch.tokens)
                batch.scored_at = job.trainer.version  # and says so, as an honest loop would

    p.wrap(legitimate, "between_passes", between)


# -- advantages by another rule than the declared one --------------------------------------------


def _other_rule(
    p: Patcher, t: int, rule: Callable[[float, list[float], list[float]], float]
) -> None:
    """Advantages from the reward, those of the group, and all that were scored."""

    def advantages(original: Any, self: Job, rewards: list[float]) -> list[float]:
        if not at(t):
            return original(self, rewards)  # type: ignore[no-any-return]
        scored = list(self.scores.values())
        return [rule(reward, rewards, scored) for reward in rewards]

    p.wrap(Job, "advantages", advantages)


@fault("J4", "advantages are over the deviation of a sample, not of the population")
def _sample_deviation(p: Patcher, t: int) -> None:
    _other_rule(p, t, lambda r, group, scored: (r - mean(group)) / (deviation(group, 1) + FLOOR))


@fault("J4", "advantages are over a deviation where the mean alone was declared", on="group_mean")
def _mean_and_deviation(p: Patcher, t: int) -> None:
    _other_rule(p, t, lambda r, group, scored: (r - mean(group)) / (deviation(group) + FLOOR))


@fault("J3", "the baseline of a group is of all groups", on="group_mean")
def _groups_mixed(p: Patcher, t: int) -> None:
    _other_rule(p, t, lambda r, group, scored: r - mean(scored))


@fault("J4", "a sample's own reward is in its baseline", on="leave_one_out")
def _own_reward_in_baseline(p: Patcher, t: int) -> None:
    _other_rule(p, t, lambda r, group, scored: r - mean(group))


@fault("J4", "advantages are over the deviation of the group, not of the batch", on="batch_scaled")
def _scaled_by_the_group(p: Patcher, t: int) -> None:
    _other_rule(p, t, lambda r, group, scored: (r - mean(group)) / (deviation(group) + FLOOR))


@fault("J3", "each virtual rank scales by the deviation of its own groups", on="batch_scaled")
def _scaled_by_the_rank(p: Patcher, t: int) -> None:
    def prepare(original: Any, self: Job, iteration: int, samples: Any) -> Any:
        batches = original(self, iteration, samples)
        if at(t):
            for micro in batches.values():
                own = [r for batch in micro for r in batch.rewards]
                scale = (deviation(NOW.notes["batch rewards"]) + FLOOR) / (deviation(own) + FLOOR)
                for batch in micro:
                    batch.advantages = batch.advantages * scale
        return batches

    p.wrap(Job, "prepare", prepare)
