"""Where a job stands at the head of the ledger, as a document and as text."""

from __future__ import annotations

from typing import Any

from shiftbook.ledger.cli_options import clock_text
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.summary import seconds_text, size_text

Standing = dict[str, Any]


def read_standing(state: LedgerState, name: str) -> Standing:
    """Everything that a person asks first about a job."""
    job = state.job(name)
    attempt = job.current_attempt()
    return {
        "job": name,
        "status": job.status,
        "mode": job.plan.moves.mode if job.plan else None,
        "iteration": job.iteration,
        "policy_version": job.policy_version,
        "policy_fingerprint": job.policy_fingerprint,
        "attempt": job.attempt,
        "attempt_epoch": attempt.epoch if attempt else None,
        "topology": job.topology.placement(),
        "safe_mode": job.safe_mode,
        "open_operations": _open_operations(job),
        "open_sync": job.open_sync,
        "leases": [
            {"device": device, "holder": held.holder, "epoch": held.epoch}
            for device, held in sorted(state.leases.items())
            if held.job == name
        ],
        "quarantine": {
            device: operation
            for device, operation in state.quarantine.items()
            if operation in job.operations
        },
        "replicas": [
            {
                "component": replica.component,
                "replica": replica.replica,
                "devices": list(replica.devices),
                "pid": replica.pid,
                "node": replica.node,
                "incarnation": replica.incarnation,
                "version": replica.version,
            }
            for replica in sorted(job.replicas.values(), key=lambda r: (r.component, r.replica))
        ],
        "engines": [
            {
                "target": engine.target,
                "standing": engine.standing,
                "version": engine.version,
                "root": engine.root,
                "incarnation": engine.incarnation,
                "reason": engine.reason,
                "position": engine.position,
            }
            for _, engine in sorted(job.engines.items())
        ],
        "last_bundle": _bundle(job),
        "registered_bundles": [
            {
                "bundle": taken.bundle,
                "path": taken.path,
                "source": taken.source,
                "iteration": taken.iteration,
                "policy_version": taken.policy_version,
                "bytes": taken.bytes,
            }
            for taken in job.registered.values()
        ],
        "events": job.version + 1,
        "last_event_ns": job.last_event_ns,
        "position": state.position,
    }


def _open_operations(job: JobState) -> list[Standing]:
    return [
        {
            "operation": operation.operation,
            "status": operation.status,
            "strategy": operation.strategy,
            "before": operation.before.text(),
            "after": operation.after.text(),
            "proposed_ns": operation.proposed_ns,
            "last_ns": operation.last_ns,
            "epoch": operation.epoch if operation.epoch >= 0 else None,
        }
        for operation in job.operations.values()
        if operation.open
    ]


def _bundle(job: JobState) -> Standing | None:
    saved = job.last_bundle
    if saved is None:
        return None
    return {
        "bundle": saved.bundle,
        "path": saved.path,
        "iteration": saved.iteration,
        "policy_version": saved.policy_version,
        "bytes": saved.bytes,
        "save_s": saved.save_s,
    }


def standing_text(standing: Standing) -> str:
    """The document for people, one fact a line."""
    lines = [
        f"{standing['job']}  {standing['status']}  (mode {standing['mode']}, position "
        f"{standing['position']})",
        f"  iteration    {standing['iteration']}",
        f"  policy       version {standing['policy_version']}, "
        f"fingerprint {standing['policy_fingerprint'] or 'none yet'}",
        f"  attempt      {standing['attempt'] or 'none yet'}, epoch {standing['attempt_epoch']}",
        f"  safe mode    {standing['safe_mode'] or 'no'}",
    ]
    for component, devices in standing["topology"].items():
        lines.append(f"  topology     {component}: {' '.join(devices) or 'no device'}")
    lines += [
        f"  lease        {lease['device']} to {lease['holder']}, epoch {lease['epoch']}"
        for lease in standing["leases"]
    ] or ["  lease        none"]
    lines += [
        f"  quarantine   {device} since {operation}"
        for device, operation in standing["quarantine"].items()
    ]
    for replica in standing["replicas"]:
        version = "no version" if replica["version"] is None else f"version {replica['version']}"
        devices = " ".join(replica["devices"]) or "no device"
        lines.append(
            f"  replica      {replica['replica']} on {devices}: "
            f"pid {replica['pid']} on {replica['node']}, {replica['incarnation']}, {version}"
        )
    for engine in standing["engines"]:
        held = "no version" if engine["version"] is None else f"version {engine['version']}"
        why = f": {engine['reason']}" if engine["reason"] else ""
        lines.append(f"  engine       {engine['target']} {engine['standing']}, {held}{why}")
    for operation in standing["open_operations"]:
        lines.append(
            f"  open         {operation['operation']} {operation['status']} since "
            f"{clock_text(operation['last_ns'])}: {operation['before']} → {operation['after']}"
        )
    if standing["open_sync"]:
        lines.append(f"  open         weight sync {standing['open_sync']}")
    bundle = standing["last_bundle"]
    if bundle:
        lines.append(
            f"  bundle       iteration {bundle['iteration']}, policy {bundle['policy_version']}, "
            f"{size_text(bundle['bytes'])} in {seconds_text(bundle['save_s'])}, "
            f"{bundle['bundle'][:12]} at {bundle['path']}"
        )
    else:
        lines.append("  bundle       none")
    for taken in standing["registered_bundles"]:
        lines.append(
            f"  registered   {taken['bundle'][:12]} of {taken['source']}, policy "
            f"{taken['policy_version']}, {size_text(taken['bytes'])}"
        )
    lines.append(f"  last event   {clock_text(standing['last_event_ns'])}")
    return "\n".join(lines) + "\n"
