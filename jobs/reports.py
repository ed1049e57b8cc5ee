"""How long an iteration took, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiftbook.jobs.iteration import Iteration
from shiftbook.ledger.errors import ShiftbookError
from shiftbook.ledger.events.observation import ComponentTime, IterationCompleted
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.fleet import Fleet


class IterationTimes:
    """Busy seconds of every process, from the start of an iteration to its end."""

    def __init__(self, fleet: Fleet, topology: Topology) -> None:
        self._fleet = fleet
        self._before = self._busy()

    def _busy(self) -> dict[str, float]:
        try:
            figures = self._fleet.each(self._fleet.hosts, "figures", limit_s=5.0)
        except ShiftbookError:
            return {}  # a process is being restarted; its time of this iteration is unknown
        return {replica: float(values["busy_s"]) for replica, values in figures.items()}

    def event(
        self,
        *,
        attempt: str,
        iteration: Iteration,
        wall_s: float,
        stalls: Mapping[str, float],
        version: int,
        fingerprint: str,
        moves: int,
        schedule: str,
        devices: int,
    ) -> IterationCompleted:
        """The event that ends an iteration."""
        after = self._busy()
        busy: dict[str, Any] = {}
        for replica, seconds in after.items():
            component = self._fleet.hosts[replica].component
            # A process that was restarted meanwhile counts from zero.
            spent = max(0.0, seconds - self._before.get(replica, 0.0))
            busy[component] = busy.get(component, 0.0) + spent
        return IterationCompleted(
            attempt=attempt,
            iteration=iteration.number,
            wall_s=wall_s,
            components={
                c: ComponentTime(busy_s=s, stall_s=stalls.get(c, 0.0)) for c, s in busy.items()
            },
            samples_verified=len(iteration.samples),
            device_s=wall_s * devices,
            reward_mean=iteration.reward_mean(),
            policy_version=version,
            policy_fingerprint=fingerprint,
            moves_committed=moves,
            schedule=schedule,
        )
