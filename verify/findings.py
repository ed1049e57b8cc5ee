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

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        return {**asdict(self), "positions": list(self.positions)}


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

    @property
    def left_off(self) -> int:
        """Findings that were counted and not kept."""
        return sum(max(0, count - MAX_FINDINGS) for count in self._counts.values())

    def sorted(self) -> tuple[Finding, ...]:
        """Kept findings by position, and by invariant within one."""
        return tuple(sorted(self._kept, key=lambda f: (f.position, f.invariant, f.expected)))
