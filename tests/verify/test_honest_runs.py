"""Goal: honest runs are never accused, and every required invariant is really checked.

Method: the synthetic honest run, and legal variants of it (stale samples inside the bound, epochs
per batch, skipped updates, reference refresh, warm start, unknown events, a live job, several
jobs, replays in distribution only), are written through a real ledger and judged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from pydantic import ConfigDict

from shiftbook.ledger.events.base import REGISTRY, Event
from shiftbook.ledger.events.job import PlanAmended
from shiftbook.ledger.events.lease import LeaseGranted, LeaseReleased
from shiftbook.ledger.events.life import ReplicaLost
from shiftbook.ledger.events.safety import SafeModeEntered, SafeModeLeft
from shiftbook.ledger.events.training import UpdateApplied
from shiftbook.ledger.topology import Topology
from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import (
    DEVICES,
    JOB,
    MOVED,
    PLACES,
    Maker,
    Run,
    h128,
    h256,
    honest_run,
    judged,
    make_plan,
    parts,
    policy,
    reward_of,
)

Judge = Callable[[Run], Verdict]


def told(verdict: Verdict) -> list[str]:
    return [f"{f.invariant}@{f.position}: {f.expected} / {f.found}" for f in verdict.findings]


def assert_clean(verdict: Verdict) -> None:
    assert told(verdict) == []
    assert verdict.could_not == ()
    assert verdict.exit_code == 0


def test_the_honest_run_is_clean_and_every_invariant_is_checked(run: Run, judge: Judge) -> None:
    verdict = judge(run)
    assert_clean(verdict)
    for name in judged():
        row = verdict.coverage.row(name)
        assert row.status == "checked", (row.invariant, row.status, row.reason)
        assert row.checks > 0
    assert verdict.last == verdict.judged_until == len(run.entries) - 1


def test_a_plan_that_requires_what_cannot_be_checked_is_not_clean(judge: Judge) -> None:
    plan = make_plan(required_invariants=("I3", "I26", "no-such-thing"))
    run = honest_run(plan)
    for entry in run.entries:
        if entry.name == "UpdateApplied":
            entry.change(loss_terms=None)
    verdict = judge(run)
    assert verdict.exit_code == 2
    assert [reason.split(",")[0] for reason in verdict.could_not] == [
        "job demo requires I26",
        "job demo requires no-such-thing",
    ]


def test_a_live_job_is_judged_and_what_is_open_is_listed(run: Run, judge: Judge) -> None:
    cut = run.at("ReallocationRolledBack", 0)
    del run.entries[cut:]
    verdict = judge(run)
    assert told(verdict) == []
    (listed,) = verdict.open_operations.values()
    assert len(listed) == 1
    assert listed[0].endswith("(quiesced)")
    assert any("is not closed at position" in note for note in verdict.notes)


def test_every_prefix_of_an_honest_run_has_no_finding(run: Run, tmp_path: Path) -> None:
    url = run.write(tmp_path / "ledger.db")
    for until in range(0, len(run.entries), 3):
        assert told(verify(url, until=until)) == [], until


class Novelty(Event):
    """A type that only this test knows while it writes."""

    model_config = ConfigDict(frozen=True, extra="allow")
    anything: int = 1


def test_unknown_events_are_kept_and_passed_over_where_asked(run: Run, tmp_path: Path) -> None:
    from tests.verify.honest_run import Entry

    for at in (60, 30, 8):
        run.entries.insert(at, Entry(Novelty()))
    # Positions moved, so leases and epochs that name them move too.
    shift_epochs(run)
    url = run.write(tmp_path / "ledger.db")
    known = REGISTRY.pop("Novelty")
    try:
        verdict, passed_over = verify(url), verify(url, allow_unknown=True)
    finally:
        REGISTRY["Novelty"] = known
    assert told(verdict) == []
    assert verdict.exit_code == 2
    (reason,) = verdict.could_not
    assert "Novelty (schema 1) 3 times), the first at position 8" in reason
    assert_clean(passed_over)
    assert any("Novelty (schema 1) 3 times" in note for note in passed_over.notes)


def shift_epochs(run: Run) -> None:
    """Set the epochs of attempts and syncs to the present positions of their leases."""
    epoch = -1
    for at, entry in enumerate(run.entries):
        if entry.name == "LeaseGranted" and entry.job == JOB:
            epoch = at
        elif entry.name in ("AttemptStarted", "WeightSyncStarted"):
            entry.change(epoch=epoch)


def test_two_jobs_one_after_the_other_on_the_same_devices(judge: Judge) -> None:
    from tests.verify.honest_run import Entry

    run = honest_run()
    run.entries.append(Entry(LeaseGranted(devices=DEVICES, holder="b1"), job="other"))
    run.entries.append(
        Entry(LeaseReleased(devices=DEVICES, holder="b1", reason="done"), job="other")
    )
    verdict = judge(run)
    assert told(verdict) == []
    assert verdict.jobs == (JOB, "other")
    assert verdict.could_not == (
        "job other declared no plan: begin it with JobOpened, which carries one; without it none "
        f"of its 2 events, the first at position {len(run.entries) - 2}, can be judged",
    )


def one_attempt(plan: Any, body: Callable[[Maker], None]) -> Run:
    maker = Maker(plan)
    maker.open()
    maker.start("a1", 0, PLACES)
    body(maker)
    maker.close()
    return maker.run


def test_a_loop_that_restores_its_first_bundle_and_repairs_a_lost_engine(judge: Judge) -> None:
    """The order of a loop that saves a bundle before anything runs and starts from it."""
    maker = Maker(make_plan())
    maker.open()
    maker.start("a1", 0, PLACES)
    run = maker.run
    at = run.at("AttemptStarted") + 1
    rest, run.entries[at:] = run.entries[at:], []
    maker.save(0)
    run.entries += [e for e in rest if e.name == "WeightSyncStarted"]
    run.entries += [e for e in rest if e.name == "ReplicaStarted"]
    maker.restore(0)
    run.entries += [e for e in rest if e.name in ("WeightSyncDelivered", "WeightSyncCommitted")]

    def engine_lost() -> None:
        lost = "rollout-n.1"
        run.add(
            ReplicaLost(
                attempt="a1",
                component="rollout",
                replica=lost,
                incarnation=maker.incarnations[lost],
                cause="killed",
                owed=("000000/1#0",),
            )
        )
        maker.replica("rollout", lost, ("n/1",))
        run.entries[-1].change(incarnation=f"{lost}#again")
        maker.incarnations[lost] = f"{lost}#again"
        maker.sync()

    maker.draw(0)
    engine_lost()
    maker.generate(0)
    tokens = maker.consume(0)
    maker.first_use("trainer", "trainer-n.3", "restore", parts(0))
    maker.update(0, tokens)
    maker.save(1)
    maker.sync()
    maker.complete(0)
    maker.iteration(1)
    maker.close()
    verdict = judge(run)
    assert told(verdict) == []
    assert verdict.coverage.row("I1").status == "checked"
    assert verdict.coverage.row("I17b").status == "checked"


def test_prompts_may_be_drawn_again_after_a_restore_inside_an_attempt(judge: Judge) -> None:
    def body(maker: Maker) -> None:
        maker.iteration(0)
        maker.draw(1)
        maker.generate(1)
        maker.consume(1)
        maker.restore(1)
        maker.first_use("trainer", "trainer-n.3", "restore", parts(1))
        maker.iteration(1)

    verdict = judge(one_attempt(make_plan(), body))
    assert told(verdict) == []
    assert verdict.coverage.row("replay").status == "checked"


def test_a_bundle_from_elsewhere_is_not_called_checked(judge: Judge) -> None:
    maker = Maker(make_plan())
    maker.open()
    maker.bundle, maker.version, maker.cursor = h256("elsewhere"), 7, 28
    maker.start("a1", 7, PLACES)
    maker.iteration(7)
    maker.close()
    verdict = judge(maker.run)
    assert told(verdict) == []
    assert verdict.exit_code == 2
    assert verdict.coverage.row("I1").status == "partly"
    assert verdict.coverage.row("I1").reason == (
        "the restored bundle was neither saved nor registered in this ledger"
    )
    assert any("requires I1," in reason for reason in verdict.could_not)


def test_stale_samples_within_the_bound_are_legal(judge: Judge) -> None:
    base = make_plan()
    plan = make_plan(sampling=base.sampling.model_copy(update={"staleness_bound": 1}))

    def body(maker: Maker) -> None:
        # Generation runs one iteration ahead: batch k is made at version k - 1.
        maker.draw(0)
        maker.generate(0)
        for iteration in range(3):
            at = maker.cursor
            maker.cursor += 4
            maker.draw(iteration + 1)
            maker.generate(iteration + 1)
            maker.cursor = at
            tokens = maker.consume(iteration)
            made_at = max(0, iteration - 1)
            maker.run.entries[-1].change(version_min=made_at)
            maker.update(iteration, tokens)
            maker.sync()
            maker.complete(iteration)
        # The last batch was drawn ahead and is dropped, as the plan allows.
        uids = tuple(maker.uids())
        from shiftbook.ledger.events.training import SamplesDropped

        maker.run.add(
            SamplesDropped(attempt="a1", iteration=3, uids=uids, reason="tool-doubtful: end")
        )

    verdict = judge(one_attempt(plan, body))
    assert told(verdict) == []


def test_deviations_of_a_sample_are_legal_when_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some libraries divide the squares by n - 1."""

    def of_samples(uids: list[str]) -> list[float]:
        groups = [[reward_of(u) for u in uids if u[:6] == uid[:6]] for uid in uids]
        return [
            (reward_of(uid) - mean(group)) / (stdev(group) + 1e-4)
            for uid, group in zip(uids, groups, strict=True)
        ]

    monkeypatch.setattr("tests.verify.honest_run.advantages", of_samples)
    undeclared = verify(honest_run().write(tmp_path / "undeclared.db"))
    assert {finding.invariant for finding in undeclared.findings} == {"I12b"}
    plan = make_plan(tolerances={"advantage_correction": 1.0})
    assert_clean(verify(honest_run(plan).write(tmp_path / "declared.db")))


