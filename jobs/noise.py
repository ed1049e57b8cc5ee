"""The noise of an engine that gives no bits, and the tolerance that a job on it declares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from shiftbook.jobs.errors import EngineError
from shiftbook.ledger.errors import InvalidInput

FACTOR = 8.0
"""Allowed gap over the measured one; the same as the verifier's."""
FLOOR = 2e-5
"""Least tolerance: float32 sums of a few dozen terms in two orders; the same as the verifier's."""
LIMIT_S = 180.0
FILE = "calibration.json"


@dataclass(frozen=True)
class Noise:
    """What ``jobs/calibrate.py`` measured: |log-probability, engine - training side|."""

    engine: str
    lanes: int
    compared: int
    mean_gap: float
    """Largest mean gap of any batch composition."""
    largest_gap: float
    between_compositions: float
    """Largest difference of the same log-probability in two compositions."""

    @property
    def tolerance(self) -> float:
        """What a job on this engine declares."""
        return max(FLOOR, FACTOR * self.mean_gap)

    def text(self) -> str:
        """In a line."""
        return (
            f"{self.engine} gives no bits: log-probabilities within {self.tolerance:.2g} of the "
            f"training side's, in the mean (calibrated here: {self.mean_gap:.2g} in the mean, "
            f"{self.largest_gap:.2g} at most, {self.between_compositions:.2g} between batches)"
        )


class Calibration:
    """A measurement in a process of its own, begun at once; kept in a folder and read again there,
    since the plan of a job that goes on is the one that it was opened with."""

    def __init__(self, folder: Path, engine: str, lanes: int) -> None:
        self._file = folder / FILE
        self._engine = engine
        self._process: subprocess.Popen[str] | None = None
        if engine == "torch" or self._file.exists():
            return
        command = [sys.executable, "-m", "shiftbook.jobs.calibrate", "--engine", engine]
        self._process = subprocess.Popen(
            [*command, "--lanes", str(lanes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def result(self) -> Noise | None:
        """What was measured; None for the reference engine, which gives bits.

        Raises ``EngineError`` where the engine does not start, ``InvalidInput`` for a file that
        holds no measurement of this engine.
        """
        if self._engine == "torch":
            return None
        if self._process is None:
            return self._stored()
        try:
            out, err = self._process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, err = "", f"no answer within {LIMIT_S:.0f} s"
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if self._process.returncode or not lines:
            last = next(reversed(err.strip().splitlines()), "nothing said")
            raise EngineError(
                f"expected {self._engine} to start and be calibrated, found: {last}; "
                "`shiftbook doctor` says what keeps it from starting"
            )
        noise = Noise(**json.loads(lines[-1]))
        self._file.write_text(json.dumps(asdict(noise), indent=2) + "\n", encoding="utf-8")
        return noise

    def _stored(self) -> Noise:
        try:
            noise = Noise(**json.loads(self._file.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise InvalidInput(
                f"expected a calibration in {self._file}, found: {error}; remove it"
            ) from error
        if noise.engine != self._engine:
            raise InvalidInput(
                f"expected a calibration of {self._engine} in {self._file}, found one of "
                f"{noise.engine}; name another folder with --out"
            )
        return noise
