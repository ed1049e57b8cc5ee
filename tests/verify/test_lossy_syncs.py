"""Goal: a sync may lose something only where the plan declares it, and within its bound.

Method: in the honest run one version goes out as a lossy patch, as its sender would record it:
targets read other bits than the source's, and one engine is read again at its first use. Under a
plan that declares the encoding and its bound it is clean. Without the declaration, above the bound,
with an error that is no number, and with roots that belong elsewhere it is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.events.state import StateFirstUsed
from shiftbook.ledger.events.sync import SyncLoss, WeightSyncDelivered, WeightSyncStarted
from shiftbook.ledger.plan import Plan, SyncPlan
from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import Entry, Run, h128, honest_run, make_plan
from tests.verify.test_faults import shift

LOSSY_ROOT = h128("version 1 with a loss")
LOSS = SyncLoss(encoding="int8-difference", max_error=1e-3, largest_error=4e-4, root=LOSSY_ROOT)
DECODED = LOSS.model_copy(update={"whole": "decoded"})
DECLARED = SyncPlan(encoding="int8-difference", max_error=2e-3)


def plan_with(syncs: SyncPlan) -> Plan:
    return make_plan().model_copy(update={"syncs": syncs})


def lossy_run(syncs: SyncPlan, loss: SyncLoss = LOSS, encoding: str = "patch") -> tuple[Run, int]:
    """The run with its second sync as a lossy one, and where that begins."""
    run = honest_run(plan_with(syncs))
    at = run.at("WeightSyncStarted", 1)
    started = run.entries[at].event
    assert isinstance(started, WeightSyncStarted)
    run.entries[at].change(lossy=loss)
    for entry in run.entries[at:]:
        if isinstance(entry.event, WeightSyncDelivered) and entry.operation == (
            run.entries[at].operation
        ):
            entry.change(root=LOSSY_ROOT, encoding=encoding)
    return run, at


def judged(run: Run, folder: Path) -> Verdict:
    return verify(run.write(folder / "ledger.db"))


def test_a_declared_loss_is_clean(tmp_path: Path) -> None:
    run, at = lossy_run(DECLARED)
    assert [(f.invariant, f.found) for f in judged(run, tmp_path).findings] == []
    assert any(
        isinstance(e.event, WeightSyncDelivered) and e.event.root == LOSSY_ROOT
        for e in run.entries[at:]
    )


@pytest.mark.parametrize(
    ("syncs", "loss", "found"),
    [
        (SyncPlan(), LOSS, "the plan does not declare"),
        (SyncPlan(encoding="int8-difference", max_error=1e-4), LOSS, "above the plan's 0.0001"),
        (DECLARED, LOSS.model_copy(update={"largest_error": 1.1e-3}), "outside its bound of 0.001"),
        (DECLARED, LOSS.model_copy(update={"largest_error": float("nan")}), "an error of nan"),
        (DECLARED, LOSS.model_copy(update={"max_error": float("nan")}), "a bound of nan"),
        (DECLARED, LOSS.model_copy(update={"max_error": float("inf")}), "a bound of inf"),
    ],
)
def test_a_loss_beyond_the_declaration_is_named(
    tmp_path: Path, syncs: SyncPlan, loss: SyncLoss, found: str
) -> None:
    run, at = lossy_run(syncs, loss)
    (finding,) = judged(run, tmp_path).findings
    assert (finding.invariant, finding.position) == ("I6", at)
    assert found in finding.found
    assert "as the plan declares" in finding.expected


@pytest.mark.parametrize(
    ("encoding", "loss"),
    [
        ("whole", LOSS),  # what goes whole loses nothing
        ("patch", LOSS.model_copy(update={"root": h128("something else")})),
    ],
)
def test_engines_must_hold_what_the_patch_leads_to(
    tmp_path: Path, encoding: str, loss: SyncLoss
) -> None:
    run, at = lossy_run(DECLARED, loss, encoding)
    findings = judged(run, tmp_path).findings
    assert {f.invariant for f in findings} >= {"I6"}
    delivered = [f for f in findings if f.invariant == "I6" and "as it was sent" in f.expected]
    assert delivered
    assert delivered[0].position > at


@pytest.mark.parametrize("encoding", ["whole", "patch"])
def test_whole_weights_may_be_what_the_patches_lead_to(tmp_path: Path, encoding: str) -> None:
    """Where the sync says so; and then the source's weights are another policy than the others'."""
    run, at = lossy_run(DECLARED, DECODED, encoding)
    assert not judged(run, tmp_path).findings
    deliveries = [
        e
        for e in run.entries[at:]
        if isinstance(e.event, WeightSyncDelivered) and e.operation == run.entries[at].operation
    ]
    started = run.entries[at].event
    assert isinstance(started, WeightSyncStarted)
    (tmp_path / "other").mkdir()
    deliveries[0].change(root=started.source_root)
    (finding, *_) = judged(run, tmp_path / "other").findings
    assert finding.invariant == "I6"
    assert "as it was sent" in finding.expected


@pytest.mark.parametrize(
    ("loss", "root", "after", "named"),
    [
        (LOSS, LOSSY_ROOT, "sync", set()),
        (LOSS, h128("overwritten"), "sync", {"I6", "I8", "I17b"}),
        (LOSS, LOSSY_ROOT, "start", {"I6", "I8", "I17b"}),  # who starts takes the weights whole
        (DECODED, LOSSY_ROOT, "start", set()),
        (DECODED, h128("overwritten"), "start", {"I6", "I8", "I17b"}),
    ],
)
def test_a_first_use_reads_what_the_patch_leads_to(
    tmp_path: Path, loss: SyncLoss, root: str, after: str, named: set[str]
) -> None:
    """Neither a second policy of that version (I8) nor weights that were overwritten (I6, I17b)."""
    run, at = lossy_run(DECLARED, loss)
    operation = run.entries[at].operation
    events = [e.event for e in run.entries if e.operation == operation]
    delivered = next(e for e in events if isinstance(e, WeightSyncDelivered))
    end = at + sum(e.operation == operation for e in run.entries[at:])
    use = StateFirstUsed(
        attempt="a1",
        component="rollout",
        replica=delivered.target,
        incarnation=delivered.incarnation,
        after=after,  # type: ignore[arg-type]
        use="generation",
        policy_version=delivered.version,
        parts={"model": root},
    )
    run.entries.insert(end, Entry(use))
    shift(run)
    assert {f.invariant for f in judged(run, tmp_path).findings} == named


def test_a_declaration_has_its_bound() -> None:
    assert Plan.model_validate(make_plan().model_dump(exclude={"syncs"})).syncs == SyncPlan()
    for fields in ({"encoding": "int8-difference"}, {"max_error": 0.1}):
        with pytest.raises(ValueError, match="declared together"):
            SyncPlan.model_validate(fields)
    for max_error in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="max_error"):
            SyncPlan(encoding="int8-difference", max_error=max_error)


def test_a_plan_file_declares_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_with(DECLARED).save(path)
    assert Plan.load(path).syncs == DECLARED
    path.write_text(path.read_text().replace('"int8-difference"', '"int4-difference"'))
    with pytest.raises(InvalidInput, match="syncs"):
        Plan.load(path)


def test_the_story_of_a_sync_tells_its_loss(tmp_path: Path) -> None:
    run, at = lossy_run(DECLARED)
    url = run.write(tmp_path / "ledger.db")
    shown = CliRunner().invoke(main, ["show", str(run.entries[at].operation), "--ledger", url])
    assert "loss         int8-difference, errors up to 0.0004, bound 0.001" in shown.output
    assert f"makes        {LOSSY_ROOT}" in shown.output
    assert "as the lossy encoding makes it" in shown.output
    assert "DIFFERS" not in shown.output
    log = CliRunner().invoke(main, ["log", "--ledger", url, "--type", "WeightSyncStarted"])
    assert log.output.count("with a loss") == 1