def test_several_epochs_per_batch_are_legal_when_declared(judge: Judge) -> None:
    base = make_plan()
    plan = make_plan(update=base.update.model_copy(update={"epochs_per_batch": 2}))

    def body(maker: Maker) -> None:
        maker.draw(0)
        maker.generate(0)
        for _ in range(2):
            at = maker.cursor
            tokens = maker.consume(0)
            maker.update(0, tokens)
            maker.cursor = at
        maker.cursor += 4
        maker.sync()
        maker.complete(0)

    # The second pass is off policy by one update.
    plan = plan.model_copy(
        update={"sampling": plan.sampling.model_copy(update={"staleness_bound": 1})}
    )
    run = one_attempt(plan, body)
    run.get("BatchConsumed", 1).change(version_min=0)
    verdict = judge(run)
    assert told(verdict) == []


def _replaying(judge: Judge, reuse: str, passes: int) -> Verdict:
    """All samples are consumed, and one group of each rank ``passes`` times in all."""
    base = make_plan()
    plan = make_plan(
        update=base.update.model_copy(update={"epochs_per_batch": 2, "sample_reuse": reuse}),
        sampling=base.sampling.model_copy(update={"staleness_bound": passes - 1}),
    )

    def body(maker: Maker) -> None:
        maker.draw(0)
        maker.generate(0)
        later = tuple(uid for uid in maker.uids() if int(uid[:6]) % 2)
        for number in range(passes):
            at = maker.cursor
            tokens = maker.consume(0, dropped=later if number else ())
            maker.update(0, tokens)
            if number:
                last = maker.run.entries[-1]
                assert isinstance(last.event, UpdateApplied)
                ranks = last.event.virtual_ranks
                last.change(virtual_ranks=tuple(r.model_copy(update={"groups": 1}) for r in ranks))
            maker.cursor = at
        maker.cursor += 4
        maker.sync()
        maker.complete(0)

    run = one_attempt(plan, body)
    for number in range(1, passes):
        run.get("BatchConsumed", number).change(version_min=0)
    return judge(run)


