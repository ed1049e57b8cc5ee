"""What an append gives back, what a decision consists of, and where the ledger ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shiftbook.ledger.envelope import Draft


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where the events of one append stand."""

    job: str
    first: int
    last: int
    first_version: int
    last_version: int
    repeated: bool = False
    """True when they stood there before, under the same key."""

    @property
    def positions(self) -> range:
        """Positions of the events, in order."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the function given to ``Ledger.decide`` wants to have appended."""

    job: str
    drafts: Sequence[Draft]
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Number of events, and the leaf hash of the last one (None in an empty ledger)."""

    size: int
    leaf: bytes | None
