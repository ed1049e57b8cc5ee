"""Shared by the tests of the judge: one honest run, and the verdict on a changed copy of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import Run, copied, honest_run

Mutation = Callable[[Run], object]


@pytest.fixture(scope="session")
def _honest() -> Run:
    return honest_run()


@pytest.fixture
def run(_honest: Run) -> Run:
    """An honest run that may be changed."""
    return copied(_honest)


@pytest.fixture
def judge(tmp_path: Path) -> Callable[[Run], Verdict]:
    """Writes a run through a real ledger and gives the verdict on it."""

    def judge_run(run: Run) -> Verdict:
        return verify(run.write(tmp_path / "ledger.db"))

    return judge_run
