"""Lets a judge that follows a live ledger put a job into safe mode at its first grave finding."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from shiftbook.ledger.errors import AppendInDoubt, IllegalStep, LedgerUnreachable
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.findings import Finding
from shiftbook.verify.patient import OnProblem, outlive
from shiftbook.verify.recorded import flagged

BY = "verifier"

PASSING = (LedgerUnreachable, AppendInDoubt)
"""What passes when a server comes back."""


class Guard:
    """Writes findings of severity ``stop`` down as they are made, and freezes their job.

    In safe mode nothing moves; training and weight syncs go on, so that no work is lost while
    somebody looks. Only an operator, or a rule that the plan declares, leaves it (``thaw``).
    ``also`` is told every finding first. A ledger that does not answer is tried until it does, or
    until ``stop`` is set; ``on_problem`` is told the first error of an outage.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        also: Callable[[Finding], None] | None = None,
        stop: threading.Event | None = None,
        on_problem: OnProblem | None = None,
    ) -> None:
        self._ledger, self._also = ledger, also
        self._stop, self._on_problem = stop or threading.Event(), on_problem
        self._gate = Gate(ledger, by=BY)

    def on_finding(self, finding: Finding) -> None:
        """Take in one finding, and return once it stands in the ledger where it has to.

        Raise LedgerUnreachable or AppendInDoubt where ``stop`` was set before that.
        """
        if self._also is not None:
            self._also(finding)
        job = finding.job
        if finding.severity != "stop" or not job:
            return
        # Judging on meanwhile would gain nothing: who cannot write cannot read either.
        outlive(lambda: self._write(job, finding), PASSING, self._stop, self._on_problem)

    def _write(self, job: str, finding: Finding) -> None:
        """Write a finding down and freeze its job; again does no harm."""
        event = flagged(finding)
        content = hashlib.sha256(event.model_dump_json().encode()).hexdigest()[:16]
        self._ledger.append(job, event, key=f"guard:{content}")
        try:
            self._gate.freeze(job, by=BY, reason=f"{finding.invariant}: {finding.cause}")
        except IllegalStep:
            # A job that has ended moves nothing any more.
            if self._ledger.state().job(job).status == "open":
                raise
