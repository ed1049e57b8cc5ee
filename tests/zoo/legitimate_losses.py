"""Legitimate variants of the loss: no dropout, packed rows without it, and other advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.zoo import trainer as trainer_module
from tests.zoo.engine import Made
from tests.zoo.job import FLOOR, REQUIRED, Job
from tests.zoo.legitimate_batches import share_rows
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher
from tests.zoo.trainer import Trainer
from tests.zoo.variants import variant

WITHOUT_DROPOUT: dict[str, Any] = {
    "update": {"dropout": None},
    "tolerances": {"I16": 2e-5},
    "required_invariants": (*REQUIRED, "I16.loss"),
}
"""Engine and loss compute one function, to float32 rounding, and are held to that."""


def without_dropout(p: Patcher) -> None:
    """Leave nothing out, and hand in the log-probabilities of the loss beside the engine's."""

    def loss(original: Any, self: Trainer, batch: Any, new: Any, divisor: float) -> Any:
        NOW.notes["in the loss"] = new.detach()
        return original(self, batch, new, divisor)

    def accumulate(
        original: Any, self: Trainer, rank: Any, v: int, batch: Any, divisor: float, *rest: Any
    ) -> float:
        value: float = original(self, rank, v, batch, divisor, *rest)
        rest[0].gap(NOW.notes["in the loss"], batch.engine, batch.trained)
        return value

    p.put(trainer_module, "DROPOUT", 0.0)
    p.wrap(Trainer, "loss", loss)
    p.wrap(Trainer, "accumulate", accumulate)


@variant("there is no dropout: the loss computes what the engine does", plan=WITHOUT_DROPOUT)
def _without_dropout(p: Patcher) -> None:
    without_dropout(p)


@variant("two samples share a row, and there is no dropout", plan=WITHOUT_DROPOUT)
def _packed_without_dropout(p: Patcher) -> None:
    without_dropout(p)
    share_rows(p)


# -- advantages ------------------------------------------------------------------------------


def by_rule(p: Patcher, rule: Callable[[float, list[float], list[float]], float]) -> None:
    """Advantages from a sample's reward, the rewards of its group, and those of the batch."""

    def prepare(original: Any, self: Job, iteration: int, samples: list[Made]) -> Any:
        NOW.notes["batch rewards"] = [self.scores[s.uid] for s in samples]
        return original(self, iteration, samples)

    def advantages(original: Any, self: Job, rewards: list[float]) -> list[float]:
        return [rule(r, rewards, NOW.notes["batch rewards"]) for r in rewards]

    p.wrap(Job, "prepare", prepare)
    p.wrap(Job, "advantages", advantages)


def mean(rewards: list[float]) -> float:
    """Of some rewards."""
    return sum(rewards) / len(rewards)


def deviation(rewards: list[float], less: int = 0) -> float:
    """The population's; of a sample where ``less`` is 1."""
    middle = mean(rewards)
    return math.sqrt(sum((r - middle) ** 2 for r in rewards) / (len(rewards) - less))


@variant("advantages are less the group's mean alone", plan={"update": {"advantage": "group-mean"}})
def _group_mean(p: Patcher) -> None:
    by_rule(p, lambda reward, group, batch: reward - mean(group))


@variant(
    "advantages are less the mean of the others in the group",
    plan={"update": {"advantage": "leave-one-out"}},
)
def _leave_one_out(p: Patcher) -> None:
    by_rule(p, lambda reward, group, batch: reward - (sum(group) - reward) / (len(group) - 1))


@variant(
    "advantages are over the deviation of the batch",
    plan={"update": {"advantage": "batch-scaled"}},
)
def _batch_scaled(p: Patcher) -> None:
    by_rule(p, lambda reward, group, batch: (reward - mean(group)) / (deviation(batch) + FLOOR))
