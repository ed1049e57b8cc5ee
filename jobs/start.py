"""Where an attempt starts: from the base policy, or from the last bundle that the ledger knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.bundle import external_part, save_bundle
from shiftbook.jobs.config import BUNDLE_PARTS, JobConfig, bundle_digests
from shiftbook.jobs.lossy_sync import PART
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.ledger import Ledger


@dataclass(frozen=True)
class Start:
    """The state that an attempt begins with."""

    parent: str | None
    bundle: str | None
    path: str | None
    iteration: int
    version: int
    cursor: int
    saved: CheckpointSaved | None = None
    """The event of the bundle; None at the beginning."""


def resume_point(ledger: Ledger, config: JobConfig) -> Start:
    """The last bundle in the ledger, or the beginning where there is none."""
    job = ledger.state().job(config.job)
    saved = job.last_bundle
    if saved is None:
        return Start(job.attempt, None, None, 0, 0, 0)
    return Start(
        job.attempt,
        saved.bundle,
        saved.path,
        saved.iteration,
        saved.policy_version,
        saved.cursor,
        saved,
    )


def first_bundle(config: JobConfig, attempt: str) -> dict[str, Any]:
    """Save the bundle of iteration 0: the base policy, its masters and a fresh optimizer."""
    from shiftbook.jobs.optimizer import Adam, masters_of
    from shiftbook.jobs.policy_file import load_policy

    path = Path(config.base_policy)
    policy = load_policy(path)
    masters = masters_of(policy)
    lossy = config.sync_encoding == "lossy"
    Path(config.bundles).mkdir(parents=True, exist_ok=True)
    saved = save_bundle(
        config.bundles,
        {
            "job": config.job,
            "attempt": attempt,
            "iteration": 0,
            "policy_version": 0,
            "sampler": {"epoch": 0, "position": 0},
            "in_flight_uids": (),
            **bundle_digests(config),
            "scheduler": {"step": 0},
        },
        {
            "model": policy,
            "masters": masters,
            "optimizer": Adam(masters).tensors(masters),
            **({PART: policy} if lossy else {}),
        },
        external={"reference": external_part(path, kind="reference", root_dir=config.bundles)},
        declared=(*BUNDLE_PARTS, *((PART,) if lossy else ())),
    )
    return {
        "bundle": saved.bundle_id,
        "path": str(saved.path),
        "parts": saved.manifest.part_roots,
        "bytes": saved.manifest.bytes,
        "save_s": 0.0,
    }
