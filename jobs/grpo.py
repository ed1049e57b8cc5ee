"""GRPO on groups of episodes: batches, advantages, reference log-probabilities and the loss.

Source: group-relative policy optimisation (Shao et al., "DeepSeekMath", arXiv 2402.03300) with the
clipped ratio of PPO (Schulman et al., arXiv 1707.06347) against the engine's own log-probabilities
and the k3 estimator of the KL divergence to a frozen reference policy. The loss of a group is a
**sum** over sampled tokens; the update divides once, by the token count of all groups. So gradients
of groups add up, in whatever processes they were computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shiftbook.checkpoint.elastic import GroupLoss
from shiftbook.jobs import tokenizer
from shiftbook.jobs.errors import TrainingError
from shiftbook.jobs.keyed_rng import hash64, parse_uid
from shiftbook.jobs.loss_watch import watch
from shiftbook.jobs.model import ModelConfig, PolicyModel, forward_train, upcast
from shiftbook.jobs.task import EpisodeState

GROUP_SIZE = 8
PAD_MULTIPLE = 16
_ADVANTAGE_FLOOR = 1e-4
_DROPOUT_STREAM = 0xD209


@dataclass(frozen=True)
class GrpoConfig:
    """Coefficients of the loss: ratio clip, KL weight, dropout probability."""

    clip_epsilon: float = 0.2
    kl_coefficient: float = 0.01
    dropout: float = 0.0


@dataclass
class GroupBatch:
    """One group of finished episodes as numpy arrays, padded to a multiple of 16 tokens.

    ``tokens`` int64 [G, T]; ``mask`` bool [G, T], true where the policy sampled the token;
    ``behaviour_logps`` and ``reference_logps`` float32 [G, T], 0 outside the mask (the latter None
    until computed); ``versions`` int64 [G, T], -1 outside the mask; ``rewards`` float32 [G].
    """

    draw: int
    uids: list[str]
    tokens: np.ndarray
    mask: np.ndarray
    behaviour_logps: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    reference_logps: np.ndarray | None = None

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the loss sums over."""
        return int(self.mask.sum())

    def with_reference(self, logps: np.ndarray) -> GroupBatch:
        """The same batch carrying reference log-probabilities [G, T]."""
        return replace(self, reference_logps=logps)


def make_group_batch(episodes: Sequence[EpisodeState]) -> GroupBatch:
    """The batch of one group's finished episodes, in member order.

    Raises ``TrainingError`` unless all are done, of one draw, and members 0, 1, 2, ….
    """
    ordered = sorted(episodes, key=lambda episode: parse_uid(episode.uid)[1])
    keys = [parse_uid(episode.uid) for episode in ordered]
    draws = {draw for draw, _ in keys}
    if len(draws) != 1 or [member for _, member in keys] != list(range(len(keys))):
        raise TrainingError(
            f"expected members 0..{len(keys) - 1} of one draw, found "
            f"{[episode.uid for episode in ordered]}; collect one whole group"
        )
    unfinished = [episode.uid for episode in ordered if not episode.done]
    if unfinished:
        raise TrainingError(f"expected finished episodes, found {unfinished} still open; wait")
    longest = max(len(episode.tokens) for episode in ordered)
    length = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    shape = (len(ordered), min(length, max(longest, ordered[0].context)))
    tokens = np.full(shape, tokenizer.PAD, np.int64)
    mask, logps = np.zeros(shape, bool), np.zeros(shape, np.float32)
    versions = np.full(shape, -1, np.int64)
    for row, episode in enumerate(ordered):
        end = len(episode.tokens)
        tokens[row, :end] = episode.tokens
        mask[row, :end] = episode.mask
        logps[row, :end] = episode.logps
        versions[row, :end] = episode.versions
    rewards = np.array([episode.reward for episode in ordered], np.float32)
    uids = [episode.uid for episode in ordered]
    return GroupBatch(draws.pop(), uids, tokens, mask, logps, versions, rewards)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Group-relative advantages float32 [G]: (r - mean) / (standard deviation + 1e-4)."""
    r = rewards.astype(np.float64)
    relative: np.ndarray = (r - r.mean()) / (r.std() + _ADVANTAGE_FLOOR)
    return relative.astype(np.float32)


def _token_logps(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability [G, T-1] of each token from the second on, given those before it."""
    logps = torch.log_softmax(logits, dim=-1)
    return logps.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)


