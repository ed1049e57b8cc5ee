"""A handle's connections: one that writes, a few that read; closed safely however it ends."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from shiftbook.ledger.dialect import Connection, Dialect, Waker, abandon
from shiftbook.ledger.errors import LedgerError, LedgerUnreachable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Pauses between tries to connect again: the second try comes soon, later ones less often."""

CLOSE_LIMIT_S = 15.0
"""Longest wait at closing for reads that are under way; each is a short one."""


class Patience:
    """How long to go on trying after a connection broke."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def again(self) -> bool:
        """Wait a little and say True, or say False at the end of the time.

        The time begins with the first call: what broke may have been waited for before.
        """
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._limit_s
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


class Connections:
    """All connections of one handle; ``reading`` lends one of at most ``dialect.readers``."""

    def __init__(self, dialect: Dialect) -> None:
        self.writer: Connection | None = None
        self.pid = os.getpid()
        self._dialect = dialect
        self._idle: list[Connection] = []
        self._lent = 0
        self._change = threading.Condition()
        self._waker: Waker | None = None
        self._closed = False

    @contextlib.contextmanager
    def reading(self, make: Callable[[], Connection]) -> Iterator[Connection]:
        """Lend a reading connection, made by ``make`` where none is idle; not from a fork."""
        if os.getpid() != self.pid:
            raise LedgerUnreachable(
                "expected a ledger opened by this process, found one inherited by a fork; "
                "open it again after the fork"
            )
        with self._change:
            self._change.wait_for(lambda: self._closed or self._lent < self._dialect.readers)
            if self._closed:
                raise LedgerUnreachable("expected an open ledger, found one that is closed")
            self._lent += 1
            connection = self._idle.pop() if self._idle else None
        sound = False
        try:
            connection = connection or make()
            yield connection
            sound = True
        except self._dialect.errors as error:
            # A statement that the server refused leaves a connection that can be used.
            sound = connection is not None and not self._dialect.broken(connection, error)
            raise
        finally:
            with self._change:
                self._lent -= 1
                if connection is not None and sound:
                    self._idle.append(connection)
                self._change.notify_all()
            if connection is not None and not sound:
                with contextlib.suppress(*self._dialect.errors):
                    connection.close()

    def waker(self) -> Waker | None:
        """What wakes followers, one for a whole handle; None where the store has no such thing."""
        with self._change:
            if self._waker is None and not self._closed:
                self._waker = self._dialect.waker()
            return self._waker

    def close(self) -> None:
        """Close the readers first, so that the writer's close can tidy the log away."""
        if os.getpid() != self.pid:
            _abandon(*self._idle, self.writer, self._waker)
            return
        with self._change:
            self._closed = True
            self._change.notify_all()
            # A thread that never comes back must not keep a program from ending.
            self._change.wait_for(lambda: not self._lent, CLOSE_LIMIT_S)
            idle, self._idle = self._idle, []
            writer, self.writer = self.writer, None
            waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()
        try:
            # Closing the writer may checkpoint, which must not meet another writer.
            if writer is not None:
                self._dialect.lock()
            for connection in (*idle, writer):
                if connection is not None:
                    self._dialect.check_log(connection)
                    connection.close()
        except LedgerError:
            _abandon(*idle, writer)
        finally:
            self._dialect.close()


def _abandon(*connections: object) -> None:
    for connection in connections:
        if connection is not None:
            abandon(connection)
