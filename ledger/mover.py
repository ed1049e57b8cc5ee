"""Who really moves the processes: the interface of a mover, and how recovery finds one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.fencing import evidence_of_death
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.job_state import JobState, OperationState
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.topology import Topology

ENTRY_POINTS = "shiftbook.movers"
CONFIG_KEY = "mover"
"""Key of ``JobOpened.config`` under which a job names the mover of all its moves."""


class Mover(Protocol):
    """Acts on the processes of a job, for recovery and for moves of other people's schedulers.

    ``restore`` and ``finish`` may be called again after a failure or a crash in their middle, so
    both must be idempotent. They pass the grant on to the workers, which check it. One that cannot
    act now raises ``RecoverLater``: the move stays open. Any other failure counts as a try.
    """

    def inspect(self) -> Topology:
        """Where the processes really stand, as they say themselves."""
        ...

    def restore(self, topology: Topology, grant: Grant) -> None:
        """Bring everything back to the topology before the move, and let it work again."""
        ...

    def finish(self, topology: Topology, grant: Grant) -> None:
        """Bring a verified move to its end, and let everything work in the new topology."""
        ...

    def close(self) -> None:
        """Let go of connections; the processes live on."""
        ...


OpenMover = Callable[[Ledger, str], Mover]
"""What an entry point of ``shiftbook.movers`` is: it takes the ledger and the job's name."""


def find_mover(ledger: Ledger, job: JobState, operation: OperationState) -> Mover | None:
    """Open the mover that the grant names, else the one of the job's config; None without either.

    Raise InvalidInput where the name leads nowhere.
    """
    config = job.opened.config if job.opened is not None else {}
    name = operation.mover or config.get(CONFIG_KEY)
    return None if name is None else load_mover(str(name))(ledger, job.name)


def load_mover(name: str) -> OpenMover:
    """Function that opens a mover, by the name of an entry point or as ``module:function``."""
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        loaded: OpenMover = entry.load()
        return loaded
    module, _, function = name.partition(":")
    try:
        found: OpenMover = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(sorted(entry_points(group=ENTRY_POINTS).names)) or "none"
        raise InvalidInput(
            f"expected a mover: an entry point of {ENTRY_POINTS} (installed: {known}) or "
            f"module:function, found {name!r} ({error}); install the package that has it"
        ) from error
    return found


class VacantMover:
    """Mover of a job whose processes are all dead, as the device locks of this node show.

    Where nobody stands, the topology of the next attempt is as good as any: the one asked for is
    confirmed as long as the locks are free. Raises DeviceHeld where a process still lives.
    """

    def __init__(self, directory: Path, devices: tuple[str, ...]) -> None:
        self._directory = directory
        self._devices = devices
        self._agreed = Topology()

    def inspect(self) -> Topology:
        """The topology agreed on; nothing stands in its way while the locks are free."""
        evidence_of_death(self._directory, self._devices)
        return self._agreed

    def restore(self, topology: Topology, grant: Grant) -> None:
        """Agree on the topology before the move."""
        evidence_of_death(self._directory, self._devices)
        self._agreed = topology

    def finish(self, topology: Topology, grant: Grant) -> None:
        """Agree on the topology after the move."""
        evidence_of_death(self._directory, self._devices)
        self._agreed = topology

    def close(self) -> None:
        """Nothing to let go of."""
