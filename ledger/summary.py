"""One line about an event, for people who scan a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.topology import Topology

Body = dict[str, Any]

MIB = 1 << 20


def summary(event: StoredEvent) -> str:
    """What the event says, in a few words; its first plain fields where it has no line here."""
    line = _LINES.get(event.type, _first_fields)
    try:
        return line(event.lifted())
    except (KeyError, TypeError, ValueError, InvalidEvent):
        # Of a newer schema, or damaged: shown by whatever plain fields it has.
        return _first_fields(event.body)


def topology_line(value: Any) -> str:
    """A stored topology as ``rollout[n/0] trainer[n/1]``."""
    return Topology.model_validate(value).text()


def size_text(count: float | None) -> str:
    """Bytes for people."""
    if count is None:
        return "?"
    return f"{count / MIB:.2f} MiB" if count >= MIB / 10 else f"{count:,.0f} B"


def seconds_text(value: Any) -> str:
    """Seconds for people: milliseconds below one second."""
    if not isinstance(value, int | float):
        return "?" if value is None else str(value)
    return f"{value * 1000:.0f} ms" if abs(value) < 1 else f"{value:.2f} s"


def _first_fields(body: Body) -> str:
    plain = [
        f"{name}={value}" for name, value in body.items() if isinstance(value, str | int | float)
    ]
    return " ".join(plain)[:120]


def _proposed(body: Body) -> str:
    return (
        f"{topology_line(body['before'])} → {topology_line(body['after'])} by {body['strategy']}, "
        f"gain {seconds_text(body['predicted_gain_s'])}, "
        f"cost {seconds_text(body['predicted_cost_s'])}"
    )


def _committed(body: Body) -> str:
    return (
        f"{topology_line(body['after'])}, {size_text(body['moved_bytes'])}, "
        f"stall {seconds_text(body['stall_s'])}"
    )


def _realised(body: Body) -> str:
    return (
        f"predicted net {seconds_text(body['predicted_gain_s'])}, "
        f"realised {seconds_text(body['adjusted_gain_s'])}"
    )


def _iteration(body: Body) -> str:
    return (
        f"iteration {body['iteration']}: {body['wall_s']:.2f} s, {body['samples_verified']} "
        f"samples, reward {body['reward_mean']:.3f}, policy {body['policy_version']}"
    )


def _window(body: Body) -> str:
    queues = " ".join(f"{name}={part['queue']}" for name, part in body["components"].items())
    return f"{body['window_s']:.2f} s, queues {queues}"


def _shadowed(body: Body) -> str:
    window = f"iterations {body['iteration']} to {body['iteration'] + body['iterations'] - 1}"
    if body["agreed"]:
        return f"{window} agreed ({body['method']}, {body['observations']} observations)"
    found = body["difference"]
    return (
        f"{window} disagreed: iteration {found['iteration']}, {found['component']}: "
        f"{found['kind']} {found['name']}: {found['what']}"
    )


_LINES: dict[str, Callable[[Body], str]] = {
    "JobOpened": lambda b: (
        f"{topology_line(b['topology'])}, mode {b['plan']['moves']['mode']}, "
        f"program {b['job_path']}"
    ),
    "AttemptStarted": lambda b: (
        f"{b['attempt']} at iteration {b['iteration']}, epoch {b['epoch']}, pid {b['pid']}"
    ),
    "JobClosed": lambda b: (
        f"{b['outcome']} after {b['iterations']} iterations, policy {b['policy_version']} "
        f"{b['policy_fingerprint'][:8]}"
    ),
    "ReplicaStarted": lambda b: f"{b['replica']} on {' '.join(b['devices'])}, pid {b['pid']}",
    "ReplicaLost": lambda b: f"{b['replica']}: {b['cause']}",
    "LeaseGranted": lambda b: f"{' '.join(b['devices'])} to {b['holder']}",
    "LeaseReleased": lambda b: f"{' '.join(b['devices'])} by {b['holder']}: {b['reason']}",
    "LeaseExpired": lambda b: f"{' '.join(b['devices'])} of {b['holder']}: {b['evidence']}",
    "WindowObserved": _window,
    "IterationCompleted": _iteration,
    "ReallocationProposed": _proposed,
    "ReallocationRejected": lambda b: f"by rule {b['rule']}: {b['reason']}",
    "ReallocationAbandoned": lambda b: b["reason"],
    "ReallocationGranted": lambda b: f"devices {' '.join(b['devices'])}",
    "ReallocationQuiesced": lambda b: (
        f"{sum(len(c['requests']) for c in b['custody'])} requests handed over, "
        f"{b['kv_tokens_lost']} KV tokens lost, {seconds_text(b['quiesce_s'])}"
    ),
    "ReallocationTransferred": lambda b: (
        f"{size_text(b['moved_bytes'])} in {seconds_text(b['transfer_s'])}"
    ),
    "ReallocationVerified": lambda b: f"{len(b['after'])} fingerprints equal",
    "ReallocationCommitted": _committed,
    "ReallocationRolledBack": lambda b: f"{b['cause']}; back to {topology_line(b['restored'])}",
    "ReallocationPoisoned": lambda b: f"{' '.join(b['devices'])}: {b['cause']}",
    "GainRealized": _realised,
    "WeightSyncStarted": lambda b: (
        f"version {b['version']}{' with a loss' if b.get('lossy') else ''} "
        f"to {' '.join(b['targets'])}"
    ),
    "WeightSyncDelivered": lambda b: (
        f"version {b['version']} at {b['target']}, {size_text(b['moved_bytes'])}"
        f"{' as a patch' if b.get('encoding') == 'patch' else ''}, "
        f"{len(b.get('differing', ()))} tensors differ"
    ),
    "WeightSyncCommitted": lambda b: f"version {b['version']}, stall {seconds_text(b['stall_s'])}",
    "CheckpointSaved": lambda b: (
        f"iteration {b['iteration']}, {size_text(b['bytes'])}, {seconds_text(b['save_s'])}"
    ),
    "CheckpointRegistered": lambda b: (
        f"{' '.join(b['parts'])} of {b['source']} ({b['form']}), {size_text(b['bytes'])}, "
        f"{b['bundle'][:12]}"
    ),
    "CheckpointRestored": lambda b: (
        f"{b['kind']} from {b['bundle'][:12]} at iteration {b['iteration']}, "
        f"{seconds_text(b['restore_s'])}"
    ),
    "UpdateApplied": lambda b: (
        f"policy {b['policy_version']}, loss {b['loss']:.4g}, KL {b['kl']:.3g}"
    ),
    "SamplesDrawn": lambda b: (
        f"iteration {b['iteration']}: {len(b['indices'])} prompts from draw {b['start']}, "
        f"{b['group_size']} samples each"
    ),
    "SamplesGenerated": lambda b: (
        f"iteration {b['iteration']}: {b['count']} samples, {b['tokens']} tokens, "
        f"policy {b['policy_version']}"
    ),
    "SamplesRewarded": lambda b: (
        f"iteration {b['iteration']}: {b['count']} samples, mean {b['reward_mean']:.3f}"
    ),
    "BatchConsumed": lambda b: (
        f"iteration {b['iteration']}: {b['count']} samples, {b['tokens']} tokens"
    ),
    "SafeModeEntered": lambda b: f"by {b['by']}: {b['reason']}",
    "SafeModeLeft": lambda b: f"by {b['by']}: {b['reason']}",
    "DivergenceFlagged": lambda b: (
        f"{b['severity']}: {b['invariant']} at {b['at']}: "
        f"expected {b['expected']}, found {b['found']}"
    ),
    "ShadowCompared": _shadowed,
    "VerificationPassed": lambda b: f"positions {b['first']} to {b['last']}",
}