def test_a_replay_buffer_may_use_samples_up_to_the_declared_times(judge: Judge) -> None:
    """Half of the samples twice and half once; the plan says at most twice."""
    assert told(_replaying(judge, "at_most", 2)) == []


def test_a_replay_buffer_that_uses_samples_too_often_is_found(judge: Judge) -> None:
    found = {f.invariant: f for f in _replaying(judge, "at_most", 3).findings}
    assert set(found) == {"I10"}, told(_replaying(judge, "at_most", 3))
    assert "at most 2 time(s)" in found["I10"].expected


def test_samples_of_a_replay_buffer_that_is_not_declared_are_missed(judge: Judge) -> None:
    """Where the plan says twice, a sample that was used once is owed once more."""
    found = _replaying(judge, "exactly", 2).findings
    assert {f.invariant for f in found} == {"I10b"}
    assert "fewer passes over the batch" in found[0].cause


def test_a_skipped_update_changes_nothing_and_is_legal(judge: Judge) -> None:
    def body(maker: Maker) -> None:
        maker.iteration(0)
        maker.draw(1)
        maker.generate(1)
        tokens = maker.consume(1)
        before = parts(maker.version)
        maker.update(1, tokens)
        maker.run.entries[-1].change(
            skipped=True,
            grad_norm=float("nan"),
            params_after=before["model"],
            masters_after=before["masters"],
            optimizer_after=before["optimizer"],
            optimizer_step=1,
            optimizer_step_least=1,
            optimizer_step_most=1,
            scheduler_step=1,
            cast_after=before["model"],
            controllers=None,
        )

    run = one_attempt(make_plan(), body)
    run.get("JobClosed").change(policy_fingerprint=policy(1))
    assert told(judge(run)) == []


