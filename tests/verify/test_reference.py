"""Goal: a refresh of the reference that is due makes it the policy of that version, or is found.

Method: runs with a declared refresh fingerprint the reference as they do the policy, from which it
begins; at a due refresh it becomes the policy, something else, an older policy, or stays. Where
its fingerprint is of another form nothing can be compared, and the coverage says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shiftbook.ledger.events.job import PlanAmended
from shiftbook.ledger.plan import Plan
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import PLACES, Maker, Run, h128, make_plan, policy

Judge = Callable[[Run], Verdict]
Reference = Callable[[int], str]
"""Fingerprint of the reference as a bundle of a version has it."""


def plan_with(every: int | None) -> Plan:
    base = make_plan()
    return make_plan(update=base.update.model_copy(update={"reference_refresh": every}))


def use(maker: Maker, reference: Reference, since: int) -> None:
    """Give the bundles, restores and first uses from an entry on this reference."""
    for entry in maker.run.entries[since:]:
        if "reference" in (getattr(entry.event, "parts", None) or {}):
            value = reference(entry.event.policy_version)
            changed = {"parts": {**entry.event.parts, "reference": value}}
            if getattr(entry.event, "file_parts", None) is not None:
                changed["file_parts"] = changed["parts"]
            entry.change(**changed)


def refreshed(reference: Reference, every: int | None = 2, iterations: int = 5) -> Run:
    maker = Maker(plan_with(every))
    maker.open()
    maker.start("a1", 0, PLACES)
    for iteration in range(iterations):
        maker.iteration(iteration)
    maker.close()
    use(maker, reference, 0)
    return maker.run


def every_two(version: int) -> str:
    return policy(version // 2 * 2)


def told(verdict: Verdict) -> list[tuple[str, int, str]]:
    return [(f.invariant, f.position, f.expected) for f in verdict.findings]


def test_a_due_refresh_is_compared_with_the_policy(judge: Judge) -> None:
    verdict = judge(refreshed(every_two))
    assert told(verdict) == []
    row = verdict.coverage.row("I14")
    assert (row.status, row.reason) == ("checked", "")
    assert row.checks == 5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda version: h128("garbage") if version >= 2 else policy(0),
        lambda version: policy(0),
        lambda version: policy(version // 2 * 2 - 1) if version >= 2 else policy(0),
    ],
    ids=["something else", "left out", "an older policy"],
)
def test_another_reference_at_a_due_refresh_is_found(wrong: Reference, judge: Judge) -> None:
    run = refreshed(wrong, iterations=3)
    ((invariant, position, expected),) = told(judge(run))
    assert invariant == "I14"
    assert position == run.where("CheckpointSaved", policy_version=2)
    assert "the policy of version 2 as the reference" in expected


def test_a_refresh_that_is_not_due_is_found(judge: Judge) -> None:
    run = refreshed(lambda version: policy(version) if version == 3 else every_two(version))
    assert run.where("CheckpointSaved", policy_version=3) in [p for _, p, _ in told(judge(run))]


def test_a_refresh_of_another_form_is_not_called_checked(judge: Judge) -> None:
    verdict = judge(refreshed(lambda version: h128("reference", version // 2)))
    assert told(verdict) == []
    row = verdict.coverage.row("I14")
    assert row.status == "partly"
    assert "other names or another dtype" in row.reason
    assert verdict.exit_code == 2


def test_masters_are_a_form_of_the_policy_too(judge: Judge) -> None:
    verdict = judge(refreshed(lambda version: h128("masters", version // 2 * 2)))
    assert told(verdict) == []
    assert verdict.coverage.row("I14").status == "checked"


def test_a_restore_goes_back_to_the_reference_of_its_bundle(judge: Judge) -> None:
    maker = Maker(plan_with(2))
    maker.open()
    maker.start("a1", 0, PLACES)
    for iteration in range(4):
        maker.iteration(iteration)
    bundle = maker.run.get("CheckpointSaved", 0).event
    maker.bundle, maker.version, maker.cursor = bundle.bundle, 1, bundle.cursor
    maker.incarnations.clear()
    maker.start("a2", 1, PLACES)
    for iteration in range(1, 5):
        maker.iteration(iteration)
    maker.close()
    use(maker, every_two, 0)
    verdict = judge(maker.run)
    assert [t for t in told(verdict) if t[0] == "I14"] == []
    assert verdict.coverage.row("I14").status == "checked"


def test_an_amended_refresh_is_due_from_then_on(judge: Judge) -> None:
    maker = Maker(plan_with(None))
    maker.open()
    maker.start("a1", 0, PLACES)
    for iteration in range(5):
        if iteration == 3:
            maker.run.add(
                PlanAmended(
                    field="update.reference_refresh", before=None, after=2, reason="it drifts"
                )
            )
        maker.iteration(iteration)
    maker.close()
    use(maker, lambda version: policy(0) if version < 4 else policy(4), 0)
    assert told(judge(maker.run)) == []
