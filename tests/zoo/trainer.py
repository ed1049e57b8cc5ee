"""The trainer: physical ranks that each hold bf16 model, fp32 masters, moments and an average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shiftbook.checkpoint.recorder_loss import PolicyLoss
from shiftbook.checkpoint.recorder_step import Adam, StepProbe
from shiftbook.checkpoint.recorder_update import UpdateRecord
from tests.zoo.model import (
    DROPOUT,
    HIDDEN,
    Tensors,
    first_parameters,
    forward,
    logical,
    positions,
)

VIRTUAL_RANKS = 2
RATE, WARMUP = 2e-2, 3
BETAS, EPSILON, DECAY = (0.9, 0.99), 1e-6, 0.01
CLIP_NORM, CLIP_RANGE, TRUNCATION = 1.0, 0.2, 2.0
EMA_DECAY = 0.9
KL_FIRST, KL_TARGET, KL_GAIN, KL_LIMIT = 0.05, 0.02, 0.5, 0.2
SCALE = 1024.0


@dataclass
class Batch:
    """One virtual rank's share: tensors (samples, tokens); rows of one group are together."""

    uids: list[str]
    tokens: torch.Tensor
    trained: torch.Tensor
    engine: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    rewards: list[float]
    lengths: list[int]
    groups: list[str]
    versions: list[int | None]
    """Version of each sample's tokens; None where they are of several."""
    scored_at: int = 0
    """Version of the model that ``old`` was computed with."""


@dataclass
class Rank:
    """One physical rank: a whole replica of the training state."""

    number: int
    model: Tensors
    masters: Tensors
    first: Tensors
    second: Tensors
    ema: Tensors
    step: int = 0
    scale: float = SCALE
    gradients: dict[int, Tensors] = field(default_factory=dict)
    """Accumulators by virtual rank."""
    reduced: Tensors = field(default_factory=dict)

    def cast(self) -> Tensors:
        """Masters in the model's dtype."""
        return {name: tensor.bfloat16() for name, tensor in self.masters.items()}

    def refresh_model(self) -> None:
        """Copy the masters into the model that computes."""
        for name, tensor in self.cast().items():
            self.model[name].data.copy_(tensor)


def new_rank(number: int, parameters: Tensors) -> Rank:
    """A rank at the start of training."""
    masters = {name: tensor.clone() for name, tensor in parameters.items()}
    rank = Rank(
        number=number,
        model={n: t.bfloat16().requires_grad_(True) for n, t in masters.items()},
        masters=masters,
        first={n: torch.zeros_like(t) for n, t in masters.items()},
        second={n: torch.zeros_like(t) for n, t in masters.items()},
        ema={n: t.clone() for n, t in masters.items()},
    )
    return rank


