"""What every command of the gate shares: clocks, identity, and decisions under the append lock."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

from shiftbook.ledger.canonical import encode
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import IllegalStep
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.reallocation import ReallocationAbandoned
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Decision, Receipt
from shiftbook.ledger.state import LedgerState


def boottime_s() -> float:
    """Seconds since the boot of this machine; it goes on while the machine or a process sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Door:
    """The ledger, who decides, and the clocks; commands of the gate derive from it."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        by: str = "gate",
        boottime_s: Callable[[], float] = boottime_s,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.ledger = ledger
        self.by = by
        self.controller = f"{by}@{platform.node()}:{os.getpid()}"
        self.boottime_s = boottime_s
        self.now_ns = now_ns
        self._steps_s: dict[tuple[str, str], float] = {}
        """(job, operation) to the boot time of the last step that this gate wrote."""
        self._moves_s: dict[tuple[str, int], float] = {}
        """(job, position) of the end of a move to its boot time."""

    def _decide(self, fn: Callable[[LedgerState], Decision]) -> Receipt:
        """Decide something that always appends."""
        receipt = self.ledger.decide(fn)
        assert receipt is not None, "the decision gave events"
        return receipt

    def _decide_or_repeat(
        self, event: Callable[[], Event], fn: Callable[[LedgerState], Decision | int]
    ) -> Receipt:
        """Decide something that may stand already: ``fn`` then gives its position.

        ``event`` gives the event that ``fn`` made. Raise IllegalStep where what stands there has
        other content.
        """
        stands: list[int] = []

        def decide(state: LedgerState) -> Decision | None:
            decision = fn(state)
            if isinstance(decision, int):
                stands.append(decision)
                return None
            return decision

        receipt = self.ledger.decide(decide)
        return receipt if receipt is not None else self._standing(event(), stands[-1])

    def _standing(self, event: Event, position: int) -> Receipt:
        """Receipt of an event that stands; IllegalStep where it has other content."""
        stored = self.ledger.event(position)
        if stored.type != event.type_() or encode(stored.body) != encode(event.plain()):
            raise IllegalStep(
                "repeated",
                f"the content that stands at {position} ({stored.type} {stored.body})",
                f"{event.type_()} {event.plain()}",
            )
        return Receipt(stored.job, position, position, stored.version, stored.version, True)


def abandon_unquiesced(job: JobState, reason: str) -> list[Draft]:
    """Events that give up every move which has not begun: proposed, or granted and not quiesced."""
    return [
        Draft(
            ReallocationAbandoned(reason=reason),
            operation=operation.operation,
            cause=operation.last_position,
        )
        for operation in job.operations.values()
        if operation.status in ("proposed", "granted")
    ]
