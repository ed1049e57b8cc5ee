"""Version stamps, a part of I8: what an engine held while it can have made the tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.state import StateFirstUsed
from shiftbook.ledger.events.sync import (
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncFailed,
    WeightSyncStarted,
)
from shiftbook.verify.invariants.spans import Span, Stamped
from shiftbook.verify.lineage import MODEL, WINDOW

MOST_HELD = 256
"""Changes of its weights that are remembered of one engine process."""


@dataclass(frozen=True, slots=True)
class Held:
    """From when an engine process held a version: until it held the next one.

    ``since`` and ``before`` count begins and ends of syncs in the attempt: the engine took the
    version after the one and before the other.
    """

    version: int
    position: int
    since: int
    before: int


class Stamps:
    """What each engine process held, one version after the other."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, list[Held]] = OrderedDict()
        self._moment = 0

    def take(self, event: Event, at: int) -> None:
        """Take in an event that says what an engine holds, or when."""
        match event:
            case AttemptStarted():
                # What an earlier attempt did came before all that this one counts.
                self._moment = 0
                for engine, held in self._held.items():
                    self._held[engine] = [Held(h.version, h.position, 0, 0) for h in held]
            case WeightSyncStarted() | WeightSyncCommitted() | WeightSyncFailed():
                self._moment += 1
            case WeightSyncDelivered():
                self._note(event.incarnation, event.version, at, self._moment)
            case StateFirstUsed() if MODEL in event.parts:
                # It held this before it was seen to use it, and nobody says how long.
                self._note(event.incarnation, event.policy_version, at, 0)
            case _:
                pass

    def _note(self, engine: str, version: int, at: int, since: int) -> None:
        held = self._held.setdefault(engine, [])
        if not held or held[-1].version != version:
            held.append(Held(version, at, since, self._moment + 1))
        del held[:-MOST_HELD]
        self._held.move_to_end(engine)
        if len(self._held) > WINDOW:
            self._held.popitem(last=False)

    def current(self, engine: str) -> int | None:
        """The version that an engine process took last."""
        held = self._held.get(engine)
        return held[-1].version if held else None

    def fault(self, sample: Stamped, drawn: int | None) -> tuple[Span, Held | None] | None:
        """The first span that its engine cannot have made, and what took its weights away before.

        ``drawn`` is the position of the sample's draw where no request can have begun before it.
        Spans whose engine never held their version are not looked at: that is I6's to say.
        """
        places: dict[str, int] = {}
        for span in sample.spans:
            engines = [*self._held] if span.incarnation is None else [span.incarnation]
            known = [
                e for e in engines if any(h.version == span.version for h in self._held.get(e, ()))
            ]
            if not known:
                continue
            first = {
                e: self._place(e, span.version, sample, drawn, places.get(e, 0)) for e in known
            }
            good = {e: place for e, place in first.items() if place is not None}
            if not good:
                return span, self._ended(known[0], span.version)
            if span.incarnation is not None:
                places |= good
        return None

    def _place(
        self, engine: str, version: int, sample: Stamped, drawn: int | None, first: int
    ) -> int | None:
        """Where in an engine's past a span fits, at ``first`` or later: tokens come in order."""
        held = self._held[engine]
        for place in range(first, len(held)):
            now, later = held[place], held[place + 1 : place + 2]
            if now.version != version:
                continue
            gone = any(
                (drawn is not None and h.position < drawn)
                or (sample.begun is not None and h.before <= sample.begun <= self._moment)
                for h in later
            )
            late = sample.ended is not None and now.since > sample.ended
            if not gone and not late:
                return place
        return None

    def _ended(self, engine: str, version: int) -> Held | None:
        """The delivery that replaced a version, the last time that it was held."""
        held = self._held[engine]
        place = max(n for n, h in enumerate(held) if h.version == version)
        return held[place + 1] if place + 1 < len(held) else None
