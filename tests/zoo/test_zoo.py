"""Goal: faults that are put into a small real job are found, and honest runs are not accused.

Method: the job of the zoo runs with one thing put in from outside and its ledger is judged. A
handful of runs here by default; the whole quick form under the slow marker. `python -m tests.zoo`
prints the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.zoo import __main__ as zoo_command
from tests.zoo import mutations, packing
from tests.zoo.__main__ import Task, main
from tests.zoo.faults import CRASHES, load_all
from tests.zoo.job import Shape
from tests.zoo.legitimate import VARIANTS
from tests.zoo.legitimate_batches import replay
from tests.zoo.run import Result, run

FAST = {
    "sampler_restarts": "I2",
    "masters_overwritten": "I17b",
    "mean_of_means": "I21",
    "shard_of_an_older_save": "I1b",
    "woken_with_base_weights": "I17b",
    "flush_in_name_only": "I7",
    "rewards_slip": "I12",
    "tool_trained": "I11",
    "kl_detached": "recomputed",
    "copies_not_reduced": "I20",
    "group_fed_apart": "I5",
    "loss_packs_leak": "I16",
    "scored_between_passes": "I16",
    "own_reward_in_baseline": "I12b",
}
"""A fault of most kinds, and an invariant that must be among those that speak."""


def test_there_are_enough_of_all_kinds() -> None:
    faults = load_all()
    assert len(faults) >= 80
    assert {fault.kind for fault in faults.values()} == set("ABCDEFGHIJK")
    assert len(VARIANTS) >= 30


def test_all_but_a_fault_of_the_whole_run_are_put_in_at_several_moments() -> None:
    moments = {name: fault.triggers() for name, fault in load_all().items()}
    alone = {name for name, triggers in moments.items() if len(set(triggers)) < 3}
    assert alone == {name for name, fault in load_all().items() if fault.when == "run"}
    assert alone == {"one_seed_for_all"}, "declare a fault of the whole run only where it is one"


@pytest.mark.parametrize("crash", list(CRASHES)[1:])
def test_a_fault_of_the_restore_is_found_after_other_crashes(crash: int) -> None:
    """Beside the honest run of that crash, which ends as the plain one does."""
    fault = load_all()["shard_of_an_older_save"]
    honest = run(fault.shape(1, crash))
    assert honest.exit_code == 0, (honest.told, honest.could_not, honest.error)
    result = run(fault.shape(1, crash), lambda p: fault.put_in(p, crash))
    assert result.exit_code == 1, (result.error, result.could_not)
    assert "I1b" in result.invariants
    assert result.final != honest.final


def test_the_plain_run_is_clean_and_repeats() -> None:
    first, again, other = run(Shape(seed=3)), run(Shape(seed=3)), run(Shape(seed=4))
    assert first.exit_code == 0, (first.told, first.could_not, first.error)
    assert first.final == again.final
    assert first.final != other.final


@pytest.mark.parametrize("name", FAST)
def test_a_fault_is_found(name: str) -> None:
    fault = load_all()[name]
    trigger = fault.triggers()[0]
    result = run(fault.shape(1, trigger), lambda p: fault.put_in(p, trigger))
    assert result.exit_code == 1, (result.error, result.could_not)
    assert FAST[name] in result.invariants
    assert result.latency is not None


@pytest.mark.parametrize("name", ["rolled_back", "warm_start", "step_skipped", "outage"])
def test_an_honest_variant_is_not_flagged(name: str) -> None:
    variant = VARIANTS[name]
    result = run(variant.shape(1), variant.put_in)
    assert result.exit_code == 0, (result.told, result.could_not, result.error)


def test_a_replay_buffer_is_not_flagged() -> None:
    """And it is not the plain run under another name."""
    variant = VARIANTS["replay_buffer"]
    result = run(variant.shape(1), variant.put_in)
    assert result.exit_code == 0, (result.told, result.could_not, result.error)
    assert result.final != run(Shape(seed=1)).final


def test_packed_rows_are_not_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are shared in every forward pass of a batch; whether that rounds otherwise is up to the
    processor."""
    shared: list[bool] = []
    unpacked = packing.unpacked

    def watched(values: torch.Tensor, where: packing.Layout, width: int) -> torch.Tensor:
        shared.append(len(values) < len(where.lengths))
        return unpacked(values, where, width)

    monkeypatch.setattr(packing, "unpacked", watched)
    variant = VARIANTS["packed"]
    result = run(variant.shape(1), variant.put_in)
    assert result.exit_code == 0, (result.told, result.could_not, result.error)
    assert shared
    assert all(shared)


