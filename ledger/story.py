"""The whole story of one operation, a reallocation or a weight sync, from its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shiftbook.ledger.cli_options import cell_text, clock_text
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.state import LedgerState, fold
from shiftbook.ledger.summary import seconds_text, size_text, summary, topology_line

Story = dict[str, Any]


def read_story(events: Sequence[StoredEvent]) -> Story:
    """Gather what an operation's events say, oldest first; at least one event is given."""
    first = events[0]
    bodies = {event.type: event.body for event in events}
    steps = _steps(events)
    if "ReallocationProposed" in bodies:
        return _reallocation(first, bodies, steps, _status(events))
    if "WeightSyncStarted" in bodies:
        return _weight_sync(first, events, bodies, steps)
    return {"operation": first.operation, "kind": "other", "job": first.job, "steps": steps}


def _steps(events: Sequence[StoredEvent]) -> list[Story]:
    start_ns = events[0].recorded_ns
    return [
        {
            "position": event.position,
            "type": event.type,
            "recorded_ns": event.recorded_ns,
            "since_start_s": (event.recorded_ns - start_ns) / 1e9,
            "actor": event.actor,
            "summary": summary(event),
        }
        for event in events
    ]


def _status(events: Sequence[StoredEvent]) -> str:
    state: LedgerState = fold(events)
    operation = state.job(events[0].job).operations.get(events[0].operation or "")
    return operation.status if operation else "unknown"


def _reallocation(
    first: StoredEvent, bodies: dict[str, Story], steps: list[Story], status: str
) -> Story:
    proposed = bodies["ReallocationProposed"]
    quiesced = bodies.get("ReallocationQuiesced", {})
    moved = bodies.get("ReallocationTransferred", {})
    committed = bodies.get("ReallocationCommitted", {})
    gain = bodies.get("GainRealized")
    rejected = bodies.get("ReallocationRejected")
    ended = next(
        (
            body.get("reason") or body.get("cause")
            for name in ("ReallocationAbandoned", "ReallocationRolledBack", "ReallocationPoisoned")
            if (body := bodies.get(name))
        ),
        None,
    )
    return {
        "operation": first.operation,
        "kind": "reallocation",
        "job": first.job,
        "attempt": proposed["attempt"],
        "status": status,
        "proposed_by": first.actor,
        "proposer": proposed.get("proposer", "scheduler"),
        "strategy": proposed["strategy"],
        "before": topology_line(proposed["before"]),
        "after": topology_line(proposed["after"]),
        "bottleneck_before": proposed["bottleneck_before"],
        "bottleneck_after": proposed["bottleneck_after"],
        "predicted_gain_s": proposed["predicted_gain_s"],
        "predicted_gain_interval_s": proposed["gain_interval"],
        "predicted_cost_s": proposed["predicted_cost_s"],
        "horizon_s": proposed["horizon_s"],
        "since_last_move_s": proposed.get("since_last_move_s"),
        "candidates": [_candidate(item) for item in proposed["candidates"]],
        "rejected": rejected,
        "ended_because": ended,
        "requests_handed_over": sum(len(c["requests"]) for c in quiesced.get("custody", ())),
        "kv_tokens_lost": committed.get("kv_tokens_lost", quiesced.get("kv_tokens_lost")),
        "moved_bytes": committed.get("moved_bytes", moved.get("moved_bytes")),
        "moved_parts": moved.get("parts"),
        "transfer_s": moved.get("transfer_s"),
        "stall_s": committed.get("stall_s"),
        "stalls": committed.get("stalls"),
        "realised_gain_s": gain["adjusted_gain_s"] if gain else None,
        "realised_gain_interval_s": gain["interval"] if gain else None,
        "raw_gain_s": gain["raw_gain_s"] if gain else None,
        "counterfactual": gain["counterfactual"] if gain else None,
        "steps": steps,
    }


def _candidate(item: Story) -> Story:
    return {**item, "after": topology_line(item["after"]), "chosen": item.get("chosen", False)}


def _weight_sync(
    first: StoredEvent,
    events: Sequence[StoredEvent],
    bodies: dict[str, Story],
    steps: list[Story],
) -> Story:
    started = bodies["WeightSyncStarted"]
    committed = bodies.get("WeightSyncCommitted")
    failed = bodies.get("WeightSyncFailed")
    delivered = [event.body for event in events if event.type == "WeightSyncDelivered"]
    return {
        "operation": first.operation,
        "kind": "weight_sync",
        "job": first.job,
        "attempt": started["attempt"],
        "status": "committed" if committed else "failed" if failed else "started",
        "version": started["version"],
        "base_version": started.get("base_version"),
        "encoding": started["encoding"],
        "lossy": started.get("lossy"),
        "source_root": started["source_root"],
        "targets": started["targets"],
        "delivered": [
            {
                "target": body["target"],
                "root": body["root"],
                "equal": body["root"] == started["source_root"] and not body.get("differing"),
                "within_loss": bool(started.get("lossy"))
                and body["root"] == started["lossy"]["root"]
                and not body.get("differing"),
                "fingerprint_of": body["fingerprint_of"],
                "moved_bytes": body["moved_bytes"],
                "full_bytes": body["full_bytes"],
                "sync_s": body["sync_s"],
                "encoding": body.get("encoding"),
                "transport": body.get("transport"),
                "nan": body.get("nan"),
            }
            for body in delivered
        ],
        "outcomes": committed["outcomes"] if committed else [],
        "stall_s": committed["stall_s"] if committed else None,
        "ended_because": failed["reason"] if failed else None,
        "steps": steps,
    }


