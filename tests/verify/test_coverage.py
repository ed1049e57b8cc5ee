"""Goal: a comparison that could not be made, because a record is absent, never reads as made.

Method: one record after the other is left out of the honest run, in all events or in some. The row
of the coverage table that is about it says so, with the reason; the verdict is clean where the plan
does not require that row, and exit code 2, naming it, where the plan does. What is absent because
the plan declares nothing of it leaves nothing to check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from shiftbook.ledger.events.probes import RewardsRescored
from shiftbook.ledger.plan import Plan
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import Entry, Maker, Run, honest_run, judged, make_plan

Judge = Callable[[Run], Verdict]


@dataclass(frozen=True)
class Left:
    """A record that is left out, the row that must say so, and words of its reason."""

    name: str
    row: str
    says: str
    leave_out: Callable[[Run], None]


LEFT: list[Left] = []


def without(row: str, says: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register the decorated omission."""

    def register(leave_out: Callable[[Run], None]) -> Callable[[Run], None]:
        LEFT.append(Left(leave_out.__name__.strip("_"), row, says, leave_out))
        return leave_out

    return register


def each(run: Run, name: str, **fields: Any) -> None:
    for entry in run.entries:
        if entry.name == name:
            entry.change(**fields)


def column(run: Run, name: str, dropped: str) -> None:
    for entry in run.entries:
        if entry.name == name:
            assert entry.rows is not None
            del entry.rows[dropped]


def micro_batches(run: Run, **fields: Any) -> None:
    for entry in run.entries:
        if entry.name == "UpdateApplied":
            micro = [m.model_copy(update=fields) for m in entry.event.micro_batches]
            entry.change(micro_batches=tuple(micro))


def drop_events(run: Run, name: str) -> None:
    from tests.verify.test_faults import shift

    run.entries[:] = [entry for entry in run.entries if entry.name != name]
    shift(run)


def part(run: Run, name: str, dropped: str, **only: Any) -> None:
    for entry in run.entries:
        if entry.name == name and all(getattr(entry.event, k) == v for k, v in only.items()):
            entry.change(parts={k: v for k, v in entry.event.parts.items() if k != dropped})


@without("I11.masks", "no mask of the trained tokens")
def _masks_of_trained_tokens(run: Run) -> None:
    column(run, "BatchConsumed", "mask_digest")


@without("I11.masks", "no mask of the sampled tokens")
def _masks_of_sampled_tokens(run: Run) -> None:
    column(run, "SamplesGenerated", "mask_digest")


@without("I16.used", "no log-probabilities that the loss used")
def _values_that_the_loss_used(run: Run) -> None:
    column(run, "BatchConsumed", "logp_digest")


@without("I16", "no log-probabilities were replayed")
def _replays(run: Run) -> None:
    drop_events(run, "LogProbsReplayed")


@without("I19.parameters", "no counters by parameter")
def _counters_by_parameter(run: Run) -> None:
    each(run, "UpdateApplied", optimizer_step_least=None, optimizer_step_most=None)


@without("I23.parameters", "parameters that stood still")
def _parameters_that_stood_still(run: Run) -> None:
    each(run, "UpdateApplied", unmoved=None)


@without("I23.parameters", "frozen parameters that moved")
def _frozen_parameters_that_moved(run: Run) -> None:
    each(run, "UpdateApplied", moved_frozen=None)


@without("I21.micro-batches", "no micro batches")
def _micro_batches(run: Run) -> None:
    each(run, "UpdateApplied", micro_batches=None)


@without("I21.micro-batches", "no micro batches")
def _micro_batches_of_one_update(run: Run) -> None:
    run.get("UpdateApplied", 1).change(micro_batches=None)


@without("I25", "no mask of the first forward and the recomputed")
def _masks_of_the_recomputed_forward(run: Run) -> None:
    micro_batches(run, recomputed_mask=None)


