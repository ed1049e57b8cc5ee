"""The log-probability gap of an update: how far the trainer lies from what the engine reported."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import RecorderMisuse


class LogProbGap:
    """Mean |log-probability of the trainer - of the engine| over trained tokens, in nats."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sum = 0.0

    def add(self, trainer: Any, engine: Any, trained: Any) -> None:
        """Take in arrays or tensors of one shape; ``trained`` says which of the tokens count.

        Raises RecorderMisuse where the shapes differ: values of other tokens would be compared.
        """
        ours, theirs, on = float64_array(trainer), float64_array(engine), float64_array(trained) > 0
        if not ours.shape == theirs.shape == on.shape:
            raise RecorderMisuse(
                "expected log-probabilities of trainer and engine and the trained mask in one "
                f"shape, found {ours.shape}, {theirs.shape} and {on.shape}; cut all three alike"
            )
        self.tokens += int(on.sum())
        with np.errstate(invalid="ignore"):  # what is no number ends as a gap that is none
            self._sum += float(np.abs(ours[on] - theirs[on]).sum())

    @property
    def mean(self) -> float | None:
        """The gap; None where no token was taken in, NaN where one has no finite value."""
        if not self.tokens:
            return None
        return self._sum / self.tokens if math.isfinite(self._sum) else math.nan


def float64_array(values: Any) -> NDArray[np.float64]:
    """Numbers or a tensor, on whatever device, as float64."""
    detached = values.detach() if hasattr(values, "detach") else values
    if hasattr(detached, "double"):
        detached = detached.double().cpu().numpy()
    return np.asarray(detached, dtype=np.float64)
