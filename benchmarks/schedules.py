"""The reference job under three schedules, in turns on one cluster: ratios beside their bounds.

``python benchmarks/schedules.py [--rounds 3] [--iterations 4]`` runs every schedule once a round,
so that each round is a paired comparison on the same machine at the same time. An iteration's time
is the median of a run without its first iteration, which warms up; a ratio is the median over
rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from shiftbook.jobs.runner import Cluster, Place, RunningJob

BOUNDS = {"static": 1.2, "timeshared": 1 / 1.03}
"""How many times faster than each other schedule the dynamic one has to be, at least."""


def main() -> int:
    """Run, print, and say with the exit code whether the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in BOUNDS}
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        with Cluster(place, len(os.sched_getaffinity(0))) as cluster:
            cluster.warm()
            for number in range(options.rounds):
                walls = {}
                for schedule in ("dynamic", "static", "timeshared"):
                    config = place.config(
                        f"{schedule}-{number}", iterations=options.iterations, schedule=schedule
                    )
                    job = RunningJob(config, cluster.devices)
                    done = job.wait(300)["iterations"]
                    job.end()
                    walls[schedule] = median(entry["wall_s"] for entry in done[1:])
                for other in BOUNDS:
                    ratios[other].append(walls[other] / walls["dynamic"])
                shown = ", ".join(f"{name} {wall:.2f} s" for name, wall in walls.items())
                print(f"round {number + 1}: {shown}", flush=True)
    missed = False
    for other, bound in BOUNDS.items():
        ratio = median(ratios[other])
        missed |= ratio < bound
        word = "ok" if ratio >= bound else "MISSED"
        print(f"{other} / dynamic: {ratio:.2f} x, at least {bound:.2f}  {word}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
