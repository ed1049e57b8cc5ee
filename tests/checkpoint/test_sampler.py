"""The declared sampler: each epoch a permutation, the same draws however it is cut and resumed.

Method: hypothesis draws sizes, seeds and ways to cut a run into draws with a save and restore
between them; a golden order pins the rule.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftbook.checkpoint.errors import SamplerStateError
from shiftbook.checkpoint.manifest import SamplerCursor
from shiftbook.checkpoint.sampler import (
    HASH_SORT,
    SEQUENTIAL,
    Draw,
    Sampler,
    SamplerState,
    epoch_order,
    expected_draws,
)

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**64 - 1)


@given(
    sizes, seeds, st.lists(st.integers(0, 40), max_size=8), st.sampled_from([HASH_SORT, SEQUENTIAL])
)
def test_resume_anywhere_gives_the_undisturbed_draws(
    size: int, seed: int, cuts: list[int], rule: str
) -> None:
    expected = expected_draws(rule, seed, size, 0, sum(cuts))
    sampler, drawn = Sampler(size, seed, rule=rule), []
    for n in cuts:
        drawn += sampler.draw(n)
        saved = json.loads(json.dumps(sampler.state().plain()))
        sampler = Sampler(size, seed, rule=rule)
        sampler.restore(saved)
    assert drawn == expected
    assert [draw.ordinal for draw in drawn] == list(range(sum(cuts)))
    assert sampler.state().ordinal == sum(cuts)


@given(sizes, seeds, st.integers(0, 3))
def test_each_epoch_draws_each_prompt_once(size: int, seed: int, epoch: int) -> None:
    draws = expected_draws(HASH_SORT, seed, size, epoch * size, size)
    assert {draw.epoch for draw in draws} == {epoch}
    assert sorted(draw.index for draw in draws) == list(range(size))


def test_an_epoch_boundary_within_a_draw() -> None:
    sampler = Sampler(5, seed=1)
    sampler.draw(3)
    draws = sampler.draw(4)
    assert [draw.epoch for draw in draws] == [0, 0, 1, 1]
    assert sampler.state() == SamplerState(HASH_SORT, 1, 5, epoch=1, position=2)
    sampler.draw(3)
    assert sampler.state().epoch == 2
    assert sampler.state().position == 0


def test_cursor_of_a_manifest_goes_on() -> None:
    sampler = Sampler(7, seed=3)
    sampler.draw(9)
    state = sampler.state()
    cursor = SamplerCursor(epoch=state.epoch, position=state.position)
    other = Sampler(7, seed=3)
    other.seek(cursor.epoch, cursor.position)
    assert other.draw(5) == sampler.draw(5) == expected_draws(HASH_SORT, 3, 7, 9, 5)


def test_seeds_and_epochs_give_other_orders_and_places_are_even() -> None:
    orders = {epoch_order(HASH_SORT, seed, epoch, 20) for seed in range(30) for epoch in range(30)}
    assert len(orders) == 900
    firsts = Counter(epoch_order(HASH_SORT, seed, 0, 4)[0] for seed in range(4000))
    # 4000 draws of 4 places: standard deviation 27.4; six of them never happen by chance.
    assert all(abs(firsts[place] - 1000) < 165 for place in range(4)), firsts


def test_golden_order_pins_the_rule() -> None:
    assert epoch_order(HASH_SORT, 42, 0, 8) == (7, 4, 6, 3, 5, 0, 1, 2)
    assert epoch_order(HASH_SORT, 42, 1, 8) == (0, 4, 7, 3, 2, 6, 1, 5)
    assert expected_draws(SEQUENTIAL, 42, 3, 2, 2) == [Draw(2, 0, 2), Draw(3, 1, 0)]


def test_a_state_of_another_order_is_refused() -> None:
    sampler = Sampler(5, seed=1)
    for said, state in (
        ("rule", SamplerState(SEQUENTIAL, 1, 5, 0, 0)),
        ("seed", SamplerState(HASH_SORT, 2, 5, 0, 0)),
        ("size", SamplerState(HASH_SORT, 1, 6, 0, 0)),
        ("unit", SamplerState(HASH_SORT, 1, 5, 0, 0, unit="batches")),
        ("position", SamplerState(HASH_SORT, 1, 5, 0, 5)),
        ("epoch", SamplerState(HASH_SORT, 1, 5, -1, 0)),
        ("sampler state", {"rule": HASH_SORT}),
    ):
        with pytest.raises(SamplerStateError, match=said):
            sampler.restore(state)
    assert sampler.state().ordinal == 0


def test_unfit_samplers_are_refused() -> None:
    with pytest.raises(SamplerStateError, match="at least 1 prompt"):
        Sampler(0, seed=1)
    with pytest.raises(SamplerStateError, match="hash-sort-v1, sequential-v1"):
        Sampler(3, seed=1, rule="shuffle")
    with pytest.raises(SamplerStateError, match="at least 0"):
        expected_draws(HASH_SORT, 1, 3, -1, 2)
    with pytest.raises(SamplerStateError, match="at least 0"):
        Sampler(3, seed=1).draw(-1)
