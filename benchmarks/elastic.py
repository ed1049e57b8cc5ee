"""Time the fixed tree of the elastic trainer against the unordered mode and a plain torch loop.

Run: ``python benchmarks/state.py trainer``, or this file alone. Two figures for each of 2 and 4
processes: the reduction of one summed gradient (tree: gather of the blocks' sums, added in order;
beside it gloo's own all-reduce), and memory held for gradients. Then whole updates of the reference
job's trainer over 1 and 2 processes, tree and unordered, on groups that are rolled out here. Last,
whole updates in one process beside a loop with ``backward``, ``clip_grad_norm_`` and the same
optimizer. Ratios are of best times taken in turns; processes share the machine's cores.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shiftbook.checkpoint.elastic import Place, VirtualRanks
from shiftbook.checkpoint.elastic_move import join_group
from shiftbook.checkpoint.unordered import UnorderedAccumulator
from shiftbook.checkpoint.virtual_ranks import (
    GradientAccumulator,
    VirtualRankPlan,
    all_reduce_tree,
)
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.grpo import (
    GROUP_SIZE,
    GroupBatch,
    GrpoLoss,
    make_group_batch,
    reference_logps,
)
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.local_run import LocalConfig, roll_out
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.task import new_episode
from shiftbook.jobs.toolbox import Toolbox
from shiftbook.jobs.trainer_state import make_trainer

ELEMENTS = 2_000_000
GROUPS, VIRTUAL_RANKS, ROUNDS = 8, 4, 15
UPDATES = 5  # whole ones of the reference job, each way


def in_turns(rounds: int, *jobs: Callable[[], object]) -> list[float]:
    """Shortest seconds of each job, after one run of each to warm up."""
    best = [float("inf")] * len(jobs)
    for number in range(rounds + 1):
        for place, job in enumerate(jobs):
            begun_s = time.perf_counter()
            job()
            if number:
                best[place] = min(best[place], time.perf_counter() - begun_s)
    return best


def reductions(port: int, rank: int, world: int) -> None:
    """One process of ``world``: rank 0 prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = join_group(store, f"world-{world}", rank, world)
    plan = VirtualRankPlan(VIRTUAL_RANKS, GROUPS)
    tree = GradientAccumulator(plan, world, rank)
    plain = UnorderedAccumulator(plan, world, rank)
    for index in tree.missing():
        flat = torch.randn(ELEMENTS)
        tree.add(index, flat, 1, {"loss_sum": 1.0}, [])
        plain.add(index, flat, 1, {"loss_sum": 1.0}, [])
    ordered_s, unordered_s = in_turns(
        ROUNDS,
        lambda: all_reduce_tree(tree.local_sums(), group),
        lambda: plain.total(group),
    )
    if rank == 0:
        print(
            f"trainer: reduction of {ELEMENTS * 4 / 1e6:.0f} MB over {world} processes: tree "
            f"{ordered_s * 1e3:.1f} ms, all-reduce {unordered_s * 1e3:.1f} ms, "
            f"{ordered_s / unordered_s:.2f} x; gradients held "
            f"{tree.resident_bytes() / plain.resident_bytes():.0f} x"
        )


def reference_groups(config: LocalConfig, indices: Sequence[int]) -> dict[int, GroupBatch]:
    """Groups of the reference job's first iteration, rolled out with the base policy."""
    base = load_policy(config.base_policy, config.model)
    reference = {name: tensor.float() for name, tensor in base.items()}
    engine = TorchEngine(config.model, lanes=16)
    engine.load(base, 0)
    episodes = {
        index: [
            new_episode(config.seed, format_uid(index, member), index, config.model.context)
            for member in range(GROUP_SIZE)
        ]
        for index in indices
    }
    with Toolbox(config.seed) as toolbox:
        roll_out(engine, toolbox, [one for each in episodes.values() for one in each])
    groups = {index: make_group_batch(each) for index, each in episodes.items()}
    return {
        index: group.with_reference(reference_logps(reference, group, config.model))
        for index, group in groups.items()
    }