def reference_logps(
    params: Mapping[str, Tensor], batch: GroupBatch, config: ModelConfig | None = None
) -> np.ndarray:
    """Log-probabilities float32 [G, T] of the sampled tokens under ``params``; 0 elsewhere.

    ``params`` may be bfloat16 (upcast here) or float32.
    """
    tokens = torch.tensor(batch.tokens)
    with torch.inference_mode():
        logits = forward_train(config or ModelConfig(), _as_float32(params), tokens[:, :-1])
        logps = _token_logps(logits, tokens)
    out = np.zeros(batch.tokens.shape, np.float32)
    out[:, 1:] = np.where(batch.mask[:, 1:], logps.numpy(), 0.0)
    return out


class GrpoLoss:
    """The loss function of the reference job's virtual ranks.

    Called with the model (float32 values of the published policy) and (batch, iteration); the
    masks of dropout are keyed by (seed, iteration, draw). Loss and gradient are computed again by
    other code (``loss_watch``), into the statistics.
    """

    def __init__(self, config: GrpoConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def __call__(self, model: PolicyModel, item: tuple[GroupBatch, int]) -> GroupLoss:
        """Summed loss of one group over its sampled tokens.

        Per sampled token: -min(ρA, clip(ρ, 1±ε)A) + β·(e^d - d - 1) with ρ = π/behaviour and
        d = log reference - log π. ``logp_gap_sum`` of the statistics is the sum over sampled tokens
        of |log π - log behaviour| in nats, ``logp_gap_max`` of the notes the largest of them.
        Raises ``TrainingError`` when the batch has no reference log-probabilities.
        """
        batch, iteration = item
        loss = self.config
        if batch.reference_logps is None:
            raise TrainingError(
                f"draw {batch.draw}: expected reference log-probabilities, found none; "
                "compute reference_logps and pass batch.with_reference(...)"
            )
        tokens = torch.tensor(batch.tokens)
        mask = torch.tensor(batch.mask[:, 1:])
        behaviour = torch.tensor(batch.behaviour_logps[:, 1:])
        reference = torch.tensor(batch.reference_logps[:, 1:])
        relative = advantages(batch.rewards)
        advantage = torch.tensor(relative).unsqueeze(1)
        generator = None
        if loss.dropout > 0.0:
            key = hash64(self.seed, _DROPOUT_STREAM, iteration, batch.draw)
            generator = torch.Generator().manual_seed(key >> 1)
        logps = _token_logps(model(tokens[:, :-1], loss.dropout, generator), tokens)
        ratio = torch.exp(logps - behaviour)
        clipped = ratio.clamp(1.0 - loss.clip_epsilon, 1.0 + loss.clip_epsilon)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        drift = reference - logps
        kl = torch.exp(drift) - drift - 1.0
        total = torch.where(mask, loss.kl_coefficient * kl - gain, 0.0).sum()
        with torch.no_grad():
            gaps = torch.where(mask, (logps - behaviour).abs(), 0.0)
            kl_sum = torch.where(mask, kl, 0.0).sum()
            clipped_tokens = (mask & (ratio != clipped)).sum()
        stats = {
            "kl_sum": kl_sum.item(),
            "logp_gap_sum": gaps.double().sum().item(),
            "clipped_tokens": float(clipped_tokens.item()),
            "reward_sum": float(batch.rewards.sum()),
            "samples": float(len(batch.uids)),
        }
        watch(
            stats,
            logps=logps,
            behaviour=batch.behaviour_logps[:, 1:],
            reference=batch.reference_logps[:, 1:],
            advantages=relative,
            mask=batch.mask[:, 1:],
            total=total,
            kl_coefficient=loss.kl_coefficient,
            clip_epsilon=loss.clip_epsilon,
        )
        return GroupLoss(
            total, batch.sampled_tokens, stats=stats, notes={"logp_gap_max": gaps.max().item()}
        )


def _as_float32(params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if all(tensor.dtype == torch.float32 for tensor in params.values()):
        return params
    return upcast(params)
