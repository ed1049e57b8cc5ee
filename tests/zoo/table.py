"""Counts and lines of the zoo's report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.zoo.run import Result


@dataclass
class Row:
    """One fault, mutation or variant over its seeds and triggers."""

    name: str
    row: str
    says: str
    runs: int = 0
    caught: int = 0
    counted: int = 0
    """Runs that ended with another final state than the baseline, or a named fault's."""
    invariants: dict[str, int] = field(default_factory=dict)
    latencies: list[int] = field(default_factory=list)
    shown: int = 0
    """Runs whose rewards leave the range of honest runs."""
    stopped: int = 0
    void: list[str] = field(default_factory=list)
    """Runs in which a named fault changed nothing and nothing was found: which, and why."""
    notes: list[str] = field(default_factory=list)

    def add(self, result: Result, label: str, *, counts: bool, shown: bool) -> None:
        """Take in one run."""
        self.runs += 1
        self.stopped += result.final is None
        self.shown += shown
        if counts:
            self.counted += 1
            self.caught += result.caught
            if not result.caught:
                self.notes.append(label)
        for name in result.invariants:
            self.invariants[name] = self.invariants.get(name, 0) + 1
        if result.latency is not None:
            self.latencies.append(result.latency)

    @property
    def by(self) -> str:
        """The invariants that speak most often."""
        ranked = sorted(self.invariants, key=lambda name: (-self.invariants[name], name))
        return ", ".join(ranked[:5])

    @property
    def latency(self) -> str:
        """Least and largest latency in events."""
        if not self.latencies:
            return "-"
        low, high = min(self.latencies), max(self.latencies)
        return str(low) if low == high else f"{low}-{high}"


def why_void(result: Result) -> str:
    """Why a run with a fault in it is no faulty run."""
    if not result.fired:
        return "never came to act"
    return "acted, and all of the final state is the honest run's"


def lines(rows: list[Row]) -> Iterator[str]:
    """The table of named faults."""
    yield f"{'row':<5}{'fault':<34}{'caught':>8}{'latency':>9}{'curve':>7}  by"
    for row in sorted(rows, key=lambda r: (r.row[0], int(r.row[1:]), r.name)):
        yield (
            f"{row.row:<5}{row.name[:33]:<34}{f'{row.caught}/{row.counted}':>8}{row.latency:>9}"
            f"{f'{row.shown}/{row.runs}':>7}  {row.by}"
        )
