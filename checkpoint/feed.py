"""Draws on their way: handed out, not yet consumed, and therefore part of the state.

A draw is a pure function of its ordinal, so the buffer is a list of ordinals. What a restore finds
in it is handed out first, before anything new is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shiftbook.checkpoint.errors import SamplerStateError
from shiftbook.checkpoint.recorder_state import uid
from shiftbook.checkpoint.sampler import Draw, Sampler


class Feed:
    """A sampler with its in-flight buffer; ``group_size`` samples are made of each draw."""

    def __init__(self, sampler: Sampler, group_size: int = 1) -> None:
        self.sampler = sampler
        self.group_size = group_size
        self._waiting: list[Draw] = []
        """In flight when the state was saved, to be handed out again."""
        self._out: dict[int, Draw] = {}

    @property
    def cursor(self) -> int:
        """Ordinal of the next draw that was never handed out."""
        return self.sampler.state().ordinal

    @property
    def in_flight(self) -> list[Draw]:
        """Draws handed out and not consumed, and those that wait to be handed out again."""
        return sorted([*self._out.values(), *self._waiting], key=lambda draw: draw.ordinal)

    def take(self, n: int) -> list[Draw]:
        """The next ``n`` draws: those that a restore brought back first, then new ones."""
        if n < 0:
            raise SamplerStateError(f"expected at least 0 draws, found {n}")
        again, self._waiting = self._waiting[:n], self._waiting[n:]
        draws = again + self.sampler.draw(n - len(again))
        self._out |= {draw.ordinal: draw for draw in draws}
        return draws

    def consumed(self, ordinals: Iterable[int]) -> None:
        """These were trained on, or dropped with a reason; each exactly once.

        Raises SamplerStateError for one that is not in flight; nothing is changed then.
        """
        gone = list(ordinals)
        strange = [ordinal for ordinal in gone if ordinal not in self._out]
        if strange or len(set(gone)) != len(gone):
            raise SamplerStateError(
                f"expected draws that are in flight, each once, found {strange[:5] or gone[:5]}; "
                "a draw is consumed exactly once"
            )
        for ordinal in gone:
            del self._out[ordinal]

    def state(self) -> dict[str, Any]:
        """Sampler and buffer of one moment, as plain values."""
        return {
            "sampler": self.sampler.state().plain(),
            "in_flight": [draw.ordinal for draw in self.in_flight],
        }

    def bundle_fields(self) -> dict[str, Any]:
        """The same as the fields ``sampler`` and ``in_flight_uids`` of a bundle."""
        return {
            "sampler": self.sampler.state().plain(),
            "in_flight_uids": tuple(
                uid(draw.ordinal, member)
                for draw in self.in_flight
                for member in range(self.group_size)
            ),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave; SamplerStateError for the state of another sampler."""
        if not {"sampler", "in_flight"} <= state.keys():
            raise SamplerStateError(
                f"expected a state with sampler and in_flight, found {sorted(state)}"
            )
        before = self.sampler.state()
        self.sampler.restore(state["sampler"])
        self._bring_back([int(ordinal) for ordinal in state["in_flight"]], before)

    def restore_bundle(self, fields: Mapping[str, Any]) -> None:
        """Go on from what ``bundle_fields`` gave, as a manifest holds it.

        SamplerStateError for the cursor of another order, where the cursor names its order, and for
        a bundle that has no in-flight buffer.
        """
        if fields["in_flight_uids"] is None:
            raise SamplerStateError(
                "expected a bundle with the in-flight buffer of its sampler, found none; what was "
                "drawn and not consumed would be lost"
            )
        before = self.sampler.state()
        named = {name: value for name, value in fields["sampler"].items() if value is not None}
        self.sampler.restore({**before.plain(), **named})
        ordinals = {int(uid.partition("/")[0]) for uid in fields["in_flight_uids"]}
        self._bring_back(sorted(ordinals), before)

    def _bring_back(self, ordinals: list[int], before: Any) -> None:
        wrong = [ordinal for ordinal in ordinals if not 0 <= ordinal < self.cursor]
        if wrong or len(set(ordinals)) != len(ordinals):
            found, cursor = wrong[:5] or ordinals[:5], self.cursor
            self.sampler.restore(before)
            raise SamplerStateError(
                f"expected draws in flight below the cursor {cursor}, each once, found {found}; "
                "take sampler and buffer from one moment"
            )
        self._waiting = [self.sampler.at(ordinal, 1)[0] for ordinal in sorted(ordinals)]
        self._out = {}
