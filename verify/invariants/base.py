"""What an invariant is: it sees each event with the state before it, and says what is broken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.state import LedgerState
from shiftbook.verify.coverage import Row
from shiftbook.verify.evidence import Rows
from shiftbook.verify.findings import Finding, Severity
from shiftbook.verify.lineage import Track


@dataclass(frozen=True, slots=True)
class Step:
    """One event as the invariants see it; ``state``, ``job`` and ``track`` are before it.

    ``event`` is an UnknownEvent where the type is not known or the body does not fit its type
    (``problem`` says so then). ``rows`` are those of the event's segment, None where it has none.
    """

    state: LedgerState
    job: JobState
    track: Track
    stored: StoredEvent
    event: Event
    rows: Rows | None
    problem: str | None = None

    @property
    def at(self) -> int:
        """Position of the event."""
        return self.stored.position

    @property
    def plan(self) -> Plan | None:
        """The plan in force, amendments included."""
        return self.job.plan


@dataclass(frozen=True, slots=True)
class End:
    """The end of the range that is judged: the head, or ``--until``."""

    state: LedgerState
    job: JobState
    track: Track
    position: int

    @property
    def closed(self) -> bool:
        """True when the job was closed within the range."""
        return self.job.status == "closed"


class Invariant(ABC):
    """One rule over one job. Subclasses set the class fields and override ``feed``.

    ``needs`` says in words which events and fields must be recorded for it to be checked, ``sees``
    which events it looks at: others are not shown to it, which most events then cost nothing.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[str]
    sees: ClassVar[tuple[type[Event], ...] | None] = None
    """None for all events, those of unknown types too."""
    aspects: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Comparisons that need a record of their own, by name: title, and what must be recorded.

    Each has a row of its own in the coverage table (``I21.micro-batches``), which a plan may
    require; so an invariant whose main comparison was made never hides that another was not.
    """

    def __init__(self, job: str, report: Callable[[Finding], None]) -> None:
        self.job = job
        self._report = report
        self._row = Row(job, self.id, self.title, needs=self.needs)
        self._aspects = {
            name: Row(job, f"{self.id}.{name}", title, needs=needs)
            for name, (title, needs) in self.aspects.items()
        }
        self.begin()

    def begin(self) -> None:
        """Set up what the invariant remembers."""
        return

    @abstractmethod
    def feed(self, step: Step) -> None:
        """Look at the next event."""

    def close(self, end: End) -> None:
        """Look at what is left at the end of the range."""
        return

    def idle_because(self, end: End) -> str | None:
        """Why there was nothing to check; None where something should have been recorded."""
        return None

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        """Why there was nothing to check of an aspect; by default what is said of the whole."""
        return self.idle_because(end)

    def rows(self, end: End) -> list[Row]:
        """The rows of the coverage table: the invariant's, and one for each aspect."""
        if not self._row.checks:
            self._row.idle = self.idle_because(end)
        for name, row in self._aspects.items():
            if not row.checks:
                row.idle = self.aspect_idle_because(name, end)
        return [self._row, *self._aspects.values()]

    def expect(
        self,
        holds: bool,
        at: int,
        *,
        expected: str,
        found: str,
        cause: str,
        action: str,
        others: Iterable[int | None] = (),
        severity: Severity = "stop",
        aspect: str | None = None,
    ) -> bool:
        """Count one comparison and report it where it does not hold; returns ``holds``.

        ``others`` are further positions that prove it; None and negative ones are left out. What
        is compared for an aspect counts in its row alone.
        """
        self.passed(1, aspect)
        if not holds:
            self.flag(
                at,
                expected=expected,
                found=found,
                cause=cause,
                action=action,
                others=others,
                severity=severity,
                aspect=aspect,
            )
        return holds

    def flag(
        self,
        at: int,
        *,
        expected: str,
        found: str,
        cause: str,
        action: str,
        others: Iterable[int | None] = (),
        severity: Severity = "stop",
        aspect: str | None = None,
    ) -> None:
        """Report a finding at a position; one of an aspect breaks the invariant too."""
        proof = {at, *(p for p in others if p is not None and p >= 0)}
        self._row.findings += 1
        if aspect is not None:
            self._aspects[aspect].findings += 1
        self._report(
            Finding(
                self.id,
                severity,
                self.job,
                at,
                tuple(sorted(proof)),
                expected,
                found,
                cause,
                action,
            )
        )

    def passed(self, times: int = 1, aspect: str | None = None) -> None:
        """Count comparisons that held."""
        # Called several times for each event, so what it needs is here and not a call away.
        row = self._row if aspect is None else self._aspects[aspect]
        row.checks += times

    def missing(self, why: str, aspect: str | None = None) -> None:
        """Count a comparison that could not be made because something was not recorded."""
        # A bounded number of reasons: they are fixed texts, never values from events.
        row = self._row if aspect is None else self._aspects[aspect]
        row.missing[why] = row.missing.get(why, 0) + 1


def short(value: object) -> str:
    """A value as it stands in a sentence: long digests are cut, None is named."""
    if value is None:
        return "nothing recorded"
    text = str(value)
    return f"{text[:16]}…" if len(text) >= 32 and " " not in text else text


def listed(values: Iterable[object], limit: int = 3) -> str:
    """The first few values and how many there are more."""
    items = [str(v) for v in values]
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
