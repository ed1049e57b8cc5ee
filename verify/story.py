"""A verdict for people: findings as a story, then what was checked and what was not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from shiftbook.verify.findings import Finding
from shiftbook.verify.grouping import plain_stories, stories
from shiftbook.verify.verdict import Verdict

WIDTH = 100

COVERAGE_COLUMNS = ("invariant", "title", "status", "required", "checks", "findings", "reason")
"""Columns of the coverage table; ``job`` stands before them where several jobs were judged."""


def finding_lines(finding: Finding, number: int | None = None) -> Iterator[str]:
    """One finding, a line for each question that it answers."""
    mark = f"{number}. " if number is not None else ""
    job = f"  job {finding.job}" if finding.job else ""
    later = finding.latency_events
    found = f"  found {later} events later" if later else ""
    yield (
        f"{mark}{finding.invariant}  at position {finding.position}{job}  "
        f"({finding.severity}){found}"
    )
    proof = ", ".join(str(p) for p in finding.positions[:12])
    for label, text in (
        ("expected", finding.expected),
        ("found", finding.found),
        ("proved by", f"positions {proof}" if len(finding.positions) > 1 else f"position {proof}"),
        ("likely cause", finding.cause),
        ("do", finding.action),
    ):
        yield from textwrap.wrap(
            f"{label + ':':<14}{text}",
            WIDTH,
            initial_indent="   ",
            subsequent_indent=" " * 17,
            break_long_words=False,
            break_on_hyphens=False,
        )


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """Everything but the coverage table."""
    number = 0
    for group in stories(verdict.findings):
        if len(group) > 1:
            names = dict.fromkeys(finding.invariant for finding in group)
            yield (
                f"one story of {len(group)} findings, from position {group[0].position}: "
                f"{', '.join(names)}"
            )
        for finding in group:
            number += 1
            yield from finding_lines(finding, number)
            yield ""
    if verdict.findings:
        yield latency_line(verdict)
    if verdict.findings_left_off:
        yield f"… and {verdict.findings_left_off} more findings of the same invariants"
        yield ""
    for reason in verdict.could_not:
        yield f"could not judge: {reason}"
    for job, listed in verdict.open_operations.items():
        yield f"open at the head of {job}: {', '.join(listed)}"
    for note in verdict.notes:
        yield f"note: {note}"


def latency_line(verdict: Verdict) -> str:
    """How soon the judge spoke: of each story its first finding."""
    events = [story["latency_events"] for story in plain_stories(verdict.findings)]
    span = f"{min(events)} to {max(events)}" if min(events) < max(events) else f"{events[0]}"
    return f"detection latency: {span} events from the first that is broken"


def closing_line(verdict: Verdict) -> str:
    """The verdict in one line."""
    states = [row.status for row in verdict.coverage.rows]
    counts = {
        "checked": states.count("checked"),
        "partly checked": states.count("partly"),
        "nothing to check": states.count("nothing to check"),
        "not checked": states.count("not checked"),
        "broken": states.count("broken"),
    }
    parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    jobs = ", ".join(verdict.jobs) or "no job"
    found = len(verdict.findings) + verdict.findings_left_off
    return (
        f"{verdict.word}: {found} findings in {jobs}, positions {verdict.first} to "
        f"{verdict.judged_until}; invariants: {parts}"
    )


def coverage_table(verdict: Verdict) -> tuple[Sequence[str], list[list[object]]]:
    """Columns and rows of the coverage table."""
    many = len(verdict.jobs) > 1
    columns = (("job",) if many else ()) + COVERAGE_COLUMNS
    rows = [[row.plain()[name] for name in columns] for row in verdict.coverage.rows]
    return columns, rows
