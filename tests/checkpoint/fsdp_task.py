"""What one of four processes does in the FSDP2 tests: trains the elastic tests' model, sharded."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shiftbook.checkpoint.ordered_fsdp import ShardedRanks, whole
from shiftbook.checkpoint.random_streams import keyed_streams
from shiftbook.checkpoint.virtual_ranks import VirtualRankError, VirtualRankPlan
from tests.checkpoint.elastic_rank import GROUPS, Net, Setup, batch_of, loss


def sharded(setup: Setup, world: int, layers: list[str]) -> Net:
    """The model, some layers and the whole of it sharded over a mesh of CPUs."""
    torch.manual_seed(11)
    model = Net(setup.dropout)
    mesh = init_device_mesh("cpu", (world,))
    for layer in layers:
        fully_shard(model.get_submodule(layer), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def run(command: dict[str, Any], rank: int, store: dist.Store) -> None:
    """Go through the worlds of the schedule, ordered by the tree or as FSDP2 does it."""
    setup = Setup(**command["setup"])
    held: dict[str, Any] = {}
    layers = command.get("layers", ["first", "last"])
    for number, (world, updates) in enumerate(command["schedule"]):
        place = f"{command['out']}-state-{number}.pt"
        if rank < world:
            prefix = dist.PrefixStore(f"{command['name']}/{number}", store)
            dist.init_process_group(
                "gloo", store=prefix, rank=rank, world_size=world, timeout=timedelta(seconds=240)
            )
            train = ordered if command["ordered"] else plain
            try:
                held = train(setup, rank, world, updates, held, layers)
            except VirtualRankError as error:
                held = {"refused": str(error)}
            dist.destroy_process_group()
            if rank == 0:
                torch.save(held, place)
        barrier(store, f"{command['name']}/{number}/done")
        held = torch.load(place)
    if rank == 0:
        torch.save(held, f"{command['out']}-0.pt")


def barrier(store: dist.Store, name: str) -> None:
    """Wait until all four processes are here."""
    if store.add(name, 1) == 4:
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"], timedelta(seconds=240))


def ordered(
    setup: Setup, rank: int, world: int, updates: int, held: dict[str, Any], layers: list[str]
) -> dict[str, Any]:
    """Updates by ``ShardedRanks``; the whole state afterwards."""
    model = sharded(setup, world, layers)
    trainer = ShardedRanks(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss,
        plan=VirtualRankPlan(setup.virtual_ranks, GROUPS),
        seed=setup.seed,
        clip_norm=setup.clip_norm,
    )
    if held:
        trainer.load(held["parts"], held["updates"])
    while trainer.updates < updates:
        for group in trainer.missing():
            trainer.add(group, batch_of(trainer.updates, group))
        trainer.update(learning_rate=1e-2 / (1 + trainer.updates))
    return {"parts": whole(trainer.parts()), "updates": trainer.updates}


def plain(
    setup: Setup, rank: int, world: int, updates: int, held: dict[str, Any], layers: list[str]
) -> dict[str, Any]:
    """Updates as anyone writes them with FSDP2: gradients are averaged by the library."""
    model = sharded(setup, world, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = VirtualRankPlan(setup.virtual_ranks, GROUPS)
    weight = GROUPS * len(batch_of(0, 0)[0])
    for update in range(updates):
        groups = [g for v in plan.block_of(rank, world) for g in plan.groups_of(v)]
        for group in groups:
            model.set_requires_gradient_sync(group == groups[-1])  # type: ignore[operator]
            owner = f"virtual-rank/{plan.rank_of(group)}"
            with keyed_streams(setup.seed, owner, update, group):
                (loss(model, batch_of(update, group)).total * (world / weight)).backward()
        if model.unused.grad is None:
            model.unused.grad = torch.zeros_like(model.unused)
        for settings in optimizer.param_groups:
            settings["lr"] = 1e-2 / (1 + update)
        optimizer.step()
        optimizer.zero_grad()
    parts = {"model": {n: p.detach() for n, p in model.named_parameters()}, "optimizer": {}}
    return {"parts": whole(parts), "updates": updates}
