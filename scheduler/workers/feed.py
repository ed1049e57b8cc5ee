"""Moves work between a worker and its job's channels, in threads of its own.

The engine's loop never waits for a remote call: work is taken ahead of need, and answers leave in
batches. An answer is kept until the job has acknowledged it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from shiftbook.scheduler.channels import Work
from shiftbook.scheduler.workers.component import Answer

TAKE_WAIT_S = 0.5
"""How long the job may hold an empty-handed take before it answers."""
RETRY_S = 0.2

log = logging.getLogger(__name__)


class Feed:
    """Two threads: one takes work while there is room, one delivers answers."""

    def __init__(
        self,
        take: Callable[[int, float], list[Work]],
        deliver: Callable[[list[Answer], int], list[Work]],
        room: Callable[[], int],
        hungry: Callable[[], bool],
        linger_s: Callable[[], float],
        arrived: threading.Event,
    ) -> None:
        self._take, self._deliver, self._room = take, deliver, room
        self._hungry, self._linger_s = hungry, linger_s
        self.inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self.arrived = arrived
        self._outbox: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._undelivered: list[Answer] = []
        self._open = threading.Event()
        self._taking = threading.Lock()
        self._delivering = threading.Lock()
        self._has_room = threading.Event()
        self._has_answers = threading.Event()
        self._urgent = threading.Event()
        self._ended = False
        for target in (self._take_loop, self._deliver_loop):
            threading.Thread(target=target, daemon=True).start()

    def open(self) -> None:
        """Begin to take work."""
        self._open.set()
        self._has_room.set()

    def close(self) -> list[Work]:
        """Stop taking; returns what was taken and not yet used, after the pending take ended."""
        self._open.clear()
        with self._taking, self._delivering:
            rest = []
            while not self.inbox.empty():
                rest.append(self.inbox.get())
            return rest

    def end(self) -> None:
        """End both threads for good."""
        self._ended = True
        self._open.set()
        self._has_room.set()
        self._has_answers.set()

    def ask(self) -> None:
        """The worker is about to run dry: what waits leaves now, and work is taken."""
        self._has_room.set()
        self._urgent.set()

    def answer(self, answers: list[Answer]) -> None:
        """Queue answers for delivery."""
        for item in answers:
            self._outbox.put(item)
        self._has_answers.set()

    def flush(self, limit_s: float) -> bool:
        """Deliver all answers now; False when the job did not take them within the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with self._delivering:
                if self._send():
                    return True
            self._has_answers.wait(RETRY_S)
        return False

    def _take_loop(self) -> None:
        while not self._ended:
            self._open.wait()
            self._has_room.wait(TAKE_WAIT_S)
            self._has_room.clear()
            if self._ended:
                return
            if not self._hungry():
                continue  # what it needs next comes with the answer to its next delivery
            with self._taking:
                if not self._open.is_set():
                    continue
                # What is in the inbox was counted as room's use only once it was submitted.
                wanted = self._room() - self.inbox.qsize()
                if wanted <= 0:
                    continue
                works = self._attempt(lambda n=wanted: self._take(n, TAKE_WAIT_S))  # type: ignore[misc]
                for work in works or []:
                    self.inbox.put(work)
            if works:
                self.arrived.set()
            if works is None:
                self._has_room.wait(RETRY_S)
            if self._hungry():
                self._has_room.set()

    def _deliver_loop(self) -> None:
        while not self._ended:
            self._has_answers.wait()
            self._has_answers.clear()
            linger_s = self._linger_s()
            if linger_s > 0:
                self._urgent.wait(linger_s)
            self._urgent.clear()
            with self._delivering:
                done = self._send()
            if not done:
                threading.Event().wait(RETRY_S)
                self._has_answers.set()

    def _send(self) -> bool:
        while not self._outbox.empty():
            self._undelivered.append(self._outbox.get())
        if not self._undelivered:
            return True
        batch = list(self._undelivered)
        wanted = max(0, self._room() - self.inbox.qsize()) if self._open.is_set() else 0
        works = self._attempt(lambda: self._deliver(batch, wanted))
        if works is None:
            return False
        del self._undelivered[: len(batch)]
        for work in works:
            self.inbox.put(work)
        if works:
            self.arrived.set()
        return True

    @staticmethod
    def _attempt(call: Callable[[], Any]) -> Any:
        """Call the job; None when it cannot be reached now, to be tried again."""
        try:
            return call()
        except Exception as error:  # any failure of the remote side means: not now
            log.debug("job not reachable: %s", error)
            return None
