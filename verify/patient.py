"""Reads a live ledger through outages: waits until the server is back, and goes on where it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shiftbook.ledger.errors import EvidenceOutOfReach
from shiftbook.ledger.events.base import Segment
from shiftbook.verify.errors import OutOfReach
from shiftbook.verify.evidence import Rows, RowSource
from shiftbook.verify.sources import EventSource, open_events
from shiftbook.verify.stored import RawRow

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between two tries: the second comes soon, later ones less often."""

OnProblem = Callable[[Exception], None]
T = TypeVar("T")


def outlive(
    act: Callable[[], T],
    passing: type[Exception] | tuple[type[Exception], ...],
    stop: threading.Event,
    on_problem: OnProblem | None = None,
    before_again: Callable[[], None] | None = None,
) -> T:
    """What ``act`` gives, tried until it does, for ever where nobody sets ``stop``.

    ``on_problem`` is told the first error of an outage; ``before_again`` is called before each
    try but the first, and what it raises counts as one more failure. The last error is raised
    where ``stop`` is set meanwhile.
    """
    pause_s, told = FIRST_PAUSE_S, False
    while True:
        try:
            if told and before_again is not None:
                before_again()
            return act()
        except passing as error:
            if not told and on_problem is not None:
                on_problem(error)
            told = True
            if stop.wait(pause_s):
                raise
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def patient_rows(
    rows: RowSource, stop: threading.Event, on_problem: OnProblem | None = None
) -> RowSource:
    """The same rows of evidence, asked for until their place answers.

    Raises EvidenceOutOfReach where ``stop`` is set during an outage.
    """

    def read(type_: str, segment: Segment) -> Rows:
        return outlive(lambda: rows(type_, segment), EvidenceOutOfReach, stop, on_problem)

    return read


class PatientEvents:
    """The part of an event source that following needs, opened again after each outage.

    The first opening raises as ``open_events`` does: a URL that is wrong is no outage. What is
    asked for is given whole or asked for again. Raises OutOfReach where ``stop`` is set during an
    outage.
    """

    def __init__(
        self, url: str, stop: threading.Event, on_problem: OnProblem | None = None
    ) -> None:
        self._url, self._stop, self._on_problem = url, stop, on_problem
        self.source: EventSource = open_events(url).__enter__()

    def __enter__(self) -> PatientEvents:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.__exit__(None, None, None)

    def rows(self, after: int = -1, until: int | None = None) -> Iterator[RawRow]:
        """Rows in order; after an outage those after the last one that was given."""
        while True:
            try:
                for row in self.source.rows(after, until):
                    yield row
                    after = row.position
                return
            except OutOfReach as error:
                self._wait(error)

    def split_keys(self) -> Iterator[tuple[str, str, int, int, int]]:
        """As of the source."""
        return iter(self._ask(lambda: list(self.source.split_keys())))

    def hidden(self, last: int, seen: int) -> tuple[int, Any] | None:
        """As of the source."""
        return self._ask(lambda: self.source.hidden(last, seen))

    def meta(self) -> list[tuple[Any, Any]]:
        """As of the source."""
        return self._ask(lambda: self.source.meta())

    def revision(self) -> list[Any]:
        """As of the source."""
        return self._ask(lambda: self.source.revision())

    def heads(self) -> list[tuple[Any, Any]]:
        """As of the source."""
        return self._ask(lambda: self.source.heads())

    def nodes(self) -> Iterator[tuple[Any, Any, Any]] | None:
        """As of the source."""

        def whole() -> list[tuple[Any, Any, Any]] | None:
            nodes = self.source.nodes()
            return None if nodes is None else list(nodes)

        found = self._ask(whole)
        return None if found is None else iter(found)

    def _ask(self, act: Callable[[], T]) -> T:
        return outlive(act, OutOfReach, self._stop, self._on_problem, self._open_again)

    def _wait(self, error: OutOfReach) -> None:
        """Wait for the end of an outage that began with an error."""
        failed: list[OutOfReach] = [error]

        def once_failed() -> None:
            if failed:
                raise failed.pop()

        self._ask(once_failed)

    def _open_again(self) -> None:
        fresh = open_events(self._url).__enter__()
        self.source.__exit__(None, None, None)
        self.source = fresh