def reference_job(port: int, rank: int, world: int) -> None:
    """Whole updates of the reference job's trainer in one process of ``world``: rank 0 prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    config = LocalConfig()
    base = load_policy(config.base_policy, config.model)
    trainers: list[VirtualRanks] = []
    for reduction in ("tree", "unordered"):
        group = join_group(store, f"job-{world}-{reduction}", rank, world) if world > 1 else None
        trainers.append(
            make_trainer(
                base,
                config.model,
                GrpoLoss(config.loss, config.seed),
                virtual_ranks=config.virtual_ranks,
                groups=config.groups,
                clip_norm=config.clip_norm,
                place=Place(rank, world, group),
                reduction=reduction,
            )
        )
    batches = reference_groups(config, trainers[0].missing())
    ends_s: list[list[float]] = [[], []]

    def one(place: int) -> None:
        trainer = trainers[place]
        for index in trainer.missing():
            trainer.add(index, (batches[index], 0), batches[index].uids)
        begun_s = time.perf_counter()
        trainer.update(1e-6)
        ends_s[place].append(time.perf_counter() - begun_s)

    tree_s, unordered_s = in_turns(UPDATES, lambda: one(0), lambda: one(1))
    if rank == 0:
        tree_end_s, unordered_end_s = (min(each[1:]) for each in ends_s)
        print(
            f"trainer: whole update of the reference job, {config.groups} groups of {GROUP_SIZE} "
            f"samples, {world} process(es): tree {tree_s * 1e3:.0f} ms, unordered "
            f"{unordered_s * 1e3:.0f} ms, {tree_s / unordered_s:.3f} x; of it reduction, norm and "
            f"step {tree_end_s * 1e3:.1f} and {unordered_end_s * 1e3:.1f} ms"
        )


def updates() -> None:
    """Whole updates in one process: tree, unordered, and the loop that anyone writes."""
    torch.set_num_threads(1)

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512) for _ in range(8)]
        model = torch.nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(batch) - batch).square().sum(), len(batch)

    batches = [torch.randn(256, 512) for _ in range(GROUPS)]

    def elastic(reduction: str) -> Callable[[], object]:
        model, optimizer = made()
        trainer = VirtualRanks(
            model,
            optimizer,
            loss,
            virtual_ranks=VIRTUAL_RANKS,
            groups=GROUPS,
            clip_norm=1.0,
            reduction=reduction,  # type: ignore[arg-type]
        )

        def one() -> None:
            for group in trainer.missing():
                trainer.add(group, batches[group])
            trainer.update()

        return one

    model, optimizer = made()

    def plain() -> None:
        optimizer.zero_grad()
        for batch in batches:
            torch.autograd.backward(loss(model, batch)[0] / (GROUPS * 256))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    tree_s, unordered_s, plain_s = in_turns(ROUNDS, elastic("tree"), elastic("unordered"), plain)
    print(
        f"trainer: update of {8 * 513 * 512 / 1e6:.1f} M parameters, {GROUPS} groups of 256 rows, "
        f"one process: tree {tree_s * 1e3:.0f} ms, unordered {unordered_s * 1e3:.0f} ms, plain "
        f"loop {plain_s * 1e3:.0f} ms; {tree_s / plain_s:.2f} x and {unordered_s / plain_s:.2f} x"
    )


def main() -> int:
    """Start the processes of each world, then time updates here."""
    if len(sys.argv) == 5:
        job = {"reductions": reductions, "reference-job": reference_job}[sys.argv[1]]
        job(*(int(word) for word in sys.argv[2:]))
        return 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for part, world in (
        ("reductions", 2),
        ("reductions", 4),
        ("reference-job", 1),
        ("reference-job", 2),
    ):
        words = [[part, str(store.port), str(rank), str(world)] for rank in range(world)]
        here = str(Path(__file__))
        ranks = [subprocess.Popen([sys.executable, here, *each]) for each in words]
        codes = [process.wait() for process in ranks]
        if any(codes):
            return 1
    updates()
    return 0


if __name__ == "__main__":
    sys.exit(main())
