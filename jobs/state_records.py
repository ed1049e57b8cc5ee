"""The records of state: bundles saved and restored, replicas started, and what they used first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiftbook.checkpoint.compare import root
from shiftbook.jobs.lossy_sync import PART
from shiftbook.ledger.events.life import ReplicaStarted
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved, StateFirstUsed
from shiftbook.scheduler.channels import Worker
from shiftbook.scheduler.supervision import Brought


def saved_bundle(
    attempt: str, saved: Mapping[str, Any], *, iteration: int, version: int, cursor: int
) -> CheckpointSaved:
    """A bundle was saved, as whoever saved it says."""
    return CheckpointSaved(
        attempt=attempt,
        bundle=saved["bundle"],
        parent=saved.get("parent"),
        path=saved["path"],
        iteration=iteration,
        policy_version=version,
        parts=saved["parts"],
        cursor=cursor,
        bytes=saved["bytes"],
        save_s=saved["save_s"],
    )


def started(attempt: str, brought: Brought) -> ReplicaStarted:
    """A replica was brought up."""
    device = brought.status["device"]
    return ReplicaStarted(
        attempt=attempt,
        component=brought.component,
        replica=brought.replica,
        incarnation=brought.status["incarnation"],
        devices=() if device is None else (device,),
        pid=brought.status["pid"],
        node=brought.status["node"],
        start_s=brought.start_s,
    )


def restored(
    attempt: str,
    bundle: str,
    saved: CheckpointSaved,
    trainer: Brought,
    reference_prints: Mapping[str, str],
    served: str | None = None,
) -> CheckpointRestored:
    """The trainer took its state from a bundle, inference its own from the reference policy.

    ``served`` is the root of what engines hold of that version, where the bundle has it as a part.
    """
    parts = {name: value for name, value in trainer.loaded.fingerprints.items() if "/" not in name}
    parts["reference"] = root(
        {name.split("/", 1)[1]: value for name, value in reference_prints.items()}
    )
    if served is not None:
        parts[PART] = served
    return CheckpointRestored(
        attempt=attempt,
        bundle=bundle,
        kind="resume",
        iteration=saved.iteration,
        policy_version=saved.policy_version,
        parts=parts,
        cursor=saved.cursor,
        restore_s=trainer.start_s,
    )


def first_used(
    attempt: str, component: str, worker: Worker, use: Mapping[str, Any]
) -> StateFirstUsed:
    """What a worker's state was at its first unit of work after it was brought up or moved."""
    return StateFirstUsed(
        attempt=attempt,
        component=component,
        replica=worker[0],
        incarnation=worker[1],
        after=use["after"],
        use=use["use"],
        policy_version=use["version"],
        parts=use["parts"],
    )


def first_updated(
    attempt: str, report: Mapping[str, Any], status: Mapping[str, Any], version: int
) -> StateFirstUsed:
    """What a trainer rank's state was before its first update; ``version`` is that state's."""
    return first_used(
        attempt,
        "trainer",
        (status["replica"], status["incarnation"]),
        {
            "after": report["first_use_after"],
            "use": "update",
            "version": version,
            "parts": report["before"],
        },
    )
