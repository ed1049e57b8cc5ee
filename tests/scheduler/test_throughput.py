"""Goal: what the model learns is right, what it predicts behaves, and its intervals are honest.

Method: estimates against closed forms and simulated streams of observations; hypothesis for the
shape of predictions (more replicas never end later at no cost, more work never ends sooner); the
exact value of the closed form where a hand calculation is possible.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.ledger.events.observation import ComponentWindow, WindowObserved
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.errors import PlanningError, TelemetryError
from shiftbook.scheduler.estimate import Estimate, t_quantile_80
from shiftbook.scheduler.makespan import Draws, Progress, source_time
from shiftbook.scheduler.throughput import IterationMeasured, Priors, ThroughputModel


def topology(rollout: int, trainer: int, shared: int = 0) -> Topology:
    """``rollout`` and ``trainer`` replicas of which ``shared`` stand on the same devices."""
    first = [f"n0/{k}" for k in range(rollout)]
    last = [f"n0/{k}" for k in range(rollout - shared, rollout - shared + trainer)]
    return Topology.of({"rollout": first, "inference": last, "trainer": last, "tool": []})


def progress(outstanding: int = 256, *, left: int = 32, **other: Any) -> Progress:
    incomplete = min(left, -(-outstanding // 8))
    settings_: dict[str, Any] = {
        "iteration": 0,
        "elapsed_s": 0.0,
        "episodes": 256,
        "outstanding": outstanding,
        "running": min(outstanding, 8),
        "waiting": 0,
        "lanes": 8,
        "groups_incomplete": incomplete,
        "left": {"inference": left, "trainer": left},
    }
    return Progress(**(settings_ | other))


def window(
    name: str, *, units: float, busy: float, replicas: int = 1, running: int = 0
) -> WindowObserved:
    return WindowObserved(
        attempt="a",
        iteration=0,
        start_ns=0,
        window_s=1.0,
        components={
            name: ComponentWindow(
                replicas=replicas,
                throughput=units,
                queue=0,
                running=running,
                waiting=0,
                busy_share=busy,
            )
        },
    )


# Estimates


def test_the_t_quantile_is_near_the_tabulated_one() -> None:
    tabulated = {2: 1.8856, 3: 1.6377, 5: 1.4759, 10: 1.3722, 30: 1.3104, 1_000: 1.2824}
    for degrees, value in tabulated.items():
        assert t_quantile_80(degrees) == pytest.approx(value, rel=0.03)
    assert t_quantile_80(1) == pytest.approx(3.078, rel=0.09)


def test_an_interval_holds_the_share_that_it_says() -> None:
    """80 % of the next observations fall inside, over many short histories."""
    rng, inside, total = random.Random(11), 0, 0
    for _ in range(400):
        estimate = Estimate(1.0, 0.5)
        for _ in range(12):
            estimate.observe(rng.gauss(2.0, 0.3))
        low, high = estimate.interval()
        inside += low <= rng.gauss(2.0, 0.3) <= high
        total += 1
    print(f"seed 11: {inside / total:.3f} of {total}")
    assert 0.72 <= inside / total <= 0.93


def test_an_estimate_forgets_and_a_limit_tames_a_stray_one() -> None:
    estimate = Estimate(1.0, 0.1, forget=0.8)
    for _ in range(30):
        estimate.observe(1.0)
    for _ in range(15):
        estimate.observe(3.0)
    assert estimate.mean == pytest.approx(3.0, abs=0.1)
    tamed = Estimate(1.0, 0.1, limit=2.0)
    wild = Estimate(1.0, 0.1)
    for one in (tamed, wild):
        for value in (1.0, 1.1, 0.9, 1.0, 50.0):
            one.observe(value)
    assert tamed.mean < 1.3 < wild.mean
    with pytest.raises(TelemetryError, match="finite"):
        tamed.observe(math.nan)


# What it learns


def test_seconds_per_unit_come_from_busy_time_and_units() -> None:
    model = ThroughputModel()
    for _ in range(20):
        model.observe(window("trainer", units=20, busy=0.8, replicas=2))
    assert model.seconds_per_unit("trainer").mean == pytest.approx(0.08, rel=0.05)
    assert model.version == 20


def test_units_longer_than_a_window_are_gathered_until_there_are_enough() -> None:
    model = ThroughputModel()
    for _ in range(3):
        for units in (0, 0, 0, 1):
            model.observe(window("trainer", units=units, busy=1.0))
    assert model.version == 1, "12 windows hold 3 units: one observation"
    assert model.seconds_per_unit("trainer").observed == 1
    model.observe(window("trainer", units=0, busy=1.0))
    assert model.version == 1


def test_a_source_is_judged_by_full_lanes_only() -> None:
    model = ThroughputModel()
    for _ in range(20):
        model.observe(window("rollout", units=40, busy=1.0, running=5), lanes=8)
    assert model.turn_s.observed == 0
    for _ in range(20):
        model.observe(window("rollout", units=100, busy=1.0, running=16, replicas=2), lanes=8)
    assert model.turn_s.mean == pytest.approx(0.02, rel=0.05)


def test_moves_iterations_and_progress_are_learned() -> None:
    model = ThroughputModel()
    for _ in range(20):
        model.observe_move("trainer-reshard", 0.3)
        model.observe_iteration(
            IterationMeasured(episodes=100, turns=500, update_s=0.2, tail_s=1.0, tail_episodes=8)
        )
        model.observe_progress(progress(10, running=6))
    assert model.move_cost("trainer-reshard").mean == pytest.approx(0.3, rel=0.05)
    assert model.move_cost("rollout-shrink").mean == Priors().shrink_s
    both_s = model.move_cost("trainer-reshard").mean + Priors().grow_s
    assert model.move_cost("combined").mean == pytest.approx(both_s), "its parts, never tried"
    assert model.turns_per_episode.mean == pytest.approx(5.0, rel=0.05)
    assert model.update_s.mean == pytest.approx(0.2, rel=0.05)
    assert model.tail_s.mean == pytest.approx(1.0 / math.log(9), rel=0.1)
    assert model.lane_share.mean == pytest.approx(0.6, rel=0.1)
    with pytest.raises(TelemetryError, match="at least 0 s"):
        model.observe_move("rollout-grow", -1.0)
    with pytest.raises(TelemetryError, match="above 0"):
        model.observe_speed("H100", 0.0)


# What it predicts


def certain() -> ThroughputModel:
    """A model whose draws hardly differ, for hand calculations."""
    return ThroughputModel(
        priors=Priors(
            turn_s=0.01, follower_s=0.02, turns_per_episode=4.0, tail_s=0.2, lane_share=1.0,
            update_s=0.1, spread=1e-6,
        )
    )  # fmt: skip


def test_the_end_equals_a_hand_calculation() -> None:
    model = certain()
    done = progress(0, left=20, running=0, groups_incomplete=0)
    # 20 groups x (0.02 + 0.02) s on one replica, then 0.1 s of update.
    assert model.predict_end(topology(1, 1), done).mean_s == pytest.approx(0.9, rel=1e-3)
    assert model.predict_end(topology(1, 2), done).mean_s == pytest.approx(0.5, rel=1e-3)
    full = progress(256, turns_left=1024.0)
    # 8 episodes fit in the lanes with (4 + 1) / 2 turns each; before that 1,004 turns at 100 a
    # second; the tail is the longer of 0.2 log(9) and 20 turns' work.
    source_s = (1024 - 20) / 100 + max(0.2 * math.log(9), 0.2)
    prediction = model.predict_end(topology(1, 1), full)
    assert prediction.source_end_s == pytest.approx(source_s, rel=1e-3)
    assert prediction.bottleneck == "rollout"
    # All groups but half of the tail's share were worked on beside the source.
    behind_s = 32 * 0.04 * 0.5 * 8 / 256
    assert prediction.mean_s == pytest.approx(source_s + max(behind_s, 0) + 0.1, rel=0.01)
    shared = model.predict_end(topology(1, 1, shared=1), full)
    assert shared.mean_s == pytest.approx(source_s + 32 * 0.04 + 0.1, rel=1e-3)
    assert shared.throughput == pytest.approx(256 / shared.mean_s)


def test_a_group_is_not_divided_among_replicas() -> None:
    model = certain()
    one = progress(0, left=1, running=0, groups_incomplete=0)
    ends = [model.predict_end(topology(1, t), one).mean_s for t in (1, 2, 4)]
    assert ends == pytest.approx([0.14] * 3, rel=1e-3)


def test_a_rank_that_waits_for_the_source_keeps_its_share() -> None:
    """Two ranks, one on the source's device: what the free one does is no help to the other."""
    model = certain()
    tail = progress(8, left=32, turns_left=20.0, running=8)
    one_free = model.predict_end(topology(1, 2, shared=1), tail)
    source_s = one_free.source_end_s
    assert one_free.mean_s >= source_s + 16 * 0.02 + 0.1 - 1e-3


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 256), st.integers(0, 32), st.integers(1, 6), st.sampled_from([1, 2, 4]),
    st.floats(0.02, 3.0), st.floats(0.1, 1.0),
)  # fmt: skip
def test_more_replicas_never_end_later_at_no_cost(
    outstanding: int, left: int, rollout: int, trainer: int, tail: float, share: float
) -> None:
    model = ThroughputModel(priors=Priors(tail_s=tail, lane_share=share))
    now = progress(outstanding, left=max(left, -(-outstanding // 8)))
    end = model.predict_end(topology(rollout, trainer), now).mean_s
    more_source = model.predict_end(topology(rollout + 1, trainer), now).mean_s
    more_trainer = model.predict_end(topology(rollout, 2 * trainer), now).mean_s
    assert more_source <= end + 1e-9
    assert more_trainer <= end + 1e-9


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 255), st.floats(1.0, 500.0), st.integers(1, 31))
def test_more_work_never_ends_sooner(outstanding: int, turns: float, left: int) -> None:
    model = ThroughputModel()
    here = progress(outstanding, turns_left=turns, left=left, groups_incomplete=0)
    more_turns = dataclasses.replace(here, turns_left=turns * 1.5)
    more_left = dataclasses.replace(here, left={"inference": left + 1, "trainer": left + 1})
    place = topology(2, 1)
    end = model.predict_end(place, here).mean_s
    assert model.predict_end(place, more_turns).mean_s >= end - 1e-9
    assert model.predict_end(place, more_left).mean_s >= end - 1e-9


@settings(deadline=None, max_examples=100)
@given(
    st.floats(1.0, 5_000.0), st.integers(1, 2_000), st.integers(1, 64),
    st.floats(10.0, 1_000.0), st.floats(0.001, 5.0),
)  # fmt: skip
def test_the_source_is_never_faster_than_its_work_at_full_rate(
    turns: float, episodes: int, replicas: int, rate: float, tail: float
) -> None:
    turns = max(turns, float(episodes))
    one = np.ones(1)
    draws = Draws(rate * one, tail * one, turns * one, 2.0 * one, 0.7 * one, one)
    counts = np.arange(1.0, replicas + 1)[:, None]
    times = source_time(draws.turns_left, float(episodes), counts, 8, draws)[:, 0]
    assert np.all(np.diff(times) <= 1e-9), "a replica more ends later"
    assert np.all(times >= turns / (counts[:, 0] * rate) - 1e-9)


def test_followers_with_devices_of_their_own_count_too() -> None:
    model = certain()
    place = Topology(
        components={
            **topology(1, 1).components,
            **Topology.of({"reward": ["n0/6"]}).components,
        }
    )
    done = dataclasses.replace(progress(0), left={"inference": 0, "trainer": 5, "reward": 40})
    prediction = model.predict_end(place, done)
    assert prediction.mean_s == pytest.approx(40 * 0.02 + 0.1, rel=1e-3)
    assert prediction.bottleneck == "reward"


def test_tools_are_the_bottleneck_where_episodes_mostly_wait_for_them() -> None:
    model = ThroughputModel(priors=Priors(lane_share=0.2, tail_s=2.0))
    assert model.predict_end(topology(2, 1), progress(10, left=2)).bottleneck == "tool"


def test_every_prediction_is_scored() -> None:
    model = ThroughputModel()
    assert model.calibration is None
    prediction = model.predict_end(topology(1, 1), progress())
    inside = model.score(prediction, prediction.mean_s + 0.1)
    assert inside.within
    assert inside.error_s == pytest.approx(0.1)
    assert not model.score(prediction, prediction.high_s + 1.0).within
    assert model.calibration == 0.5
    assert model.bias_s is not None
    assert model.bias_s > 0


def test_progress_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanningError, match="at most 256"):
        progress(300)
    with pytest.raises(PlanningError, match="at least 0"):
        progress(3, running=-1)
    with pytest.raises(PlanningError, match="no component 'trainer'"):
        ThroughputModel().predict_end(Topology.of({"rollout": ["n0/0"]}), progress())
