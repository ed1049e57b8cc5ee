"""The registry of named faults: a kind of the catalogue, a sentence, and how it is put in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.zoo.job import Shape
from tests.zoo.legitimate import VARIANTS, Variant
from tests.zoo.patching import Patcher

When = Literal["step", "restore", "run"]
"""A fault of an iteration, of a save or restore, or of the whole run from its first moment on."""
PutIn = Callable[[Patcher, int], None]

TRIGGERS = (1, 3, 5)
"""Iterations in which a step fault is put in; after 3 the checkpoint is saved that is restored."""

CRASHES = {4: "plain", 2: "killed_in_2", 5: "killed_in_5"}
"""Honest runs by the iteration in which they are killed, for faults of saves and restores.

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
    act: PutIn
    at: tuple[int, ...] = ()
    """Iterations, where not all of ``TRIGGERS`` leave the fault something to act on."""
    on: str = "plain"
    """The honest variant that it is put into."""

    @property
    def kind(self) -> str:
        """Letter of the catalogue."""
        return self.row[0]

    def triggers(self) -> tuple[int, ...]:
        """When it is put in: an iteration, or the crash before the restore (``CRASHES``)."""
        if self.when == "restore":
            return tuple(CRASHES)
        return self.at or (TRIGGERS if self.when == "step" else (0,))

    def base(self, trigger: int) -> Variant:
        """The honest run that it is put into, and compared with."""
        return VARIANTS[CRASHES[trigger] if self.when == "restore" else self.on]

    def shape(self, seed: int, trigger: int) -> Shape:
        """Shape of that run."""
        return self.base(trigger).shape(seed)

    def put_in(self, patcher: Patcher, trigger: int) -> None:
        """The variant, and the fault around it."""
        variant = self.base(trigger).put_in
        if variant is not None:
            variant(patcher)
        self.act(patcher, trigger)

    def label(self, trigger: int) -> str:
        """The trigger in words."""
        if self.when == "restore":
            return f"killed in iteration {trigger}"
        return f"iteration {trigger}" if self.when == "step" else "whole run"


FAULTS: dict[str, Fault] = {}


def fault(
    row: str, says: str, when: When = "step", at: tuple[int, ...] = (), on: str = "plain"
) -> Callable[[PutIn], PutIn]:
    """Register the decorated function; its name is the fault's."""

    def register(put_in: PutIn) -> PutIn:
        name = put_in.__name__.strip("_")
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, row, says, when, put_in, at, on)
        return put_in

    return register


def load_all() -> dict[str, Fault]:
    """Import every module that registers faults; all of them by name."""
    import tests.zoo.faults_data
    import tests.zoo.faults_groups
    import tests.zoo.faults_losses
    import tests.zoo.faults_packing
    import tests.zoo.faults_state
    import tests.zoo.faults_sync
    import tests.zoo.faults_training  # noqa: F401

    return FAULTS
