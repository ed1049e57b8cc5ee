"""Moves, repairs, updates and syncs keep out of each other's way: one has the trainer at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from shiftbook.jobs.standing import Standing
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.errors import MoveFailed

MOVE_LIMIT_S = 60.0
"""How long an update or a repair waits for a move that is under way, beside the start of engines
that may be part of its end."""
UPDATE = "update"
"""Owner of the trainer that is no move."""


class RightOfWay:
    """Who may change the processes now; safe to use from several threads.

    ``wake`` is called when a move has ended, so that work waiting for its replicas flows again.
    """

    def __init__(
        self, job: str, standing: Standing, wake: Callable[[], None], start_limit_s: float = 0.0
    ) -> None:
        self._job, self._standing, self._wake = job, standing, wake
        self.limit_s = MOVE_LIMIT_S + start_limit_s
        """How long anything waits for a move that is under way."""
        self._free = threading.Condition()
        self._owner: str | None = None
        """Of the trainer: a move, or the update."""
        self._repairing = 0
        self._syncing = 0
        self._closed = False
        self.moving: str | None = None
        """The move that is under way."""

    @property
    def updating(self) -> bool:
        """True while the trainer belongs to the update."""
        return self._owner == UPDATE

    def begin_move(self, operation: str, components: Collection[str]) -> str | None:
        """A move is about to quiesce: None where it may, else what is in its way, in words.

        That is an update or another move that has the trainer, a repair, a sync without the gate,
        or the end of the job.
        """
        with self._free:
            why = self._in_the_way(operation, components)
            if why is None:
                if "trainer" in components:
                    self._owner = operation
                self.moving = operation
        return why

    def _in_the_way(self, operation: str, components: Collection[str]) -> str | None:
        if self._closed:
            return "the job is about to end"
        if self._repairing:
            return "a repair is under way"
        if self._syncing:
            return "a weight sync is under way whose records wait for the ledger"
        if "trainer" in components and self._owner not in (None, operation):
            return "an update is under way" if self.updating else f"{self._owner} has the trainer"
        return None

    def end_move(
        self, operation: str, topology: Topology, stalls: Mapping[str, float], committed: bool
    ) -> None:
        """A move is over and left a topology; one that is not known is over already."""
        with self._free:
            if operation not in (self.moving, self._owner):
                return
        self._standing.topology = topology
        self._standing.add_stalls(stalls)
        self._standing.moves += committed
        with self._free:
            if self._owner == operation:
                self._owner = None
            if self.moving == operation:
                self.moving = None
            self._free.notify_all()
        self._wake()

    def close(self) -> None:
        """The job is about to end: no move begins any more."""
        with self._free:
            self._closed = True

    def begin_sync(self) -> bool:
        """A sync that cannot ask the gate, since its record goes to the spool, is about to begin;
        False while a move is under way. No move begins before `end_sync`."""
        with self._free:
            if self.moving is not None:
                return False
            self._syncing += 1
        return True

    def end_sync(self) -> None:
        """The records of a sync that began without the gate are durable."""
        with self._free:
            self._syncing -= 1

    def await_move(self) -> None:
        """Wait until no move is under way, or for the limit."""
        with self._free:
            self._free.wait_for(lambda: self.moving is None, self.limit_s)

    @contextmanager
    def trainer(self) -> Iterator[None]:
        """Have the trainer; waits for a move of it, and raises MoveFailed when it does not end."""
        with self._free:
            if not self._free.wait_for(lambda: self._owner is None, self.limit_s):
                raise MoveFailed(
                    f"expected move {self._owner} to end within "
                    f"{self.limit_s:.0f} s; run `shiftbook recover {self._job}`"
                )
            self._owner = UPDATE
        try:
            yield
        finally:
            with self._free:
                if self._owner == UPDATE:
                    self._owner = None
                self._free.notify_all()

    @contextmanager
    def repair(self) -> Iterator[None]:
        """No move begins while a repair is under way."""
        with self._free:
            self._repairing += 1
        try:
            yield
        finally:
            with self._free:
                self._repairing -= 1
