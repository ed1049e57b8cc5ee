"""Goal: `pytest` alone runs the fast tests, and whoever names tests gets those that were named.

Method: a project of three tests takes its hooks from ours, and pytest lists what it would run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOOKS = "from tests.conftest import pytest_configure, pytest_report_header\n"
TESTS = """
import pytest
def test_fast(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.ray
def test_ray(): pass
"""
INI = "[pytest]\ntestpaths = cases\nmarkers =\n  slow\n  ray\n  vllm\n"


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ((), {"fast"}),
        (("-n", "2"), {"fast"}),
        (("-m", "slow or ray"), {"slow", "ray"}),
        (("-m", "slow or not slow"), {"fast", "slow", "ray"}),
        (("-k", "ray"), {"ray"}),
        (("cases",), {"fast", "slow", "ray"}),
        (("cases/test_all.py::test_slow",), {"slow"}),
    ],
)
def test_what_runs(given: tuple[str, ...], listed: set[str], tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    cases.mkdir()
    (tmp_path / "pytest.ini").write_text(INI)
    (cases / "conftest.py").write_text(HOOKS)
    (cases / "test_all.py").write_text(TESTS)
    # What plugins of this run have set in the environment is not for that one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *given],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name for name in ("fast", "slow", "ray") if f"test_{name} PASSED" in done.stdout}
    assert f"{len(listed)} passed" in done.stdout
    if "-n" not in given:
        assert found == listed
    assert ("left out: slow tests" in done.stdout) is (listed == {"fast"})