def test_a_declared_refresh_of_the_reference_is_legal(judge: Judge) -> None:
    base = make_plan()
    plan = make_plan(update=base.update.model_copy(update={"reference_refresh": 2}))

    def body(maker: Maker) -> None:
        for iteration in range(4):
            maker.iteration(iteration)
            saved = maker.run.get("CheckpointSaved", -1)
            fresh = {**saved.event.parts, "reference": h128("reference", (iteration + 1) // 2)}
            saved.change(parts=fresh, file_parts=fresh)

    assert told(judge(one_attempt(plan, body))) == []


def test_a_warm_start_may_leave_parts_out(judge: Judge) -> None:
    def body(maker: Maker) -> None:
        maker.iteration(0)

    maker = Maker(make_plan())
    maker.open()
    maker.start("a1", 0, PLACES)
    body(maker)
    maker.incarnations.clear()
    maker.start("a2", 1, PLACES)
    restored = maker.run.get("CheckpointRestored")
    kept = {k: v for k, v in restored.event.parts.items() if k in ("model", "masters", "reference")}
    restored.change(kind="warm-start", parts=kept)
    used = maker.run.get("StateFirstUsed")
    used.change(parts=kept)
    maker.iteration(1)
    maker.close()
    assert told(judge(maker.run)) == []


def test_replays_in_distribution_only_may_differ(run: Run, tmp_path: Path) -> None:
    base = make_plan()
    plan = make_plan(
        sampling=base.sampling.model_copy(update={"batch_composition": "distribution"})
    )
    changed = honest_run(plan)
    rows = changed.get("SamplesGenerated", 3).rows
    assert rows is not None
    rows["logp_digest"][0] = h128("another")
    used = changed.get("BatchConsumed", 3).rows
    assert used is not None
    used["logp_digest"][0] = h128("another")
    verdict = verify(changed.write(tmp_path / "ledger.db"))
    assert told(verdict) == []
    assert verdict.coverage.row("replay").status == "nothing to check"


def test_safe_mode_and_amendments_are_legal(run: Run, judge: Judge) -> None:
    from tests.verify.honest_run import Entry

    at = run.at("IterationCompleted", 0) + 1
    topology = Topology.of(MOVED)
    run.entries[at:at] = [
        Entry(SafeModeEntered(reason="look", by="operator", topology=topology)),
        Entry(SafeModeLeft(by="operator:ann", reason="looked")),
        Entry(
            PlanAmended(
                field="update.learning_rate", before=1e-3, after=5e-4, reason="loss is noisy"
            )
        ),
    ]
    for entry in run.entries[at:]:
        if entry.name == "UpdateApplied":
            entry.change(learning_rate=5e-4)
    shift_epochs(run)
    assert_clean(judge(run))


def test_a_cancelled_job_owes_no_samples(judge: Judge) -> None:
    def body(maker: Maker) -> None:
        maker.iteration(0)
        maker.draw(1)
        maker.generate(1)

    run = one_attempt(make_plan(), body)
    run.get("JobClosed").change(outcome="cancelled")
    assert told(judge(run)) == []


@pytest.mark.parametrize("job", [None, JOB])
def test_judging_one_job_gives_the_same_verdict(run: Run, tmp_path: Path, job: str | None) -> None:
    verdict = verify(run.write(tmp_path / "ledger.db"), job=job)
    assert_clean(verdict)
    assert verdict.jobs == (JOB,)
