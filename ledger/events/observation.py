"""Events of what was seen: the pipeline, the windows that a decision used, iterations."""

from __future__ import annotations

from shiftbook.ledger.events.base import Count, Event, Hex128, Part
from shiftbook.ledger.events.job import Edge


class PipelineObserved(Event):
    """Components and edges as the traffic in the job's channels shows them."""

    components: tuple[str, ...]
    edges: tuple[Edge, ...]
    found_by: str
    matches_declared: bool


class ComponentWindow(Part):
    """One component during one window."""

    replicas: Count
    throughput: float
    """Units of the component finished a second (turns, groups)."""
    queue: Count
    running: Count
    waiting: Count
    busy_share: float
    """Share of the window in which its devices worked, 0 to 1."""
    kv_use: float | None = None
    prefix_hit_rate: float | None = None
    remaining: Count | None = None
    """Units until the end of the iteration, as far as known."""


class WindowObserved(Event):
    """A telemetry window that a decision used."""

    attempt: str
    iteration: Count
    start_ns: Count
    window_s: float
    components: dict[str, ComponentWindow]


class ComponentTime(Part):
    """Seconds of one component within an iteration, summed over its devices."""

    busy_s: float
    stall_s: float


class IterationCompleted(Event):
    """An iteration ended: its wall time, where the time went, and the policy it made."""

    attempt: str
    iteration: Count
    wall_s: float
    components: dict[str, ComponentTime]
    samples_verified: Count
    device_s: float
    reward_mean: float
    policy_version: Count
    policy_fingerprint: Hex128
    moves_committed: Count = 0
    schedule: str
