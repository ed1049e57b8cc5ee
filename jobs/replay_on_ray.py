"""The reference job as a target of ``shiftbook replay`` on a Ray cluster of its own.

The job itself runs, with its controller, its workers and a ledger in a folder that is thrown away;
what that ledger holds is what the run shows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.bundle import restore_bundle
from shiftbook.jobs.config import JobConfig, Schedule
from shiftbook.jobs.errors import JobError
from shiftbook.jobs.runner import Cluster, Place, RunningJob
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.evidence import EvidenceFolder
from shiftbook.verify.replay.protocol import (
    Conditions,
    Numbers,
    Observation,
    Sample,
    Samples,
    Step,
    Tensors,
)
from shiftbook.verify.replay.recorded_trace import PARTS, Recorded, recorded_job, recorded_lines
from shiftbook.verify.replay.trace import Line

ON_RAY: dict[str, Schedule] = {
    "ray-static": "static",
    "ray-timeshared": "timeshared",
    "ray-dynamic": "dynamic",
}
"""Schedules of a replay to those of the job."""
JOB = "replay"
START_LIMIT_S = 120.0
ITERATION_LIMIT_S = 90.0


def steps_on_ray(
    values: Mapping[str, Any], base_policy: str, conditions: Conditions
) -> Iterator[Step]:
    """Run the job under ``conditions`` and give what its ledger holds, step by step.

    Its slots are the workers of rollout and trainer together; ``static`` splits them so, the others
    do with them what they do. With a seed of moves the dynamic schedule makes those moves.
    """
    schedule = ON_RAY[conditions.schedule]
    if conditions.moves is not None and schedule != "dynamic":
        raise JobError(
            f"expected the schedule ray-dynamic for moves on Ray, found {conditions.schedule}; "
            "leave --moves away, or choose it"
        )
    if conditions.start is not None:
        raise JobError(
            "expected a schedule in one process for a run from a bundle, found "
            f"{conditions.schedule}; a job on Ray goes on from its own bundles"
        )
    rollout, trainer = conditions.workers["rollout"], conditions.workers["trainer"]
    with tempfile.TemporaryDirectory(prefix="shiftbook-on-ray-") as folder:
        place = Place(Path(folder))
        config = place.config(
            JOB,
            **{name: values[name] for name in values},
            seed=conditions.seed,
            iterations=conditions.steps,
            schedule=schedule,
            rollout_slots=rollout if schedule == "static" else None,
            random_moves=conditions.moves,
        )
        if Path(base_policy).is_file():
            config = config.model_copy(update={"base_policy": base_policy})
        _run(place, config, rollout + trainer)
        with Ledger.open(place.ledger_url, create=False, read_only=True) as ledger:
            recorded = recorded_job(ledger, JOB)
            rows = EvidenceFolder(ledger)
            for number in range(conditions.steps):
                lines = list(recorded_lines(recorded, rows, [number]))
                yield Step(number, list(_observed(number, lines, recorded)))


def _run(place: Place, config: JobConfig, slots: int) -> None:
    with Cluster(place, slots) as cluster:
        job = RunningJob(config, cluster.devices)
        try:
            job.wait(START_LIMIT_S + ITERATION_LIMIT_S * config.iterations)
        finally:
            job.end()


def _observed(number: int, lines: list[Line], recorded: Recorded) -> Iterator[Observation]:
    samples = [
        Sample(
            line.name,
            line.fields["tokens"],
            line.fields["logps"],
            float(line.fields["reward"]) if "reward" in line.fields else None,
            line.event,
            line.reward_event,
        )
        for line in lines
        if line.kind == "sample"
    ]
    yield Samples("rollout", samples)
    numbers = {one.name: float(one.fields["value"]) for one in lines if one.kind == "number"}
    updated = recorded.iterations[number].updated
    yield Numbers("trainer", numbers, None if updated is None else updated[0])
    saved = recorded.iterations[number].saved
    if saved is None:
        raise JobError(f"expected a bundle after iteration {number}, found none recorded")
    for part, tensors in restore_bundle(saved[1].path, list(PARTS)).items():
        yield Tensors("trainer", part, tensors, each=part == "masters", event=saved[0])
