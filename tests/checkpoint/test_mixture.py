"""Goal: draws from several sources follow the declared shares and stages, resume anywhere, and the
verifier recomputes them from the plan alone.

Method: Hypothesis draws sources, shares and stages; counts are compared with the declaration block
by block, draws from any start with those of an undisturbed run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shiftbook.checkpoint.errors import SamplerStateError
from shiftbook.checkpoint.mixture import offsets
from shiftbook.checkpoint.sampler import MIXTURE, Sampler, SamplerState, expected_draws
from shiftbook.ledger.plan import DataPlan, MixturePlan, Plan, SourcePlan, StagePlan

EASY, HARD, CODE = SourcePlan(name="easy", size=7), SourcePlan(name="hard", size=5), "code"


@st.composite
def mixtures(draw: st.DrawFn) -> MixturePlan:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    names = [f"s{n}" for n in range(len(sizes))]
    starts = [0, *sorted(draw(st.sets(st.integers(1, 40), max_size=3)))]
    shares = st.dictionaries(st.sampled_from(names), st.integers(0, 4), min_size=1).filter(
        lambda found: sum(found.values()) > 0
    )
    return MixturePlan(
        sources=tuple(SourcePlan(name=n, size=s) for n, s in zip(names, sizes, strict=True)),
        stages=tuple(StagePlan(start=start, shares=draw(shares)) for start in starts),
    )


def size_of(mixture: MixturePlan) -> int:
    return sum(source.size for source in mixture.sources)


@given(mixtures(), st.integers(0, 2**64 - 1), st.integers(0, 70), st.integers(0, 30))
def test_any_start_gives_the_draws_of_the_undisturbed_run(
    mixture: MixturePlan, seed: int, start: int, n: int
) -> None:
    size = size_of(mixture)
    whole = expected_draws(MIXTURE, seed, size, 0, start + n, mixture)
    assert [draw.ordinal for draw in whole] == list(range(start + n))
    assert expected_draws(MIXTURE, seed, size, start, n, mixture) == whole[start:]
    sampler = Sampler(size, seed, rule=MIXTURE, mixture=mixture)
    sampler.draw(start)
    other = Sampler(size, seed, rule=MIXTURE, mixture=mixture)
    other.restore(json.loads(json.dumps(sampler.state().plain())))
    assert other.draw(n) == whole[start:]


@given(mixtures(), st.integers(0, 99))
def test_shares_hold_in_every_block_and_sources_are_permuted(
    mixture: MixturePlan, seed: int
) -> None:
    draws = expected_draws(MIXTURE, seed, size_of(mixture), 0, 80, mixture)
    begin = offsets(mixture)
    ends = [stage.start for stage in mixture.stages[1:]] + [80]
    for stage, end in zip(mixture.stages, ends, strict=True):
        block = sum(stage.shares.values())
        wanted = Counter({name: share for name, share in stage.shares.items() if share})
        for first in range(stage.start, min(end, 80) - block + 1, block):
            assert Counter(d.source for d in draws[first : first + block]) == wanted
    for source in mixture.sources:
        own = [d.index - begin[source.name] for d in draws if d.source == source.name]
        for first in range(0, len(own), source.size):
            epoch = own[first : first + source.size]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(source.size))


def curriculum(**changes: object) -> DataPlan:
    mixture = MixturePlan(
        sources=(EASY, HARD),
        stages=(
            StagePlan(start=0, shares={"easy": 1}),
            StagePlan(start=10, shares={"easy": 1, "hard": 3}),
        ),
    )
    fields = {"dataset_digest": "d", "tokenizer_digest": "t", "dataset_size": 12, "seed": 4}
    fields |= {"sampler_rule": MIXTURE, "mixture": mixture}
    return DataPlan.model_validate({**fields, **changes})


def test_a_curriculum_begins_easy_and_turns_at_its_declared_draw() -> None:
    sampler = Sampler.declared(curriculum())
    draws = sampler.draw(30)
    assert {d.source for d in draws[:10]} == {"easy"}
    assert Counter(d.source for d in draws[10:]) == {"easy": 5, "hard": 15}
    assert sampler.state().ordinal == 30
    assert [d.epoch for d in draws[:13]] == [0] * 12 + [1]


def test_a_later_stage_changes_no_earlier_draw() -> None:
    before = curriculum()
    assert before.mixture is not None
    more = before.mixture.model_copy(
        update={"stages": (*before.mixture.stages, StagePlan(start=22, shares={"hard": 1}))}
    )
    after = Sampler.declared(curriculum(mixture=more)).draw(40)
    assert after[:22] == Sampler.declared(before).draw(22)
    assert {d.source for d in after[22:]} == {"hard"}


def test_a_state_of_another_mixture_is_refused() -> None:
    data = curriculum()
    assert data.mixture is not None
    other = data.mixture.model_copy(update={"stages": (StagePlan(start=0, shares={"hard": 1}),)})
    saved = Sampler.declared(curriculum(mixture=other)).state()
    with pytest.raises(SamplerStateError, match="mixture"):
        Sampler.declared(data).restore(saved)
    with pytest.raises(SamplerStateError, match="rule"):
        Sampler.declared(data).restore(SamplerState("hash-sort-v1", 4, 12, 0, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: StagePlan(start=0, shares={}),
        lambda: StagePlan(start=0, shares={"a": 0}),
        lambda: StagePlan(start=0, shares={"a": -1, "b": 2}),
        lambda: StagePlan(start=0, shares={"a": 10**6}),
        lambda: MixturePlan(sources=(EASY, EASY), stages=(StagePlan(start=0, shares={"easy": 1}),)),
        lambda: MixturePlan(sources=(EASY,), stages=(StagePlan(start=1, shares={"easy": 1}),)),
        lambda: MixturePlan(sources=(EASY,), stages=(StagePlan(start=0, shares={CODE: 1}),)),
        lambda: MixturePlan(sources=(EASY,), stages=(StagePlan(start=0, shares={"easy": 1}),) * 2),
        lambda: curriculum(sampler_rule="hash-sort-v1"),
        lambda: curriculum(mixture=None),
        lambda: curriculum(dataset_size=13),
    ],
)
def test_declarations_that_say_nothing_or_too_much_are_refused(make: object) -> None:
    with pytest.raises(ValidationError):
        make()  # type: ignore[operator]


def test_samplers_without_their_mixture_are_refused() -> None:
    mixture = curriculum().mixture
    for size, rule, given_mixture in (
        (12, MIXTURE, None),
        (12, "hash-sort-v1", mixture),
        (13, MIXTURE, mixture),
    ):
        with pytest.raises(SamplerStateError, match="expected"):
            Sampler(size, 1, rule=rule, mixture=given_mixture)


def test_a_plan_with_a_mixture_goes_through_its_file(tmp_path: Path) -> None:
    from tests.checkpoint.test_recorder import plan

    made: Plan = plan(data=curriculum())
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
