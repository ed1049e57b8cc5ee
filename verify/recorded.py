"""Writes a verdict into the ledger that it judges."""

from __future__ import annotations

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.safety import DivergenceFlagged, VerificationPassed
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.errors import NothingToJudge
from shiftbook.verify.findings import Finding
from shiftbook.verify.verdict import EXIT_COULD_NOT, Verdict

MAX_TEXT = 500
"""Characters of expected and found that are recorded; an event has a largest size."""


def flagged(finding: Finding) -> DivergenceFlagged:
    """The event that says a finding."""
    return DivergenceFlagged(
        invariant=finding.invariant,
        severity=finding.severity,
        at=finding.position,
        expected=finding.expected[:MAX_TEXT],
        found=finding.found[:MAX_TEXT],
        positions=finding.positions[:64],
    )


def record(ledger: Ledger, verdict: Verdict) -> int:
    """Append VerificationPassed to each judged job, or DivergenceFlagged for each finding.

    The same verdict recorded again adds nothing. Returns the events that this verdict has in the
    ledger. Raises NothingToJudge for a verdict that could not be reached, or of a damaged ledger.
    """
    if verdict.exit_code == EXIT_COULD_NOT:
        raise NothingToJudge(
            "expected a verdict to record, found that it could not be reached: "
            + "; ".join(verdict.could_not)
        )
    if verdict.integrity_broken:
        raise NothingToJudge(
            "expected a sound ledger to record a verdict in, found a damaged one; restore it from "
            "a copy first, and keep the damaged file as evidence"
        )
    written = 0
    for job in verdict.jobs:
        # Findings of evidence belong to no job; they are recorded with the first.
        own = [
            f for f in verdict.findings if f.job == job or (not f.job and job == verdict.jobs[0])
        ]
        events: list[Event | Draft] = [flagged(finding) for finding in own]
        if not own:
            rows = [row for row in verdict.coverage.rows if row.job in ("", job)]
            events.append(
                VerificationPassed(
                    first=0,
                    last=verdict.judged_until,
                    head=verdict.head,
                    checked=tuple(r.invariant for r in rows if r.satisfied),
                    not_checked=tuple(r.invariant for r in rows if not r.satisfied),
                )
            )
        receipt = ledger.append(
            job, events, key=f"verdict:{verdict.judged_until}:{verdict.head[:16]}"
        )
        written += len(receipt.positions)
    return written
