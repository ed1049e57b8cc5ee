"""Goal: an invariant that says which events it looks at would do nothing with any other.

Method: honest runs and the golden ledgers are judged; each event is also shown to every invariant
that does not look at it, which must neither report anything nor remember anything of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.events.base import Event
from shiftbook.verify import judge
from shiftbook.verify.findings import Finding
from shiftbook.verify.invariants import INVARIANTS, Invariant, Step
from shiftbook.verify.verdict import verify
from tests.verify.honest_run import Run

ASSETS = Path(__file__).parents[1] / "assets"
GOLDEN = sorted(ASSETS.glob("*/job.db"))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Types that were shown to an invariant that does not look at them."""
    seen: list[str] = []
    steps: list[Step] = []

    def step(*given: Any) -> Step:
        steps[:] = [Step(*given)]
        return steps[0]

    real = judge.Bench.looking_at

    def looking_at(bench: judge.Bench, kind: type[Event]) -> list[Invariant]:
        looking = real(bench, kind)
        for other in bench.invariants:
            if other not in looking:
                show(other, steps[0])
                seen.append(kind.__name__)
        return looking

    def show(other: Invariant, step: Step) -> None:
        def refuse(finding: Finding) -> None:
            raise AssertionError(f"{other.id} reports on {step.stored.type}: {finding}")

        report = other._report
        other._report = refuse
        before = repr(vars(other))
        other.feed(step)
        assert repr(vars(other)) == before, (other.id, step.stored.type)
        other._report = report

    monkeypatch.setattr(judge, "Step", step)
    monkeypatch.setattr(judge.Bench, "looking_at", looking_at)
    return seen


def test_what_it_does_not_look_at_means_nothing_to_it(
    run: Run, shown: list[str], tmp_path: Path
) -> None:
    run.write(tmp_path / "book.db")
    assert not verify(f"sqlite:///{tmp_path}/book.db").findings
    assert len(set(shown)) > 15


@pytest.mark.parametrize("golden", GOLDEN, ids=[path.parent.name for path in GOLDEN])
def test_the_same_in_golden_ledgers(golden: Path, shown: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(golden.parent, tmp_path / "copy")
    verify(f"sqlite:///{folder}/job.db")
    assert len(set(shown)) > 15


def test_most_invariants_say_what_they_look_at() -> None:
    assert sum(invariant.sees is None for invariant in INVARIANTS) <= 2
