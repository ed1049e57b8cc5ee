"""Goal: the job's fast mode adds gradients as they come, and loses none in a move.

Method: trainer workers of the job are resharded 1 → 2 → 1 in the middle of an update, as a move
does it, and their update is compared with the fixed tree's. What the configuration declares is
read: it must promise no bits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs import trainer
from shiftbook.jobs.config import opened, plan_of
from shiftbook.jobs.model import ModelConfig, init_params
from shiftbook.jobs.optimizer import Adam, masters_of
from shiftbook.jobs.replay import reference_job
from shiftbook.jobs.runner import Place
from shiftbook.jobs.trainer import TrainerWorker
from shiftbook.ledger.errors import InvalidInput
from shiftbook.scheduler.workers.component import Layout, Loaded
from shiftbook.scheduler.workers.host import HostSpec
from tests.jobs.test_trainer_worker import MODEL, SEED, batch

GROUPS = 4


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would go through Ray's object store is handed on as it is."""
    monkeypatch.setattr(trainer, "offer", lambda value: value)


class World:
    """Trainer processes of the job, as threads of this one, and their moves."""

    def __init__(self, folder: Path, reduction: str) -> None:
        self.config = {"seed": SEED, "model": MODEL, "virtual_ranks": 2, "groups": GROUPS}
        self.config |= {"base_policy": "none", "reduction": reduction}
        policy = {n: t.bfloat16() for n, t in init_params(ModelConfig(**MODEL), SEED).items()}
        masters = masters_of(policy)
        parts = {"model": policy, "masters": masters, "optimizer": Adam(masters).tensors(masters)}
        fields = {"job": "j", "attempt": "a", "iteration": 0, "policy_version": 0}
        saved = save_bundle(folder / "bundles", fields | {"scheduler": {"step": 0}}, parts)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers: list[TrainerWorker] = []
        self.bundle = str(saved.path)
        self.generation = 0

    def _worker(self) -> TrainerWorker:
        spec = HostSpec("trainer", "t", None, "node", "shiftbook.jobs.trainer:TrainerWorker")
        return TrainerWorker(spec, self.config)

    def begin(self) -> None:
        self.workers = [self._worker()]
        self._prepare({"bundle": self.bundle})

    def resize(self, world: int) -> tuple[dict[str, str], dict[str, str]]:
        """Fingerprints at the sources, and as the targets took them."""
        sent = {str(n): worker.snapshot() for n, worker in enumerate(self.workers)}
        before: dict[str, str] = {}
        for answer in sent.values():
            before |= answer["fingerprints"]
        self.workers = self.workers[:world]
        self.workers += [self._worker() for _ in range(world - len(self.workers))]
        after: dict[str, str] = {}
        for loaded in self._prepare({"snapshots": sent}):
            after |= loaded.fingerprints
        return before, {name: after[name] for name in after if name in before}

    def _prepare(self, payload: dict[str, Any]) -> list[Loaded]:
        self.generation += 1
        payload |= {"store": ("127.0.0.1", self.store.port)}
        world = len(self.workers)

        def prepare(rank: int) -> Loaded:
            layout = Layout(rank, world, f"g{self.generation}")
            return self.workers[rank].prepare(layout, payload)

        with ThreadPoolExecutor(world) as pool:
            loaded = list(pool.map(prepare, range(world)))
        for worker in self.workers:
            worker.activate()
        return loaded

    def add(self, *groups: int) -> None:
        for group in groups:
            owner = next(w for w in self.workers if w._held().ranks.accumulator.owns(group))
            for _ in range(2):  # delivered twice, counted once
                owner.submit((0, group), batch(0, group))
                owner.step()

    def update(self) -> list[dict[str, Any]]:
        arguments = {"learning_rate": 1e-3, "clip_norm": 1.0, "version": 1}
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda w: w.call("update", arguments), self.workers))


def moved(folder: Path, reduction: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    folder.mkdir()
    world = World(folder, reduction)
    world.begin()
    world.add(3, 0)
    before, after = world.resize(2)
    assert before == after
    assert any(name.startswith("accumulator/") for name in before)
    world.add(2, 1, 3, 0)
    before, after = world.resize(1)
    assert before == after
    assert world.workers[0]._held().ranks.accumulator.missing() == []
    reports = world.update()
    return reports, world.workers[0]._held().parts()["masters"]


def test_a_move_within_an_update_loses_nothing_and_stays_within_rounding(tmp_path: Path) -> None:
    ((tree,), expected), ((loose,), found) = (
        moved(tmp_path / reduction, reduction) for reduction in ("tree", "unordered")
    )
    assert loose["tokens"] == tree["tokens"]
    assert loose["grad_norm"] == pytest.approx(tree["grad_norm"], rel=1e-7)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5)
    print("equal bits:", fingerprint_tensors(expected) == fingerprint_tensors(found))


def test_two_processes_end_with_one_policy(tmp_path: Path) -> None:
    world = World(tmp_path, "unordered")
    world.begin()
    world.resize(2)
    world.add(0, 1, 2, 3)
    first, second = world.update()
    assert first["after"] == second["after"]


def test_the_plan_says_so_and_nothing_promises_bits(tmp_path: Path) -> None:
    place = Place(tmp_path)
    devices = ("local/0", "local/1")
    fast = place.config("fast", reduction="unordered")
    plan = plan_of(fast)
    assert plan.update.reduction == plan.view().reduction == "unordered"
    assert plan.tolerances == {"replay": 1e-5}
    assert opened(fast, devices).replay is None
    with pytest.raises(InvalidInput, match="fixed tree, found the reduction 'unordered'"):
        reference_job(fast.model_dump())
    ordered = place.config("ordered")
    assert plan_of(ordered).update.reduction == "tree"
    assert plan_of(ordered).tolerances == {}
    assert opened(ordered, devices).replay is not None
    with pytest.raises(ValueError, match="reduction"):
        place.config("none", reduction="fast")
