"""Goal: the reference job's trainer gives the same update whether or not it is resized in between.

Method: workers as the job has them, without Ray: a value that would go through its object store is
handed on as it is. One worker makes two updates alone; another stops in the middle of the first,
goes on as rank 0 of 2 beside a fresh worker, over a real gloo group, and shrinks again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.jobs import trainer as job_trainer
from shiftbook.jobs.grpo import GroupBatch
from shiftbook.jobs.model import ModelConfig, init_params
from shiftbook.jobs.optimizer import Adam, masters_of
from shiftbook.jobs.trainer import TrainerWorker
from shiftbook.scheduler.workers.component import Layout
from shiftbook.scheduler.workers.host import HostSpec

MODEL = {"layers": 1, "width": 16, "heads": 2, "context": 24}
GROUPS, SEED = 8, 13
UPDATE = {"learning_rate": 1e-2, "clip_norm": 0.5}


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_trainer, "offer", lambda value: value)
    monkeypatch.setattr(job_trainer, "fetch", lambda value: value)


def batch(iteration: int, group: int) -> GroupBatch:
    """A group of four sequences of random tokens."""
    draw = np.random.default_rng([SEED, iteration, group])
    shape = (4, 16)
    mask = draw.random(shape) < 0.6
    logps = np.where(mask, -draw.random(shape), 0.0).astype(np.float32)
    return GroupBatch(
        draw=group,
        uids=[f"{group:06d}/{n}" for n in range(4)],
        tokens=draw.integers(3, 20, shape),
        mask=mask,
        behaviour_logps=logps,
        versions=np.zeros(shape, np.int64),
        rewards=draw.random(4).astype(np.float32),
        reference_logps=(logps * 1.1).astype(np.float32),
    )


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    policy = {n: t.bfloat16() for n, t in init_params(ModelConfig(**MODEL), SEED).items()}
    masters = masters_of(policy)
    parts = {"model": policy, "masters": masters, "optimizer": Adam(masters).tensors(masters)}
    fields = {"job": "j", "attempt": "a", "iteration": 0, "policy_version": 0}
    return str(save_bundle(tmp_path, fields | {"scheduler": {"step": 0}}, parts).path)


def worker(name: str) -> TrainerWorker:
    config = {"seed": SEED, "model": MODEL, "loss": {"dropout": 0.1}, "virtual_ranks": 4}
    config |= {"groups": GROUPS, "base_policy": "none"}
    spec = HostSpec("trainer", name, None, "node", "shiftbook.jobs.trainer:TrainerWorker")
    return TrainerWorker(spec, config)


def feed(one: TrainerWorker, iteration: int, groups: list[int]) -> None:
    for group in groups:
        one.submit((iteration, group), batch(iteration, group))
        (answer,) = one.step()
        assert answer.key == (iteration, group)


def together(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def roots_of(report: dict[str, Any]) -> dict[str, str]:
    return dict(report["after"])


def test_a_resize_in_the_middle_of_an_update_changes_nothing(bundle: str) -> None:
    alone = worker("alone")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = ("127.0.0.1", store.port)
    alone.prepare(Layout(0, 1, "g0"), {"store": address, "bundle": bundle})
    alone.activate()
    wanted = []
    for iteration in range(2):
        feed(alone, iteration, list(range(GROUPS)))
        wanted.append(alone.call("update", {**UPDATE, "version": iteration + 1}))

    first, second = worker("first"), worker("second")
    loaded = first.prepare(Layout(0, 1, "h0"), {"store": address, "bundle": bundle})
    first.activate()
    assert loaded.fingerprints.items() >= wanted[0]["before"].items()
    feed(first, 0, [5, 0, 2])
    snapshots = {"first": first.snapshot()}
    payload = {"store": address, "snapshots": snapshots}
    answers = together(
        [
            lambda: first.prepare(Layout(0, 2, "h1"), payload),
            lambda: second.prepare(Layout(1, 2, "h1"), payload),
        ]
    )
    for answer in answers:
        assert all(
            snapshots["first"]["fingerprints"][k] == v for k, v in answer.fingerprints.items()
        )
    first.activate()
    second.activate()
    feed(first, 0, [1, 3])
    feed(second, 0, [7, 6, 5, 4])
    reports = together(
        [lambda w=w: w.call("update", {**UPDATE, "version": 1}) for w in (first, second)]
    )
    for report in reports:
        assert roots_of(report) == roots_of(wanted[0])
        assert report["grad_norm"] == wanted[0]["grad_norm"]
        for what in ("gradient", "cast"):
            assert report["watched"][what] == wanted[0]["watched"][what]
    for what in ("loss_terms", "recomputed"):  # of all groups, wherever they were computed
        assert reports[0]["watched"][what] == wanted[0]["watched"][what]
    assert all(r.largest <= r.allowed for r in reports[0]["watched"]["recomputed"].values())
    assert reports[1]["first_use_after"] == "move"

    feed(second, 1, [6, 4])
    feed(first, 1, [0])
    snapshots = {"first": first.snapshot(), "second": second.snapshot()}
    second.prepare(Layout(0, 1, "h2"), {"store": address, "snapshots": snapshots})
    second.activate()
    first.drop()
    feed(second, 1, [1, 2, 3, 7, 5])
    report = second.call("update", {**UPDATE, "version": 2})
    assert roots_of(report) == roots_of(wanted[1])
    assert report["loss"] == wanted[1]["loss"]
    assert report["watched"] == wanted[1]["watched"]
    assert report["step"] == wanted[1]["step"] == 2
