"""Small jobs that are not deterministic and need no torch: a run of theirs starts at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent import futures

import numpy as np

from shiftbook.verify.replay.protocol import Conditions, Job, Numbers, Step, component


def job(compute: Callable[[Conditions, int], float]) -> Job:
    """A job of two steps that shows one number of the component ``reward``."""

    def run(conditions: Conditions) -> Iterator[Step]:
        for number in range(conditions.steps):
            with component("reward"):
                value = compute(conditions, number)
            yield Step(number, [Numbers("reward", {"score": value})])

    return Job(run)


def _arrival(conditions: Conditions, number: int) -> float:
    """Sums in the order of arrival; how long each worker takes stands for the load of a machine."""
    spins = [(os.getpid() * 2654435761 >> index) % 256 * 300 for index in range(12)]

    def part(index: int) -> float:
        sum(range(spins[index]))
        return 10.0 ** (index - 4) / 3.0

    with futures.ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(part, index) for index in range(12)]
        total = 1.0
        for done in futures.as_completed(waiting):
            total = total * 1.0000001 + done.result()
    return total


def _dict_order(conditions: Conditions, number: int) -> float:
    """Sums a dict in its order, which is the order of the set that filled it."""
    by_name = {name: 10.0 ** (int(name) - 6) / 3.0 for name in {str(n) for n in range(12)}}
    total = 1.0
    for value in by_name.values():
        total = total * 1.0000001 + value
    return total


def _numpy(conditions: Conditions, number: int) -> float:
    return float(np.random.default_rng().random() + np.random.default_rng(3).random())


arrival = job(_arrival)
dict_order = job(_dict_order)
numpy_random = job(_numpy)
