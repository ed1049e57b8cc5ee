"""What was checked, how often, and what was not checked and why: the table that ends a verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["checked", "partly", "not checked", "nothing to check", "broken"]


@dataclass(slots=True)
class Row:
    """One invariant of one job.

    ``checks`` counts comparisons made; ``missing`` counts, by reason, comparisons that could not
    be made because something was not recorded; ``idle`` says why there was nothing to compare
    (None where something should have been).
    """

    job: str
    invariant: str
    title: str
    required: bool = False
    checks: int = 0
    findings: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    idle: str | None = None
    needs: str = ""

    @property
    def status(self) -> Status:
        """How far the invariant was judged. Not recorded is not checked, never clean."""
        if self.findings:
            return "broken"
        if self.missing:
            return "partly" if self.checks else "not checked"
        if self.checks:
            return "checked"
        return "nothing to check" if self.idle else "not checked"

    @property
    def reason(self) -> str:
        """Why it was not, or not wholly, checked; empty when it was."""
        if self.missing:
            return "; ".join(
                why if count == 1 else f"{why} ({count} times)"
                for why, count in sorted(self.missing.items())
            )
        if self.checks:
            return ""
        return self.idle or (f"not recorded: {self.needs}" if self.needs else "not recorded")

    @property
    def satisfied(self) -> bool:
        """True when a plan that requires it has nothing to complain about on this account."""
        return self.status in ("checked", "nothing to check")

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        return {
            "job": self.job,
            "invariant": self.invariant,
            "title": self.title,
            "status": self.status,
            "required": self.required,
            "checks": self.checks,
            "findings": self.findings,
            "reason": self.reason,
        }


@dataclass(slots=True)
class Coverage:
    """All rows of a verdict."""

    rows: list[Row] = field(default_factory=list)

    def row(self, invariant: str, job: str | None = None) -> Row:
        """The row of an invariant (of one job where several were judged); KeyError if none."""
        for row in self.rows:
            if row.invariant == invariant and job in (None, row.job):
                return row
        raise KeyError(invariant)

    def unchecked_required(self) -> list[Row]:
        """Rows that the plan requires and that were not, or not wholly, checked."""
        return [
            row
            for row in self.rows
            if row.required and not row.satisfied and row.status != "broken"
        ]

    def names(self, *statuses: Status) -> tuple[str, ...]:
        """Invariants with one of the statuses, each once, in table order."""
        return tuple(dict.fromkeys(r.invariant for r in self.rows if r.status in statuses))
