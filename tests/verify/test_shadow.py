"""Goal: the shadow comparison raises a false alarm no more often than it says, and finds drifts.

Method: sequences under many laws that are symmetric (heavy tails, changing scale, discrete) and
under shifts of known size are drawn by seed and looked at after each observation; the share that
ever raised the alarm is compared with the stated bound, with three standard errors of room.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from shiftbook.ledger.errors import InvalidInput
from shiftbook.verify.sequential import SymmetryTest
from shiftbook.verify.shadow import ALPHA, MEASURES, ShadowTest, Window

RUNS, LENGTH, SEED = 1000, 100, 20
BOUNDS = (pytest.param(0.05, marks=pytest.mark.slow), ALPHA)
"""One that 1000 runs can tell from 0, and the one that plans have by default."""

Law = Callable[[random.Random, int], float]
SYMMETRIC: dict[str, Law] = {
    "normal": lambda r, n: r.gauss(0.0, 1.0),
    "heavy": lambda r, n: r.gauss(0.0, 1.0) / max(abs(r.gauss(0.0, 1.0)), 1e-9),
    "growing": lambda r, n: r.gauss(0.0, 1.1**n),
    "rewards": lambda r, n: float(r.random() < 0.3) - float(r.random() < 0.3),
    "gaps": lambda r, n: gap(r, 1.5) - gap(r, 1.5),
}


def gap(random_: random.Random, spread: float, factor: float = 1.0) -> float:
    """Mean log-probability gap of a window in nats: never negative, with a tail to the right."""
    return factor * 1e-3 * math.exp(random_.gauss(0.0, spread))


def alarms(law: Law, runs: int = RUNS, length: int = LENGTH, alpha: float = ALPHA) -> list[int]:
    """Numbers of the observation at which runs raised the alarm."""
    random_ = random.Random(SEED)
    found = []
    for _ in range(runs):
        test = SymmetryTest(alpha)
        for number in range(length):
            if test.add(law(random_, number)):
                found.append(number + 1)
                break
    return found


def at_most(alpha: float, runs: int) -> float:
    """A bound with three standard errors of room."""
    return alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)


@pytest.mark.parametrize("alpha", BOUNDS)
@pytest.mark.parametrize("name", sorted(SYMMETRIC))
def test_false_alarms_stay_within_the_bound(name: str, alpha: float) -> None:
    rate = len(alarms(SYMMETRIC[name], alpha=alpha)) / RUNS
    print(f"seed {SEED}: {name}: {rate:.4f} of {RUNS} runs, bound {alpha}")
    assert rate <= at_most(alpha, RUNS)


@pytest.mark.parametrize(("shift", "power", "within"), [(1.0, 0.95, 40), (0.5, 0.8, 100)])
def test_shifts_are_found_in_time(shift: float, power: float, within: int) -> None:
    found = alarms(lambda r, n: r.gauss(shift, 1.0), runs=200)
    rate = sum(number <= within for number in found) / 200
    print(f"seed {SEED}: shift {shift} sd: {rate:.3f} within {within}, median "
          f"{sorted(found)[len(found) // 2]}")  # fmt: skip
    assert rate >= power


def windows_until_gap_alarm(factor: float, runs: int, alpha: float = ALPHA) -> list[int]:
    """Windows of 30 after which a job's test raised the alarm by the gap; the live side's is
    larger by ``factor``, all else is of one law. Gaps of one side move by a third."""
    random_ = random.Random(SEED)
    found = []
    for _ in range(runs):
        test = ShadowTest(alpha)
        for number in range(30):
            live, shadow = (window(random_, 0.5, samples=16) for _ in range(2))
            live = replace(live, iterations=with_gap(live, gap(random_, 0.3, factor)))
            shadow = replace(shadow, iterations=with_gap(shadow, gap(random_, 0.3)))
            if test.add(live, shadow):
                if "logp_gap" in test.plain()["by"]:
                    found.append(number + 1)
                break
    return found


def with_gap(of: Window, mean: float) -> dict[str, list[float]]:
    return {name: [mean] if name == "logp_gap" else list(v) for name, v in of.iterations.items()}


@pytest.mark.parametrize(
    ("factor", "power", "within"),
    [(50.0, 0.99, 14), (2.0, 0.9, 20), pytest.param(1.5, 0.5, 30, marks=pytest.mark.slow)],
)
def test_a_wider_gap_is_found_in_time(factor: float, power: float, within: int) -> None:
    """Alone, beside measures of one law: an engine that reports log-probabilities of others."""
    found = windows_until_gap_alarm(factor, runs=100)
    rate = sum(number <= within for number in found) / 100
    print(f"seed {SEED}: gap x {factor}: {rate:.2f} within {within} windows, median "
          f"{sorted(found)[len(found) // 2]}")  # fmt: skip
    assert rate >= power


def windows_until_alarm(law: float, runs: int, windows: int, alpha: float) -> list[int]:
    """Windows after which a job's test, as a shadow uses it, raised the alarm; live rewards are 1
    with probability ``law``, those of the shadow with 0.5."""
    random_ = random.Random(SEED)
    found = []
    for _ in range(runs):
        test = ShadowTest(alpha)
        for number in range(windows):
            if test.add(window(random_, law, samples=64), window(random_, 0.5, samples=64)):
                found.append(number + 1)
                break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("alpha", BOUNDS)
def test_whole_windows_raise_false_alarms_and_find_drifts_as_stated(alpha: float) -> None:
    """All measures and the samples' rewards together, a look after each of 20 windows."""
    false = len(windows_until_alarm(0.5, 400, 20, alpha)) / 400
    print(f"seed {SEED}: whole windows: {false:.4f} of 400 runs, bound {alpha}")
    assert false <= at_most(alpha, 400)
    for law, within, power in ((0.65, 20, 0.9), (0.8, 3, 0.9)):
        found = windows_until_alarm(law, 100, 20, alpha)
        share = sum(number <= within for number in found) / 100
        median = sorted(found)[len(found) // 2]
        print(f"seed {SEED}: rewards {law} for 0.5: {share:.2f} in {within}, median {median}")
        assert share >= power


def window(random_: random.Random, reward: float, loss: float = 0.0, samples: int = 128) -> Window:
    return Window(
        {name: [loss + random_.gauss(0.0, 1.0) for _ in range(3)] for name in MEASURES},
        {f"{n:06d}/0": float(random_.random() < reward) for n in range(samples)},
    )


def test_a_window_that_differs_is_told_by_what_it_differs_in() -> None:
    random_ = random.Random(SEED)
    same, rewards, losses = ShadowTest(), ShadowTest(), ShadowTest()
    for _ in range(40):
        same.add(window(random_, 0.4), window(random_, 0.4))
        rewards.add(window(random_, 0.55), window(random_, 0.4))
        losses.add(window(random_, 0.4, 2.0), window(random_, 0.4))
    assert not same.alarmed, same.plain()
    assert rewards.plain()["by"] == ["sample reward"]
    assert set(losses.plain()["by"]) == set(MEASURES)


def test_zeros_say_nothing_and_what_is_no_number_raises_the_alarm() -> None:
    test = SymmetryTest(0.01)
    assert not test.extend([0.0] * 1000)
    assert test.log_evidence == pytest.approx(0.0)
    assert test.add(math.nan)
    assert test.alarmed_at == 1001


def test_windows_of_other_samples_are_refused() -> None:
    random_ = random.Random(1)
    one = window(random_, 0.5)
    other = Window(one.iterations, {"000009/9": 1.0})
    with pytest.raises(InvalidInput, match="same samples"):
        ShadowTest().add(one, other)
    with pytest.raises(InvalidInput, match="as many values"):
        ShadowTest().add(one, Window({**one.iterations, "kl": [0.0]}, one.rewards))
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        SymmetryTest(0.0)
