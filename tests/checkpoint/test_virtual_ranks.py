"""Goal: an update has the same bits on 1, 2 and 4 trainer processes, whatever order gradients come
in and whatever happens to the trainer in the middle of it.

Method: four real processes live through the whole module and form gloo groups of 1, 2 and 4 again
and again, each over its own prefix of one store. Gradients are synthetic, spread over eight orders
of magnitude, so a single addition in another order shows. Bits are compared, with the token counts
and statistics, against sums that this test writes out by hand.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shiftbook.checkpoint.virtual_ranks import (
    GradientAccumulator,
    RankSum,
    VirtualRankError,
    VirtualRankPlan,
    all_reduce_tree,
    reduce_tree,
)
from tests.checkpoint.gloo_rank import GROUPS, SIZE, gradient

ROOT = Path(__file__).parents[2]
SEED = 5
GENERATIONS = itertools.count()

PLAN = VirtualRankPlan(4, GROUPS)


class Ranks:
    """Four trainer processes and the store that they meet in."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint.gloo_rank", str(self.store.port)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for _ in range(4)
        ]

    def run(self, commands: list[dict[str, Any]]) -> None:
        """Give command r to process r and wait until all have answered."""
        for process, command in zip(self.processes, commands, strict=False):
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        for process, _ in zip(self.processes, commands, strict=False):
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    print("seed", SEED)
    group = Ranks()
    yield group
    group.close()


def expected() -> RankSum:
    """The declared sum, written out: each virtual rank in order, then ((0+1)+(2+3))."""
    sums, tokens, losses = [], 0, []
    for virtual_rank in range(4):
        total: torch.Tensor | None = None
        loss = 0.0
        for step, index in enumerate(range(virtual_rank * 4, virtual_rank * 4 + 4)):
            flat, count, stats, _ = gradient(index)
            total = flat.clone() if total is None else total + flat
            loss = stats["loss_sum"] if step == 0 else loss + stats["loss_sum"]
            tokens += count
        assert total is not None
        sums.append(total)
        losses.append(loss)
    loss_sum = (losses[0] + losses[1]) + (losses[2] + losses[3])
    return RankSum((sums[0] + sums[1]) + (sums[2] + sums[3]), tokens, {"loss_sum": loss_sum})


def shuffled(seed: int, groups: list[int] | None = None) -> list[int]:
    order = list(range(GROUPS)) if groups is None else list(groups)
    random.Random(seed).shuffle(order)
    return order


def finish(
    ranks: Ranks, folder: Path, world: int, add: list[int], restore: list[Path] | None = None
) -> list[dict[str, Any]]:
    """One update on ``world`` processes; what each of them holds at the end."""
    generation = next(GENERATIONS)
    outputs = [folder / f"out-{generation}-{rank}.pt" for rank in range(world)]
    ranks.run(
        [
            {
                "world": world, "rank": rank, "generation": generation, "add": add,
                "out": str(outputs[rank]), "restore": [str(path) for path in restore or []],
            }
            for rank in range(world)
        ]
    )  # fmt: skip
    return [torch.load(path) for path in outputs]


def assert_is_expected(result: dict[str, Any]) -> None:
    wanted = expected()
    assert torch.equal(result["flat"].view(torch.int32), wanted.flat.view(torch.int32))
    assert result["tokens"] == wanted.tokens
    assert result["stats"]["loss_sum"] == wanted.stats["loss_sum"]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("order_seed", [0, SEED])
def test_world_size_and_arrival_order_do_not_change_a_bit(
    ranks: Ranks, tmp_path: Path, world: int, order_seed: int
) -> None:
    for result in finish(ranks, tmp_path, world, shuffled(order_seed)):
        assert_is_expected(result)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_an_update_that_moves_halfway_has_the_same_bits(
    ranks: Ranks, tmp_path: Path, before: int, after: int
) -> None:
    """Nine groups arrive in odd order (so some wait), the trainer is resized, seven follow."""
    order = shuffled(SEED + 10 * before + after)
    early, late = order[:9], order[9:]
    paths = [tmp_path / f"snapshot-{rank}.pt" for rank in range(before)]
    ranks.run(
        [
            {"world": before, "rank": rank, "add": early, "snapshot": str(path)}
            for rank, path in enumerate(paths)
        ]
    )
    snapshots = [torch.load(path) for path in paths]
    assert any(part["pending"] for s in snapshots for part in s["ranks"].values())
    results = finish(ranks, tmp_path, after, late, restore=paths)
    for result in results:
        assert_is_expected(result)
    uids = [uid for result in results for uid in result["uids"]]
    assert uids == [f"{group:06d}/{member}" for group in range(GROUPS) for member in range(8)]


def test_two_moves_in_one_update(ranks: Ranks, tmp_path: Path) -> None:
    order = shuffled(SEED + 99)
    first = [tmp_path / f"first-{rank}.pt" for rank in range(4)]
    second = [tmp_path / "second-0.pt"]
    ranks.run(
        [
            {"world": 4, "rank": rank, "add": order[:5], "snapshot": str(path)}
            for rank, path in enumerate(first)
        ]
    )
    ranks.run(
        [
            {
                "world": 1, "rank": 0, "add": order[5:10], "snapshot": str(second[0]),
                "restore": [str(path) for path in first],
            }
        ]
    )  # fmt: skip
    for result in finish(ranks, tmp_path, 2, order[10:], restore=second):
        assert_is_expected(result)


