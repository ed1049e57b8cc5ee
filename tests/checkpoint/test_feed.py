"""Goal: no draw is lost or consumed twice, wherever a run is cut and however many draws are out.

Method: Hypothesis cuts a run at random between taking and consuming; the state goes through JSON or
through a bundle's fields. The model is the list of ordinals.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftbook.checkpoint.errors import SamplerStateError
from shiftbook.checkpoint.feed import Feed
from shiftbook.checkpoint.manifest import BundleFields
from shiftbook.checkpoint.sampler import HASH_SORT, SEQUENTIAL, Sampler, expected_draws

SIZE, SEED = 11, 5


def fresh() -> Feed:
    return Feed(Sampler(SIZE, SEED), group_size=2)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=12),
    st.integers(0, 99),
)
def test_each_draw_is_consumed_once_whatever_happens(
    steps: list[tuple[int, int, bool]], seed: int
) -> None:
    feed, held, done = fresh(), [], []
    shuffle = random.Random(seed)
    for take, consume, cut in steps:
        held += [draw.ordinal for draw in feed.take(take)]
        shuffle.shuffle(held)
        gone, held = held[:consume], held[consume:]
        feed.consumed(gone)
        done += gone
        if cut:  # the process dies here; what is out is handed out again
            fields = BundleFields.model_validate(
                {"job": "j", "attempt": "a", "iteration": 0, "policy_version": 0}
                | feed.bundle_fields()
            )
            other = fresh()
            if seed % 2:
                other.restore(json.loads(json.dumps(feed.state())))
            else:
                other.restore_bundle(fields.model_dump())
            assert other.state() == feed.state()
            feed, held = other, []
    while feed.in_flight:
        waiting = [draw.ordinal for draw in feed.in_flight if draw.ordinal not in held]
        held += [draw.ordinal for draw in feed.take(len(waiting))]
        feed.consumed(held)
        done += held
        held = []
    assert sorted(done) == list(range(len(done)))
    assert feed.cursor == len(done)
    assert feed.take(4) == expected_draws(HASH_SORT, SEED, SIZE, len(done), 4)


def test_what_was_in_flight_comes_first_and_is_the_same() -> None:
    feed = fresh()
    first = feed.take(5)
    feed.consumed([1, 3])
    other = fresh()
    other.restore(feed.state())
    assert other.take(4) == [first[0], first[2], first[4], *fresh().sampler.at(5, 1)]
    assert feed.bundle_fields()["in_flight_uids"][:3] == ("000000/0", "000000/1", "000002/0")


def test_what_is_not_in_flight_cannot_be_consumed() -> None:
    feed = fresh()
    feed.take(3)
    for ordinals in ([3], [0, 0], [-1]):
        with pytest.raises(SamplerStateError, match="exactly once"):
            feed.consumed(ordinals)
    feed.consumed([0])
    with pytest.raises(SamplerStateError, match="exactly once"):
        feed.consumed([0])
    assert [draw.ordinal for draw in feed.in_flight] == [1, 2]
    with pytest.raises(SamplerStateError, match="at least 0"):
        feed.take(-1)


def test_states_of_two_moments_are_refused_and_change_nothing() -> None:
    feed = fresh()
    feed.take(3)
    state = feed.state()
    for wrong, said in (
        ({**state, "in_flight": [7]}, "one moment"),
        ({**state, "in_flight": [1, 1]}, "one moment"),
        ({"sampler": state["sampler"]}, "in_flight"),
        ({**state, "sampler": {**state["sampler"], "seed": 1}}, "seed"),
    ):
        with pytest.raises(SamplerStateError, match=said):
            feed.restore(wrong)
        assert feed.state() == state


def test_a_bundle_of_another_order_is_refused() -> None:
    """The cursor of a bundle names its order; one that names none fits any sampler."""
    feed = fresh()
    feed.take(3)
    kept = BundleFields.model_validate(
        {"job": "j", "attempt": "a", "iteration": 0, "policy_version": 0} | feed.bundle_fields()
    ).model_dump()
    for other, said in (
        (Sampler(SIZE, SEED + 1), "seed"),
        (Sampler(SIZE + 1, SEED), "size"),
        (Sampler(SIZE, SEED, rule=SEQUENTIAL), "rule"),
    ):
        strange = Feed(other, group_size=2)
        with pytest.raises(SamplerStateError, match=said):
            strange.restore_bundle(kept)
        assert (strange.cursor, strange.in_flight) == (0, [])
    with pytest.raises(SamplerStateError, match="in-flight buffer"):
        fresh().restore_bundle({**kept, "in_flight_uids": None})
    bare = {**kept, "sampler": {"epoch": 0, "position": 3}}
    again = fresh()
    again.restore_bundle(bare)
    assert again.state() == feed.state()