@without("I20.gradient", "ranks report no gradient")
def _gradients_of_ranks(run: Run) -> None:
    for entry in run.entries:
        if entry.name == "UpdateApplied":
            ranks = [rank.model_copy(update={"gradient": None}) for rank in entry.event.ranks]
            entry.change(ranks=tuple(ranks))


def members(run: Run, count: int = 2, **fields: Any) -> None:
    """Change what the last of the first ``count`` members of each group tells."""
    for entry in run.entries:
        if entry.name == "UpdateApplied":
            entry.change(
                model_parallel=tuple(
                    group.model_copy(
                        update={
                            "members": (
                                *group.members[: count - 1],
                                group.members[count - 1].model_copy(update=fields),
                            )
                        }
                    )
                    for group in entry.event.model_parallel
                )
            )


@without("I20.copies", "updates tell no model-parallel group")
def _model_parallel_groups(run: Run) -> None:
    each(run, "UpdateApplied", model_parallel=None)


@without("I5.fed", "updates tell no model-parallel group")
def _groups_of_one_update(run: Run) -> None:
    run.get("UpdateApplied", 1).change(model_parallel=None)


@without("I20.copies", "one rank alone reports of a model-parallel group")
def _other_members(run: Run) -> None:
    members(run, count=1)


@without("I20.copies", "some ranks of a group tell no copies")
def _copies_of_one_member(run: Run) -> None:
    members(run, copies=None)


@without("I5.fed", "some ranks of a group tell no tokens computed")
def _what_one_member_was_fed(run: Run) -> None:
    members(run, fed=None)


@without("I20", "a rank that computed a micro batch reports no state")
def _one_rank(run: Run) -> None:
    for entry in run.entries:
        if entry.name == "UpdateApplied":
            entry.change(ranks=entry.event.ranks[:1])


@without("recomputed.gradient", "the sum of the micro batches' gradients")
def _sum_of_gradients(run: Run) -> None:
    for entry in run.entries:
        if entry.name == "UpdateApplied":
            found = dict(entry.event.recomputed)
            del found["gradient"]
            entry.change(recomputed=found)


@without("I4", "did not say what its data set is")
def _the_data_set(run: Run) -> None:
    drop_events(run, "DataBuilt")


@without("I4", "not one digest for each of its prompts")
def _a_digest_of_a_prompt(run: Run) -> None:
    event = run.get("SamplesDrawn", 1).event
    run.get("SamplesDrawn", 1).change(prompt_digests=event.prompt_digests[:-1])


@without("I4", "carry no digest of their prompt")
def _digests_of_prompts_of_a_draw(run: Run) -> None:
    run.get("SamplesDrawn", 0).change(prompt_digests=None)


@without("I9", "no random states by owner")
def _random_states(run: Run) -> None:
    drop_events(run, "RandomStatesRecorded")


@without("I9b", "no random state of an owner")
def _random_state_in_the_bundle(run: Run) -> None:
    for name in ("CheckpointSaved", "CheckpointRestored", "StateFirstUsed"):
        part(run, name, "rng:rank/1")


@without("I17.bundles", "names no part optimizer")
def _optimizer_in_the_bundles(run: Run) -> None:
    for name in ("CheckpointSaved", "CheckpointRestored"):
        part(run, name, "optimizer")


@without("I8", "names no part model")
def _model_in_a_bundle(run: Run) -> None:
    part(run, "CheckpointSaved", "model", iteration=1)


@without("I14", "names no part reference")
def _reference_in_a_bundle(run: Run) -> None:
    part(run, "CheckpointSaved", "reference", iteration=4)


@without("I17b", "names not all of model, masters and optimizer")
def _masters_at_first_use(run: Run) -> None:
    part(run, "StateFirstUsed", "masters", component="trainer")


@without("I17b", "an update after a restore and no StateFirstUsed")
def _first_use_after_the_restore(run: Run) -> None:
    from tests.verify.test_faults import shift

    at = run.where("StateFirstUsed", component="trainer")
    del run.entries[at]
    shift(run)


