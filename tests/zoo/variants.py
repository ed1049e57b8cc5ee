"""The registry of legitimate variants: runs that differ from the plain one in a declared way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.zoo.job import Shape
from tests.zoo.patching import Patcher

PutIn = Callable[[Patcher], None]


@dataclass(frozen=True)
class Variant:
    """A declared difference; ``shape`` is made for a seed."""

    name: str
    says: str
    shape: Callable[[int], Shape]
    put_in: PutIn | None = None


VARIANTS: dict[str, Variant] = {}


def variant(says: str, **shape: Any) -> Callable[[PutIn], PutIn]:
    """Register the decorated function as what is put in."""

    def register(put_in: PutIn) -> PutIn:
        name = put_in.__name__.strip("_")
        VARIANTS[name] = Variant(name, says, lambda seed: Shape(seed=seed, **shape), put_in)
        return put_in

    return register


def shaped(name: str, says: str, **shape: Any) -> None:
    """Register a variant that needs another shape alone."""
    VARIANTS[name] = Variant(name, says, lambda seed: Shape(seed=seed, **shape))
