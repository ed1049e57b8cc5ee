"""Compares windows of a live run with a static run from the same bundle, by a sequential test.

Under the hypothesis that both are under one law, a window of the live run and one of the shadow
that begins at the same bundle can be exchanged: the difference of what they show is as likely as
its negative. That holds for a window as a whole, and for each sample of its first iteration, where
both have the same weights; it does not hold for later iterations one by one, which depend on the
earlier ones. So a later iteration enters through its window's mean alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.errors import InvalidInput
from shiftbook.verify.sequential import SymmetryTest

MEASURES = ("loss", "reward", "kl", "logp_gap")
ALPHA = 0.01
"""Probability of a false alarm in the life of a job, over all measures, at most."""


@dataclass(frozen=True)
class Window:
    """What one side showed of one window. ``iterations`` has a value of each measure for each
    iteration; ``rewards`` the reward of each sample of the first iteration by uid."""

    iterations: Mapping[str, Sequence[float]]
    rewards: Mapping[str, float] = field(default_factory=dict)

    def mean(self, measure: str) -> float:
        """Mean over the window; InvalidInput where nothing of the measure is there."""
        values = self.iterations.get(measure, ())
        if not values:
            raise InvalidInput(f"expected values of {measure} in a window, found none")
        return sum(values) / len(values)


class ShadowTest:
    """Takes window after window; the alarm is raised once any measure's evidence is enough.

    The bound ``alpha`` is shared equally by the measures and the samples' rewards (Bonferroni).
    """

    def __init__(self, alpha: float = ALPHA, measures: Sequence[str] = MEASURES) -> None:
        if not measures:
            raise InvalidInput("expected a measure to compare, found none")
        self.alpha = alpha
        self.windows = 0
        share = alpha / (len(measures) + 1)
        self._tests = {name: SymmetryTest(share) for name in (*measures, "sample reward")}

    def add(self, live: Window, shadow: Window) -> bool:
        """Take in one window of both; True once the alarm has been raised.

        Raises InvalidInput where the windows are not of the same iterations and samples.
        """
        if live.rewards.keys() != shadow.rewards.keys():
            other = sorted(live.rewards.keys() ^ shadow.rewards.keys())
            raise InvalidInput(
                f"expected the same samples on both sides, found {other[0]} on one; begin both "
                "at one bundle, and draw by the same sampler"
            )
        for name in self._tests:
            if name != "sample reward" and len(live.iterations.get(name, ())) != len(
                shadow.iterations.get(name, ())
            ):
                raise InvalidInput(f"expected as many values of {name} on both sides")
        self.windows += 1
        for name, test in self._tests.items():
            if name == "sample reward":
                test.extend(live.rewards[uid] - shadow.rewards[uid] for uid in sorted(live.rewards))
            else:
                test.add(live.mean(name) - shadow.mean(name))
        return self.alarmed

    @property
    def alarmed(self) -> bool:
        """True once two laws are told apart."""
        return any(test.alarmed for test in self._tests.values())

    def plain(self) -> dict[str, Any]:
        """As plain values: what was tested, how much evidence there is, what raised the alarm."""
        return {
            "windows": self.windows,
            "alpha": self.alpha,
            "alarmed": self.alarmed,
            "by": [name for name, test in self._tests.items() if test.alarmed],
            "log_evidence": {name: test.log_evidence for name, test in self._tests.items()},
            "threshold": {name: 1.0 / test.alpha for name, test in self._tests.items()},
        }
