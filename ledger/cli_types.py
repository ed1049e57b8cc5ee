"""What an option's word may be: whole numbers that a ledger can hold, finite ones, named paths."""

from __future__ import annotations

import math
from typing import Any

import click

LARGEST = 2**63 - 1
"""The largest whole number that a ledger's columns hold."""


class Whole(click.IntRange):
    """A whole number of at most LARGEST; a position, a count or a size."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail on one that nothing here can count to."""
        number = super().convert(value, param, ctx)
        if number > LARGEST:
            self.fail(f"expected a number of at most {LARGEST}, found {number}", param, ctx)
        return number


class Finite(click.FloatRange):
    """A number that is finite, within a range where one is given."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail on NaN, which no range keeps out, and on infinity."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, found {value!r}", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()


class NamedPath(click.Path):
    """A path that is not empty: the name in an unset variable of a shell is a mistake."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; fail on an empty name, which would be the current folder."""
        if value in ("", b""):
            self.fail("expected a path, found nothing; check the variable that should hold it")
        return super().convert(value, param, ctx)
