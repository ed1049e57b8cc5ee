"""Goal: what the judge computes for itself is right: schedules, controllers, Fisher's test.

Method: values worked out by hand, and sums that must be one.
"""

from __future__ import annotations

import math

import pytest

from shiftbook.ledger.events.training import Controller
from shiftbook.verify.invariants.loss import _expected
from shiftbook.verify.invariants.selection import fisher
from shiftbook.verify.invariants.update import scheduled


@pytest.mark.parametrize(
    ("name", "updates", "share"),
    [
        ("constant", 7, 1.0),
        ("warmup:4", 0, 0.25),
        ("warmup:4", 3, 1.0),
        ("warmup:4", 9, 1.0),
        ("linear:2:10", 0, 0.5),
        ("linear:2:10", 2, 1.0),
        ("linear:2:10", 6, 0.5),
        ("linear:2:10", 12, 0.0),
        ("cosine:0:8", 4, 0.5),
        ("cosine:0:8", 8, 0.0),
        ("warmup", 1, None),
        ("warmup:x", 1, None),
        ("warmup:-1", 1, None),
        ("one-cycle:3", 1, None),
    ],
)
def test_schedules(name: str, updates: int, share: float | None) -> None:
    found = scheduled(name, updates)
    assert found is share or found == pytest.approx(share, abs=1e-12)


def test_controllers() -> None:
    rule: dict[str, float | str] = {"rule": "adaptive-kl", "target": 0.1, "gain": 0.5, "limit": 0.2}

    def after(kl: float) -> object:
        return _expected(rule, Controller(before=2.0, after=0.0, inputs={"kl": kl}))

    assert after(0.1) == 2.0
    assert after(9.0) == pytest.approx(2.2)
    assert after(0.0) == pytest.approx(1.8)
    count = Controller(before=5.0, after=0.0, inputs={"added": 3.0})
    assert _expected({"rule": "count"}, count) == 8.0
    assert _expected({"rule": "count"}, Controller(before=5.0, after=8.0)) == "added"
    assert _expected({"rule": "of ours"}, count) is None
    assert _expected({"rule": "constant"}, count) == 5.0


def test_fisher_is_the_tail_of_the_hypergeometric_distribution() -> None:
    # 5 of 5 drawn are marked where 5 of 10 are: 1 of C(10, 5) draws.
    assert fisher(5, 0, 0, 5) == pytest.approx(1 / 252)
    assert fisher(0, 5, 5, 0) == pytest.approx(1.0)
    tails = [fisher(k, 6 - k, 8 - k, 3 + k) for k in range(7)]
    assert tails == sorted(tails, reverse=True)
    at_least_two = 1 - (math.comb(9, 6) + 8 * math.comb(9, 5)) / math.comb(17, 6)
    assert tails[2] == pytest.approx(at_least_two)
