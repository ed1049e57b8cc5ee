"""The registry of named faults: a kind of the catalogue, a sentence, and how it is put in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.zoo.job import Shape
from tests.zoo.patching import Patcher

When = Literal["step", "restore", "run"]
"""A fault of an iteration, of a save or restore, or of the whole run from its first moment on."""
PutIn = Callable[[Patcher, int], None]

TRIGGERS = (1, 3, 5)
"""Iterations in which a step fault is put in; after 3 the checkpoint is saved that is restored."""

CRASHES: dict[int, Callable[[int], Shape]] = {
    4: lambda seed: Shape(seed=seed),
    2: lambda seed: Shape(seed=seed, killed_in=2, saves=(0, 1), ranks=((0, 2), (2, 1), (4, 2))),
    5: lambda seed: Shape(seed=seed, killed_in=5, saves=(1, 2), ranks=((0, 2), (3, 1), (6, 2))),
}
"""Shapes by the iteration in which the job is killed, for faults of saves and restores.

Killed in 4 the job goes on from the save after 3, and nothing but the iteration it died in is
computed again. Killed in 2 the restored save is of one epoch less. Killed in 5 the last save is
three iterations old, and the first life has already shrunk to one rank. In each, an older save is
there to be mistaken for the right one.
"""


@dataclass(frozen=True)
class Fault:
    """A named fault; ``row`` is the public fault of the catalogue that it is the kind of."""

    name: str
    row: str
    says: str
    when: When
    put_in: PutIn
    at: tuple[int, ...] = ()
    """Iterations, where not all of ``TRIGGERS`` leave the fault something to act on."""

    @property
    def kind(self) -> str:
        """Letter of the catalogue."""
        return self.row[0]

    def triggers(self) -> tuple[int, ...]:
        """When it is put in: an iteration, or the crash before the restore (``CRASHES``)."""
        if self.when == "restore":
            return tuple(CRASHES)
        return self.at or (TRIGGERS if self.when == "step" else (0,))

    def shape(self, seed: int, trigger: int) -> Shape:
        """The job that it is put into."""
        return CRASHES[trigger](seed) if self.when == "restore" else Shape(seed=seed)

    def label(self, trigger: int) -> str:
        """The trigger in words."""
        if self.when == "restore":
            return f"killed in iteration {trigger}"
        return f"iteration {trigger}" if self.when == "step" else "whole run"


FAULTS: dict[str, Fault] = {}


def fault(
    row: str, says: str, when: When = "step", at: tuple[int, ...] = ()
) -> Callable[[PutIn], PutIn]:
    """Register the decorated function; its name is the fault's."""

    def register(put_in: PutIn) -> PutIn:
        name = put_in.__name__.strip("_")
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, row, says, when, put_in, at)
        return put_in

    return register


def load_all() -> dict[str, Fault]:
    """Import every module that registers faults; all of them by name."""
    import tests.zoo.faults_data
    import tests.zoo.faults_state
    import tests.zoo.faults_sync
    import tests.zoo.faults_training  # noqa: F401

    return FAULTS
