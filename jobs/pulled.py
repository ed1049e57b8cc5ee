"""An engine whose versions come from a receiver: pulled over the wire, served when verified.

The receiver checks what arrived against the fingerprints of its source, the served engine what it
then reads and says. Only when both agree does the sync count for its target; otherwise the engine
is on the version before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shiftbook.checkpoint.layouts import split
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.receiver import Receiver, Synced
from shiftbook.jobs.engine_types import TurnRequest
from shiftbook.jobs.errors import EngineError
from shiftbook.jobs.model import ModelConfig, parameter_shapes
from shiftbook.jobs.probe import TOLERANCE, Probe, expected_logps
from shiftbook.jobs.serving import ServedEngine, Taken

DTYPE = "bfloat16"
"""Of the weights that engines take."""


def stored_whole(config: ModelConfig) -> dict[str, Stored]:
    """What the receiver of an engine on one device stores: each declared tensor, whole."""
    return {
        name: Stored(DTYPE, split(name, shape, 0, 0, 1))
        for name, shape in parameter_shapes(config).items()
    }


class PulledEngine:
    """Joins a receiver of one rank and a served engine.

    The receiver must store the engine's declared tensors whole (`stored_whole`). Each version is
    probed: what the engine says to fixed prompts is held against a plain forward of the weights
    that arrived, within `tolerance`.
    """

    def __init__(
        self,
        receiver: Receiver,
        served: ServedEngine,
        config: ModelConfig,
        *,
        tolerance: float = TOLERANCE,
    ) -> None:
        if receiver.ranks != 1:
            raise EngineError(
                f"expected a receiver of one rank, found {receiver.ranks}; each rank of an engine "
                "loads its own slices"
            )
        self.receiver, self.served = receiver, served
        self._config, self._tolerance = config, tolerance
        self.taken: Taken | None = None
        """How the engine took the last version that it was given; None before the first."""

    @property
    def serving(self) -> bool:
        """True when the engine serves the newest version that the receiver knows of."""
        return self.receiver.serving and self.served.version == self.receiver.version

    def sync(self, *, wait_s: float = 0.0, whole: bool = False) -> Synced:
        """Pull the newest version and let the engine take it; see `Receiver.sync`.

        Raises TransferError. The engine is then on the version before, verified again, and takes no
        new turns before a sync succeeds; turns in hand go on under that version.
        """
        return self.receiver.sync(wait_s=wait_s, whole=whole, install=self._install)

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn. Raises TransferRefused where the engine has missed a version, or has none,
        and EngineError where the turn asks for another one."""
        # The receiver refuses where it may serve none; a check, so it must not stand in an assert.
        _ = self.receiver.tensors
        self.served.submit(request)

    def _install(self, arrays: Mapping[str, Any]) -> bool:
        """Take what the receiver hands over; True where the engine was read back."""
        catalogue = self.receiver.taking
        version = self.receiver.version if catalogue is None else catalogue.version
        if catalogue is None and self.served.version == version:
            return True  # it went back by itself, and verified that
        assert version is not None
        weights = {name: _tensor(arrays[name]) for name in parameter_shapes(self._config)}
        probe = Probe(expected_logps(weights, self._config), self._tolerance)
        source = None if catalogue is None else catalogue.fingerprints
        self.taken = taken = self.served.take(weights, version, probe, source)
        if taken.failure is not None:
            raise EngineError(f"the engine refused version {version}: {taken.failure}")
        return taken.fingerprint_of == "resident"


def _tensor(bits: Any) -> Tensor:
    """A tensor on the bits of a stored array, which are not copied."""
    return torch.from_numpy(bits.view("i2")).view(torch.bfloat16)