def filled(groups: list[int], world: int = 1, rank: int = 0) -> GradientAccumulator:
    accumulator = GradientAccumulator(PLAN, world, rank)
    for group in groups:
        accumulator.add(group, *gradient(group))
    return accumulator


def test_another_order_of_additions_would_show() -> None:
    """The comparison above can fail: a plain running sum has other bits."""
    flats = [gradient(group)[0] for group in range(GROUPS)]
    running = flats[0].clone()
    for flat in flats[1:]:
        running += flat
    assert not torch.equal(running, expected().flat)


def test_every_arrival_order_of_one_virtual_rank() -> None:
    plan = VirtualRankPlan(1, 4)
    wanted: torch.Tensor | None = None
    for order in itertools.permutations(range(4)):
        accumulator = GradientAccumulator(plan)
        for position, group in enumerate(order):
            assert not accumulator.ready()
            accumulator.add(group, *gradient(group))
            assert sorted(accumulator.groups_in) == sorted(order[: position + 1])
        total = all_reduce_tree(accumulator.local_sums(), None).flat
        wanted = total if wanted is None else wanted
        assert torch.equal(total, wanted)


def test_plan_gives_aligned_blocks() -> None:
    plan = VirtualRankPlan(4, 32)
    assert [plan.rank_of(group) for group in (0, 7, 8, 31)] == [0, 0, 1, 3]
    assert list(plan.groups_of(2)) == list(range(16, 24))
    assert [list(plan.block_of(rank, 2)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [plan.physical_rank_of(17, world) for world in (1, 2, 4)] == [0, 1, 2]


def test_named_gradients_and_flat_ones_are_the_same() -> None:
    flat, tokens, stats, uids = gradient(0)
    named = {"a": flat[:11].view(11, 1), "b": flat[11:]}
    one, other = (
        GradientAccumulator(VirtualRankPlan(1, 1)),
        GradientAccumulator(VirtualRankPlan(1, 1)),
    )
    one.add(0, flat, tokens, stats, uids)
    other.add(0, named, tokens, stats, uids)
    assert torch.equal(one.local_sums()[0].flat, other.local_sums()[0].flat)


def test_a_snapshot_does_not_change_with_its_source() -> None:
    accumulator = filled([0, 2])
    snapshot = accumulator.snapshot()
    kept = snapshot["ranks"][0]["flat"].clone()
    accumulator.add(1, *gradient(1))
    assert torch.equal(snapshot["ranks"][0]["flat"], kept)
    assert list(snapshot["ranks"][0]["pending"]) == [2]


def test_reset_and_bytes() -> None:
    accumulator = filled([0, 2])
    assert accumulator.resident_bytes() == 2 * 4 * SIZE
    accumulator.reset()
    assert accumulator.resident_bytes() == 0
    assert accumulator.groups_in == []
    assert accumulator.missing() == list(range(GROUPS))


def test_a_group_counts_once_and_only_where_it_belongs() -> None:
    accumulator = filled([0, 3], world=2)
    for again in (0, 3):
        with pytest.raises(VirtualRankError, match="exactly once"):
            accumulator.add(again, *gradient(again))
    with pytest.raises(VirtualRankError, match="send it to rank 1"):
        accumulator.add(12, *gradient(12))
    with pytest.raises(VirtualRankError, match="still missing"):
        accumulator.local_sums()
    flat, tokens, stats, uids = gradient(1)
    with pytest.raises(VirtualRankError, match="gradient elements"):
        accumulator.add(1, flat[:-1], tokens, stats, uids)
    with pytest.raises(VirtualRankError, match="float32"):
        accumulator.add(1, flat.double(), tokens, stats, uids)
    with pytest.raises(VirtualRankError, match="statistics"):
        accumulator.add(1, flat, tokens, {"other": 1.0}, uids)
    assert accumulator.groups_in == [0, 3]


def test_snapshots_that_do_not_fit_are_refused_and_change_nothing() -> None:
    halves = [filled([0, 1], 2, 0).snapshot(), filled([8], 2, 1).snapshot()]
    target = filled([5])
    with pytest.raises(VirtualRankError, match=r"missing \[2, 3\]"):
        target.restore(halves[:1])
    with pytest.raises(VirtualRankError, match="two snapshots"):
        target.restore([halves[0], *halves])
    with pytest.raises(VirtualRankError, match="plan cannot change"):
        target.restore([GradientAccumulator(VirtualRankPlan(4, 32)).snapshot()])
    assert target.groups_in == [5]
    target.restore(halves)
    assert target.groups_in == [0, 1, 8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: VirtualRankPlan(3, 12),
        lambda: VirtualRankPlan(4, 30),
        lambda: PLAN.block_of(0, 3),
        lambda: PLAN.block_of(0, 8),
        lambda: PLAN.block_of(2, 2),
        lambda: PLAN.rank_of(GROUPS),
        lambda: reduce_tree([RankSum(torch.zeros(1), 1)] * 3),
        lambda: reduce_tree({1: RankSum(torch.zeros(1), 1), 2: RankSum(torch.zeros(1), 1)}),
    ],
)
def test_what_fits_no_tree_is_refused(make: Any) -> None:
    with pytest.raises(VirtualRankError, match="expected"):
        make()
