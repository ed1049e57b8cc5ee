"""Goal: a plan that gives up the order of its sums is held to a tolerance, and to no bits.

Method: the invariant is shown one update twice, with a crash between, as a job in the fast mode
would record it: with another norm within and beyond what is declared, another weight, another
policy after it, and once from another state. The same under a plan with the fixed tree stands
beside it. The honest run under such a plan must be clean.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.training import BatchConsumed, UpdateApplied
from shiftbook.ledger.plan import Plan
from shiftbook.verify.findings import Finding
from shiftbook.verify.invariants.replay import Replay
from shiftbook.verify.verdict import verify
from tests.verify.honest_run import Run, h128, honest_run, make_plan


def plan_with(reduction: str, tolerances: dict[str, float] | None = None) -> Plan:
    plan = make_plan(tolerances=tolerances or {})
    update = plan.update.model_copy(update={"reduction": reduction})
    return plan.model_copy(update={"update": update})


@pytest.fixture(scope="module")
def honest() -> Run:
    return honest_run()


def shown(
    honest: Run, plan: Plan, again: dict[str, Any], batch: dict[str, Any] | None = None
) -> tuple[list[Finding], Replay]:
    """The findings after an update, a new attempt, and the update once more with other fields."""
    consumed, update = honest.get("BatchConsumed").event, honest.get("UpdateApplied").event
    assert isinstance(consumed, BatchConsumed)
    assert isinstance(update, UpdateApplied)
    attempt = honest.get("AttemptStarted").event
    assert isinstance(attempt, AttemptStarted)
    events: list[Event] = [
        consumed,
        update,
        consumed,  # its update died with the attempt
        attempt,
        consumed.model_copy(update=batch or {}),
        update.model_copy(update=again),
    ]
    found: list[Finding] = []
    invariant = Replay("j", found.append)
    for at, event in enumerate(events):
        step: Any = SimpleNamespace(
            event=event, plan=plan, at=at, track=SimpleNamespace(attempt_position=3)
        )
        invariant.feed(step)
    return found, invariant


@pytest.mark.parametrize(
    ("tolerances", "factor", "found"),
    [({}, 1.000005, False), ({}, 1.01, True), ({"replay": 0.1}, 1.01, False), ({}, -1.0, True)],
)
def test_norms_may_differ_by_the_tolerance(
    honest: Run, tolerances: dict[str, float], factor: float, found: bool
) -> None:
    update = honest.get("UpdateApplied").event
    assert isinstance(update, UpdateApplied)
    assert update.grad_norm > 0
    findings, invariant = shown(
        honest, plan_with("unordered", tolerances), {"grad_norm": update.grad_norm * factor}
    )
    assert bool(findings) == found, findings
    assert invariant.rows(SimpleNamespace())[0].status != "nothing to check"  # type: ignore[arg-type]
    if found:
        assert (findings[0].position, findings[0].severity) == (5, "stop")
        assert "within 1e-05" in findings[0].expected
        assert 1 in findings[0].positions


def test_the_weight_must_be_the_same(honest: Run) -> None:
    update = honest.get("UpdateApplied").event
    assert isinstance(update, UpdateApplied)
    (finding,), _ = shown(honest, plan_with("unordered"), {"tokens": update.tokens - 1})
    assert f"{update.tokens - 1} tokens" in finding.found


def test_other_bits_are_a_finding_under_the_tree_alone(honest: Run) -> None:
    other = {"params_after": h128("other bits"), "masters_after": h128("others")}
    assert len(shown(honest, plan_with("tree"), other)[0]) == 2
    findings, _ = shown(honest, plan_with("unordered"), other)
    assert findings == []


def test_another_state_or_batch_is_another_update(honest: Run) -> None:
    for again, batch in (
        ({"masters_before": h128("others"), "grad_norm": 9.0}, {}),
        ({"grad_norm": 9.0}, {"digest": h128("other samples")}),
    ):
        findings, invariant = shown(honest, plan_with("unordered"), again, batch)
        assert findings == []
        end: Any = SimpleNamespace()
        assert invariant.idle_because(end) == (
            "no update was computed twice from one state; its sums have no order"
        )


def test_the_honest_run_is_clean_under_such_a_plan(tmp_path: Path) -> None:
    verdict = verify(honest_run(plan_with("unordered")).write(tmp_path / "ledger.db"))
    assert [f.invariant for f in verdict.findings] == []
    assert verdict.coverage.row("replay").status == "nothing to check"
