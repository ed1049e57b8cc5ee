"""LISTEN wakes followers at a commit; they look by themselves too, so a lost one costs time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg

from shiftbook.ledger.errors import LedgerError
from shiftbook.ledger.postgres_session import Session

SLICE_S = 0.05
"""Longest wait without a look at ``stop``."""

RECONNECT_S = 1.0
"""Pause between two tries to listen again."""


class Notified:
    """One listening connection for all followers of a handle.

    One follower at a time waits on the connection and tells the others.
    """

    def __init__(self, connect: Callable[[], Session], channel: str) -> None:
        self._connect = connect
        self._channel = channel
        self._session: Session | None = None
        self._not_before_s = 0.0
        self._listening = threading.Lock()
        self._changed = threading.Condition()
        self._wakes = 0
        self._closed = False

    def wait(self, timeout_s: float, stop: threading.Event) -> None:
        """Return at the next commit, or when ``stop`` is set, or after ``timeout_s`` at most."""
        before, deadline_s = self._wakes, time.monotonic() + timeout_s
        while self._wakes == before and not stop.is_set():
            left_s = min(SLICE_S, deadline_s - time.monotonic())
            if left_s <= 0:
                return
            if self._listening.acquire(blocking=False):
                try:
                    heard = self._hear(left_s)
                finally:
                    self._listening.release()
                if heard:
                    with self._changed:
                        self._wakes += 1
                        self._changed.notify_all()
                elif self._session is None:
                    stop.wait(left_s)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._wakes != before, left_s)

    def _hear(self, timeout_s: float) -> bool:
        try:
            if self._session is None:
                if self._closed or time.monotonic() < self._not_before_s:
                    return False
                self._not_before_s = time.monotonic() + RECONNECT_S
                self._session = self._connect()
                self._session.execute(f"LISTEN {self._channel}")
                return True  # what came before this is not told any more: look now
            heard = self._session.wire.notifies(timeout=timeout_s, stop_after=1)
            return sum(1 for _ in heard) > 0
        except (psycopg.Error, LedgerError):
            self._drop()
            return False

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Close the connection, after whoever waits on it."""
        self._closed = True
        with self._listening:
            self._drop()
