"""Goal: a calibration says how noisy the stack is, and can hide nothing that training does (I16).

Method: replays of the honest run are marked as calibrations, early and late, small and large; what
is replayed after them is judged by the tolerance that they give.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shiftbook.ledger.events import probes
from shiftbook.verify.invariants.logprobs import FACTOR, MOST_NOISE
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import PLACES, Maker, Run, make_plan

Judge = Callable[[Run], Verdict]


def calibrated(gap: float, **tolerances: float) -> tuple[Maker, probes.LogProbsReplayed]:
    """A run that calibrates before it trains; gives the calibration too."""
    maker = Maker(make_plan(tolerances=tolerances))
    maker.open()
    maker.start("a1", 0, PLACES)
    maker.replayed(0)
    event = maker.run.entries[-1].event
    assert isinstance(event, probes.LogProbsReplayed)
    noise = event.model_copy(update={"calibrating": True, "mean_gap": gap, "largest_gap": 4 * gap})
    maker.run.entries[-1].event = noise
    return maker, noise


def run_with(gap: float, then: float, **tolerances: float) -> Run:
    maker, _ = calibrated(gap, **tolerances)
    maker.iteration(0)
    maker.close()
    maker.run.get("LogProbsReplayed", 1).change(mean_gap=then, largest_gap=2 * then)
    return maker.run


def i16(verdict: Verdict) -> list[tuple[int, str, str]]:
    assert {finding.invariant for finding in verdict.findings} <= {"I16"}
    return [(f.position, f.expected, f.found) for f in verdict.findings]


def test_early_noise_within_the_bound_sets_the_tolerance(judge: Judge) -> None:
    verdict = judge(run_with(0.003, FACTOR * 0.003))
    assert i16(verdict) == []
    assert verdict.exit_code == 0, verdict.could_not


def test_a_gap_beyond_the_calibrated_noise_is_found(judge: Judge) -> None:
    run = run_with(0.003, 0.1)
    ((position, expected, _),) = i16(judge(run))
    assert position == run.at("LogProbsReplayed", 1)
    assert "the calibrated 0.003" in expected


@pytest.mark.parametrize("gap", [MOST_NOISE * 1.01, 5.0, float("nan"), float("inf")])
def test_noise_beyond_the_bound_is_found_and_widens_nothing(gap: float, judge: Judge) -> None:
    run = run_with(gap, 1e-3)
    told = i16(judge(run))
    assert [position for position, _, _ in told] == [
        run.at("LogProbsReplayed", 0),
        run.at("LogProbsReplayed", 1),
    ]
    assert f"noise of the stack within {MOST_NOISE:g}" in told[0][1]
    assert "nothing was calibrated" in told[1][1]


def test_a_plan_may_declare_a_noisier_stack(judge: Judge) -> None:
    assert i16(judge(run_with(0.05, 0.2, **{"I16.calibration": 0.06}))) == []


def test_a_calibration_after_the_first_update_is_found_and_widens_nothing(judge: Judge) -> None:
    maker, noise = calibrated(1e-7)
    maker.iteration(0)
    at = maker.run.add(noise.model_copy(update={"mean_gap": 0.01, "largest_gap": 0.02}))
    maker.iteration(1)
    maker.close()
    maker.run.get("LogProbsReplayed", -1).change(mean_gap=0.01, largest_gap=0.02)
    told = i16(judge(maker.run))
    assert [position for position, _, _ in told] == [at, maker.run.at("LogProbsReplayed", -1)]
    assert "before the first update of the attempt" in told[0][1]


def test_a_new_attempt_may_calibrate_its_stack(judge: Judge) -> None:
    maker, noise = calibrated(1e-7)
    maker.iteration(0)
    maker.incarnations.clear()
    maker.start("a2", 1, PLACES)
    maker.run.add(noise.model_copy(update={"attempt": "a2", "mean_gap": 0.01}))
    maker.iteration(1)
    maker.close()
    maker.run.get("LogProbsReplayed", -1).change(mean_gap=0.02, largest_gap=0.1)
    verdict = judge(maker.run)
    assert i16(verdict) == []
    assert verdict.exit_code == 0, verdict.could_not


def test_a_run_that_only_calibrates_was_not_checked(run: Run, judge: Judge) -> None:
    for entry in run.entries:
        if entry.name == "LogProbsReplayed":
            entry.change(calibrating=True, mean_gap=5.0, largest_gap=9.0)
    verdict = judge(run)
    # One lies before any update of its attempt, in each of the two attempts; all are too large.
    assert len(i16(verdict)) == len([e for e in run.entries if e.name == "LogProbsReplayed"])
    row = verdict.coverage.row("I16")
    assert row.status == "broken"
    assert row.missing == {"no log-probabilities were replayed": 1}
