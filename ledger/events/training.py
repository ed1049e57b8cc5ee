"""Events of the training record: which samples were drawn, made, rewarded, dropped and consumed."""

from __future__ import annotations

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


class SamplesGenerated(Event):
    """The samples of one iteration; rows uid, group, turns, tokens, token_digest, logp_digest,
    version_min, version_max, replica, incarnation stand in the segment."""

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
    virtual_rank, tokens stand in the segment."""

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
