"""Says, at any number of observations, whether pairs differ by more than chance: with a bound on
false alarms that holds however often one looks.

Where two runs are under the same law and independent given the past, each difference d of a pair is
as likely as -d. Then for any λ chosen before d is seen, exp(λ d) / cosh(λ d) has the mean 1, so a
product of such factors is a test martingale, and so is a mean of such products over many λ. It
reaches 1/α ever with probability at most α (J. Ville, "Étude critique de la notion de collectif",
1939; the factor is the one of V. de la Peña, "A general class of exponential inequalities for
martingales and ratios", Annals of Probability 27, 1999). Neither variance nor law need be known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shiftbook.ledger.errors import InvalidInput

BETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Sizes of λ, in units of 1 over the root mean square of the differences seen before."""


class SymmetryTest:
    """Tests that paired differences are symmetric about 0, one difference after the other."""

    def __init__(self, alpha: float) -> None:
        """``alpha`` bounds the probability that a symmetric sequence ever raises the alarm."""
        if not 0.0 < alpha < 1.0:
            raise InvalidInput(f"expected alpha between 0 and 1, found {alpha}; such as 0.01")
        self.alpha = alpha
        self.count = 0
        """Differences seen, zeros included."""
        self.alarmed_at: int | None = None
        """Number of the difference at which the alarm was raised; it stays raised."""
        self._squares = 0.0
        self._seen = 0
        self._logs = [0.0] * (2 * len(BETS))

    def add(self, difference: float) -> bool:
        """Take in the next difference; True once the alarm has been raised.

        A difference that is no number raises the alarm at once: the two sides are not of one law.
        A zero says nothing and changes nothing.
        """
        self.count += 1
        if not math.isfinite(difference):
            self.alarmed_at = self.alarmed_at or self.count
        elif difference != 0.0:
            self._bet(difference)
            if self.log_evidence >= -math.log(self.alpha):
                self.alarmed_at = self.alarmed_at or self.count
        return self.alarmed

    def extend(self, differences: Iterable[float]) -> bool:
        """Take in several, in their order."""
        for difference in differences:
            self.add(difference)
        return self.alarmed

    @property
    def alarmed(self) -> bool:
        """True once the evidence has reached 1/alpha."""
        return self.alarmed_at is not None

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the martingale; the alarm is raised at -log(alpha)."""
        top = max(self._logs)
        return top + math.log(sum(math.exp(one - top) for one in self._logs) / len(self._logs))

    def _bet(self, difference: float) -> None:
        # The scale uses what came before alone; the first difference has none and is not bet on.
        if self._seen:
            scaled = difference / math.sqrt(self._squares / self._seen)
            for index, size in enumerate(BETS):
                bet = size * scaled
                magnitude = abs(bet)
                # log cosh without overflow
                log_cosh = magnitude + math.log1p(math.exp(-2.0 * magnitude)) - math.log(2.0)
                self._logs[2 * index] += bet - log_cosh
                self._logs[2 * index + 1] += -bet - log_cosh
        self._squares += difference * difference
        self._seen += 1
