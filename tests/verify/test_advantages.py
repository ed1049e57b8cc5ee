"""Goal: whoever declares how advantages come from rewards is judged by that, and by nothing else.

Method: a loop turns rewards into advantages by each rule, written here once more and otherwise
than in the judge, and consumes them whole or in minibatches that split groups. Under the declared
rule it is clean; under each other one, with the rewards of neighbours, or with the baseline of a
minibatch, it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from shiftbook.checkpoint.recorder import Consumed, Generated, Recorder, data_digests, uid
from shiftbook.ledger.plan import AdvantageRule, Plan, SamplingPlan, UpdatePlan
from shiftbook.verify.coverage import Row
from shiftbook.verify.verdict import Verdict, verify
from tests.checkpoint.test_recorder import DATA, RATE, plan

PROMPTS, GROUP, FLOOR = 3, 4, 1e-4
REWARDS = np.random.default_rng(5).normal(size=(PROMPTS, GROUP)).round(3)

Rule = Callable[[np.ndarray], np.ndarray]

RULES: dict[AdvantageRule, Rule] = {
    "group": lambda r: (r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + FLOOR),
    "group-mean": lambda r: r - r.mean(1, keepdims=True),
    "leave-one-out": lambda r: np.array(
        [[row[i] - np.delete(row, i).mean() for i in range(GROUP)] for row in r]
    ),
    "batch-scaled": lambda r: (r - r.mean(1, keepdims=True)) / (r.std() + FLOOR),
    "batch": lambda r: (r - r.mean()) / (r.std() + FLOOR),
}
NAMES = [uid(draw, member) for draw in range(PROMPTS) for member in range(GROUP)]
WHOLE = [NAMES]
SPLIT = [NAMES[0::2], NAMES[1::2]]
"""Two minibatches, each with half of every group."""


def run(
    folder: Path,
    advantages: np.ndarray,
    *,
    rule: AdvantageRule = "group",
    batches: Iterable[list[str]] = WHOLE,
    dropped: Iterable[str] = (),
    required: tuple[str, ...] = ("I10", "I12", "I12b", "I5"),
    split: bool = False,
) -> Verdict:
    """One iteration that consumes everything, in as many updates as there are batches."""
    url, weights = f"sqlite:///{folder}/l.db", {"w": 0.0}
    batches = list(batches)
    made: Plan = plan(
        objective="rl",
        iterations=1,
        sampling=SamplingPlan(staleness_bound=1),
        update=UpdatePlan(
            prompts_per_update=PROMPTS,
            group_size=GROUP,
            virtual_ranks=1,
            learning_rate=RATE,
            advantage=rule,
            groups="split" if split else "whole",
        ),
        drop_rules=("long",),
        required_invariants=required,
    )
    tokens = {name: DATA[int(name[:6])] for name in NAMES}
    rewards = dict(zip(NAMES, REWARDS.ravel().tolist(), strict=True))
    used = dict(zip(NAMES, advantages.ravel().tolist(), strict=True))
    with Recorder.open(url, "job", made, policy=weights) as record:
        record.data(data_digests(DATA), tokenizer="t")
        record.started("rollout", "engine", "engine#1")
        with record.iteration(0):
            with record.sync(0, weights, ["engine"]) as sync:
                sync.delivered("engine", "engine#1", weights, caches_flushed=["none"])
            record.drawn(0, start=0, indices=range(PROMPTS), epoch=0, prompts=DATA)
            samples = [
                Generated(n, tokens[n], None, 0, "engine", "engine#1", prompt=tokens[n])
                for n in NAMES
            ]
            record.generated(0, samples, version=0)
            record.rewarded(0, rewards, tokens, by="one")
            record.dropped(0, list(dropped), "long: cut off")
            for number, names in enumerate(batches):
                rows = [Consumed(n, tokens[n], rewards[n], used[n]) for n in names]
                record.consumed(0, rows, version=number)
                state = {"model": weights, "masters": weights, "optimizer": {"step": number}}
                with record.update(0, lambda state=state: state) as update:  # type: ignore[misc]
                    weights = {"w": weights["w"] + RATE}
                    step = {"step": number + 1}
                    state |= {"model": weights, "masters": weights, "optimizer": step}
                    groups = sorted({n[:6] for n in names})
                    update.micro_batch(
                        tokens=3 * len(names),
                        samples=len(names),
                        divisor=3 * len(names),
                        groups=groups,
                    )
                    update.applied(
                        version=number + 1,
                        optimizer_step=number + 1,
                        learning_rate=RATE,
                        loss=0.0,
                        grad_norm=1.0,
                    )
        record.finish(iterations=1, version=len(batches), policy=weights)
    return verify(url)


def row_of(verdict: Verdict) -> Row:
    return next(row for row in verdict.coverage.rows if row.invariant == "I12b")


def accused(verdict: Verdict) -> set[str]:
    return {finding.invariant for finding in verdict.findings}


@pytest.mark.parametrize("rule", RULES)
def test_the_declared_rule_is_clean(rule: AdvantageRule, tmp_path: Path) -> None:
    verdict = run(tmp_path, RULES[rule](REWARDS), rule=rule)
    assert not verdict.findings
    assert row_of(verdict).status == "checked"


@pytest.mark.parametrize("declared", RULES)
@pytest.mark.parametrize("done", RULES)
def test_another_rule_is_found(
    declared: AdvantageRule, done: AdvantageRule, tmp_path: Path
) -> None:
    if declared != done:
        assert "I12b" in accused(run(tmp_path, RULES[done](REWARDS), rule=declared))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("split", [False, True])
def test_the_reward_of_a_neighbour_is_found(
    rule: AdvantageRule, split: bool, tmp_path: Path
) -> None:
    rolled = np.roll(REWARDS, 1, axis=1)
    batches = SPLIT if split else WHOLE
    found = run(tmp_path, RULES[rule](rolled), rule=rule, batches=batches, split=split)
    assert "I12b" in accused(found)


@pytest.mark.parametrize("rule", RULES)
def test_groups_may_be_split_where_that_is_declared(rule: AdvantageRule, tmp_path: Path) -> None:
    verdict = run(tmp_path, RULES[rule](REWARDS), rule=rule, batches=SPLIT, split=True)
    assert not verdict.findings
    assert row_of(verdict).status == "checked"


def test_groups_that_are_split_without_that_are_found(tmp_path: Path) -> None:
    assert "I12b" in accused(run(tmp_path, RULES["group"](REWARDS), batches=SPLIT))


@pytest.mark.parametrize("rule", ["group", "group-mean", "leave-one-out"])
def test_a_baseline_of_the_minibatch_alone_is_found(rule: AdvantageRule, tmp_path: Path) -> None:
    """Who splits groups and then computes the baseline over what is left trains on another one."""
    wrong = np.empty_like(REWARDS)
    for half in (0, 1):
        part = REWARDS[:, half::2]
        base = part.mean(1, keepdims=True)
        if rule == "leave-one-out":
            wrong[:, half::2] = part - part[:, ::-1]
        else:
            scale = part.std(1, keepdims=True) + FLOOR if rule == "group" else 1.0
            wrong[:, half::2] = (part - base) / scale
    assert "I12b" in accused(run(tmp_path, wrong, rule=rule, batches=SPLIT, split=True))


def test_a_dropped_member_has_no_part_in_the_baseline(tmp_path: Path) -> None:
    left = [name for name in NAMES if name != NAMES[5]]
    rewards = REWARDS.copy()
    advantages = RULES["group-mean"](rewards)
    advantages[1] = rewards[1] - np.delete(rewards[1], 1).mean()
    halves = [left[0::2], left[1::2]]
    verdict = run(
        tmp_path,
        advantages,
        rule="group-mean",
        batches=halves,
        dropped=[NAMES[5]],
        split=True,
    )
    assert not verdict.findings


def test_a_rule_of_its_own_is_not_checked_and_says_so(tmp_path: Path) -> None:
    """Advantages of a critic, say: no finding, and no clean verdict where I12b is required."""
    verdict = run(tmp_path, REWARDS * 7, rule="other")
    assert not verdict.findings
    row = row_of(verdict)
    assert (row.status, verdict.exit_code) == ("not checked", 2)
    assert "a rule of its own" in row.reason


def test_blocks_of_split_groups_are_refused() -> None:
    with pytest.raises(ValidationError, match="only where dealing is any"):
        UpdatePlan(
            prompts_per_update=1,
            group_size=2,
            virtual_ranks=1,
            learning_rate=RATE,
            groups="split",
            dealing="blocks",
        )