class Trainer:
    """All ranks, the random streams of the virtual ranks, the reference and the controllers."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.seed = seed
        parameters = first_parameters(seed)
        self.ranks = [new_rank(number, parameters) for number in range(ranks)]
        self.reference = {n: t.bfloat16() for n, t in parameters.items()}
        self.buffer = positions()
        self.streams = {v: self.new_stream(v) for v in range(VIRTUAL_RANKS)}
        self.shadows: dict[int, torch.Generator] = {}
        self.kl_coefficient = KL_FIRST
        self.rewards_seen = 0
        self.scheduled = 0
        self.version = 0
        self.frozen_reference = True

    def new_stream(self, virtual_rank: int) -> torch.Generator:
        """Generator of a virtual rank's dropout."""
        return torch.Generator().manual_seed(self.seed * 1000 + 17 + virtual_rank)

    # -- forward ---------------------------------------------------------------------------

    def keep_mask(self, stream: torch.Generator, shape: Sequence[int]) -> torch.Tensor:
        """Dropout mask, scaled, from a stream."""
        drawn = torch.rand(*shape, HIDDEN, generator=stream)
        return (drawn >= DROPOUT).float() / (1 - DROPOUT)

    def score(self, model: Tensors, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities without dropout or gradient."""
        with torch.no_grad():
            return forward(model, self.buffer, tokens)

    def policy_logps(
        self, rank: Rank, virtual_rank: int, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With dropout and gradient, its masks drawn twice as activation checkpointing does.

        What the first forward gives is what the recomputed one gives from the same mask, and nobody
        reads it: it is left out.
        """
        stream = self.streams[virtual_rank]
        state = stream.get_state()
        first = self.keep_mask(stream, tokens.shape)
        again = self.recompute_mask(stream, state, tokens)
        logps = forward(rank.model, self.buffer, tokens, again)
        return logps, first, again

    def recompute_mask(
        self, stream: torch.Generator, state: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """The same mask again, from the state before the first forward."""
        stream.set_state(state)
        return self.keep_mask(stream, tokens.shape)

    # -- loss and gradient -----------------------------------------------------------------

    def loss(self, batch: Batch, new: torch.Tensor, divisor: float) -> torch.Tensor:
        """Clipped policy loss with truncated importance weights, and a KL term."""
        on = batch.trained
        ratio = torch.exp(torch.where(on, new - batch.old, 0.0))
        weight = self.truncated(torch.exp(torch.where(on, batch.old - batch.engine, 0.0)))
        advantages = batch.advantages[:, None]
        clipped = torch.clamp(ratio, 1 - CLIP_RANGE, 1 + CLIP_RANGE)
        policy = -torch.minimum(ratio * advantages, clipped * advantages) * weight
        total = torch.where(on, policy + self.kl_coefficient * self.kl(batch, new), 0.0)
        return total.sum() / divisor

    def truncated(self, weight: torch.Tensor) -> torch.Tensor:
        """Importance weights capped."""
        return torch.clamp(weight, max=TRUNCATION)

    def kl(self, batch: Batch, new: torch.Tensor) -> torch.Tensor:
        """Low-variance KL estimate to the reference, token by token."""
        gap = torch.where(batch.trained, batch.reference - new, 0.0)
        return torch.exp(gap) - gap - 1

    def accumulate(
        self,
        rank: Rank,
        virtual_rank: int,
        batch: Batch,
        divisor: float,
        record: UpdateRecord,
        declared: PolicyLoss,
    ) -> float:
        """One micro batch: forward, backward, gradient added to its accumulator."""
        new, first_mask, again_mask = self.policy_logps(rank, virtual_rank, batch.tokens)
        loss = self.loss(batch, new, divisor)
        declared.watch(
            new=new,
            old=batch.old,
            engine=batch.engine,
            reference=batch.reference,
            advantages=batch.advantages,
            trained=batch.trained,
            divisor=divisor,
            value=loss,
            scale=rank.scale,
        )
        self.backward(loss * rank.scale)
        seen = {
            n: torch.zeros(t.shape) if t.grad is None else t.grad.float() / rank.scale
            for n, t in rank.model.items()
        }
        own = self.take_gradients(rank)
        self.add(rank, virtual_rank, own)
        again = torch.rand(first_mask.shape, generator=self.shadows[virtual_rank])
        gap = (first_mask - torch.where(again < DROPOUT, 0.0, 1 / (1 - DROPOUT))).abs().max()
        record.recomputed("dropout mask", float(gap), allowed=1e-6, compared=first_mask.numel())
        record.micro_batch(
            rank=rank.number,
            virtual_rank=virtual_rank,
            groups=batch.groups,
            samples=len(batch.uids),
            tokens=int(batch.trained.sum()),
            divisor=divisor,
            gradient=seen,
            first_mask=first_mask,
            recomputed_mask=again_mask,
        )
        return float(loss.detach())

    def backward(self, loss: torch.Tensor) -> None:
        """Gradient of the loss."""
        loss.backward()

    def take_gradients(self, rank: Rank) -> Tensors:
        """The micro batch's own gradient in float32; the model's is cleared."""
        own = {}
        for name, tensor in rank.model.items():
            grad = tensor.grad
            own[name] = torch.zeros(tensor.shape) if grad is None else grad.float() / rank.scale
            tensor.grad = None
        return own

    def add(self, rank: Rank, virtual_rank: int, own: Tensors) -> None:
        """Add to the accumulator of a virtual rank."""
        held = rank.gradients.setdefault(virtual_rank, {})
        for name, tensor in own.items():
            held[name] = held[name] + tensor if name in held else tensor.clone()

    def clear(self, rank: Rank) -> None:
        """Empty the accumulators."""
        rank.gradients.clear()

    def all_reduce(self) -> Tensors:
        """Sum over virtual ranks in their order, whatever rank holds them."""
        by_virtual = {v: g for rank in self.ranks for v, g in rank.gradients.items()}
        total: Tensors = {}
        for virtual_rank in sorted(by_virtual):
            for name, tensor in by_virtual[virtual_rank].items():
                total[name] = total[name] + tensor if name in total else tensor.clone()
        return total

    def scatter(self, total: Tensors) -> None:
        """Hand the sum to each rank."""
        for rank in self.ranks:
            rank.reduced = {name: tensor.clone() for name, tensor in total.items()}

    def norm(self, gradients: Tensors) -> float:
        """Global 2-norm."""
        return float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values())))

    def clip(self, rank: Rank, norm: float) -> bool:
        """Scale the gradient down to the largest norm; True where it was."""
        if norm <= CLIP_NORM:
            return False
        for tensor in rank.reduced.values():
            tensor.mul_(CLIP_NORM / (norm + 1e-6))
        return True

    # -- step ------------------------------------------------------------------------------

    def learning_rate(self) -> float:
        """Linear warm-up over the first updates, then constant."""
        return RATE * min(1.0, (self.scheduled + 1) / WARMUP)

    def adam(self, rank: Rank, rate: float) -> None:
        """AdamW on the masters."""
        rank.step += 1
        for name, master in rank.masters.items():
            g = rank.reduced[name]
            rank.first[name].mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
            rank.second[name].mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            top = rank.first[name] / (1 - BETAS[0] ** rank.step)
            root = torch.sqrt(rank.second[name] / (1 - BETAS[1] ** rank.step))
            master.mul_(1 - rate * DECAY)
            master.sub_(rate * top / (root + EPSILON))

    def average(self, rank: Rank) -> None:
        """Exponential moving average of the masters."""
        for name, master in rank.masters.items():
            rank.ema[name].mul_(EMA_DECAY).add_(master, alpha=1 - EMA_DECAY)

    def move_controllers(self, kl: float, rewards: int) -> None:
        """Adaptive KL coefficient (arXiv 1909.08593) and the count of rewards."""
        error = min(max(kl / KL_TARGET - 1, -KL_LIMIT), KL_LIMIT)
        self.kl_coefficient = self.kl_coefficient * (1 + KL_GAIN * error)
        self.rewards_seen += rewards

    def place(self, virtual_rank: int) -> Rank:
        """The physical rank of a virtual one: aligned blocks."""
        return self.ranks[virtual_rank * len(self.ranks) // VIRTUAL_RANKS]

    def update(
        self,
        batches: Mapping[int, list[Batch]],
        divisor: float,
        record: UpdateRecord,
        declared: PolicyLoss,
        probe: StepProbe,
    ) -> None:
        """One whole update over all virtual ranks."""
        lead = self.ranks[0]
        probe.begin(lead.masters, lead.first, lead.second, ema=lead.ema, ema_decay=EMA_DECAY)
        # The probe draws the masks again, from the states that stand before the update.
        self.shadows = {
            v: torch.Generator().set_state(stream.get_state()) for v, stream in self.streams.items()
        }
        loss = 0.0
        for rank in self.ranks:
            self.clear(rank)
        for virtual_rank, micro in batches.items():
            for batch in micro:
                loss += self.accumulate(
                    self.place(virtual_rank), virtual_rank, batch, divisor, record, declared
                )
        self.scatter(self.all_reduce())
        norm = self.norm(lead.reduced)
        if self.overflow(norm):
            self.skip(record, loss, norm, declared)
            return
        clipped = [self.clip(rank, norm) for rank in self.ranks]
        probe.reduced(lead.reduced, norm)
        rate = self.learning_rate()
        before = {name: tensor.clone() for name, tensor in lead.masters.items()}
        for rank in self.ranks:
            self.adam(rank, rate)
            self.average(rank)
            rank.refresh_model()
        self.scheduled += 1
        self.version += 1
        kl = declared.terms()["kl"].value
        coefficient, count = self.kl_coefficient, self.rewards_seen
        rewards = sum(len(b.rewards) for micro in batches.values() for b in micro)
        self.move_controllers(kl, rewards)
        record.controller("kl_coefficient", coefficient, self.kl_coefficient, kl=kl)
        record.controller("rewards_seen", count, self.rewards_seen, added=rewards)
        for rank in self.ranks:
            self.tell(record, rank, rank.reduced)
        record.applied(
            version=self.version,
            optimizer_step=lead.step,
            learning_rate=rate,
            loss=loss,
            kl=kl,
            grad_norm=norm,
            clipped=clipped[0],
            step_range=(min(r.step for r in self.ranks), max(r.step for r in self.ranks)),
            scheduler_step=self.scheduled,
            unmoved=tuple(
                n
                for n, old in before.items()
                if lead.reduced[n].any() and torch.equal(old, lead.masters[n])
            ),
            moved_frozen=tuple(
                n
                for n, old in before.items()
                if n not in lead.reduced and not torch.equal(old, lead.masters[n])
            ),
        )

    def tell(self, record: UpdateRecord, rank: Rank, gradient: Tensors | None = None) -> None:
        """Hand a rank's state to the recorder."""
        record.rank(
            rank.number,
            {**logical(rank.model), "step": rank.step},
            gradient=gradient,
            scale=rank.scale,
        )

    def overflow(self, norm: float) -> bool:
        """True where the gradient is not finite and the step is to be skipped."""
        return not math.isfinite(norm)

    def skip(self, record: UpdateRecord, loss: float, norm: float, declared: PolicyLoss) -> None:
        """Count a version and change nothing."""
        self.version += 1
        for rank in self.ranks:
            self.tell(record, rank)
        record.controller("kl_coefficient", self.kl_coefficient, self.kl_coefficient)
        record.controller("rewards_seen", self.rewards_seen, self.rewards_seen)
        record.applied(
            version=self.version,
            optimizer_step=self.ranks[0].step,
            learning_rate=self.learning_rate(),
            loss=loss,
            kl=declared.terms()["kl"].value,
            grad_norm=norm,
            skipped=True,
            step_range=(min(r.step for r in self.ranks), max(r.step for r in self.ranks)),
            scheduler_step=self.scheduled,
        )

    # -- parts -----------------------------------------------------------------------------

    def published(self) -> Tensors:
        """What engines get: logical bf16 tensors, the tied head and the buffer among them."""
        model = {n: t.detach() for n, t in self.ranks[0].model.items()}
        return {**logical(model, tied=True), "positions": self.buffer}

    def state(self) -> dict[str, Any]:
        """Parts of the live state by name, for the recorder."""
        lead = self.ranks[0]
        moments = {f"{n}/first": t for n, t in logical(lead.first).items()}
        moments |= {f"{n}/second": t for n, t in logical(lead.second).items()}
        return {
            "model": self.published(),
            "masters": logical(lead.masters),
            "optimizer": {**moments, "step": lead.step},
            "cast": self.cast_masters(),
            "ema": logical(lead.ema),
            # Under the policy's names, so that a refresh can be compared with it.
            "reference": {**logical(self.reference, tied=True), "positions": positions()},
            "controllers": {"kl": self.kl_coefficient, "rewards": self.rewards_seen},
            "scheduler": {"step": self.scheduled},
            "scaler": {"scale": lead.scale},
        }

    def cast_masters(self) -> Tensors:
        """Masters in the model's dtype, for the recorder alone."""
        cast = {n: t.to(torch.bfloat16) for n, t in self.ranks[0].masters.items()}
        return {**logical(cast, tied=True), "positions": positions()}

    def random_states(self) -> dict[str, torch.Tensor]:
        """State of every stream by owner."""
        return {f"dropout/{v}": stream.get_state() for v, stream in self.streams.items()}

    # -- resize, save, load ----------------------------------------------------------------

    def resize(self, ranks: int) -> None:
        """Go on with another number of physical ranks: each new one copies the first."""
        self.ranks = [self.copy_of(self.ranks[0], number) for number in range(ranks)]

    def copy_of(self, rank: Rank, number: int) -> Rank:
        """A rank with the same state."""

        def copied(tensors: Tensors) -> Tensors:
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}

        return Rank(
            number=number,
            model={n: t.detach().clone().requires_grad_(True) for n, t in rank.model.items()},
            masters=copied(rank.masters),
            first=copied(rank.first),
            second=copied(rank.second),
            ema=copied(rank.ema),
            step=rank.step,
            scale=rank.scale,
        )


ADAM = Adam(*BETAS, epsilon=EPSILON, weight_decay=DECAY)
