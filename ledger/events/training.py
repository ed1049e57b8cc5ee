"""Events of the training record: which samples were drawn, made, rewarded, dropped and consumed."""

from __future__ import annotations

from typing import Literal

from shiftbook.ledger.events.base import Count, Event, Hex128, Part, Segment, Sha256


class SamplesDrawn(Event):
    """Prompts were drawn from the declared order; each gives ``group_size`` samples.

    A sample's uid is ``draw ordinal/member``.
    """

    attempt: str
    iteration: Count
    rule: str
    seed: int
    epoch: Count
    start: Count
    """Draw ordinal of the first prompt."""
    indices: tuple[Count, ...]
    """Dataset index of each prompt, in order."""
    group_size: Count
    prompt_digests: tuple[Hex128, ...] | None = None
    """Token digest of each prompt as it was fed, in the same order."""


class Transform(Part):
    """How a token was drawn from the policy's distribution, and what its log-probability is of."""

    temperature: float
    top_p: float
    log_probs: Literal["processed", "raw"]


class SamplesGenerated(Event):
    """The samples of one iteration; rows uid, group, turns, tokens, token_digest, logp_digest,
    version_min, version_max, replica, incarnation stand in the segment, and where they are
    recorded mask_digest, prompt_digest, stream and cache_version_min, and span_versions,
    span_tokens, span_incarnations (sampled tokens by what made them, of a sample of several), begun
    and ended (weight syncs begun and ended by then); null for a sample without."""

    schema_ = 2  # the segment names the types of its columns

    attempt: str
    iteration: Count
    count: Count
    tokens: Count
    sampled_tokens: Count
    policy_version: Count
    digest: Sha256
    """SHA-256 over uid, token and log-probability digests in uid order."""
    segment: Segment
    transform: Transform | None = None


class SamplesRewarded(Event):
    """Rewards of one iteration; rows uid, token_digest, reward, scorer stand in the segment."""

    schema_ = 2  # the segment names the types of its columns

    attempt: str
    iteration: Count
    count: Count
    reward_mean: float
    digest: Sha256
    segment: Segment


class SamplesDropped(Event):
    """Samples that will never be consumed, each with its reason."""

    attempt: str
    iteration: Count
    uids: tuple[str, ...]
    reason: str


class BatchConsumed(Event):
    """Samples as an update consumed them; rows uid, token_digest, reward, advantage, group,
    virtual_rank, tokens stand in the segment, and where they are recorded mask_digest,
    logp_digest (of the behaviour log-probabilities that the loss used) and proximal_digest (of
    those that its ratio is taken against); null for a sample without."""

    schema_ = 2  # the segment names the types of its columns

    attempt: str
    iteration: Count
    count: Count
    tokens: Count
    policy_version: Count
    version_min: Count
    digest: Sha256
    """SHA-256 over uid and token digest in uid order."""
    segment: Segment


class VirtualRank(Part):
    """Where one virtual rank ran at the update."""

    virtual_rank: Count
    pid: Count
    device: str
    groups: Count


class MicroBatch(Part):
    """One accumulation of the gradient: what it added, and by what its loss was divided."""

    rank: Count
    samples: Count
    tokens: Count
    divisor: float
    first_mask: Hex128 | None = None
    """Digest of the dropout masks that the first forward drew."""
    recomputed_mask: Hex128 | None = None
    """Digest of those that the recomputed forward drew; absent where nothing is recomputed."""
    mask_size: Count | None = None
    """Elements that dropout drew for."""
    masked: Count | None = None
    """Those that it left out."""


class RankState(Part):
    """One physical rank after the update; equal on all of them."""

    rank: Count
    params: Hex128
    gradient: Hex128 | None = None
    """Root of the gradient that it applied."""
    scale: float | None = None
    """Loss scale."""


class ModelParallelMember(Part):
    """One rank of a model-parallel group after the update."""

    rank: Count
    copies: Hex128 | None = None
    """Root of the tensors that every rank of the group holds whole, as this one holds them."""
    differing: tuple[str, ...] = ()
    """Names of the first of them that are not as the first rank of the group has them."""
    fed: Hex128 | None = None
    """Digest over the token ids that it computed in the update, row by row."""


class ModelParallelGroup(Part):
    """Ranks that share one model: some tensors are cut over them, each has a copy of the others."""

    name: str
    members: tuple[ModelParallelMember, ...]


class LossTerm(Part):
    """One declared term of the loss: its coefficient, value and part of the gradient."""

    coefficient: float
    value: float
    gradient_norm: float
    """Norm of its part of the loss's gradient with respect to the log-probabilities."""


class Controller(Part):
    """A value that a rule moves, such as the KL coefficient, before and after the update."""

    before: float
    after: float
    inputs: dict[str, float] = {}
    """What the rule read, by the names of the rule."""


class Residual(Part):
    """A computation done again from its recorded inputs: how far the job's result lies from it."""

    largest: float
    """Largest absolute difference."""
    allowed: float
    """What rounding on this stack explains, as measured or derived where it was recomputed."""
    compared: Count


class UpdateApplied(Event):
    """One optimizer step: what went in and what came out."""

    attempt: str
    iteration: Count
    policy_version: Count
    """Version that the update made."""
    params_before: Hex128
    params_after: Hex128
    masters_before: Hex128
    masters_after: Hex128
    optimizer_before: Hex128
    optimizer_after: Hex128
    optimizer_step: Count
    learning_rate: float
    tokens: Count
    divisor: float
    loss: float
    kl: float
    grad_norm: float
    clipped: bool
    skipped: bool
    virtual_ranks: tuple[VirtualRank, ...]
    cast_before: Hex128 | None = None
    """Root of the masters cast to the policy's dtype."""
    cast_after: Hex128 | None = None
    ema_before: Hex128 | None = None
    ema_after: Hex128 | None = None
    optimizer_step_least: Count | None = None
    """Least counter over all parameters."""
    optimizer_step_most: Count | None = None
    scheduler_step: Count | None = None
    """Updates that the learning-rate schedule has counted after this one."""
    micro_batches: tuple[MicroBatch, ...] | None = None
    ranks: tuple[RankState, ...] | None = None
    model_parallel: tuple[ModelParallelGroup, ...] | None = None
    loss_terms: dict[str, LossTerm] | None = None
    controllers: dict[str, Controller] | None = None
    recomputed: dict[str, Residual] | None = None
    unmoved: tuple[str, ...] | None = None
    """Parameters with a gradient whose masters kept every bit; empty where all of them moved."""
    moved_frozen: tuple[str, ...] | None = None
    """Parameters without a gradient whose masters changed."""
    logp_gap: float | None = None
    """Mean |log-probability of the trainer - of the engine| over the trained tokens, in nats; the
    trainer's under the weights that sampled them, in the numbers that the loss used."""
    segment: Segment | None = None
    """Lists in rows that have no room here, such as ``micro_batches`` (`ledger.long_fields`)."""
