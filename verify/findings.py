"""A finding: one thing that the judge holds against a ledger, with the positions that prove it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["stop", "warn"]

MAX_FINDINGS = 100
"""Findings kept for each invariant of a job; later ones are counted. Bounds the memory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule: where first, by which events, what was expected, what was found.

    ``severity`` is ``stop`` where the policy may be another one than the program meant, ``warn``
    where the record is untidy and nothing follows from it.
    """

    invariant: str
    severity: Severity
    job: str
    position: int
    positions: tuple[int, ...]
    expected: str
    found: str
    cause: str
    action: str
    found_at: int | None = None
    """Position of the event at which the judge spoke; None where that is the broken one."""

    @property
    def latency_events(self) -> int:
        """Events from the one that broke the rule to the one at which the judge spoke."""
        return 0 if self.found_at is None else max(0, self.found_at - self.position)

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        return {
            **asdict(self),
            "positions": list(self.positions),
            "found_at": self.position + self.latency_events,
            "latency_events": self.latency_events,
        }


class FindingList:
    """Findings in the order in which they were made, at most MAX_FINDINGS for each invariant."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, finding: Finding) -> bool:
        """Keep or count a finding; True when it was kept."""
        key = (finding.job, finding.invariant)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] > MAX_FINDINGS:
            return False
        self._kept.append(finding)
        return True

    def extend(self, other: FindingList) -> None:
        """Take in the findings of other jobs."""
        self._kept += other._kept
        self._counts |= other._counts

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def count(self, job: str, invariant: str) -> int:
        """Findings of an invariant of a job, those that were not kept included."""
        return self._counts.get((job, invariant), 0)

    @property
    def left_off(self) -> int:
        """Findings that were counted and not kept."""
        return sum(max(0, count - MAX_FINDINGS) for count in self._counts.values())

    def sorted(self) -> tuple[Finding, ...]:
        """Kept findings by position, and by invariant within one."""
        return tuple(sorted(self._kept, key=lambda f: (f.position, f.invariant, f.expected)))
