"""Goal: one fault reads as one story, and two faults as two.

Method: findings with chosen positions are grouped; a real verdict with two faults is told.
"""

from __future__ import annotations

from collections.abc import Callable

from shiftbook.verify.findings import Finding
from shiftbook.verify.grouping import plain_stories, stories
from shiftbook.verify.story import verdict_lines
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import Run, h128
from tests.verify.test_faults import CASES


def finding(name: str, *positions: int, job: str = "j") -> Finding:
    return Finding(name, "stop", job, positions[0], positions, "e", "f", "c", "a")


def names(groups: list[list[Finding]]) -> list[list[str]]:
    return [[f.invariant for f in group] for group in groups]


def test_findings_are_joined_by_what_proves_them() -> None:
    chain = [finding("c", 9, 5), finding("a", 2), finding("b", 5, 2), finding("d", 20, 19)]
    assert names(stories(chain)) == [["a", "b", "c"], ["d"]]


def test_jobs_and_strangers_stay_apart() -> None:
    assert names(stories([finding("a", 2), finding("b", 2, job="k"), finding("c", 3)])) == [
        ["a"],
        ["b"],
        ["c"],
    ]
    assert stories([]) == []


def test_a_fault_is_told_as_one_story(run: Run, judge: Callable[[Run], Verdict]) -> None:
    run.get("UpdateApplied", 1).change(params_before=h128("reloaded"))
    run.get("SamplesDrawn", 0).change(epoch=3)
    told = list(verdict_lines(judge(run)))
    (head,) = [line for line in told if line.startswith("one story")]
    assert "I17" in head
    assert "I22" in head
    assert "I3" not in head


def test_stories_name_their_findings_by_place() -> None:
    found = [finding("c", 9, 5), finding("a", 2), finding("b", 5, 2), finding("d", 20, 19)]
    first, second = plain_stories(found)
    assert (first["position"], first["invariants"], first["findings"]) == (
        2,
        ["a", "b", "c"],
        [1, 2, 0],
    )
    assert (second["position"], second["findings"], second["latency_events"]) == (20, [3], 0)


def test_how_late_a_fault_is_found_is_told(run: Run, judge: Callable[[Run], Verdict]) -> None:
    """An operation that is left open shows at the end alone; a wrong learning rate at once."""
    next(case for case in CASES if case.name == "operation_left_open").put_in(run)
    run.get("UpdateApplied", 0).change(learning_rate=9.0)
    verdict = judge(run)
    late = {f.invariant: f.latency_events for f in verdict.findings}
    assert late == {"I18": 0, "operations": verdict.last - verdict.findings[-1].position}
    assert late["operations"] > 50
    told = list(verdict_lines(verdict))
    assert (
        f"detection latency: 0 to {late['operations']} events from the first that is broken" in told
    )
    assert any(f"found {late['operations']} events later" in line for line in told)
