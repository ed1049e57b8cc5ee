"""Goal: a change that makes the reference job non-deterministic, or another job, is seen at once.

Method: the plugin's own fixture replays two small steps of the job, in processes of their own,
against the golden trace that is committed beside this file: as it is, and with another schedule,
other worker counts and injected moves. A change that is meant is accepted with
``pytest --shiftbook-update-golden`` and a review of the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from shiftbook.jobs.replay import ENVIRONMENT

REFERENCE = "shiftbook.jobs.replay:reference_job"
GOLDEN = "reference.golden"


def test_the_reference_job_is_the_one_that_was_reviewed(shiftbook_replay: Any) -> None:
    outcome = shiftbook_replay(REFERENCE, golden=GOLDEN)
    assert outcome.steps == 2
    assert outcome.observations > 200


def test_schedule_workers_and_moves_change_nothing(shiftbook_replay: Any) -> None:
    shiftbook_replay(
        REFERENCE,
        golden=GOLDEN,
        schedule="streamed",
        workers={"rollout": 2, "trainer": 4},
        moves=3,
    )


ADAM = """
import math
import numpy as np
import torch
from shiftbook.jobs.optimizer import BETA1, BETA2, EPSILON, Adam

torch.set_num_threads(1)
draw = torch.Generator().manual_seed(5)
master = torch.randn(100_000, generator=draw)
adam, rate = Adam({"w": master}, lr=3e-4), 3e-4
f = np.float32
p, m, v = master.numpy().copy(), np.zeros(100_000, f), np.zeros(100_000, f)
for step in range(1, 4):
    master.grad = torch.randn(100_000, generator=draw) * 0.01
    adam.step()
    g = master.grad.numpy()
    m, v = m * f(BETA1) + f(1 - BETA1) * g, v * f(BETA2) + f(1 - BETA2) * g * g
    below = np.sqrt(v) / f(math.sqrt(1 - BETA2**step)) + f(EPSILON)
    p = p + f(-rate / (1 - BETA1**step)) * m / below
    assert np.array_equal(p, master.numpy()), step
"""


def test_the_optimizer_rounds_as_ieee_754_says() -> None:
    """So that another processor gives the same: numpy does, one operation after the other."""
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", ADAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
