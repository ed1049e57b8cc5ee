"""Holds the stored nodes of the tree against those that the events give.

A node is the root of a full tile, kept so that a proof reads little. A wrong one proves nothing
about an event, and spoils every proof that is made through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shiftbook.ledger.merkle import TILE_HEIGHT

EDITED = "the row was edited, or the disk or a copy lost bytes"


@dataclass(frozen=True, slots=True)
class WrongNode:
    """A stored node that is not as the events give it, in the words of a finding."""

    at: int
    """First event under it; 0 where its place is under none."""
    last: int | None
    """Last event under it, where the events give a node there."""
    expected: str
    found: str
    cause: str


def nodes_under(nodes: Mapping[tuple[int, int], bytes], size: int) -> dict[tuple[int, int], bytes]:
    """Those nodes whose events all stand under the first ``size``, by level and number."""
    return {
        (level, number): value
        for (level, number), value in nodes.items()
        if (number + 1) << level * TILE_HEIGHT <= size
    }


def first_wrong(
    stored: Iterable[tuple[Any, Any, Any]], expected: Mapping[tuple[int, int], bytes], events: int
) -> tuple[int, WrongNode | None]:
    """How many rows are stored, and the first node that is wrong, lacking or one too many.

    Where one is lacking or wrong that the events give, it is the first of these; a row that should
    not be there at all comes after them. ``events`` is their number in the ledger. Raises what
    reading ``stored`` raises.
    """
    left = dict(expected)
    count = 0
    first: WrongNode | None = None
    for level, number, value in stored:
        count += 1
        if type(level) is not int or type(number) is not int:
            found = f"{level!r:.40} and {number!r:.40}"
            wrong = WrongNode(0, None, "numbers in the table of nodes", found, EDITED)
        else:
            wanted = left.pop((level, number), None)
            # What none is expected for is wrong whatever it holds, also where that is nothing.
            if wanted is not None and wanted == value:
                continue
            told = f"{value.hex()[:16]}…" if isinstance(value, bytes) else f"{value!r:.40}"
            again = wanted is None and (level, number) in expected
            wrong = _wrong(level, number, wanted, told, events, again=again)
        first = wrong if first is None else min(first, wrong, key=_rank)
    lacking = [_wrong(*place, value, "none", events) for place, value in left.items()]
    return count, min([*lacking, *([] if first is None else [first])], key=_rank, default=None)


def _rank(wrong: WrongNode) -> tuple[bool, int]:
    return wrong.last is None, wrong.at


def _wrong(
    level: int,
    number: int,
    wanted: bytes | None,
    found: str,
    events: int,
    *,
    again: bool = False,
) -> WrongNode:
    inside = 1 <= level <= 7 and 0 <= number < 1 << 56
    first = number << level * TILE_HEIGHT if inside else 0
    last = max(first, min(first + (1 << level * TILE_HEIGHT), events) - 1)
    should = f"{wanted.hex()[:16]}…" if wanted else "absent: no head covers its events"
    should = "there once" if again else should
    return WrongNode(
        first if first < max(1, events) else 0,
        last if wanted else None,
        f"node {number} of level {level} to be {should}",
        f"another, {found}" if again else found,
        f"the node was edited, or an event among {first} to {last} was",
    )
