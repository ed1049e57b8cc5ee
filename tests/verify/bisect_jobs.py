"""Small jobs that are not deterministic, one for each cause, and one that is."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent import futures

import numpy as np
import torch

from shiftbook.verify.replay.protocol import Conditions, Job, Numbers, Step, Tensors, component


def job(compute: Callable[[Conditions, int], float]) -> Job:
    """A job of two steps that shows one number of the component ``reward``."""

    def run(conditions: Conditions) -> Iterator[Step]:
        for number in range(conditions.steps):
            with component("reward"):
                value = compute(conditions, number)
            yield Step(number, [Numbers("reward", {"score": value})])

    return Job(run)


def _python(conditions: Conditions, number: int) -> float:
    return random.random() if number else 0.5


def _numpy(conditions: Conditions, number: int) -> float:
    return float(np.random.default_rng().random() + np.random.default_rng(3).random())


def _legacy_numpy(conditions: Conditions, number: int) -> float:
    return float(np.random.rand())


def _hashes(conditions: Conditions, number: int) -> float:
    return float(list({f"name-{n}" for n in range(50)}).index("name-7"))


def _clock(conditions: Conditions, number: int) -> float:
    random.seed(conditions.seed)
    return time.time() + random.random()


def _entropy(conditions: Conditions, number: int) -> float:
    return float(uuid.uuid4().int % 1000003)


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


def _both(conditions: Conditions, number: int) -> float:
    return random.random() + float(np.random.rand())


def _honest(conditions: Conditions, number: int) -> float:
    _ = time.perf_counter(), uuid.uuid4()
    return random.Random(conditions.seed).random()


python_random = job(_python)
numpy_random = job(_numpy)
legacy_numpy = job(_legacy_numpy)
hash_order = job(_hashes)
clock = job(_clock)
entropy = job(_entropy)
arrival = job(_arrival)
both = job(_both)
honest = job(_honest)


class Tower(torch.nn.Module):
    """A layer, dropout by torch's own generator, a layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = torch.nn.utils.skip_init(torch.nn.Linear, 8, 8, bias=False)
        self.noise = torch.nn.Dropout(0.5)
        self.down = torch.nn.utils.skip_init(torch.nn.Linear, 8, 1, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.noise(self.up(x)))


def _train(conditions: Conditions) -> Iterator[Step]:
    torch.seed()
    model = Tower()
    for number in range(conditions.steps):
        with component("trainer"):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
        gradient = {name: p.grad for name, p in model.named_parameters()}
        yield Step(number, [Tensors("trainer", "gradient", gradient)])


def _scatter(conditions: Conditions) -> Iterator[Step]:
    """Adds many values into few places from two threads, without an order."""
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(conditions.seed)
    for number in range(conditions.steps):
        values = torch.randn(400_000, generator=generator)
        places = torch.randint(0, 7, (400_000,), generator=generator)
        with component("trainer"):
            total = torch.zeros(7).index_put_((places,), values, accumulate=True)
        yield Step(number, [Tensors("trainer", "total", {"sum": total})])


torch_random = Job(_train)
kernel = Job(_scatter)
