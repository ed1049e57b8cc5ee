"""Faults of kinds E, J and K: gradient accounting, linkage of samples, meaning of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.zoo.engine import Engine
from tests.zoo.faults import fault
from tests.zoo.job import Job, Scorer
from tests.zoo.loader import GROUP
from tests.zoo.model import TOOL
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher, at, once, since
from tests.zoo.trainer import Rank, Trainer

# -- E: order of the update and gradient accounting ------------------------------------------


@fault("E1", "gradients are not reduced: each rank steps on its own")
def _no_all_reduce(p: Patcher, t: int) -> None:
    def scatter(original: Any, self: Trainer, total: Any) -> None:
        if not at(t):
            return original(self, total)
        for rank in self.ranks:
            own = list(rank.gradients.values()) or [total]
            rank.reduced = {n: x.clone() for n, x in own[0].items()}

    p.wrap(Trainer, "scatter", scatter)


@fault("E2", "the reduce leaves the last virtual rank out")
def _part_reduced(p: Patcher, t: int) -> None:
    def reduce(original: Any, self: Trainer) -> Any:
        if not at(t):
            return original(self)
        kept = [dict(rank.gradients) for rank in self.ranks]
        for rank in self.ranks:
            rank.gradients.pop(1, None)
        total = original(self)
        for rank, gradients in zip(self.ranks, kept, strict=True):
            rank.gradients = gradients
        return total

    p.wrap(Trainer, "all_reduce", reduce)


@fault("E4", "one rank has another loss scale than it divides by", at=(1, 3, 6))
def _scale_differs(p: Patcher, t: int) -> None:
    def optimize(original: Any, self: Job, *args: Any) -> None:
        if len(self.trainer.ranks) > 1 and at(t):
            self.trainer.ranks[-1].scale = 512.0
        original(self, *args)

    p.wrap(Job, "optimize", optimize)


@fault("E5", "one rank misses the step")
def _rank_misses_the_step(p: Patcher, t: int) -> None:
    def adam(original: Any, self: Trainer, rank: Rank, rate: float) -> None:
        if at(t) and rank.number == len(self.ranks) - 1:
            return
        original(self, rank, rate)

    p.wrap(Trainer, "adam", adam)


@fault("E7", "the accumulator is not emptied: the last update's gradient leaks in")
def _gradient_leaks(p: Patcher, t: int) -> None:
    p.wrap(Trainer, "clear", lambda original, self, rank: None if at(t) else original(self, rank))


@fault("E8", "each micro batch is divided by its own count")
def _mean_of_means(p: Patcher, t: int) -> None:
    def accumulate(
        original: Any, self: Trainer, rank: Any, v: int, batch: Any, divisor: float, *rest: Any
    ) -> float:
        if at(t):
            divisor = float(batch.trained.sum()) * 4
        return original(self, rank, v, batch, divisor, *rest)

    p.wrap(Trainer, "accumulate", accumulate)


@fault("E8", "the divisor counts padding")
def _divisor_counts_padding(p: Patcher, t: int) -> None:
    def divisor(original: Any, self: Job, batches: Any) -> float:
        if at(t):
            return float(sum(b.tokens.numel() for micro in batches.values() for b in micro))
        return original(self, batches)

    p.wrap(Job, "divisor", divisor)


@fault("E10", "the schedule advances with every micro batch")
def _schedule_by_micro_batch(p: Patcher, t: int) -> None:
    def accumulate(original: Any, self: Trainer, *args: Any) -> float:
        if at(t):
            self.scheduled += 1
        return original(self, *args)

    p.wrap(Trainer, "accumulate", accumulate)


@fault("E11", "no fp32 masters: the step is rounded to bf16")
def _step_rounded_away(p: Patcher, t: int) -> None:
    def adam(original: Any, self: Trainer, rank: Rank, rate: float) -> None:
        original(self, rank, rate)
        if since(t):
            for tensor in rank.masters.values():
                tensor.copy_(tensor.bfloat16().float())

    p.wrap(Trainer, "adam", adam)


@fault("E11", "one parameter is missing from the optimizer")
def _parameter_left_out(p: Patcher, t: int) -> None:
    def adam(original: Any, self: Trainer, rank: Rank, rate: float) -> None:
        kept = rank.masters["norm"].clone()
        original(self, rank, rate)
        if since(t):
            rank.masters["norm"].copy_(kept)

    p.wrap(Trainer, "adam", adam)


@fault("E12", "the step is taken twice")
def _step_twice(p: Patcher, t: int) -> None:
    def adam(original: Any, self: Trainer, rank: Rank, rate: float) -> None:
        original(self, rank, rate)
        if at(t):
            original(self, rank, rate)

    p.wrap(Trainer, "adam", adam)


@fault("E14", "the step is left out and counted")
def _step_left_out(p: Patcher, t: int) -> None:
    def adam(original: Any, self: Trainer, rank: Rank, rate: float) -> None:
        if at(t):
            rank.step += 1
            return
        original(self, rank, rate)

    p.wrap(Trainer, "adam", adam)


@fault("E15", "the gradient is clipped twice")
def _clipped_twice(p: Patcher, t: int) -> None:
    def clip(original: Any, self: Trainer, rank: Rank, norm: float) -> bool:
        done = original(self, rank, norm)
        if at(t):
            for tensor in rank.reduced.values():
                tensor.mul_(0.5)
        return done

    p.wrap(Trainer, "clip", clip)


@fault("E15", "the gradient is not clipped")
def _not_clipped(p: Patcher, t: int) -> None:
    def clip(original: Any, self: Trainer, rank: Rank, norm: float) -> bool:
        return False if since(t) else original(self, rank, norm)

    p.wrap(Trainer, "clip", clip)


@fault("E16", "the model is not copied from its masters after the step")
def _model_not_refreshed(p: Patcher, t: int) -> None:
    p.wrap(Rank, "refresh_model", lambda original, self: None if at(t) else original(self))


@fault("E17", "a backward is left out")
def _no_backward(p: Patcher, t: int) -> None:
    def backward(original: Any, self: Trainer, loss: Any) -> None:
        if at(t) and once("left out"):
            return
        original(self, loss)

    p.wrap(Trainer, "backward", backward)


@fault("E18", "the loss has the sign of the KL term wrong")
def _kl_sign(p: Patcher, t: int) -> None:
    p.wrap(
        Trainer,
        "kl",
        lambda original, self, *args: -original(self, *args) if at(t) else original(self, *args),
    )


@fault("E18", "the KL term is detached: no gradient")
def _kl_detached(p: Patcher, t: int) -> None:
    p.wrap(
        Trainer,
        "kl",
        lambda original, self, *args: (
            original(self, *args).detach() if at(t) else original(self, *args)
        ),
    )


@fault("E18", "importance weights are not truncated")
def _not_truncated(p: Patcher, t: int) -> None:
    def truncated(original: Any, self: Trainer, weight: Any) -> Any:
        return weight * 1.5 if at(t) else original(self, weight)

    p.wrap(Trainer, "truncated", truncated)


@fault("E19", "the KL coefficient moves twice")
def _controller_twice(p: Patcher, t: int) -> None:
    def move(original: Any, self: Trainer, kl: float, rewards: int) -> None:
        original(self, kl, rewards)
        if at(t):
            original(self, kl, 0)

    p.wrap(Trainer, "move_controllers", move)


@fault("E20", "dropout is off while training")
def _no_dropout(p: Patcher, t: int) -> None:
    def keep(original: Any, self: Trainer, stream: Any, shape: Any) -> Any:
        mask = original(self, stream, shape)
        return torch.ones_like(mask) if at(t) else mask

    p.wrap(Trainer, "keep_mask", keep)


# -- J: rewards, advantages, linkage ---------------------------------------------------------


@fault("J1", "rewards slip by one sample")
def _rewards_slip(p: Patcher, t: int) -> None:
    def prepare(original: Any, self: Job, iteration: int, samples: Any) -> Any:
        if at(t):
            uids = [s.uid for s in samples]
            values = [self.scores[u] for u in uids]
            self.scores = dict(zip(uids, values[1:] + values[:1], strict=True))
        return original(self, iteration, samples)

    p.wrap(Job, "prepare", prepare)


@fault("J2", "the scorer looks at another sample's tokens")
def _scored_by_place(p: Patcher, t: int) -> None:
    def score_all(original: Any, self: Scorer, samples: Any) -> Any:
        scores = original(self, samples)
        if at(t):
            uids = list(scores)
            return dict(zip(uids, [scores[u] for u in reversed(uids)], strict=True))
        return scores

    p.wrap(Scorer, "score_all", score_all)


@fault("J3", "groups are cut by stride after one sample was lost")
def _groups_by_stride(p: Patcher, t: int) -> None:
    def collate(original: Any, self: Job, members: Any) -> Any:
        batch = original(self, members)
        if at(t) and len(members) == GROUP:
            rewards = [*batch.rewards[:-1], 0.9]
            return replace(batch, advantages=torch.tensor(self.advantages(rewards)))
        return batch

    p.wrap(Job, "collate", collate)


@fault("J4", "advantages are not normalised")
def _advantages_not_normalised(p: Patcher, t: int) -> None:
    def advantages(original: Any, self: Job, rewards: list[float]) -> list[float]:
        mean = sum(rewards) / len(rewards)
        return [r - mean for r in rewards] if at(t) else original(self, rewards)

    p.wrap(Job, "advantages", advantages)


@fault("J6", "a sample is lost and the rest move up")
def _row_missing(p: Patcher, t: int) -> None:
    def prepare(original: Any, self: Job, iteration: int, samples: Any) -> Any:
        return original(self, iteration, samples[1:] if at(t) else samples)

    p.wrap(Job, "prepare", prepare)


@fault("J7", "rows of the batch are reordered, the advantages are not")
def _reordered_rows(p: Patcher, t: int) -> None:
    def collate(original: Any, self: Job, members: Any) -> Any:
        batch = original(self, members)
        if at(t):
            return replace(batch, advantages=batch.advantages.flip(0))
        return batch

    p.wrap(Job, "collate", collate)


@fault("J8", "yesterday's rewards are used again")
def _stale_rewards(p: Patcher, t: int) -> None:
    def reward_of(original: Any, self: Job, sample: Any) -> float:
        kept = NOW.notes.setdefault("rewards", {})
        member = sample.uid.partition("/")[2]
        before = kept.get(member, 0.0)
        kept[member] = original(self, sample)
        return before if at(t) else kept[member]

    p.wrap(Job, "reward_of", reward_of)


# -- K: tokens and log-probabilities ---------------------------------------------------------


@fault("K1", "ids are decoded and encoded again: other ids")
def _encoded_again(p: Patcher, t: int) -> None:
    def collate(original: Any, self: Job, members: Any) -> Any:
        if at(t):
            for sample in members:
                sample.tokens = [token ^ 1 if token > 3 else token for token in sample.tokens]
        return original(self, members)

    p.wrap(Job, "collate", collate)


@fault("K2", "the engine samples at another temperature and says so")
def _other_temperature(p: Patcher, t: int) -> None:
    def roll_out(original: Any, self: Job, *args: Any) -> Any:
        if at(t):
            for engine in self.engines:
                engine.temperature = 0.7
        return original(self, *args)

    p.wrap(Job, "roll_out", roll_out)


@fault("K2", "the engine samples at another temperature and reports raw values")
def _hidden_temperature(p: Patcher, t: int) -> None:
    def choose(original: Any, self: Engine, logp: Any, uid: str, place: int) -> int:
        return original(self, logp / 0.6 if at(t) else logp, uid, place)

    p.wrap(Engine, "choose", choose)


@fault("K4", "the first answer token is never trained")
def _mask_off_by_one(p: Patcher, t: int) -> None:
    def mask(original: Any, self: Job, sample: Any, width: int) -> Any:
        out = original(self, sample, width)
        if at(t):
            out[out.index(True)] = False
        return out

    p.wrap(Job, "trained_mask", mask)


@fault("K5", "the engine's log-probabilities are shifted by one")
def _logps_shifted(p: Patcher, t: int) -> None:
    def collate(original: Any, self: Job, members: Any) -> Any:
        batch = original(self, members)
        return replace(batch, engine=batch.engine.roll(1, dims=1)) if at(t) else batch

    p.wrap(Job, "collate", collate)


@fault("K5", "the trainer's log-probabilities are shifted by one")
def _trainer_shifted(p: Patcher, t: int) -> None:
    def score(original: Any, self: Trainer, *args: Any) -> Any:
        return original(self, *args).roll(1, dims=1) if at(t) else original(self, *args)

    p.wrap(Trainer, "score", score)


@fault("K7", "the tool's text is trained")
def _tool_trained(p: Patcher, t: int) -> None:
    def mask(original: Any, self: Job, sample: Any, width: int) -> Any:
        out = original(self, sample, width)
        if at(t):
            for place, token in enumerate(sample.tokens):
                out[place] = out[place] or token == TOOL
        return out

    p.wrap(Job, "trained_mask", mask)


@fault("K8", "behaviour log-probabilities are not those of the sampling")
def _behaviour_recomputed(p: Patcher, t: int) -> None:
    def collate(original: Any, self: Job, members: Any) -> Any:
        batch = original(self, members)
        return replace(batch, engine=batch.old.clone() + 0.01) if at(t) else batch

    p.wrap(Job, "collate", collate)


@fault("K9", "the reference's log-probabilities come from the policy")
def _reference_from_policy(p: Patcher, t: int) -> None:
    def collate(original: Any, self: Job, members: Any) -> Any:
        batch = original(self, members)
        return replace(batch, reference=batch.old.clone()) if at(t) else batch

    p.wrap(Job, "collate", collate)


@fault("K10", "the ratio is taken over the sequence where tokens were meant")
def _ratio_over_sequence(p: Patcher, t: int) -> None:
    def loss(original: Any, self: Trainer, batch: Any, new: Any, divisor: float) -> Any:
        if not at(t):
            return original(self, batch, new, divisor)
        gap = torch.where(batch.trained, new - batch.old, 0.0).sum(dim=1, keepdim=True)
        return original(self, replace(batch, old=(new - gap).detach()), new, divisor)

    p.wrap(Trainer, "loss", loss)


@fault("K11", "the trainer's buffer is of other positions")
def _trainer_buffer_shifted(p: Patcher, t: int) -> None:
    def optimize(original: Any, self: Job, *args: Any) -> None:
        original(self, *args)
        if at(t):
            self.trainer.buffer = self.trainer.buffer.roll(1, dims=0)

    p.wrap(Job, "optimize", optimize)