@without("I1b", "not read back from its file")
def _a_part_of_the_file(run: Run) -> None:
    entry = run.get("CheckpointSaved", 1)
    found = {k: v for k, v in entry.event.file_parts.items() if k != "masters"}
    entry.change(file_parts=found)


@pytest.mark.parametrize("left", LEFT, ids=lambda left: left.name)
def test_what_was_left_out_is_said(left: Left, judge: Judge) -> None:
    run = honest_run(make_plan(required_invariants=(left.row,)))
    left.leave_out(run)
    verdict = judge(run)
    assert verdict.findings == ()
    row = verdict.coverage.row(left.row)
    assert row.status in ("partly", "not checked")
    assert left.says in row.reason
    assert verdict.exit_code == 2
    assert len(verdict.could_not) == 1
    assert f"requires {left.row}, which was {row.status}: " in verdict.could_not[0]


@pytest.mark.parametrize("left", LEFT, ids=lambda left: left.name)
def test_what_the_plan_does_not_require_is_said_all_the_same(left: Left, judge: Judge) -> None:
    run = honest_run(make_plan(required_invariants=()))
    left.leave_out(run)
    verdict = judge(run)
    assert verdict.exit_code == 0
    assert verdict.coverage.row(left.row).status in ("partly", "not checked")


def test_an_aspect_that_is_absent_leaves_the_invariant_as_it_is(judge: Judge) -> None:
    run = honest_run(make_plan(required_invariants=("I21",)))
    each(run, "UpdateApplied", micro_batches=None)
    verdict = judge(run)
    assert verdict.exit_code == 0
    assert verdict.coverage.row("I21").status == "checked"
    assert verdict.coverage.row("I21.micro-batches").status == "not checked"


def test_an_aspect_that_is_broken_breaks_the_invariant(run: Run, judge: Judge) -> None:
    run.get("UpdateApplied", 0).change(unmoved=("norm",))
    verdict = judge(run)
    assert [finding.invariant for finding in verdict.findings] == ["I23"]
    assert verdict.coverage.row("I23").status == "broken"
    assert verdict.coverage.row("I23.parameters").status == "broken"


def rescored(run: Run, gap: float) -> int:
    from tests.verify.test_faults import shift

    at = run.at("SamplesRewarded", 0) + 1
    event = RewardsRescored(attempt="a1", iteration=0, samples=2, largest_gap=gap, worst="000000/1")
    run.entries.insert(at, Entry(event))
    shift(run)
    return at


def test_rewards_that_nobody_scored_again_are_not_checked(judge: Judge) -> None:
    verdict = judge(honest_run(make_plan(required_invariants=("I12", "I12.rescored"))))
    assert verdict.exit_code == 2
    assert verdict.coverage.row("I12").status == "checked"
    assert verdict.coverage.row("I12.rescored").reason == "not recorded: RewardsRescored"


def test_rewards_that_were_scored_again_are(run: Run, judge: Judge) -> None:
    rescored(run, 0.0)
    verdict = judge(run)
    assert verdict.exit_code == 0, verdict.could_not
    assert verdict.coverage.row("I12.rescored").status == "checked"


def test_another_reward_when_scored_again_is_found(run: Run, judge: Judge) -> None:
    at = rescored(run, 1.0)
    verdict = judge(run)
    assert [(f.invariant, f.position) for f in verdict.findings] == [("I12", at)]
    assert verdict.coverage.row("I12.rescored").status == "broken"


def updates(**fields: Any) -> Plan:
    """The plan with other declarations of its update; rows are required as before."""
    base = make_plan()
    return make_plan(
        update=base.update.model_copy(update=fields),
        required_invariants=(*judged(), "I18.counter", "recomputed.average", "recomputed.dropout"),
    )


