"""The registry of named faults: a kind of the catalogue, a sentence, and how it is put in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.zoo.patching import Patcher

When = Literal["step", "restore", "always"]
PutIn = Callable[[Patcher, int], None]

TRIGGERS = (1, 3, 5)
"""Iterations in which a step fault is put in; after 3 the checkpoint is saved that is restored."""


@dataclass(frozen=True)
class Fault:
    """A named fault; ``row`` is the public fault of the catalogue that it is the kind of."""

    name: str
    row: str
    says: str
    when: When
    put_in: PutIn

    @property
    def kind(self) -> str:
        """Letter of the catalogue."""
        return self.row[0]

    def triggers(self) -> tuple[int, ...]:
        """Iterations at which it can be put in."""
        return TRIGGERS if self.when == "step" else (0,)


FAULTS: dict[str, Fault] = {}


def fault(row: str, says: str, when: When = "step") -> Callable[[PutIn], PutIn]:
    """Register the decorated function; its name is the fault's."""

    def register(put_in: PutIn) -> PutIn:
        name = put_in.__name__.strip("_")
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, row, says, when, put_in)
        return put_in

    return register


def load_all() -> dict[str, Fault]:
    """Import every module that registers faults; all of them by name."""
    import tests.zoo.faults_data
    import tests.zoo.faults_state
    import tests.zoo.faults_sync
    import tests.zoo.faults_training  # noqa: F401

    return FAULTS
