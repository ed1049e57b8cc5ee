"""Goal: a fork is legal, its origin is judged like any other, and it hides nothing that was copied.

Method: a job forks within itself, and another begins from a bundle of the first in the same ledger;
both train on, honestly and with state that is not the bundle's. A fork that somebody writes into an
honest or a faulty run switches off no check of what goes on as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import (
    JOB,
    PLACES,
    Entry,
    Maker,
    Run,
    h128,
    make_plan,
    parts,
    policy,
)
from tests.verify.test_faults import shift

Judge = Callable[[Run], Verdict]
CHILD = "child"
JUDGED_BY_ORIGIN = ("I1", "I2", "I15", "I17", "I17b", "I10", "I9b")


def told(verdict: Verdict) -> list[tuple[str, str, int]]:
    return [(f.invariant, f.job, f.position) for f in verdict.findings]


def parent_run() -> Maker:
    """A job of three iterations, each with a bundle."""
    maker = Maker(make_plan())
    maker.open()
    maker.start("a1", 0, PLACES)
    for iteration in range(3):
        maker.iteration(iteration)
    maker.close()
    return maker


def with_child(
    *, fork: bool = True, before: bool = False, change: Callable[[Run], None] = lambda run: None
) -> Run:
    """The parent, and a job that begins from its second bundle and trains two more iterations."""
    parent = parent_run()
    bundle = parent.run.get("CheckpointSaved", 1).event
    child = Maker(make_plan())
    child.bundle, child.version, child.cursor = bundle.bundle, 2, bundle.cursor
    child.open()
    child.start("c1", 2, PLACES)
    event = Entry(ExperimentForked(parent=JOB, reason="another reward"))
    at = child.run.at("AttemptStarted")
    if fork:
        child.run.entries.insert(at - 1 if before else at + 1, event)
    child.iteration(2)
    child.iteration(3)
    child.close()
    change(child.run)
    for entry in child.run.entries:
        entry.job = CHILD
    whole = Run([*parent.run.entries, *child.run.entries])
    lease(whole)
    return whole


def lease(run: Run) -> None:
    """Attempts and syncs name the lease that stands right before them."""
    epoch = -1
    for at, entry in enumerate(run.entries):
        if entry.name == "LeaseGranted":
            epoch = at
        elif entry.name in ("AttemptStarted", "WeightSyncStarted"):
            entry.change(epoch=epoch)


@pytest.mark.parametrize("before", [False, True], ids=["in the attempt", "before the attempt"])
def test_a_job_may_begin_from_a_bundle_of_its_parent(before: bool, judge: Judge) -> None:
    verdict = judge(with_child(before=before))
    assert told(verdict) == []
    for row in verdict.coverage.rows:
        if row.job == CHILD and row.invariant in JUDGED_BY_ORIGIN:
            assert row.status == "checked", (row.invariant, row.reason)


def test_without_a_fork_the_bundle_is_of_nowhere(judge: Judge) -> None:
    verdict = judge(with_child(fork=False))
    assert told(verdict) == []
    assert verdict.exit_code == 2
    (row,) = [r for r in verdict.coverage.rows if (r.job, r.invariant) == (CHILD, "I1")]
    assert "neither saved nor registered" in row.reason


def test_the_child_alone_is_judged_by_what_the_parents_save_says(tmp_path: Path) -> None:
    url = with_child().write(tmp_path / "ledger.db")
    verdict = verify(url, job=CHILD)
    assert told(verdict) == []
    for name in ("I1", "I2", "I15", "I17"):
        assert verdict.coverage.row(name).status == "checked", name


def _masters_of_another(run: Run) -> None:
    for name in ("CheckpointRestored", "StateFirstUsed"):
        entry = run.entries[run.at(name)]
        entry.change(parts={**entry.event.parts, "masters": h128("elsewhere")})
    run.get("UpdateApplied", 0).change(masters_before=h128("elsewhere"))


def _optimizer_anew(run: Run) -> None:
    run.get("UpdateApplied", 0).change(optimizer_before=h128("fresh"))


def _cursor_at_the_start(run: Run) -> None:
    run.get("SamplesDrawn", 0).change(start=0)


def _another_policy(run: Run) -> None:
    run.get("AttemptStarted").change(policy_fingerprint=policy(1))


def _another_version(run: Run) -> None:
    run.get("AttemptStarted").change(policy_version=1)


@pytest.mark.parametrize("url_job", [None, CHILD], ids=["both jobs", "the child alone"])
@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (_masters_of_another, "I1"),
        (_optimizer_anew, "I17"),
        (_cursor_at_the_start, "I2"),
        (_another_policy, "I8"),
        (_another_version, "I15"),
    ],
)
def test_a_child_that_begins_with_other_state_is_found(
    change: Callable[[Run], None], invariant: str, url_job: str | None, tmp_path: Path
) -> None:
    verdict = verify(with_child(change=change).write(tmp_path / "ledger.db"), job=url_job)
    assert (invariant, CHILD) in {(name, job) for name, job, _ in told(verdict)}
    assert {job for _, job, _ in told(verdict)} == {CHILD}


def forked_inside() -> Maker:
    """A job that goes back to its first bundle and trains on as another experiment."""
    maker = Maker(make_plan())
    maker.open()
    maker.start("a1", 0, PLACES)
    for iteration in range(3):
        maker.iteration(iteration)
    bundle = maker.run.get("CheckpointSaved", 0).event
    maker.bundle, maker.version, maker.cursor = bundle.bundle, 1, bundle.cursor
    maker.incarnations.clear()
    maker.start("a2", 1, PLACES)
    maker.run.entries.insert(
        maker.run.at("AttemptStarted", 1) + 1,
        Entry(ExperimentForked(parent=JOB, reason="another learning rate")),
    )
    return maker


def renamed(run: Run, since: int, versions: range) -> None:
    """From an entry on, the policies of these versions are others."""
    new = {policy(v): h128("forked model", v) for v in versions}
    new |= {parts(v)["masters"]: h128("forked masters", v) for v in versions}
    new |= {parts(v)["optimizer"]: h128("forked optimizer", v) for v in versions}

    def swapped(value: object) -> object:
        if isinstance(value, str):
            return new.get(value, value)
        if isinstance(value, dict):
            return {k: swapped(v) for k, v in value.items()}
        return value

    for entry in run.entries[since:]:
        fields = {n: getattr(entry.event, n) for n in type(entry.event).model_fields}
        changed = {n: swapped(v) for n, v in fields.items() if swapped(v) != v}
        ranks = fields.get("ranks")
        if ranks:
            changed["ranks"] = tuple(
                rank.model_copy(update={"params": swapped(rank.params)}) for rank in ranks
            )
        if changed:
            entry.change(**changed)


def test_a_fork_inside_a_job_may_make_other_policies_of_the_same_versions(judge: Judge) -> None:
    maker = forked_inside()
    since = len(maker.run.entries)
    maker.iteration(1)
    maker.iteration(2)
    maker.close()
    renamed(maker.run, since, range(2, 4))
    shift(maker.run)
    verdict = judge(maker.run)
    assert told(verdict) == []
    row = verdict.coverage.row("replay")
    assert row.status == "nothing to check"
    assert "after an amendment, a fork or a warm start" in row.reason


def test_without_the_fork_the_same_is_found(judge: Judge) -> None:
    maker = forked_inside()
    since = len(maker.run.entries)
    maker.iteration(1)
    maker.iteration(2)
    maker.close()
    renamed(maker.run, since, range(2, 4))
    del maker.run.entries[maker.run.at("ExperimentForked")]
    shift(maker.run)
    assert {"I8", "replay"} <= {name for name, _, _ in told(judge(maker.run))}


def test_the_policy_that_a_fork_begins_from_stays_what_it_is(judge: Judge) -> None:
    maker = forked_inside()
    maker.iteration(1)
    maker.close()
    shift(maker.run)
    at = maker.run.at("CheckpointRestored")
    changed = {**maker.run.entries[at].event.parts, "model": h128("other")}
    maker.run.entries[at].change(parts=changed)
    assert ("I8", JOB, at) in told(judge(maker.run))


def inserted(run: Run, at: int) -> None:
    run.entries.insert(at, Entry(ExperimentForked(parent=JOB, reason="none")))
    shift(run)


@pytest.mark.parametrize("name", ["SamplesDrawn", "UpdateApplied", "CheckpointSaved"])
def test_a_fork_that_changes_nothing_is_clean(name: str, run: Run, judge: Judge) -> None:
    inserted(run, run.at(name, 1))
    assert told(judge(run)) == []


def test_an_inserted_fork_hides_nothing_that_was_copied(run: Run, judge: Judge) -> None:
    run.get("UpdateApplied", 2).change(optimizer_before=h128("fresh"))
    restored = run.get("CheckpointRestored", 0)
    restored.change(parts={**restored.event.parts, "masters": h128("late")})
    run.get("SamplesDrawn", 3).change(start=0)
    sync = run.where("WeightSyncStarted", version=1)
    run.entries[sync].change(source_root=h128("another version 1"))
    inserted(run, run.at("AttemptStarted", 1) + 1)
    inserted(run, run.at("UpdateApplied", 0) + 1)
    spoke = {name for name, _, _ in told(judge(run))}
    assert {"I1", "I2", "I17", "I8", "I6"} <= spoke
