"""One trainer process of the elastic tests: trains a small model through a schedule of worlds."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shiftbook.checkpoint.elastic import GroupLoss, Place, VirtualRanks, fp32_masters
from tests.checkpoint.process_end import end_process

PROCESSES = 4
GROUPS = 8
ROWS = 3


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    virtual_ranks: int = 4
    dropout: float = 0.0
    clip_norm: float | None = None
    dtype: str = "float32"
    optimizer: str = "AdamW"
    reduction: str = "tree"
    seed: int = 3

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class Net(nn.Module):
    """Two layers with a parameter that is used twice and one that is never used."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(7, 16)
        self.middle = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)
        self.unused = nn.Parameter(torch.ones(5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.tanh(self.first(x)))
        x = x + self.dropout(torch.relu(self.middle(x)))
        return self.last(self.norm(self.middle(x)))


def batch_of(update: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of one group: targets span six orders of magnitude, so that order shows."""
    generator = torch.Generator().manual_seed(1000 * update + group)
    x = torch.randn(ROWS, 7, generator=generator)
    power = torch.randint(-3, 3, (ROWS, 1), generator=generator).float()
    return x, torch.randn(ROWS, 3, generator=generator) * 10.0**power


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> GroupLoss:
    """Summed squared error of a noisy input: noise from torch, numpy and Python's generator."""
    x, y = batch
    dtype = next(model.parameters()).dtype
    noise = float(np.random.rand()) + random.random()
    x = x + 1e-3 * noise * torch.randn(x.shape)
    error = (model(x.to(dtype)).float() - y).square()
    return GroupLoss(error.sum(), len(x), {"largest": float(error.detach().max())})


def make(setup: Setup) -> VirtualRanks:
    """The trainer, the same in each process."""
    torch.manual_seed(11)
    model = Net(setup.dropout).to(getattr(torch, setup.dtype))
    masters = fp32_masters(model) if setup.dtype != "float32" else None
    trained = list(model.parameters()) if masters is None else list(masters.values())
    settings = {"lr": 1e-2} | ({"momentum": 0.9} if setup.optimizer == "SGD" else {})
    return VirtualRanks(
        model,
        getattr(torch.optim, setup.optimizer)(trained, **settings),
        loss,
        virtual_ranks=setup.virtual_ranks,
        groups=GROUPS,
        seed=setup.seed,
        clip_norm=setup.clip_norm,
        masters=masters,
        reduction=setup.reduction,  # type: ignore[arg-type]
    )


def take_part(trainer: VirtualRanks, updates: int, share: float, order: int) -> None:
    """Go on until ``updates`` are made and ``share`` of the next one's groups is in."""
    while trainer.place is not None:
        groups = trainer.missing()
        random.Random(order + trainer.updates).shuffle(groups)
        last = trainer.updates == updates
        if last:
            owned = GROUPS // trainer.place.world
            groups = groups[: max(0, round(share * owned) - (owned - len(groups)))]
        for group in groups:
            trainer.add(group, batch_of(trainer.updates, group), [f"{group:06d}/0"])
        if last:
            return
        trainer.update(learning_rate=1e-2 / (1 + trainer.updates))


def run(command: dict[str, Any], rank: int, store: dist.Store) -> None:
    """Train through the schedule: (world, updates made at its end, share of the next one)."""
    setup = Setup(**command["setup"])
    trainer = make(setup)
    trainer = trainer.at(Place() if rank == 0 else None)
    torch.manual_seed(rank)  # what stands outside of the groups' streams must not matter
    for number, (world, updates, share) in enumerate(command["schedule"]):
        trainer.resize(store, f"{command['name']}/{number}", rank, world, PROCESSES)
        take_part(trainer, updates, share, command.get("order", 0))
    if trainer.place is not None:
        torch.save(
            {
                "parts": trainer.parts(),
                "updates": trainer.updates,
                "uids": trainer.accumulator.uids,
            },
            f"{command['out']}-{rank}.pt",
        )


def main() -> None:
    """Serve commands until stdin ends."""
    torch.set_num_threads(1)
    rank = int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("task") == "fsdp":
            from tests.checkpoint import fsdp_task

            fsdp_task.run(command, rank, store)
        else:
            run(command, rank, store)
        sys.stdout.write("done\n")
        sys.stdout.flush()
    end_process()


if __name__ == "__main__":
    main()
