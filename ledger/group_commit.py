"""Group commit: concurrent appends of one process share one transaction, a lone one waits for none.

There is no thread and no timer. Whoever gets the turn commits everything that queued up while the
one before was committing. Those whose request it took along leave at once, without a turn of their
own: they come back with their next request while the next commit is made, and so share one again.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shiftbook.ledger.errors import AppendInDoubt, LedgerError, LedgerUnreachable
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.receipt import Receipt

MAX_REQUESTS = 512
"""Most appends in one transaction, so that the first of them does not wait for ever."""


Item = tuple[Event, str | None, int | None, int | None, str | None, int | None]
"""The fields of a Draft, in its order; a tuple is made in a tenth of the time."""


class Request:
    """One append on its way: what to write, then what came of it."""

    __slots__ = ("done", "error", "expected_version", "items", "job", "key", "receipt")

    def __init__(
        self, job: str, items: Sequence[Item], key: str | None, expected_version: int | None
    ) -> None:
        self.job = job
        self.items = items
        self.key = key
        self.expected_version = expected_version
        self.receipt: Receipt | None = None
        self.error: LedgerError | None = None
        self.done = False

    def result(self) -> Receipt:
        """Receipt of a request that is done, or its error raised."""
        if self.error is not None:
            raise self.error
        assert self.receipt is not None
        return self.receipt


class GroupCommit:
    """The queue of appends of one handle, and the turn that its committers take."""

    def __init__(self, commit: Callable[[Sequence[Request]], None], timeout_s: float) -> None:
        self._commit = commit
        self._timeout_s = timeout_s
        self._turn = threading.Condition()
        self._busy = False
        self._holder: int | None = None
        self._queue: deque[Request] = deque()

    def submit(self, request: Request) -> Receipt:
        """Have a request committed, by this thread or by the one that is ahead of it."""
        self._refuse_nested()
        with self._turn:
            self._queue.append(request)
            if not self._turn.wait_for(lambda: request.done or not self._busy, self._timeout_s):
                self._withdraw(request)
            if request.done:
                return request.result()
            self._take_turn()
        try:
            while not request.done:
                self._commit_next()
        finally:
            self._end_turn()
        return request.result()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the turn; queued appends wait until it is given back."""
        self._refuse_nested()
        with self._turn:
            if not self._turn.wait_for(lambda: not self._busy, self._timeout_s):
                raise self._too_long()
            self._take_turn()
        try:
            yield
        finally:
            self._end_turn()

    def _take_turn(self) -> None:
        self._busy, self._holder = True, threading.get_ident()

    def _end_turn(self) -> None:
        with self._turn:
            self._busy, self._holder = False, None
            self._turn.notify_all()

    def _commit_next(self) -> None:
        group: list[Request] = []
        while self._queue and len(group) < MAX_REQUESTS:
            group.append(self._queue.popleft())
        try:
            self._commit(group)
        except LedgerError as error:
            for request in group:
                if request.error is None:
                    # Each thread raises an error of its own, so tracebacks do not mix.
                    request.error = copy.copy(error)
                    request.error.__cause__ = error.__cause__
        except BaseException as error:
            for request in group:
                request.error = request.error or AppendInDoubt(
                    f"the append was interrupted ({type(error).__name__}) before its commit was "
                    "confirmed; retry it with the same key"
                )
            raise
        finally:
            for request in group:
                request.done = True

    def _withdraw(self, request: Request) -> None:
        """After the time limit: out of the queue, or, when it is being committed, wait for it."""
        try:
            self._queue.remove(request)
        except ValueError:
            self._turn.wait_for(lambda: request.done or not self._busy)
            return
        raise self._too_long()

    def _too_long(self) -> LedgerUnreachable:
        return LedgerUnreachable(
            f"expected this process's other appends to end within {self._timeout_s:g} s, found "
            "one still running; shorten what runs inside decide(), or try again"
        )

    def _refuse_nested(self) -> None:
        if self._holder == threading.get_ident():
            raise LedgerError(
                "append() or decide() was called inside decide(), which holds the append lock; "
                "return the events from the function instead"
            )
