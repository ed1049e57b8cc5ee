"""Goal: each owner's generator goes on exactly where it was saved, whatever made it, and one that
was reseeded or drawn from between the restore and its first use is named.

Method: Hypothesis draws how far each kind of generator has gone; states travel as hex through JSON,
a bundle's fields and a live snapshot. Keyed streams are compared over different histories.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shiftbook.checkpoint.errors import RandomStreamChanged, RandomStreamError
from shiftbook.checkpoint.live import LiveSnapshot
from shiftbook.checkpoint.manifest import BundleFields
from shiftbook.checkpoint.random_streams import (
    RandomStreams,
    key_of,
    keyed_streams,
    process_generators,
    seed_generator,
)

KINDS: dict[str, Callable[[int], Any]] = {
    "python": random.Random,
    "numpy, legacy": np.random.RandomState,
    "PCG64": lambda seed: np.random.Generator(np.random.PCG64(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}
if torch.cuda.is_available():
    KINDS["cuda"] = lambda seed: torch.Generator(device="cuda").manual_seed(seed)

seeds = st.integers(0, 2**31 - 1)


def draw(generator: Any, n: int) -> list[float]:
    """Numbers of two distributions, so that a kept half of a normal pair counts too."""
    if isinstance(generator, torch.Generator):
        return torch.randn(n, generator=generator, device=generator.device).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(n)] + [generator.random()]
    return [float(generator.normal()) for _ in range(n)] + [float(generator.uniform())]


@given(st.sampled_from(sorted(KINDS)), seeds, st.integers(0, 30), st.integers(1, 9))
def test_a_stream_goes_on_where_it_was_saved(kind: str, seed: int, gone: int, more: int) -> None:
    streams = RandomStreams()
    generator = streams.own("augment/0", KINDS[kind](seed))
    draw(generator, gone)
    saved = json.loads(json.dumps(streams.states()))
    expected = draw(generator, more)
    other = RandomStreams({"augment/0": KINDS[kind](seed + 1)})
    other.restore(saved)
    assert other.first_use() == saved
    assert draw(other["augment/0"], more) == expected


def test_states_travel_in_bundles_and_live_snapshots() -> None:
    streams = RandomStreams.of_process("rank/0")
    assert {"rank/0/python", "rank/0/numpy", "rank/0/torch"} <= streams.states().keys()
    fields = {"job": "j", "attempt": "a", "iteration": 0, "policy_version": 0}
    stored = BundleFields.model_validate({**fields, "rng": streams.states()})
    assert stored.rng == streams.states()
    live = LiveSnapshot.take(policy_version=0, iteration=0, tensors={}, rng=streams.states())
    assert live.nbytes == sum(len(state) for state in streams.values().values())
    assert set(streams.parts()) == {f"rng:{owner}" for owner in streams.states()}


def test_the_processes_own_generators_are_those_that_code_draws_from() -> None:
    streams = RandomStreams.of_process("trainer")
    streams.seed(5)
    saved = streams.states()
    first = (random.random(), np.random.rand(), float(torch.rand(())))
    streams.restore(saved)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == first
    streams.seed(6)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) != first


@pytest.mark.parametrize(
    ("meddle", "owner"),
    [
        (lambda: random.seed(0), "rank/0/python"),
        (lambda: np.random.rand(), "rank/0/numpy"),
        (lambda: torch.manual_seed(0), "rank/0/torch"),
        (lambda: torch.nn.Linear(2, 2), "rank/0/torch"),
    ],
)
def test_a_draw_or_a_reseed_before_the_first_use_is_named(
    meddle: Callable[[], Any], owner: str
) -> None:
    streams = RandomStreams.of_process("rank/0")
    streams.seed(9)
    saved = streams.states()
    streams.restore(saved)
    meddle()
    with pytest.raises(RandomStreamChanged, match="reseeded or drawn from") as caught:
        streams.first_use()
    assert caught.value.owners == (owner,)
    streams.restore(saved)
    assert streams.first_use() == saved
    meddle()
    streams.first_use()  # checked once; from here on it draws as it likes


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    streams = RandomStreams({"a": random.Random(1), "b": torch.Generator().manual_seed(1)})
    before = streams.states()
    numpy_state = RandomStreams({"b": np.random.RandomState(2)}).states()
    for states, said in (
        ({"a": before["a"]}, "missing"),
        ({**before, "c": before["a"]}, "unknown"),
        ({"a": random.Random(3), **numpy_state}, "state of a"),
        ({"a": before["b"], "b": before["b"]}, "state of a"),
    ):
        given_states = {
            o: RandomStreams({o: s}).states()[o] if isinstance(s, random.Random) else s
            for o, s in states.items()
        }
        with pytest.raises(RandomStreamError, match=said):
            streams.restore(given_states)
        assert streams.states() == before
    with pytest.raises(RandomStreamError, match="one owner has one stream"):
        streams.own("a", random.Random(2))
    with pytest.raises(RandomStreamError, match="another owner has"):
        streams.own("c", streams["a"])


@given(st.integers(0, 2**63), st.integers(0, 50), st.integers(0, 50))
def test_keyed_streams_depend_on_their_key_alone(seed: int, place: int, history: int) -> None:
    def drawn(seed: int, owner: str, *at: int) -> tuple[float, float, float]:
        with keyed_streams(seed, owner, *at):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(history)
    torch.manual_seed(history)
    before = [g.getstate() for g in process_generators().values() if isinstance(g, random.Random)]
    torch_before = torch.get_rng_state()
    one = drawn(seed, "virtual-rank/1", 3, place)
    assert before == [
        g.getstate() for g in process_generators().values() if isinstance(g, random.Random)
    ]
    assert torch.equal(torch_before, torch.get_rng_state())
    torch.manual_seed(history + 1)
    assert drawn(seed, "virtual-rank/1", 3, place) == one
    others = [
        drawn(seed, "virtual-rank/2", 3, place),
        drawn(seed, "virtual-rank/1", 4, place),
        drawn(seed, "virtual-rank/1", 3, place + 1),
        drawn(seed + 1, "virtual-rank/1", 3, place),
    ]
    assert len({one, *others}) == 5


def test_a_block_that_raises_puts_the_generators_back() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()

    def fails() -> None:
        with keyed_streams(1, "x"):
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_are_pinned_and_seeds_of_all_kinds_differ() -> None:
    assert key_of(7, "virtual-rank/0/torch", 0, 1) == key_of(7, "virtual-rank/0/torch", 0, 1)
    keys = {key_of(seed, owner) for seed in range(40) for owner in ("a", "b", "a/b")}
    assert len(keys) == 120
    for make in KINDS.values():
        states = set()
        for key in (0, 1, 2**32, 2**63, 2**64 - 1):
            generator = make(0)
            seed_generator(generator, key)
            states.add(tuple(draw(generator, 3)))
        assert len(states) == 5


def test_torchs_words_are_those_of_the_same_twister() -> None:
    """The layout of torch's state is what is believed here: numpy draws the same words."""
    key = key_of(1, "layout")
    generator = torch.Generator()
    seed_generator(generator, key)
    found = torch.empty(1000, dtype=torch.int32).random_(generator=generator)
    words = np.random.RandomState([key >> 32, key & 0xFFFF_FFFF])
    wanted = words.randint(0, 2**32, 1000, dtype=np.uint32).astype(np.int64) % 2**31
    assert found.tolist() == wanted.tolist()
