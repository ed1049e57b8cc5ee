"""What a recorder stands on: events are held back, appended together, and spooled in an outage."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from shiftbook.checkpoint.recorder_samples import Columns
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.evidence import write_segments
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.spool import SpoolingWriter

MAX_BUFFERED = 256
"""Events that are held back at most before they are appended."""

RETRY_S = 1.0
"""Pause between two tries to append what an outage spooled."""


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
        evidence: Path | None,
        spool: Path,
        policy: tuple[int, str],
    ) -> None:
        self.ledger, self.job, self.plan, self.attempt = ledger, job, plan, attempt
        self._epoch = epoch
        self._device = devices[0] if devices else f"{platform.node()}/0"
        self._evidence: Ledger | Path = evidence or ledger
        self._writer = SpoolingWriter(
            ledger.append, spool, writer=f"recorder-{attempt}", retry_s=RETRY_S
        )
        self._pending: list[tuple[Event, str | None, int, Columns | None]] = []
        self._policy = policy
        self._syncs = 0
        self._owned = False
        self._after: Literal["restore", "start"] | None = "start"
        self._versions: dict[str, int] = {}
        self._verified = 0
        self._reward_mean = 0.0

    def _add(self, event: Event, operation: str | None = None, rows: Columns | None = None) -> None:
        self._pending.append((event, operation, time.time_ns(), rows))
        if len(self._pending) >= MAX_BUFFERED:
            self.flush()

    def flush(self) -> bool:
        """Append what is held back; False where it was spooled to local disk instead."""
        if not self._pending:
            return self._writer.waiting == 0
        pending, self._pending = self._pending, []
        with_rows = [rows for _, _, _, rows in pending if rows is not None]
        segments = iter(write_segments(self._evidence, with_rows) if with_rows else [])
        drafts = []
        for event, operation, occurred_ns, rows in pending:
            final = event if rows is None else event.model_copy(update={"segment": next(segments)})
            drafts.append(Draft(final, operation=operation, occurred_ns=occurred_ns))
        return self._writer.record(self.job, drafts) is not None

    @property
    def waiting(self) -> int:
        """Records that an outage keeps on local disk."""
        return self._writer.waiting

    def close(self) -> None:
        """Append what is held back and end this handle; the job stays as it is."""
        self.flush()
        if self._writer.waiting:
            self._writer.drain()
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
        self.close()