def test_what_the_plan_declares_nothing_of_leaves_nothing_to_check(judge: Judge) -> None:
    verdict = judge(honest_run(updates()))
    assert verdict.exit_code == 0, verdict.could_not
    for name in ("I18.counter", "recomputed.average", "recomputed.dropout"):
        assert verdict.coverage.row(name).status in ("checked", "nothing to check"), name


@pytest.mark.parametrize(
    ("declared", "row"),
    [
        ({"ema_decay": 0.9}, "recomputed.average"),
        ({"ema_decay": 0.9}, "I17"),
        ({"dropout": 0.1}, "recomputed.dropout"),
        ({"dropout": 0.1}, "I25"),
    ],
)
def test_what_the_plan_declares_must_be_recorded(
    declared: dict[str, Any], row: str, judge: Judge
) -> None:
    verdict = judge(honest_run(updates(**declared)))
    assert verdict.exit_code == 2
    assert any(f"requires {row}, which was" in reason for reason in verdict.could_not)


def test_a_schedule_that_moves_must_say_its_count(judge: Judge) -> None:
    run = honest_run(updates(learning_rate_schedule="warmup:1"))
    each(run, "UpdateApplied", scheduler_step=None)
    verdict = judge(run)
    assert verdict.coverage.row("I18.counter").status == "not checked"
    assert verdict.coverage.row("I18").status == "checked"


def test_ranks_that_hold_the_whole_model_have_no_group_when_declared(judge: Judge) -> None:
    run = honest_run(updates(model_parallel=False))
    each(run, "UpdateApplied", model_parallel=None)
    verdict = judge(run)
    assert verdict.exit_code == 0, (verdict.findings, verdict.could_not)
    for name in ("I5.fed", "I20.copies"):
        row = verdict.coverage.row(name)
        assert row.status == "nothing to check"
        assert row.reason == "the plan says that each rank holds the whole model"


def test_groups_that_share_one_thing_alone_are_compared_by_it(judge: Judge) -> None:
    """Tied embeddings of the first and the last stage: no two stages are fed alike."""
    run = honest_run(updates(model_parallel=True))
    for entry in run.entries:
        if entry.name == "UpdateApplied":
            tensor, other = entry.event.model_parallel
            stages = tuple(m.model_copy(update={"fed": None}) for m in other.members)
            tied = other.model_copy(update={"name": "embedding/0", "members": stages})
            entry.change(model_parallel=(tensor, tied))
    verdict = judge(run)
    assert verdict.exit_code == 0, (verdict.findings, verdict.could_not)
    assert verdict.coverage.row("I20.copies").status == "checked"
    assert verdict.coverage.row("I5.fed").status == "checked"


def test_dropout_without_recomputation_is_whole_when_declared(judge: Judge) -> None:
    run = honest_run(updates(dropout=0.1, recomputation=False))
    micro_batches(run, recomputed_mask=None, mask_size=1000, masked=100)
    row = judge(run).coverage.row("I25")
    assert (row.status, row.reason) == ("checked", "")


def test_no_dropout_leaves_no_mask_to_check(judge: Judge) -> None:
    run = honest_run(make_plan())
    micro_batches(run, first_mask=None, recomputed_mask=None)
    row = judge(run).coverage.row("I25")
    assert (row.status, row.reason) == ("nothing to check", "the plan declares no dropout")


def test_a_bundle_that_is_named_and_never_restored_is_not_nothing_to_check(judge: Judge) -> None:
    maker = Maker(make_plan())
    maker.open()
    maker.start("a1", 0, make_places())
    maker.iteration(0)
    maker.incarnations.clear()
    maker.start("a2", 1, make_places())
    for name in ("CheckpointRestored", "StateFirstUsed"):
        drop_events(maker.run, name)
    maker.iteration(1)
    maker.close()
    for name in ("I1", "I17b"):
        assert judge_status(judge(maker.run), name) == "not checked", name


def make_places() -> dict[str, list[str]]:
    from tests.verify.honest_run import PLACES

    return PLACES


def judge_status(verdict: Verdict, name: str) -> str:
    return verdict.coverage.row(name).status
