"""Small jobs that are not deterministic, one for each cause, and one that is."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator

import numpy as np
import torch

from shiftbook.verify.replay.protocol import Conditions, Job, Step, Tensors, component
from tests.verify.bisect_jobs_light import job


def _python(conditions: Conditions, number: int) -> float:
    return random.random() if number else 0.5


def _legacy_numpy(conditions: Conditions, number: int) -> float:
    return float(np.random.rand())


def _hashes(conditions: Conditions, number: int) -> float:
    return float(list({f"name-{n}" for n in range(50)}).index("name-7"))


def _clock(conditions: Conditions, number: int) -> float:
    random.seed(conditions.seed)
    return time.time() + random.random()


def _entropy(conditions: Conditions, number: int) -> float:
    return float(uuid.uuid4().int % 1000003)


def _both(conditions: Conditions, number: int) -> float:
    return random.random() + float(np.random.rand())


def _honest(conditions: Conditions, number: int) -> float:
    _ = time.perf_counter(), uuid.uuid4()
    return random.Random(conditions.seed).random()


python_random = job(_python)
legacy_numpy = job(_legacy_numpy)
hash_order = job(_hashes)
clock = job(_clock)
entropy = job(_entropy)
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
