"""The update: waits for all groups, then reduces, steps, publishes and saves on every rank."""

from __future__ import annotations

import os
from typing import Any

from shiftbook.checkpoint.sampler import Sampler
from shiftbook.jobs.care import Care
from shiftbook.jobs.config import DATASET_SIZE, JobConfig, bundle_digests
from shiftbook.jobs.desk import Desk
from shiftbook.jobs.iteration import Iteration
from shiftbook.jobs.right_of_way import RightOfWay
from shiftbook.jobs.standing import Standing
from shiftbook.scheduler.errors import MoveFailed, WorkerLost
from shiftbook.scheduler.fleet import Fleet

LOOK_AGAIN_S = 0.5
"""Pause between two looks at whether all groups are there."""

Reports = list[tuple[dict[str, Any], dict[str, Any]]]
"""(report of the update, status) of each rank, in rank order; the first report has ``saved``."""


class Updater:
    """Makes the update of an iteration, and makes it again when a rank died meanwhile."""

    def __init__(
        self,
        config: JobConfig,
        fleet: Fleet,
        sampler: Sampler,
        standing: Standing,
        desk: Desk,
        way: RightOfWay,
        care: Care,
    ) -> None:
        self._config, self._fleet, self._sampler = config, fleet, sampler
        self._standing, self._desk, self._way, self._care = standing, desk, way, care
        self._digests = bundle_digests(config)

    def update(self, iteration: Iteration) -> Reports:
        """Wait for all groups, then update, on every rank at once."""
        import ray

        while True:
            self._desk.changed.wait(LOOK_AGAIN_S)
            if not iteration.complete:
                self._desk.changed.clear()
                continue
            with self._way.trainer():
                # A repair may have emptied the update while the trainer was waited for.
                if not iteration.complete:
                    continue
                try:
                    return self._once(iteration)
                except (WorkerLost, MoveFailed, ray.exceptions.RayError) as error:
                    os.write(2, f"update of iteration {iteration.number} again: {error}\n".encode())
                    self._care.repair(self._standing.topology, anew=frozenset({"trainer"}))

    def _once(self, iteration: Iteration) -> Reports:
        ranks = [r.name for r in self._standing.topology.replicas("trainer")]
        grant = self._standing.grant
        arguments: dict[str, Any] = {
            "learning_rate": self._config.learning_rate,
            "clip_norm": self._config.clip_norm,
            "version": self._standing.version + 1,
        }
        reports = self._fleet.each(ranks, "call", grant, "update", arguments)
        first = reports[ranks[0]]
        for replica in ranks[1:]:
            if reports[replica]["after"] != first["after"]:
                raise MoveFailed(
                    f"expected the same parameters on every rank after the update, found others "
                    f"on {replica} than on {ranks[0]}"
                )
        epoch, position = divmod(self._sampler.state().ordinal, DATASET_SIZE)
        fields = {
            "job": self._config.job,
            "attempt": grant.operation,
            "parent": self._standing.bundle,
            "iteration": iteration.number + 1,
            "sampler": {"epoch": epoch, "position": position},
            "in_flight_uids": (),  # the next draws are made when this version is served
            **self._digests,
        }
        place: dict[str, Any] = {"root_dir": self._config.bundles, "fields": fields}
        served = self._standing.served_next(first["weights"], arguments["version"])
        if served is not None:
            place["served"] = served
        saved = self._fleet.each(ranks[:1], "call", grant, "save", place)[ranks[0]]
        first["saved"] = {**saved, "parent": self._standing.bundle}
        statuses = self._fleet.each(ranks, "status")
        return [(reports[r], statuses[r]) for r in ranks]
