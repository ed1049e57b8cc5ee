"""Goal: one fault reads as one story, and two faults as two.

Method: findings with chosen positions are grouped; a real verdict with two faults is told.
"""

from __future__ import annotations

from collections.abc import Callable

from shiftbook.verify.findings import Finding
from shiftbook.verify.grouping import stories
from shiftbook.verify.story import verdict_lines
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import Run, h128


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
