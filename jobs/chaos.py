"""Faults at random: processes of a running job are killed, drawn by seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

from shiftbook.jobs.config import fleet_spec
from shiftbook.jobs.runner import RunningJob
from shiftbook.ledger.errors import ShiftbookError
from shiftbook.scheduler.cluster import import_ray
from shiftbook.scheduler.fleet import Fleet

KINDS = ("controller", "rollout", "tool", "trainer", "inference", "loop")
GAP_S = (4.0, 9.0)
"""Seconds between two faults: long enough that each is recovered from, most of the time."""
MOST_FAULTS = 6


class Chaos:
    """Kills a process of a job now and then, until it is told to stop."""

    def __init__(self, job: RunningJob, seed: int, devices: tuple[str, ...]) -> None:
        self._job = job
        self._random = random.Random(seed)
        self._fleet = Fleet(fleet_spec(devices))
        self._stop = threading.Event()
        self._done: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> list[str]:
        """End; says what was killed, in order."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        return list(self._done)

    def _run(self) -> None:
        began_s = time.monotonic()
        kinds = list(KINDS)
        self._random.shuffle(kinds)
        for number in range(MOST_FAULTS):
            if self._stop.wait(self._random.uniform(*GAP_S)):
                return
            kind = kinds[number % len(kinds)]
            victim = self._victim(kind)
            if victim is None:
                continue
            name, pid = victim
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._done.append(f"{name} at {time.monotonic() - began_s:.1f} s")

    def _victim(self, kind: str) -> tuple[str, int] | None:
        """A living process of a kind, and its name; None where there is none now."""
        ray = import_ray()
        try:
            if kind == "loop":
                return self._named("loop", ray.get(self._job.loop.status.remote(), timeout=5))
            if kind == "controller":
                if self._job.controller is None:
                    return None
                status = ray.get(self._job.controller.status.remote(), timeout=5)
                return self._named("controller", status)
            statuses = self._fleet.statuses()
        except (ray.exceptions.RayError, ShiftbookError):
            return None
        living = [s for s in statuses.values() if s is not None and s["component"] == kind]
        active = [s for s in living if s["state"] == "active"] or living
        if not active:
            return None
        chosen = self._random.choice(sorted(active, key=lambda s: str(s["replica"])))
        return str(chosen["replica"]), int(chosen["pid"])

    @staticmethod
    def _named(name: str, status: dict[str, Any]) -> tuple[str, int]:
        return name, int(status["pid"])
