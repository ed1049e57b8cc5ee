"""A quantity that is learned online: mean, spread and how far to trust them, with forgetting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shiftbook.scheduler.errors import TelemetryError

Z_80 = 1.2815515655446004
"""Normal quantile that leaves 10 % above it: intervals here hold 80 %."""


def t_quantile_80(degrees: float) -> float:
    """Student's t quantile that leaves 10 % above it, for any degrees of freedom of at least 1.

    Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5) to third order; within 3 % from 2
    degrees up and 8 % below the true 3.078 at 1.
    """
    z, v = Z_80, max(degrees, 1.0)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


@dataclass
class Estimate:
    """Exponentially weighted mean and variance that start from a prior.

    The prior counts as ``prior_weight`` observations and fades like any other. ``forget`` is the
    weight that an observation keeps when the next one of weight 1 comes. Update of mean and
    squares: West (1979), with decay.
    """

    mean: float
    spread: float
    """Standard deviation of one observation, by the prior until more is known."""
    forget: float = 0.85
    prior_weight: float = 0.5
    limit: float | None = None
    """Predictive standard deviations beyond which an observation counts as that far only: for
    quantities with a heavy tail, where a single stray one says little about the next."""
    observed: int = 0
    _weight: float = field(init=False)
    _squares: float = field(init=False)
    _weight_squared: float = field(init=False)

    def __post_init__(self) -> None:
        self._weight = self.prior_weight
        self._weight_squared = self.prior_weight**2
        self._squares = self.prior_weight * self.spread**2
        self._floor = 1e-3 * abs(self.mean)

    def observe(self, value: float, weight: float = 1.0) -> None:
        """Take an observation in; ``weight`` counts it as several. Raises on what is no number."""
        if not (math.isfinite(value) and math.isfinite(weight) and weight >= 0):
            raise TelemetryError(
                f"expected a finite observation with a weight of at least 0, found {value!r} "
                f"with weight {weight!r}; check the counter that it came from"
            )
        if weight == 0:
            return
        if self.limit is not None:
            reach = self.limit * self.predictive
            value = min(max(value, self.mean - reach), self.mean + reach)
        decay = self.forget**weight
        # An observation of a large weight is a mean of several: it must not outweigh for good.
        gain = (1 - decay) / (1 - self.forget)
        self._weight = decay * self._weight + gain
        self._weight_squared = decay**2 * self._weight_squared + gain**2 / max(weight, 1.0)
        before = value - self.mean
        self.mean += gain / self._weight * before
        self._squares = decay * self._squares + gain * before * (value - self.mean)
        self.observed += 1
        self.spread = math.sqrt(max(self._squares / self._weight, 0.0))

    @property
    def effective(self) -> float:
        """Observations that the estimate rests on after forgetting (Kish's effective size)."""
        return self._weight**2 / self._weight_squared

    @property
    def predictive(self) -> float:
        """Standard deviation of the next observation, the mean's own error included.

        Scaled so that mean ± ``Z_80`` × predictive is the t-based 80 % interval.
        """
        n = max(self.effective, 1.0)
        widened = t_quantile_80(n) / Z_80
        return max(self.spread * math.sqrt(1 + 1 / n) * widened, self._floor)

    def interval(self) -> tuple[float, float]:
        """80 % interval of the next observation."""
        reach = Z_80 * self.predictive
        return self.mean - reach, self.mean + reach
