"""Turns cumulative counters of the components into windows of rates and use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shiftbook.ledger.events.observation import ComponentWindow, WindowObserved
from shiftbook.scheduler.errors import TelemetryError

WINDOW_S = 0.05
"""Default length of a window: shorter than any move that it may lead to."""


@dataclass(frozen=True)
class Counters:
    """One component at one moment; what is counted or summed only ever grows within one life."""

    replicas: int
    units: int
    """Finished so far (turns, groups)."""
    busy_s: float
    """Seconds in which its devices worked, summed over replicas."""
    queue: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: int | None = None
    kv_capacity: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    remaining: int | None = None
    """Units until the end of the iteration, as far as known."""


@dataclass
class _Sums:
    units: int = 0
    busy_s: float = 0.0
    replica_s: float = 0.0
    kv_s: float = 0.0
    kv_time_s: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass
class _Sample:
    at_s: float
    counters: dict[str, Counters]


@dataclass
class WindowAggregator:
    """Makes a window of every ``length_s`` seconds of samples.

    Counters that fall (a worker was replaced) start anew from zero; a window never spans an
    attempt, an iteration or a jump back of the clock.
    """

    attempt: str
    length_s: float = WINDOW_S
    latest: WindowObserved | None = None
    """The last window that was complete."""
    _last: _Sample | None = None
    _began_s: float = 0.0
    _began_ns: int = 0
    _iteration: int = -1
    _sums: dict[str, _Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.length_s <= 0:
            raise TelemetryError(f"expected a window longer than 0 s, found {self.length_s}")

    def add(
        self, now_s: float, wall_ns: int, iteration: int, counters: Mapping[str, Counters]
    ) -> WindowObserved | None:
        """Take a sample; return the window that it completes, else None.

        ``now_s`` is a monotonic clock, ``wall_ns`` the UTC time that the window's start is told in.
        """
        last = self._last
        if last is None or iteration != self._iteration or now_s < last.at_s:
            # What was done across the boundary belongs to neither side for sure.
            self._begin(now_s, wall_ns, iteration)
            self._last = _Sample(now_s, dict(counters))
            return None
        for name, now in counters.items():
            self._add(name, last.counters.get(name), now, now_s - last.at_s)
        self._last = _Sample(now_s, dict(counters))
        if now_s - self._began_s < self.length_s:
            return None
        window_s = now_s - self._began_s
        self.latest = WindowObserved(
            attempt=self.attempt,
            iteration=iteration,
            start_ns=self._began_ns,
            window_s=window_s,
            components={
                name: _window(now, self._sums.get(name, _Sums()), window_s)
                for name, now in counters.items()
            },
        )
        self._begin(now_s, wall_ns, iteration)
        return self.latest

    def _begin(self, now_s: float, wall_ns: int, iteration: int) -> None:
        self._began_s, self._began_ns, self._iteration = now_s, wall_ns, iteration
        self._sums = {}

    def _add(self, name: str, before: Counters | None, now: Counters, step_s: float) -> None:
        if before is None:
            # Seen for the first time: what it did before this sample is not of this window.
            return
        sums = self._sums.setdefault(name, _Sums())
        replaced = now.units < before.units or now.busy_s < before.busy_s
        sums.units += now.units - (0 if replaced else before.units)
        sums.busy_s += now.busy_s - (0.0 if replaced else before.busy_s)
        sums.replica_s += before.replicas * step_s
        sums.prefix_queries += _grown(before.prefix_queries, now.prefix_queries)
        sums.prefix_hits += _grown(before.prefix_hits, now.prefix_hits)
        if now.kv_used is not None and now.kv_capacity:
            sums.kv_s += now.kv_used / now.kv_capacity * step_s
            sums.kv_time_s += step_s


def _grown(before: int | None, now: int | None) -> int:
    if now is None:
        return 0
    return now - before if before is not None and now >= before else now


def _window(now: Counters, sums: _Sums, window_s: float) -> ComponentWindow:
    busy = sums.busy_s / sums.replica_s if sums.replica_s > 0 else 0.0
    return ComponentWindow(
        replicas=now.replicas,
        throughput=sums.units / window_s,
        queue=now.queue,
        running=now.running,
        waiting=now.waiting,
        busy_share=min(1.0, busy),
        kv_use=min(1.0, sums.kv_s / sums.kv_time_s) if sums.kv_time_s > 0 else None,
        prefix_hit_rate=(
            min(1.0, sums.prefix_hits / sums.prefix_queries) if sums.prefix_queries > 0 else None
        ),
        remaining=now.remaining,
    )
