"""Time of one decision of the planner against its budgets, for two large systems.

``python benchmarks/planner.py`` prints, for 128 devices x 5 components and 10,000 x 8, the median
and the worst processor time of a decision over many progresses, and the ratio to the budget
(processor time, so that other work on the machine does not count).
"""

from __future__ import annotations

import statistics
import sys
import time

from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.plan import MovePlan
from shiftbook.ledger.topology import Device, Topology
from shiftbook.scheduler.makespan import Progress
from shiftbook.scheduler.planner import Planner
from shiftbook.scheduler.throughput import ThroughputModel

BUDGETS_S = {(128, 5): 0.002, (10_000, 8): 0.020}
ROUNDS = 30


def system(devices: int, components: int) -> tuple[Planner, Topology, list[Progress]]:
    """A job with rollout, trainer (with inference on it) and followers with devices of their own.

    ``components`` counts those with replicas, inference among them.
    """
    names = [f"n{index // 8}/{index % 8}" for index in range(devices)]
    followers = [f"reward{k}" for k in range(components - 3)]
    trainer = 1 << (devices // 4).bit_length() - 1
    each = max(1, devices // (8 * max(1, len(followers))))
    placement = {"rollout": names[: devices - trainer - each * len(followers)]}
    taken = len(placement["rollout"])
    for name in followers:
        placement[name] = names[taken : taken + each]
        taken += each
    placement["inference"] = placement["trainer"] = names[taken:]
    elastic = {name: ElasticRange(minimum=1, maximum=devices) for name in placement}
    model = ThroughputModel()
    planner = Planner(model, elastic, [Device(name=n) for n in names], MovePlan())
    groups, episodes = devices * 4, devices * 32
    progresses = [
        Progress(
            iteration=0,
            elapsed_s=10.0 * step,
            episodes=episodes,
            outstanding=episodes * (ROUNDS - step) // ROUNDS,
            running=min(episodes * (ROUNDS - step) // ROUNDS, 8 * len(placement["rollout"])),
            waiting=max(0, episodes * (ROUNDS - step) // ROUNDS - 8 * len(placement["rollout"])),
            lanes=8,
            turns_left=4.5 * episodes * (ROUNDS - step) / ROUNDS,
            groups_incomplete=groups * (ROUNDS - step) // ROUNDS,
            left={
                name: groups * (ROUNDS - step // 2) // ROUNDS
                for name in placement
                if name != "rollout"
            },
        )
        for step in range(ROUNDS)
    ]
    return planner, Topology.of(placement), progresses


def main() -> int:
    """Print a line per system; 1 when a median is above its budget."""
    failed = False
    for (devices, components), budget_s in BUDGETS_S.items():
        planner, topology, progresses = system(devices, components)
        times, moves = [], 0
        planner.decide(None, topology, progresses[0], 0.0)
        for step, progress in enumerate(progresses):
            began = time.process_time()
            decision = planner.decide(None, topology, progress, 10.0 * step)
            times.append(time.process_time() - began)
            moves += decision is not None
        median_s = statistics.median(times)
        failed |= median_s > budget_s
        print(
            f"{devices} devices x {components} components: median {median_s * 1e3:.2f} ms, "
            f"worst {max(times) * 1e3:.2f} ms, budget {budget_s * 1e3:g} ms, "
            f"ratio {median_s / budget_s:.2f} (bound 1.00), {moves} of {ROUNDS} decided to move"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
