"""What a recorder stands on: events are held back, appended together, and spooled in an outage."""

from __future__ import annotations

import platform
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from shiftbook.checkpoint.failed_saves import tell_failed
from shiftbook.checkpoint.recorder_leftovers import spool_writer
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.evidence import Rows, as_table, writable_place, write_segments
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.long_fields import set_apart
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.spool import SpoolingWriter

MAX_BUFFERED = 256
"""Events that are held back before they are appended."""

RETRY_S = 1.0
"""Pause between two tries to append what an outage spooled."""


@dataclass(frozen=True, slots=True)
class Held:
    """An event that waits for its append, with the rows that go into its segment."""

    event: Event
    operation: str | None = None
    rows: Rows | None = None
    occurred_ns: int = 0


class HeldSave(Protocol):
    """A save in the background, at the place among the events where its record belongs."""

    @property
    def done(self) -> bool:
        """True when `held` returns at once."""

    def held(self) -> Held | None:
        """The record of the bundle; None where the save failed. Waits for its end."""

    def close(self) -> None:
        """Its record, if there is one, is with the ledger or the spool."""


def whole(entry: Held, now_ns: int) -> Held:
    """What is held back of one event, with everything about it that could be refused looked at."""
    event, apart = set_apart(entry.event)
    rows = apart if entry.rows is None else entry.rows
    return Held(event, entry.operation, None if rows is None else as_table(rows), now_ns)


class Book:
    """The pending events of one attempt, and what its records know of each other."""

    def __init__(
        self,
        ledger: Ledger,
        job: str,
        plan: Plan,
        attempt: str,
        *,
        epoch: int,
        devices: Sequence[str],
        evidence: Path | str | None,
        spool: Path,
        policy: tuple[int, str],
    ) -> None:
        self.ledger, self.job, self.plan, self.attempt = ledger, job, plan, attempt
        self._epoch = epoch
        self._device = devices[0] if devices else f"{platform.node()}/0"
        self._writer = SpoolingWriter(
            ledger.append,
            spool,
            writer=spool_writer(attempt),
            retry_s=RETRY_S,
            evidence=writable_place(evidence or ledger),
        )
        self._spool = spool
        self._pending: list[Held | HeldSave] = []
        self._saved: list[HeldSave] = []
        """Saves that ended, whose records are on their way."""
        self._batches: deque[tuple[str, list[Draft]]] = deque()
        """Batches on their way: each keeps its key until the ledger or the spool has it."""
        self._key = f"recorder:{attempt}:{secrets.token_hex(4)}"
        self._batched = 0
        self._policy = policy
        self._syncs = 0
        self._moment = 0
        self._owned = False
        self._after: Literal["restore", "start"] | None = "start"
        self._versions: dict[int, dict[str, int]] = {}
        """By iteration: oldest version of each of its samples, for the updates that may use it."""
        self._verified = 0
        self._reward_mean = 0.0

    def _add(self, event: Event, operation: str | None = None, rows: Rows | None = None) -> None:
        self._add_all([Held(event, operation, rows)])

    def _add_all(self, entries: Sequence[Held]) -> None:
        """Hold back what one call recorded, all of it or, where this raises, none of it.

        Room is made before, not after: a call whose records could not be taken may be repeated.
        What no ledger would take is refused here, where it is said, and never held back: raises
        InvalidEvent and EvidenceError for it, and otherwise as ``flush`` does.
        """
        now_ns = time.time_ns()
        made = [whole(entry, now_ns) for entry in entries]
        if self._pending and len(self._pending) + len(made) > MAX_BUFFERED:
            self.flush()
            if len(self._pending) + len(made) > MAX_BUFFERED:  # a save holds them up
                self._flush_all()
        self._pending += made

    def flush(self) -> bool:
        """Append what is held back; False where some of it is not in the ledger yet.

        That is where the ledger, or the store of evidence, is out of reach, and it was spooled to
        local disk instead; and where it comes after a save that goes on in the background, whose
        record has its place before it. Where this raises, nothing is lost: the next call tries
        again, in the same order, and a batch that had reached the ledger all the same stands in it
        once.
        """
        ready: list[Held] = []
        ended: list[HeldSave] = []
        looked_at = 0
        for entry in self._pending:
            made: Held | None
            if isinstance(entry, Held):
                made = entry
            elif entry.done:
                made = entry.held()
                ended.append(entry)
            else:
                break
            looked_at += 1
            if made is not None:
                ready.append(made)
        if ready:
            drafts = self._drafts(ready)
            for first in range(0, len(drafts), MAX_BUFFERED):
                self._batched += 1
                batch = drafts[first : first + MAX_BUFFERED]
                self._batches.append((f"{self._key}:{self._batched}", batch))
        del self._pending[:looked_at]
        self._saved += ended
        while self._batches:
            key, drafts = self._batches[0]
            self._writer.record(self.job, drafts, key)
            self._batches.popleft()
        while self._saved:
            self._saved.pop().close()
        return self._writer.waiting == 0 and not self._pending

    def _flush_all(self) -> None:
        """Append all that is held back; waits for the saves that hold some of it up."""
        while True:
            self.flush()
            if not self._pending:
                return
            first = self._pending[0]
            assert not isinstance(first, Held)
            first.held()

    def _drafts(self, entries: Sequence[Held]) -> list[Draft]:
        """Write the segments of what is held back; its events with their segments."""
        with_rows = [entry.rows for entry in entries if entry.rows is not None]
        place = self._writer.segments
        segments = iter(write_segments(place, with_rows) if with_rows else [])
        return [
            Draft(
                entry.event
                if entry.rows is None
                else entry.event.model_copy(update={"segment": next(segments)}),
                operation=entry.operation,
                occurred_ns=entry.occurred_ns,
            )
            for entry in entries
        ]

    def _made_by(self) -> dict[str, int]:
        """Oldest version of the tokens of each sample that an update may use, as made last."""
        known: dict[str, int] = {}
        for made in self._versions.values():
            known |= made
        return known

    def _forget(self, iteration: int) -> None:
        """Let samples go that no update from this iteration on may use, as the verifier does.

        An iteration may pass without an update, so the versions of their tokens count as well.
        """
        bound = self.plan.sampling.staleness_bound
        least = self._policy[0] - bound
        for old in [made for made in self._versions if made < iteration - bound]:
            kept = {uid: low for uid, low in self._versions[old].items() if bound and low >= least}
            if kept:
                self._versions[old] = kept
            else:
                del self._versions[old]

    @property
    def waiting(self) -> int:
        """Records that an outage keeps on local disk."""
        return self._writer.waiting

    def _drained(self) -> None:
        """Have all that was recorded in the ledger; raise LedgerUnreachable where some waits."""
        self._flush_all()
        left = self._writer.drain()
        if left.waiting:
            raise LedgerUnreachable(
                f"expected all records of {self.attempt} in the ledger, found {left.waiting} that "
                f"wait in {self._writer.directory}: {left.cause}; try again when it is back"
            )

    def close(self) -> None:
        """Append what is held back and end this handle; the job stays as it is.

        Waits for saves that it was told of. What an outage still keeps from the ledger stays
        spooled, for the next attempt or for ``shiftbook recover``. Raises EarlierSaveFailed, when
        all else is done, where a save in the background failed and nobody asked for its result.
        """
        self._end()
        tell_failed("the recorder is closed, and its ledger has no record of that bundle")

    def _end(self) -> None:
        try:
            self._flush_all()
            if self._writer.waiting:
                self._writer.drain()
        finally:
            self._writer.close()
            if self._owned:
                self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()  # what broke the block is what has to be seen
