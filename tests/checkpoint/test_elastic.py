"""Goal: whatever the number of trainer processes does within a run, the parameters, the optimizer's
state and its settings are those of the run on one process, bit for bit.

Method: four real processes live through the module and train small models through schedules of
worlds, groups of gloo built over one lasting store; schedules that change the world between updates
and in the middle of them, drawn by hand and by Hypothesis. The run that they are compared with is
made here, in one process, by one `VirtualRanks` that never moves.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint.elastic import GroupLoss, Place, VirtualRanks, fp32_masters
from shiftbook.checkpoint.elastic_move import agree
from shiftbook.checkpoint.elastic_move import settings as what_must_agree
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.reduction_tree import RankSum
from shiftbook.checkpoint.virtual_ranks import VirtualRankError
from shiftbook.ledger.plan import Plan
from tests.checkpoint.elastic_rank import GROUPS, PROCESSES, Net, Setup, batch_of, make, take_part

ROOT = Path(__file__).parents[2]
NAMES = itertools.count()
UPDATES = 4

SETUPS = {
    "plain": Setup(),
    "dropout and clipping": Setup(dropout=0.3, clip_norm=0.5),
    "bf16 with fp32 masters": Setup(dtype="bfloat16", dropout=0.1, clip_norm=10.0),
    "momentum": Setup(optimizer="SGD", clip_norm=1.0, dropout=0.2),
    "eight virtual ranks": Setup(virtual_ranks=8, dropout=0.1),
}

Schedule = list[tuple[int, int, float]]
"""(world, updates made at its end, share of the next update's groups that are in then)."""

DOWN_AND_UP: Schedule = [(4, 1, 0.0), (2, 2, 0.0), (1, 3, 0.0), (4, UPDATES, 0.0)]
MIDWAY: Schedule = [(4, 1, 0.5), (2, 1, 0.75), (1, 2, 0.25), (4, 2, 1.0), (2, UPDATES, 0.0)]


class Trainers:
    """Four trainer processes and the store that they meet in."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.checkpoint.elastic_rank",
                    str(self.store.port),
                    str(n),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for n in range(PROCESSES)
        ]

    def run(self, folder: Path, setup: Setup, **more: Any) -> list[dict[str, Any]]:
        """Give all processes one command; what those that train at the end hold."""
        name = f"run-{next(NAMES)}"
        command = {"name": name, "setup": setup.plain(), "out": str(folder / name), **more}
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
        return [torch.load(path) for path in sorted(folder.glob(f"{name}-*.pt"))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prints(parts: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Fingerprints by part and name."""
    return fingerprint_tensors({f"{p}/{n}": t for p, ts in parts.items() for n, t in ts.items()})


def fixed(setup: Setup, updates: int = UPDATES) -> dict[str, str]:
    """The run that the others are held against: one process, groups in declared order."""
    trainer = make(setup)
    for _ in range(updates):
        for group in range(GROUPS):
            trainer.add(group, batch_of(trainer.updates, group))
        trainer.update(learning_rate=1e-2 / (1 + trainer.updates))
    return prints(trainer.parts())


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("schedule", [DOWN_AND_UP, MIDWAY], ids=["between updates", "within them"])
def test_four_two_one_four_gives_the_bits_of_the_fixed_run(
    trainers: Trainers, tmp_path: Path, name: str, schedule: Schedule
) -> None:
    wanted = fixed(SETUPS[name])
    results = trainers.run(tmp_path, SETUPS[name], schedule=schedule, order=5)
    assert len(results) == schedule[-1][0]
    for result in results:
        assert result["updates"] == UPDATES
        assert prints(result["parts"]) == wanted


worlds = st.sampled_from([1, 2, 4])
steps = st.tuples(worlds, st.integers(0, 1), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(moves=st.lists(steps, min_size=1, max_size=5), last=worlds, order=st.integers(0, 99))
def test_any_schedule_gives_the_bits_of_the_fixed_run(
    trainers: Trainers, tmp_path: Path, moves: Schedule, last: int, order: int
) -> None:
    """Worlds, cuts within updates and arrival orders at random; all that arrived is used once."""
    schedule, updates, share = [], 0, 0.0
    for world, more, part in moves:
        updates += more
        share = max(part, 0.0 if more else share)  # what is in stays in
        schedule.append((world, updates, share))
    schedule.append((last, updates + 1, 0.0))
    setup = SETUPS["dropout and clipping"]
    for result in trainers.run(tmp_path, setup, schedule=schedule, order=order):
        assert prints(result["parts"]) == fixed(setup, updates + 1)


def test_half_done_sums_and_their_uids_travel(trainers: Trainers, tmp_path: Path) -> None:
    schedule = [(4, 1, 0.5), (2, 1, 0.5)]
    results = trainers.run(tmp_path, Setup(), schedule=schedule, order=1)
    uids = [uid for result in results for uid in result["uids"]]
    assert len(uids) == len(set(uids)) == GROUPS // 2


def test_a_stream_of_another_seed_and_a_sum_in_another_order_would_show() -> None:
    """The comparisons above can fail: each ingredient moves the bits."""
    wanted = fixed(SETUPS["dropout and clipping"])
    assert fixed(Setup(dropout=0.3, clip_norm=0.5, seed=4)) != wanted
    assert fixed(Setup(dropout=0.3, clip_norm=0.5, virtual_ranks=8)) != wanted
    assert fixed(Setup(dropout=0.3, clip_norm=0.5, virtual_ranks=1)) != wanted
    assert fixed(Setup(dropout=0.3)) != wanted
    assert fixed(SETUPS["dropout and clipping"]) == wanted


def test_the_groups_draw_from_no_stream_of_the_process() -> None:
    trainer = make(Setup(dropout=0.5))
    torch.manual_seed(99)
    first, _ = trainer.gradient(2, batch_of(0, 2))
    after = torch.get_rng_state()
    torch.manual_seed(99)
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(1)
    again, _ = trainer.gradient(2, batch_of(0, 2))
    other, _ = trainer.gradient(3, batch_of(0, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_update_is_what_torch_does_with_the_whole_batch() -> None:
    """Against one backward over all groups, torch's clipping and its AdamW, up to rounding."""
    trainer = make(Setup(clip_norm=0.5))
    torch.manual_seed(11)
    model = Net(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = [trainer.gradient(group, batch_of(0, group)) for group in range(GROUPS)]
    for group in range(GROUPS):
        trainer.add(group, batch_of(0, group))
    report = trainer.update()
    total = sum(flat.double() for flat, _ in gradients)
    start = 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.grad = (total[start:stop] / report.weight).float().view(parameter.shape)
        start = stop
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert report.clipped
    assert report.weight == 3 * GROUPS
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert report.loss == pytest.approx(sum(g.stats["loss_sum"] for _, g in gradients) / 24)
    for name, theirs in model.named_parameters():
        assert torch.allclose(trainer.parameters[name], theirs, atol=1e-6), name


def test_the_unordered_mode_keeps_within_rounding_and_loses_nothing_in_a_move(
    trainers: Trainers, tmp_path: Path
) -> None:
    setup = Setup(dropout=0.2, clip_norm=0.5, reduction="unordered")
    ordered = make(Setup(dropout=0.2, clip_norm=0.5))
    take_part(ordered, UPDATES, 0.0, 0)
    wanted = ordered.parts()["masters"]
    for result in trainers.run(tmp_path, setup, schedule=[*MIDWAY[:-1], (4, UPDATES, 0.0)]):
        for name, tensor in result["parts"]["masters"].items():
            assert torch.allclose(tensor, wanted[name], rtol=1e-3, atol=1e-4), name


def test_a_move_that_fails_leaves_everything_in_place() -> None:
    trainer = make(Setup())
    take_part(trainer, 1, 0.5, 0)
    before, held = prints(trainer.parts()), trainer.accumulator.groups_in
    piece = trainer.accumulator.snapshot()
    broken = {**piece, "ranks": {k: v for k, v in piece["ranks"].items() if k != 1}}
    with pytest.raises(VirtualRankError, match="missing"):
        trainer.at(Place(0, 2), [broken])
    assert (prints(trainer.parts()), trainer.accumulator.groups_in) == (before, held)
    half = trainer.at(Place(1, 2), [piece])
    assert half.missing() == [g for g in trainer.missing() if g >= GROUPS // 2]
    assert trainer.accumulator.groups_in == held


def test_processes_that_differ_are_refused_by_name() -> None:
    """`agree` is called with what two processes would say; here both sides are this process."""
    mine = what_must_agree(make(Setup()))
    pair = [dist.HashStore()]
    found: list[str] = []

    def other(rank: int, said: dict[str, Any]) -> None:
        group = dist.ProcessGroupGloo(pair[0], rank, 2, timedelta(seconds=20))
        try:
            agree(group, said)
        except VirtualRankError as error:
            found.append(str(error))

    sides = [
        threading.Thread(target=other, args=(0, mine)),
        threading.Thread(target=other, args=(1, {**mine, "threads": mine["threads"] + 1})),
    ]
    for side in sides:
        side.start()
    for side in sides:
        side.join(30)
    assert len(found) == 2
    assert all("same threads" in text for text in found)


class Counting(torch.nn.Module):
    """Writes to a buffer in its forward, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.weight * x


def simple(model: torch.nn.Module, batch: torch.Tensor) -> GroupLoss:
    return GroupLoss(model(batch).sum(), 2)


def test_what_cannot_be_trained_alike_everywhere_is_refused() -> None:
    model = Counting()
    trainer = VirtualRanks(model, torch.optim.SGD(model.parameters(), lr=0.1), simple)
    with pytest.raises(VirtualRankError, match="wrote to seen"):
        trainer.add(0, torch.ones(2))
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(VirtualRankError, match="fp32_masters"):
        VirtualRanks(half, torch.optim.SGD(half.parameters(), lr=0.1), simple)
    masters = fp32_masters(half)
    with pytest.raises(VirtualRankError, match="make it from"):
        VirtualRanks(half, torch.optim.SGD(half.parameters(), lr=0.1), simple, masters=masters)
    with pytest.raises(VirtualRankError, match="tree or unordered"):
        VirtualRanks(
            half, torch.optim.SGD(masters.values(), lr=0.1), simple, masters=masters,
            reduction="ring",  # type: ignore[arg-type]
        )  # fmt: skip


def test_groups_and_gradients_that_do_not_fit_change_nothing() -> None:
    trainer = make(Setup())
    before = prints(trainer.parts())
    trainer.add(0, batch_of(0, 0))
    with pytest.raises(VirtualRankError, match="exactly once"):
        trainer.add(0, batch_of(0, 0))
    with pytest.raises(VirtualRankError, match="still missing"):
        trainer.update()
    size = sum(p.numel() for p in trainer.parameters.values())
    for total, said in (
        (RankSum(torch.full((size,), float("nan")), 1), "finite"),
        (RankSum(torch.zeros(size), 0), "weight"),
        (RankSum(torch.zeros(size - 1), 1), "gradient elements"),
    ):
        with pytest.raises(VirtualRankError, match=said):
            trainer.apply(total)
    assert prints(trainer.parts()) == before
    assert trainer.updates == 0


def test_a_process_without_a_part_in_the_training_adds_nothing() -> None:
    idle = make(Setup()).at(None)
    assert idle.missing() == []
    with pytest.raises(VirtualRankError, match="left out"):
        idle.add(0, batch_of(0, 0))
    with pytest.raises(VirtualRankError, match="left out"):
        idle.update()
    with pytest.raises(VirtualRankError, match="stand at one update"):
        idle.resize(dist.HashStore(), "first", rank=0, world=1, processes=1)
    with pytest.raises(VirtualRankError, match="take part in a resize"):
        idle.resize(dist.HashStore(), "second", rank=0, world=2, processes=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_arrival_order_changes_no_bit_on_a_gpu() -> None:
    torch.use_deterministic_algorithms(True)
    found = []
    for order in (range(GROUPS), reversed(range(GROUPS))):
        trainer = make(Setup(dropout=0.3, clip_norm=0.5))
        model = trainer.model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = VirtualRanks(model, optimizer, trainer.loss, groups=GROUPS, clip_norm=0.5)
        for group in order:
            trainer.add(group, tuple(t.cuda() for t in batch_of(0, group)))
        trainer.update()
        found.append(prints(trainer.parts()))
    torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]


def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    trainer = make(Setup())
    take_part(trainer, 1, 0.0, 0)
    parts, before = trainer.parts(), prints(trainer.parts())
    for part, change in (
        ("masters", {"more": torch.ones(1)}),
        ("model", {"unused": torch.ones(6)}),
        ("optimizer", {"other/exp_avg": torch.ones(1)}),
    ):
        with pytest.raises(VirtualRankError, match="expected"):
            trainer.load({**parts, part: {**parts[part], **change}}, 1)
    assert prints(trainer.parts()) == before
    other = make(Setup(seed=9))
    other.load(parts, 1)
    assert prints(other.parts()) == before
    assert other.updates == 1


def test_the_plan_gives_every_setting() -> None:
    from tests.checkpoint.test_recorder import plan

    made = plan()
    update = made.update.model_copy(
        update={"virtual_ranks": 2, "prompts_per_update": 6, "clip_norm": 0.25}
    )
    declared: Plan = made.model_copy(update={"update": update, "seed": 77})
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = VirtualRanks.declared(model, optimizer, simple, declared)
    assert (trainer.plan.virtual_ranks, trainer.plan.groups_per_iteration) == (2, 6)
    assert (trainer.seed, trainer.clip_norm, trainer.reduction) == (77, 0.25, "tree")
    fast = declared.model_copy(
        update={"update": update.model_copy(update={"reduction": "unordered"})}
    )
    assert VirtualRanks.declared(model, optimizer, simple, fast).reduction == "unordered"
    changed = declared.view().differences(fast.view())
    assert changed == {"reduction": ("tree", "unordered")}
