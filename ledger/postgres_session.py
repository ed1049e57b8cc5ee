"""A connection to PostgreSQL with the little that the store needs, and a limit on every wait."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg.types.numeric import Int8BinaryDumper

PREPARE_AFTER = 2
"""Uses of a statement after which the server keeps it prepared."""

T = TypeVar("T")


class AnswerLate(psycopg.OperationalError):
    """The server did not answer in time; what it does with the statement is not known."""


class _Wire(psycopg.Connection[tuple[Any, ...]]):
    """A connection that gives up on a server that accepts bytes and never answers.

    A host that lost its power or a process that was stopped sends nothing, not even an error, and
    the server's own limits do not run then.
    """

    answer_s: float | None = None

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, ``answer_s`` at most where the caller sets no limit."""
        if self.answer_s is not None and kwargs.get("timeout") is None:
            gen = _limited(gen, self.answer_s)
        return super().wait(gen, *args, **kwargs)


def _limited(waiting: Generator[Any, Any, T], limit_s: float) -> Generator[Any, Any, T]:
    deadline_s = time.monotonic() + limit_s
    try:
        wanted = next(waiting)
        while True:
            ready = yield wanted
            # Whoever waits looks up several times a second and then finds nothing ready.
            if not ready and time.monotonic() > deadline_s:
                raise AnswerLate(f"no answer within {limit_s:g} s")
            wanted = waiting.send(ready)
    except StopIteration as ended:
        value: T = ended.value
        return value


class Session:
    """One connection in autocommit: transactions begin and end where the store says so."""

    def __init__(self, parameters: dict[str, Any], *, answer_s: float | None) -> None:
        self.wire = _Wire.connect(
            **parameters, autocommit=True, prepare_threshold=PREPARE_AFTER, client_encoding="utf8"
        )
        self.wire.answer_s = answer_s
        # One width for all numbers, or each combination of widths is a statement of its own.
        self.wire.adapters.register_dumper(int, Int8BinaryDumper)

    def execute(self, text: str, parameters: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        """Run a statement; without parameters it may be several, separated by semicolons."""
        try:
            if not parameters:
                return self.wire.execute(text, prepare=False)  # type: ignore[call-overload]
            return self.wire.execute(text, parameters, binary=True)  # type: ignore[call-overload]
        except AnswerLate:
            self.wire.close()  # an answer that came later would be taken for the next one's
            raise

    def copy(self, text: str, types: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Load rows by COPY in its binary format."""
        try:
            with self.wire.cursor() as cursor, cursor.copy(text) as copy:  # type: ignore[call-overload]
                copy.set_types(types)
                for row in rows:
                    copy.write_row(row)
        except AnswerLate:
            self.wire.close()
            raise

    @property
    def gone(self) -> bool:
        """True when nothing can be sent on it any more."""
        return self.wire.closed

    def close(self) -> None:
        """Close it; an open transaction is rolled back by the server."""
        self.wire.close()
