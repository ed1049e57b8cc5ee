"""Goal: a change that makes the reference job non-deterministic, or another job, is seen at once.

Method: the plugin's own fixture replays two small steps of the job, in processes of their own,
against the golden trace that is committed beside this file: as it is, and with another schedule,
other worker counts and injected moves. A change that is meant is accepted with
``pytest --shiftbook-update-golden`` and a review of the difference.
"""

from __future__ import annotations

from typing import Any

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
