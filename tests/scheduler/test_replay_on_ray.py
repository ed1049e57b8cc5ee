"""Goal: a job that was recorded on Ray gives the same when it is run on Ray again, moved otherwise.

Method: the reference job is recorded under a static split; `shiftbook replay` runs it on a cluster
of its own under the dynamic schedule, with moves drawn by a seed, and compares.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.conftest import OnRay

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from shiftbook.ledger.cli import main; sys.exit(main())"


def replay(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "replay", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_job_recorded_on_ray_is_run_on_ray_again_under_another_schedule(on_ray: OnRay) -> None:
    on_ray.run("recorded", groups=4, schedule="static", rollout_slots=1, slots=2)
    url = on_ray.place.ledger_url
    code, out = replay(url, "--schedule", "ray-dynamic", "--moves", "random:3",
                       "--workers", "rollout=1,trainer=2")  # fmt: skip
    assert code == 0, out
    assert "schedule=ray-dynamic" in out
    assert "moves=random:3" in out
    code, out = replay(url, "--schedule", "ray-static", "--moves", "random:3")
    assert code == 2
    assert "expected the schedule ray-dynamic for moves on Ray" in out