def test_model_parallel_groups_are_not_flagged() -> None:
    """Each member computes its half with its own copies; the halves' sums round otherwise."""
    variant = VARIANTS["model_parallel"]
    result = run(variant.shape(1), variant.put_in)
    assert result.exit_code == 0, (result.told, result.could_not, result.error)
    assert result.final is not None


@pytest.mark.parametrize(
    ("uses", "reuse", "invariant"), [(3, "at_most", "I10"), (2, "exactly", "I10b")]
)
def test_a_replay_buffer_is_held_to_what_the_plan_says(
    uses: int, reuse: str, invariant: str
) -> None:
    """Used three times where twice is the most; used once where twice is the rule."""
    plan = {
        "update": {"epochs_per_batch": 2, "sample_reuse": reuse},
        "sampling": {"staleness_bound": uses - 1},
    }
    result = run(Shape(seed=1, plan=plan), lambda p: replay(p, uses))
    assert result.invariants[:1] == (invariant,), result.told


def test_everything_put_in_is_taken_out_again() -> None:
    before = run(Shape(seed=5)).final
    fault = load_all()["step_twice"]
    assert run(Shape(seed=5), lambda p: fault.put_in(p, 1)).final != before
    assert run(Shape(seed=5)).final == before


def test_mutations_are_the_same_for_ever_and_of_all_sorts() -> None:
    drawn = [mutations.draw(number) for number in range(400)]
    assert drawn == [mutations.draw(number) for number in range(400)]
    assert set(Counter(m.operator for m in drawn)) == set(mutations.OPERATORS)
    assert {m.owner for m in drawn} == set(mutations.FUNCTIONS)


@pytest.mark.parametrize(
    ("task", "code", "says"),
    [
        (("variant", "rolled_back", 0, 0), 0, "goals met"),
        (("variant", "rolled_back", 0, 1), 1, "flagged honest run rolled_back"),
        (("fault", "step_twice", 0, 1), 0, "1 of 1 caught"),
        (("fault", "step_twice", 0, 0), 1, "missed fault E12 step_twice"),
        (
            ("fault", "step_twice", 1, 1),
            1,
            "E12 step_twice, seed 1, iteration 1: never came to act",
        ),
        (("mutation", "0", 0, 1), 0, "1 of 1 caught"),
        (("mutation", "0", 0, 0), 1, "0 of 1 caught"),
    ],
)
def test_a_missed_goal_is_exit_code_1(
    task: Task,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a fault, a mutation or an honest run that is caught (trigger 1) or not (0).

    A fault that changes nothing (seed 1) is not counted, and listed with the reason.
    """

    def results(*_: object) -> Iterator[tuple[Task, Result]]:
        for seed in (0, 1):
            yield ("variant", "plain", seed, 0), Result("a", [0.5], 0, (), None)
        if task[2] == 1:  # of seed 1 nothing comes
            yield task, Result("a", [0.5], 0, (), None, fired=False)
            return
        caught = task[3] == 1
        yield task, Result("b", [0.5], int(caught), ("I19",) * caught, 0 if caught else None)

    monkeypatch.setattr(zoo_command, "results", results)
    assert main([]) == code
    assert says in capsys.readouterr().out


def test_the_quick_form_is_one_seed_and_trigger_and_keeps_to_its_runs() -> None:
    """Its time is printed; what a test can hold it to on any machine is the number of runs."""
    chosen = list(zoo_command.tasks(full=False))
    assert len(chosen) <= zoo_command.QUICK_RUNS
    faults = [name for kind, name, _, _ in chosen if kind == "fault"]
    assert sorted(faults) == sorted(load_all())
    assert {kind for kind, *_ in chosen} == {"fault", "mutation", "variant"}
    assert {seed for kind, name, seed, _ in chosen if name != "plain"} == {0}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quick_form_meets_its_goals(capsys: pytest.CaptureFixture[str]) -> None:
    """200 mutations at least are counted, and the seconds stand beside their bound."""
    code = main([])
    out = capsys.readouterr().out
    print(out)
    assert code == 0
    counted = re.search(r"mutations: \d+ of (\d+) caught", out)
    assert counted is not None, "the line on mutations"
    assert int(counted[1]) >= 200
    assert re.search(r"\d+ runs in \d+ s with \d+ s of CPU time \(at most 360 s", out)