def story_text(story: Story) -> str:
    """The story for people, as indented lines."""
    lines = [
        f"{story['operation']}  {story.get('status', '')}  ({story['kind']} of {story['job']})"
    ]
    if story["kind"] == "reallocation":
        lines += _reallocation_lines(story)
    elif story["kind"] == "weight_sync":
        lines += _sync_lines(story)
    lines += ["", "steps"]
    lines += [
        f"  {step['position']:>6}  {clock_text(step['recorded_ns'])}  "
        f"+{step['since_start_s']:.3f} s  {step['type']}  {step['summary']}"
        for step in story["steps"]
    ]
    return "\n".join(lines) + "\n"


def _reallocation_lines(story: Story) -> list[str]:
    interval = story["predicted_gain_interval_s"]
    since = story["since_last_move_s"]
    lines = [
        f"  before       {story['before']}",
        f"  after        {story['after']}",
        f"  strategy     {story['strategy']}, proposed by the {story['proposer']} "
        f"({story['proposed_by']})",
        f"  bottleneck   {story['bottleneck_before']} → {story['bottleneck_after']}",
        f"  predicted    gain {seconds_text(story['predicted_gain_s'])} "
        f"({seconds_text(interval['low'])} to {seconds_text(interval['high'])}), "
        f"cost {seconds_text(story['predicted_cost_s'])}, "
        f"horizon {seconds_text(story['horizon_s'])}",
        f"  last move    {'none before' if since is None else seconds_text(since) + ' earlier'}",
    ]
    if story["rejected"]:
        rejected = story["rejected"]
        lines.append(
            f"  rejected     by {rejected['by']}, rule {rejected['rule']}: {rejected['reason']}"
        )
    if story["ended_because"]:
        lines.append(f"  ended        {story['ended_because']}")
    if story["moved_bytes"] is not None:
        parts = " ".join(f"{k}={size_text(v)}" for k, v in (story["moved_parts"] or {}).items())
        lines.append(
            f"  moved        {size_text(story['moved_bytes'])} in "
            f"{seconds_text(story['transfer_s'])} {parts}".rstrip()
        )
    if story["kv_tokens_lost"] is not None:
        lines.append(
            f"  custody      {story['requests_handed_over']} requests handed over, "
            f"{story['kv_tokens_lost']} KV tokens lost"
        )
    if story["stall_s"] is not None:
        stalls = " ".join(f"{k}={seconds_text(v)}" for k, v in (story["stalls"] or {}).items())
        lines.append(f"  stall        {seconds_text(story['stall_s'])} {stalls}".rstrip())
    if story["realised_gain_s"] is not None:
        low_high = story["realised_gain_interval_s"]
        lines.append(
            f"  realised     gain {seconds_text(story['realised_gain_s'])} "
            f"({seconds_text(low_high['low'])} to {seconds_text(low_high['high'])}), "
            f"raw {seconds_text(story['raw_gain_s'])}; against: {story['counterfactual']}"
        )
    return lines + _candidate_lines(story["candidates"])


def _candidate_lines(candidates: Sequence[Story]) -> list[str]:
    if not candidates:
        return []
    lines = ["", "candidates"]
    for item in candidates:
        said = "chosen" if item["chosen"] else item.get("rejected_because") or "not chosen"
        lines.append(
            f"  {item['after']} by {item['strategy']}: end in "
            f"{seconds_text(item['predicted_end_s'])}, "
            f"gain {seconds_text(item['predicted_gain_s'])}, "
            f"cost {seconds_text(item['predicted_cost_s'])}, "
            f"probability {cell_text(item['probability'])}; {said}"
        )
    return lines


def _how(item: Story) -> str:
    """How a version came to its target, as far as it was recorded."""
    said = [item["encoding"], item["transport"]]
    if item["nan"]:
        said.append(f"{item['nan']} NaN")
    return "".join(f"{word}, " for word in said if word)


def _loss_lines(lossy: Story | None) -> list[str]:
    if lossy is None:
        return []
    return [
        f"  loss         {lossy['encoding']}, errors up to {lossy['largest_error']:g}, "
        f"bound {lossy['max_error']:g}",
        f"  makes        {lossy['root']}",
    ]


def _sync_lines(story: Story) -> list[str]:
    base = "none" if story["base_version"] is None else story["base_version"]
    lines = [
        f"  version      {story['version']} (base {base}), {story['encoding']}",
        f"  source       {story['source_root']}",
        *_loss_lines(story["lossy"]),
        f"  targets      {' '.join(story['targets'])}",
    ]
    for item in story["delivered"]:
        said = "equal to the source" if item["equal"] else f"DIFFERS: {item['root']}"
        if item["within_loss"]:
            said = "as the lossy encoding makes it"
        lines.append(
            f"  delivered    {item['target']}: {size_text(item['moved_bytes'])} of "
            f"{size_text(item['full_bytes'])} in {seconds_text(item['sync_s'])}, "
            f"{_how(item)}{item['fingerprint_of']}, {said}"
        )
    for outcome in story["outcomes"]:
        reason = f": {outcome['reason']}" if outcome.get("reason") else ""
        lines.append(f"  outcome      {outcome['target']} {outcome['outcome']}{reason}")
    if story["stall_s"] is not None:
        lines.append(f"  stall        {seconds_text(story['stall_s'])}")
    if story["ended_because"]:
        lines.append(f"  ended        {story['ended_because']}")
    return lines
