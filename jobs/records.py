"""The training record of one iteration: events and their evidence rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shiftbook.checkpoint.recorder_data import dataset_digest
from shiftbook.checkpoint.recorder_state import mask_digest
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from shiftbook.jobs.config import DATASET_SIZE, tokenizer_digest
from shiftbook.jobs.grpo import advantages
from shiftbook.jobs.iteration import Iteration
from shiftbook.jobs.keyed_rng import hash64
from shiftbook.jobs.questions import question_digests
from shiftbook.ledger.digests import (
    consumed_digest,
    generated_digest,
    logp_digest,
    rewarded_digest,
    token_digest,
)
from shiftbook.ledger.events.probes import DataBuilt, RandomStatesRecorded
from shiftbook.ledger.events.training import (
    BatchConsumed,
    MicroBatch,
    RankState,
    SamplesDrawn,
    SamplesGenerated,
    SamplesRewarded,
    Transform,
    UpdateApplied,
    VirtualRank,
)
from shiftbook.ledger.evidence import Place, write_segment

SCORER = "exact-match"
MOST_PROMPTS = 512
"""Prompts whose digests stand in the event of their draw, which has room for 60,000 bytes."""
TRANSFORM = Transform(temperature=1.0, top_p=1.0, log_probs="raw")
"""How every engine of the job draws: from the policy's own distribution."""


def drawn(attempt: str, iteration: Iteration, rule: str, seed: int) -> SamplesDrawn:
    """The prompts of an iteration, in draw order."""
    first = iteration.draws[0]
    prompts = None
    if len(iteration.draws) <= MOST_PROMPTS:
        prompts = tuple(
            token_digest(iteration.prompt(place)) for place in range(len(iteration.draws))
        )
    return SamplesDrawn(
        attempt=attempt,
        iteration=iteration.number,
        rule=rule,
        seed=seed,
        epoch=first.epoch,
        start=first.ordinal,
        indices=tuple(draw.index for draw in iteration.draws),
        group_size=iteration.group_size,
        prompt_digests=prompts,
    )


def begun(
    attempt: str, iteration: int, seed: int, place: Place
) -> tuple[DataBuilt, RandomStatesRecorded]:
    """What an attempt begins with: the data set as it is made here, and no generator at all.

    Every draw of the job is keyed by what it is for, so no random state goes on from one to the
    next, and none is lost by a move or a crash.
    """
    digests = question_digests(seed, DATASET_SIZE)
    rows = {"index": list(range(DATASET_SIZE)), "digest": list(digests)}
    return (
        DataBuilt(
            attempt=attempt,
            dataset_digest=dataset_digest(digests),
            tokenizer_digest=tokenizer_digest(),
            size=DATASET_SIZE,
            segment=write_segment(place, rows),
        ),
        RandomStatesRecorded(attempt=attempt, iteration=iteration, moment="start", states={}),
    )


def _optional(columns: dict[str, list[Any]], *names: str) -> dict[str, list[Any]]:
    """The columns without those of ``names`` that some row has no value for."""
    return {n: c for n, c in columns.items() if n not in names or None not in c}


def _stream(streams: Sequence[int | None]) -> str | None:
    """Name of a sample's randomness: from the keys that its turns were drawn with."""
    known = [key for key in streams if key is not None]
    return f"{hash64(*known):016x}" if known and len(known) == len(streams) else None


def _oldest(versions: Sequence[int | None]) -> int | None:
    """Oldest version of cached values over a sample's turns; None where an engine did not say."""
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def generated(
    attempt: str, iteration: Iteration, version: int, place: Place
) -> tuple[SamplesGenerated, SamplesRewarded]:
    """All samples of an iteration and their rewards; segments are durable on return."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "uid", "group", "turns", "tokens", "token_digest", "logp_digest",
            "version_min", "version_max", "replica", "incarnation", "mask_digest", "prompt_digest",
            "stream", "cache_version_min",
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
        prompt = episode.tokens[: len(episode.question.tokens)]
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
            ("mask_digest", mask_digest([on == 1 for on in episode.mask])),
            ("prompt_digest", token_digest(prompt)),
            ("stream", _stream(episode.streams)),
            ("cache_version_min", _oldest(episode.cache_versions)),
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
            segment=write_segment(place, _optional(columns, "stream", "cache_version_min")),
            transform=TRANSFORM,
        ),
        SamplesRewarded(
            attempt=attempt,
            iteration=iteration.number,
            count=len(rewards["uid"]),
            reward_mean=iteration.reward_mean(),
            digest=rewarded_digest(scored),
            segment=write_segment(place, rewards),
        ),
    )


def consumed(
    attempt: str, iteration: Iteration, version: int, plan: VirtualRankPlan, place: Place
) -> BatchConsumed:
    """The samples as the update consumed them, taken from the batches that went into it."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "uid", "token_digest", "reward", "advantage", "group", "virtual_rank", "tokens",
            "mask_digest", "logp_digest",
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
                ("mask_digest", mask_digest(batch.mask[row, : lengths[row]])),
                ("logp_digest", logp_digest(batch.behaviour_logps[row, : lengths[row]].tolist())),
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
        segment=write_segment(place, columns),
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
    steps = [report["step"] for report, _ in ranks]
    before, after, watched = first["before"], first["after"], first["watched"]
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
        logp_gap=first["logp_gap"],
        grad_norm=first["grad_norm"],
        clipped=first["clipped"],
        skipped=False,
        virtual_ranks=tuple(sorted(places, key=lambda place: place.virtual_rank)),
        optimizer_step_least=min(steps),
        optimizer_step_most=max(steps),
        # What each virtual rank added to the sum, which is divided once.
        micro_batches=tuple(
            MicroBatch(rank=number, samples=samples, tokens=tokens, divisor=float(first["tokens"]))
            for number, (report, _) in enumerate(ranks)
            for _, (samples, tokens) in sorted(report["added"].items())
        ),
        cast_before=watched["cast"][0],
        cast_after=watched["cast"][1],
        ranks=tuple(
            RankState(
                rank=number,
                params=report["after"]["model"],
                gradient=report["watched"]["gradient"],
            )
            for number, (report, _) in enumerate(ranks)
        ),
        loss_terms=watched["loss_terms"],
        recomputed=watched["recomputed"],
        unmoved=watched["unmoved"],
        moved_frozen=watched["moved_frozen"],
    )
