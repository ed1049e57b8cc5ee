"""Goal: windows say what really happened between their samples, whatever the counters do.

Method: hand-made samples with known answers, and a hypothesis stream whose sums over all windows
must equal the counters' own growth.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.scheduler.errors import TelemetryError
from shiftbook.scheduler.telemetry import Counters, WindowAggregator


def test_a_window_has_rates_and_shares() -> None:
    windows = WindowAggregator("a", length_s=1.0)
    base = {
        "rollout": Counters(
            replicas=2, units=10, busy_s=1.0, kv_used=0, kv_capacity=100, prefix_queries=0,
            prefix_hits=0,
        )
    }  # fmt: skip
    assert windows.add(0.0, 5, 3, base) is None
    half = Counters(
        replicas=2, units=14, busy_s=1.5, kv_used=20, kv_capacity=100, prefix_queries=4,
        prefix_hits=1,
    )  # fmt: skip
    assert windows.add(0.5, 6, 3, {"rollout": half}) is None
    full = Counters(
        replicas=2, units=30, busy_s=2.5, queue=7, running=9, waiting=2, kv_used=60,
        kv_capacity=100, prefix_queries=10, prefix_hits=4, remaining=50,
    )  # fmt: skip
    window = windows.add(1.0, 7, 3, {"rollout": full})
    assert window is not None
    assert windows.latest is window
    assert (window.attempt, window.iteration, window.start_ns, window.window_s) == ("a", 3, 5, 1.0)
    seen = window.components["rollout"]
    assert seen.throughput == pytest.approx(20.0)
    assert seen.busy_share == pytest.approx(1.5 / 2.0)
    assert seen.kv_use == pytest.approx(0.4)
    assert seen.prefix_hit_rate == pytest.approx(0.4)
    assert (seen.queue, seen.running, seen.waiting, seen.remaining) == (7, 9, 2, 50)


def test_a_replaced_worker_counts_from_zero() -> None:
    windows = WindowAggregator("a", length_s=1.0)
    windows.add(0.0, 0, 0, {"trainer": Counters(1, 100, 50.0)})
    window = windows.add(1.0, 1, 0, {"trainer": Counters(1, 3, 0.5)})
    assert window is not None
    assert window.components["trainer"].throughput == pytest.approx(3.0)
    assert window.components["trainer"].busy_share == pytest.approx(0.5)


def test_no_window_spans_an_iteration_or_a_clock_that_jumps_back() -> None:
    windows = WindowAggregator("a", length_s=1.0)
    windows.add(0.0, 0, 0, {"trainer": Counters(1, 0, 0.0)})
    windows.add(0.9, 0, 0, {"trainer": Counters(1, 9, 0.0)})
    assert windows.add(1.1, 0, 1, {"trainer": Counters(1, 11, 0.0)}) is None
    window = windows.add(2.2, 0, 1, {"trainer": Counters(1, 22, 0.0)})
    assert window is not None
    assert window.iteration == 1
    assert window.components["trainer"].throughput == pytest.approx(10.0)
    assert windows.add(1.0, 0, 1, {"trainer": Counters(1, 23, 0.0)}) is None


def test_a_component_that_appears_is_counted_from_then_on() -> None:
    windows = WindowAggregator("a", length_s=1.0)
    windows.add(0.0, 0, 0, {})
    windows.add(0.5, 0, 0, {"trainer": Counters(1, 1_000, 9.0)})
    window = windows.add(1.0, 0, 0, {"trainer": Counters(1, 1_004, 9.25)})
    assert window is not None
    assert window.components["trainer"].throughput == pytest.approx(4.0)
    assert window.components["trainer"].busy_share == pytest.approx(0.5)
    with pytest.raises(TelemetryError, match="longer than 0"):
        WindowAggregator("a", length_s=0.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 0.4), st.integers(0, 9), st.integers(1, 4)), min_size=1))
def test_nothing_is_counted_twice_or_lost(steps: list[tuple[float, int, int]]) -> None:
    windows = WindowAggregator("a", length_s=1.0)
    now_s, units, busy_s, counted, opened = 0.0, 0, 0.0, 0.0, 0
    windows.add(now_s, 0, 0, {"x": Counters(1, 0, 0.0)})
    for step_s, more, replicas in steps:
        now_s, units, busy_s = now_s + step_s, units + more, busy_s + step_s
        window = windows.add(now_s, 0, 0, {"x": Counters(replicas, units, busy_s)})
        opened += more
        if window is not None:
            counted += window.components["x"].throughput * window.window_s
            assert counted == pytest.approx(units)
            assert 0.0 <= window.components["x"].busy_share <= 1.0
            opened = 0
    assert counted + opened == pytest.approx(units)
