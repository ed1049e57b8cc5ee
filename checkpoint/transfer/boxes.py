"""Boxes of logical tensors: what a rank holds, what a receiver wants, and where the two meet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """`size` elements along each axis from `offset` on; a scalar has no axes and one element."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements stand in it."""
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box | None:
        """What both hold of the same logical tensor; None where that is nothing."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def inside(self, outer: Box) -> bool:
        """True when each of its elements stands in the other as well."""
        return len(self.offset) == len(outer.offset) and all(
            a >= b and a + m <= b + n
            for a, m, b, n in zip(self.offset, self.size, outer.offset, outer.size, strict=True)
        )

    def window(self, outer: Box) -> tuple[Any, ...]:
        """The index that makes a view of it (of a scalar too) from an array that holds `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return (..., *(slice(a, a + n) for a, n in zip(starts, self.size, strict=True)))

    def pieces(self, most: int) -> Iterator[Box]:
        """Itself in boxes of at most `most` elements each (1 at least), in C order."""
        if self.elements <= max(1, most):
            yield self
            return
        axis = next(i for i, n in enumerate(self.size) if n > 1)
        rows = max(1, most // (self.elements // self.size[axis]))
        for first in range(0, self.size[axis], rows):
            count = min(rows, self.size[axis] - first)
            offset = (*self.offset[:axis], self.offset[axis] + first, *self.offset[axis + 1 :])
            yield from Box(offset, (*self.size[:axis], count, *self.size[axis + 1 :])).pieces(most)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)
