"""What benchmarks share: a ratio with its bound, and an event of middling size."""

from __future__ import annotations

from dataclasses import dataclass

from shiftbook.ledger.events import observation
from shiftbook.ledger.events.base import Event

DIGEST = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Result:
    """One line of the output."""

    name: str
    value: float
    bound: float
    at_least: bool
    unit: str
    detail: str

    @property
    def met(self) -> bool:
        """True when the bound holds."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """The line itself."""
        sign = "≥" if self.at_least else "≤"
        state = "ok" if self.met else "MISSED"
        return (
            f"{self.name:<37} {self.value:7.2f} {self.unit:<3} (bound {sign} {self.bound:g}) "
            f"{state:<7} {self.detail}"
        )


def iteration(number: int) -> Event:
    """An event of middling size, as each training iteration writes it."""
    return observation.IterationCompleted(
        attempt="attempt-0001",
        iteration=number,
        wall_s=4.0612347 + number / 1e6,
        components={
            name: observation.ComponentTime(busy_s=3.1 + number / 1e7, stall_s=0.02)
            for name in ("rollout", "tool", "inference", "trainer")
        },
        samples_verified=256,
        device_s=8.12,
        reward_mean=0.613281,
        policy_version=number,
        policy_fingerprint=DIGEST,
        moves_committed=2,
        schedule="dynamic",
    )
