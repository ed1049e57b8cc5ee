"""Goal: the realised gain of a move is what it says: the counterfactual's end minus the real one.

Method: a job whose rates are known, so that the end without the move can be computed by hand; and
the same move judged by the simulation, which can really be run without it.
"""

from __future__ import annotations

from typing import Any

import pytest

from shiftbook.ledger.events.reallocation import Interval, ReallocationProposed
from shiftbook.ledger.plan import TrainingView
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.errors import TelemetryError
from shiftbook.scheduler.gain import Outcome, RatesMeasured, realized, with_rates
from shiftbook.scheduler.makespan import Progress
from shiftbook.scheduler.throughput import ThroughputModel
from tests.scheduler import pipeline_simulation as simulation

VIEW = TrainingView(
    virtual_ranks=4, prompts_per_update=32, group_size=8, sampler_rule="r", rng_keys=("uid",),
    engine="torch", engine_dtype="float32", batch_composition="bitwise",
)  # fmt: skip


def proposed(before: Topology, after: Topology) -> ReallocationProposed:
    return ReallocationProposed(
        attempt="a", before=before, after=after, strategy="reshard", sees=VIEW, candidates=(),
        bottleneck_before="trainer", bottleneck_after="trainer", predicted_throughput=60.0,
        predicted_gain_s=0.5, gain_interval=Interval(low=0.3, high=0.7), predicted_cost_s=0.1,
        horizon_s=1.2, model_version=3,
    )  # fmt: skip


MOVE = proposed(simulation.topology([0], [1]), simulation.topology([0], [0, 1]))


def at_move(left: int) -> Progress:
    return Progress(
        iteration=4, elapsed_s=3.0, episodes=256, outstanding=0, running=0, waiting=0, lanes=8,
        left={"inference": left, "trainer": left},
    )  # fmt: skip


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "at_move": at_move(25),
        "observed_end_s": 0.7,
        "iteration_s": 3.7,
        "iteration_before_s": 4.0,
        "devices_before": 2,
        "devices_after": 2,
        "rates": RatesMeasured(
            seconds_per_unit={"inference": 0.01, "trainer": 0.03}, update_s=0.05
        ),
    }
    return Outcome(**(values | changes))


def test_the_gain_is_the_counterfactual_minus_what_came() -> None:
    gain = realized(ThroughputModel(), MOVE, outcome())
    # 25 groups x 0.04 s on one replica and 0.05 s of update.
    assert gain.counterfactual_end_s == pytest.approx(1.05, rel=1e-6)
    assert gain.adjusted_gain_s == pytest.approx(0.35, rel=1e-6)
    assert gain.interval.low < gain.adjusted_gain_s < gain.interval.high
    assert gain.raw_gain_s == pytest.approx(0.3)
    assert gain.predicted_gain_s == pytest.approx(0.4), "net of the predicted cost"
    assert gain.device_s_before == 8.0
    assert gain.device_s_after == pytest.approx(7.4)
    for part in ("rollout[n0/0]", "25 of trainer", "iteration 4", "update, inference, trainer"):
        assert part in gain.counterfactual


def test_a_move_that_lost_time_has_a_negative_gain() -> None:
    assert realized(ThroughputModel(), MOVE, outcome(observed_end_s=1.5)).adjusted_gain_s < 0
    with pytest.raises(TelemetryError, match="when the iteration is completed"):
        realized(ThroughputModel(), MOVE, outcome(observed_end_s=0.0))


def test_measured_rates_replace_the_learned_ones_in_a_copy_only() -> None:
    model = ThroughputModel()
    told = with_rates(model, RatesMeasured(turn_s=0.02, tail_s=1.0, tail_episodes=8, update_s=0.3))
    assert (told.turn_s.mean, told.update_s.mean) == (0.02, 0.3)
    assert told.tail_s.mean == pytest.approx(1.0 / 2.1972, rel=1e-3)
    assert model.turn_s.mean != 0.02
    assert told.follower_s.keys() == model.follower_s.keys()


def test_the_counterfactual_is_what_the_simulation_does_without_the_move() -> None:
    """Both branches are really run from the same state; the model sees only one of them."""
    ends = {}
    for moves in (False, True):
        job = simulation.Job(simulation.Workload(), simulation.topology([0], [1]), seed=2)
        while job.outstanding or job.iteration < 0:
            job.step()
        at_s, left = job.now_s, job.progress()
        if moves:
            job.move(simulation.topology([0], [0, 1]))
        while job.iteration == left.iteration:
            job.step()
        ends[moves] = job.now_s - at_s
    rates = RatesMeasured(seconds_per_unit={"inference": 0.01, "trainer": 0.031}, update_s=0.04)
    gain = realized(
        ThroughputModel(), MOVE, outcome(at_move=left, observed_end_s=ends[True], rates=rates)
    )
    print(f"seed 2: without the move {ends[False]:.3f} s, said {gain.counterfactual_end_s:.3f} s")
    assert gain.counterfactual_end_s == pytest.approx(ends[False], abs=0.06)
    assert gain.adjusted_gain_s == pytest.approx(ends[False] - ends[True], abs=0.06)
