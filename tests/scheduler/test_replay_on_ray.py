"""Goal: a job that was recorded on Ray gives the same when it is run on Ray again, moved otherwise.

Method: the reference job is recorded under a static split; `shiftbook replay` runs it on a cluster
of its own under the dynamic schedule, with moves drawn by a seed, and compares. The small job of
its Python path is run in time-shared phases on a cluster and in one process.
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


def test_time_shared_phases_on_ray_give_what_one_process_gives() -> None:
    """The job's Python path, without a record: a run on Ray against one in a process. What the
    ledger and the bundles of the run on Ray do not hold is told and not missed."""
    target = "shiftbook.jobs.replay:reference_job"
    code, out = replay(target, "--schedule", "ray-timeshared", "--workers", "rollout=1,trainer=1")
    assert code == 0, out
    assert "schedule=ray-timeshared" in out
    assert "does not show it: trainer tensor gradient, trainer root gradient" in out
    assert "378 observations in 2 steps" in out
