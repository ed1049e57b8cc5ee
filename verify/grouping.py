"""Groups findings that tell of one fault: those that share a position which proves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shiftbook.verify.findings import Finding


def stories(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings in groups, each in order of position; groups in the order in which they begin.

    Two findings of a job belong together where a position stands in the proof of both: an update
    that began with the wrong state, say, and the sync that sent what it made.
    """
    parent = list(range(len(findings)))

    def top(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    seen: dict[tuple[str, int], int] = {}
    for number, finding in enumerate(findings):
        for position in {finding.position, *finding.positions}:
            other = seen.setdefault((finding.job, position), number)
            parent[top(number)] = top(other)
    groups: dict[int, list[Finding]] = {}
    for number, finding in enumerate(findings):
        groups.setdefault(top(number), []).append(finding)
    for group in groups.values():
        group.sort(key=lambda f: (f.position, f.invariant, f.expected))
    return sorted(groups.values(), key=lambda group: (group[0].position, group[0].invariant))


def plain_stories(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The groups as plain values; the fields are the command's JSON contract.

    ``findings`` of a story are places in the sequence that was given, the earliest first.
    """
    place = {id(finding): number for number, finding in enumerate(findings)}
    return [
        {
            "job": group[0].job,
            "position": group[0].position,
            "severity": "stop" if any(f.severity == "stop" for f in group) else "warn",
            "invariants": list(dict.fromkeys(finding.invariant for finding in group)),
            "findings": [place[id(finding)] for finding in group],
            "latency_events": min(f.position + f.latency_events for f in group) - group[0].position,
        }
        for group in stories(findings)
    ]
