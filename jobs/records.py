"""The training record of one iteration: events and their evidence rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from shiftbook.jobs.grpo import advantages
from shiftbook.jobs.iteration import Iteration
from shiftbook.ledger.digests import (
    consumed_digest,
    generated_digest,
    logp_digest,
    rewarded_digest,
    token_digest,
)
from shiftbook.ledger.events.training import (
    BatchConsumed,
    SamplesDrawn,
    SamplesGenerated,
    SamplesRewarded,
    UpdateApplied,
    VirtualRank,
)
from shiftbook.ledger.evidence import write_segment

SCORER = "exact-match"


def drawn(attempt: str, iteration: Iteration, rule: str, seed: int) -> SamplesDrawn:
    """The prompts of an iteration, in draw order."""
    first = iteration.draws[0]
    return SamplesDrawn(
        attempt=attempt,
        iteration=iteration.number,
        rule=rule,
        seed=seed,
        epoch=first.epoch,
        start=first.ordinal,
        indices=tuple(draw.index for draw in iteration.draws),
        group_size=iteration.group_size,
    )


def generated(
    attempt: str, iteration: Iteration, version: int, folder: Path | str
) -> tuple[SamplesGenerated, SamplesRewarded]:
    """All samples of an iteration and their rewards; segments are durable on return."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "uid", "group", "turns", "tokens", "token_digest", "logp_digest",
            "version_min", "version_max", "replica", "incarnation",
        )
    }  # fmt: skip
    rewards: dict[str, list[Any]] = {"uid": [], "token_digest": [], "reward": [], "scorer": []}
    name: str
    value: Any
    sampled = 0
    for uid, sample in iteration.rows():
        episode = sample.episode
        versions = [v for v, on in zip(episode.versions, episode.mask, strict=True) if on]
        digest = token_digest(episode.tokens)
        sampled += len(versions)
        for name, value in (
            ("uid", uid),
            ("group", iteration.group_of(uid)),
            ("turns", len(episode.turns)),
            ("tokens", len(episode.tokens)),
            ("token_digest", digest),
            ("logp_digest", logp_digest(np.asarray(episode.logps, np.float32).tolist())),
            ("version_min", min(versions)),
            ("version_max", max(versions)),
            ("replica", sample.worker[0]),
            ("incarnation", sample.worker[1]),
        ):
            columns[name].append(value)
        for name, value in (
            ("uid", uid),
            ("token_digest", digest),
            ("reward", float(episode.reward)),
            ("scorer", SCORER),
        ):
            rewards[name].append(value)
    triples = zip(columns["uid"], columns["token_digest"], columns["logp_digest"], strict=True)
    scored = zip(rewards["uid"], rewards["token_digest"], rewards["reward"], strict=True)
    return (
        SamplesGenerated(
            attempt=attempt,
            iteration=iteration.number,
            count=len(columns["uid"]),
            tokens=sum(columns["tokens"]),
            sampled_tokens=sampled,
            policy_version=version,
            digest=generated_digest(triples),
            segment=write_segment(folder, columns),
        ),
        SamplesRewarded(
            attempt=attempt,
            iteration=iteration.number,
            count=len(rewards["uid"]),
            reward_mean=iteration.reward_mean(),
            digest=rewarded_digest(scored),
            segment=write_segment(folder, rewards),
        ),
    )


def consumed(
    attempt: str, iteration: Iteration, version: int, plan: VirtualRankPlan, folder: Path | str
) -> BatchConsumed:
    """The samples as the update consumed them, taken from the batches that went into it."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "uid", "token_digest", "reward", "advantage", "group", "virtual_rank", "tokens",
        )
    }  # fmt: skip
    version_min = version
    for group in sorted(iteration.referenced):
        batch = iteration.referenced[group]
        lengths = [len(e.tokens) for e in iteration.episodes(group)]
        version_min = min(version_min, int(batch.versions[batch.mask].min()))
        for row, (uid, advantage) in enumerate(
            zip(batch.uids, advantages(batch.rewards), strict=True)
        ):
            for name, value in (
                ("uid", uid),
                ("token_digest", token_digest(batch.tokens[row, : lengths[row]].tolist())),
                ("reward", float(batch.rewards[row])),
                ("advantage", float(advantage)),
                ("group", group),
                ("virtual_rank", plan.rank_of(group)),
                ("tokens", int(batch.mask[row].sum())),
            ):
                columns[name].append(value)
    pairs = zip(columns["uid"], columns["token_digest"], strict=True)
    return BatchConsumed(
        attempt=attempt,
        iteration=iteration.number,
        count=len(columns["uid"]),
        tokens=sum(columns["tokens"]),
        policy_version=version,
        version_min=version_min,
        digest=consumed_digest(pairs),
        segment=write_segment(folder, columns),
    )


def updated(
    attempt: str,
    iteration: int,
    version: int,
    first: dict[str, Any],
    ranks: list[tuple[dict[str, Any], dict[str, Any]]],
    groups_per_rank: int,
) -> UpdateApplied:
    """The optimizer step: ``first`` is rank 0's report, ``ranks`` pairs each report with the
    status of the process that made it."""
    before, after = first["before"], first["after"]
    places = [
        VirtualRank(
            virtual_rank=rank, pid=status["pid"], device=status["device"], groups=groups_per_rank
        )
        for report, status in ranks
        for rank in report["block"]
    ]
    return UpdateApplied(
        attempt=attempt,
        iteration=iteration,
        policy_version=version,
        params_before=before["model"],
        params_after=after["model"],
        masters_before=before["masters"],
        masters_after=after["masters"],
        optimizer_before=before["optimizer"],
        optimizer_after=after["optimizer"],
        optimizer_step=first["step"],
        learning_rate=first["learning_rate"],
        tokens=first["tokens"],
        divisor=float(first["tokens"]),
        loss=first["loss"],
        kl=first["kl"],
        grad_norm=first["grad_norm"],
        clipped=first["clipped"],
        skipped=False,
        virtual_ranks=tuple(sorted(places, key=lambda place: place.virtual_rank)),
    )
