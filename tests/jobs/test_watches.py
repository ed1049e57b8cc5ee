"""Goal: what the reference job computes again of an update agrees where it is honest, and not else.

Method: one trainer rank without Ray makes an update from real episodes of the base policy, as it is
and with one thing changed from outside: in the loss, the optimizer, or what is published. Engines
say which weights wrote what a turn was computed from, also where a load leaves the cache as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.jobs import trainer as job_trainer
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.engine_types import TurnRequest
from shiftbook.jobs.grpo import GroupBatch, GrpoLoss, make_group_batch, reference_logps
from shiftbook.jobs.keyed_rng import format_uid, turn_key
from shiftbook.jobs.local_run import roll_out
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.optimizer import Adam, masters_of
from shiftbook.jobs.policy_file import BASE_POLICY, load_policy
from shiftbook.jobs.questions import question
from shiftbook.jobs.task import new_episode
from shiftbook.jobs.toolbox import Toolbox
from shiftbook.jobs.trainer import TrainerWorker
from shiftbook.scheduler.workers.component import Layout
from shiftbook.scheduler.workers.host import HostSpec

SEED, GROUPS = 17, 4


@pytest.fixture(scope="module")
def policy() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return load_policy()


@pytest.fixture(scope="module")
def batches(policy: dict[str, torch.Tensor]) -> list[GroupBatch]:
    made = [new_episode(SEED, format_uid(g, m), g) for g in range(GROUPS) for m in range(8)]
    engine = TorchEngine(ModelConfig())
    engine.load(policy, 0)
    with Toolbox(SEED) as toolbox:
        roll_out(engine, toolbox, made)
    groups = [make_group_batch(made[8 * g : 8 * g + 8]) for g in range(GROUPS)]
    # A reference that lies apart, so that the KL term has a part in the gradient.
    apart = {n: t + 0.01 * torch.sign(t) if t.dim() == 2 else t for n, t in policy.items()}
    return [group.with_reference(reference_logps(apart, group)) for group in groups]


@pytest.fixture
def rank(policy: dict[str, torch.Tensor], tmp_path: Path) -> TrainerWorker:
    masters = masters_of(policy)
    parts = {"model": policy, "masters": masters, "optimizer": Adam(masters).tensors(masters)}
    fields = {"job": "j", "attempt": "a", "iteration": 0, "policy_version": 0}
    path = save_bundle(tmp_path, fields | {"scheduler": {"step": 0}}, parts).path
    config = {"seed": SEED, "virtual_ranks": 4, "groups": GROUPS, "base_policy": str(BASE_POLICY)}
    spec = HostSpec("trainer", "t0", None, "node", "shiftbook.jobs.trainer:TrainerWorker")
    worker = TrainerWorker(spec, config)
    worker.prepare(Layout(0, 1, "g0"), {"store": ("", 0), "bundle": str(path)})
    worker.activate()
    return worker


def updated(rank: TrainerWorker, batches: list[GroupBatch], clip_norm: float = 0.05) -> Any:
    for group, batch in enumerate(batches):
        rank.submit((0, group), batch)
        rank.step()
    arguments = {"learning_rate": 3e-4, "clip_norm": clip_norm, "version": 1}
    return rank.call("update", arguments)


def beyond(report: Any) -> set[str]:
    """What lies beyond its rounding."""
    found = report["watched"]["recomputed"]
    assert set(found) == {"loss", "loss gradient", "step", "moments", "norm"}
    return {name for name, one in found.items() if not one.largest <= one.allowed}


def test_an_honest_update_is_computed_again(rank: TrainerWorker, batches: list[GroupBatch]) -> None:
    report = updated(rank, batches)
    watched = report["watched"]
    print(watched["recomputed"])
    assert beyond(report) == set()
    assert watched["recomputed"]["loss"].compared == GROUPS
    assert watched["cast"] == (report["before"]["model"], report["after"]["model"])
    assert watched["unmoved"] == ()
    assert watched["moved_frozen"] == ()
    assert sum(tokens for _, tokens in report["added"].values()) == report["tokens"]
    assert {samples for samples, _ in report["added"].values()} == {len(batches[0].uids)}
    terms = watched["loss_terms"]
    assert terms["kl"].gradient_norm > 0
    assert terms["policy"].gradient_norm > 0
    total = terms["policy"].value + terms["kl"].coefficient * terms["kl"].value
    assert total == pytest.approx(report["loss"], rel=1e-4)


def _changed_loss(change: Callable[[Any], Any]) -> Callable[[TrainerWorker], None]:
    def put_in(rank: TrainerWorker) -> None:
        ranks = rank._held().ranks
        honest = ranks.loss

        def other(model: Any, item: Any) -> Any:
            return change(honest(model, item))

        ranks.loss = other

    return put_in


def _other_config(**values: float) -> Callable[[TrainerWorker], None]:
    def put_in(rank: TrainerWorker) -> None:
        loss = rank._held().ranks.loss
        assert isinstance(loss, GrpoLoss)
        loss.config = replace(loss.config, **values)

    return put_in


def _other_rate(rank: TrainerWorker) -> None:
    def double(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    rank._held().adam.register_step_pre_hook(double)


def _no_moments(rank: TrainerWorker) -> None:
    adam = rank._held().adam

    def forget(optimizer: Any, *_: Any) -> None:
        for state in adam.state.values():
            state["exp_avg_sq"].zero_()

    adam.register_step_post_hook(forget)


def _one_left_out(rank: TrainerWorker) -> None:
    settings = rank._held().adam.param_groups[0]
    settings["params"] = settings["params"][:-1]


def _not_published(rank: TrainerWorker) -> None:
    rank._held().ranks.publish = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("put_in", "named"),
    [
        (_changed_loss(lambda loss: replace(loss, total=2 * loss.total)), {"loss gradient"}),
        (_changed_loss(lambda loss: replace(loss, total=-loss.total)), {"loss gradient"}),
        (_other_rate, {"step"}),
        (_no_moments, {"moments"}),
        (_one_left_out, {"step", "moments"}),
    ],
    ids=["loss scaled", "sign", "rate", "moments", "one left out"],
)
def test_what_is_computed_otherwise_shows(
    put_in: Callable[[TrainerWorker], None],
    named: set[str],
    rank: TrainerWorker,
    batches: list[GroupBatch],
) -> None:
    put_in(rank)
    assert beyond(updated(rank, batches)) == named


def test_a_group_without_a_backward_has_no_number(
    rank: TrainerWorker, batches: list[GroupBatch]
) -> None:
    """The loss is there and its graph is not: what was to be compared never came."""
    ranks = rank._held().ranks
    honest = ranks.loss

    def cut(model: Any, item: Any) -> Any:
        loss: Any = honest(model, item)
        dead = loss.total.detach() + 0 * next(iter(model.parameters())).sum()
        return replace(loss, total=dead)

    ranks.loss = cut
    assert {"loss", "loss gradient"} <= beyond(updated(rank, batches))


def test_a_term_with_another_coefficient_is_told_as_it_is(
    rank: TrainerWorker, batches: list[GroupBatch]
) -> None:
    _other_config(kl_coefficient=0.0)(rank)
    terms = updated(rank, batches)["watched"]["loss_terms"]
    assert (terms["kl"].coefficient, terms["kl"].gradient_norm) == (0.0, 0.0)


def test_a_model_that_was_not_refreshed_is_not_its_masters(
    rank: TrainerWorker, batches: list[GroupBatch]
) -> None:
    _not_published(rank)
    report = updated(rank, batches)
    before, after = report["watched"]["cast"]
    assert before == report["before"]["model"] == report["after"]["model"]
    assert after != report["after"]["model"]


def test_an_engine_says_which_weights_wrote_its_cache(policy: dict[str, torch.Tensor]) -> None:
    def half_done(engine: TorchEngine) -> TorchEngine:
        engine.load(policy, 0)
        engine.submit(TurnRequest("000000/3", 0, list(question(SEED, 0).tokens), seed=SEED))
        for _ in range(len(question(SEED, 0).tokens) + 2):
            engine.step()
        return engine

    def finish(engine: TorchEngine) -> Any:
        found: list[Any] = []
        while not found:
            found = engine.step()
        return found[0]

    honest = half_done(TorchEngine(ModelConfig()))
    honest.load(policy, 1)
    done = finish(honest)
    assert (done.cache_version, done.versions[0], done.versions[-1]) == (1, 0, 1)
    assert done.stream == turn_key(SEED, "000000/3", 0)

    stale = half_done(TorchEngine(ModelConfig()))
    stale.version = 1  # other weights, and the cache as it was
    assert finish(stale).cache_version == 0


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_trainer, "offer", lambda value: value)
    monkeypatch.setattr(job_trainer, "fetch", lambda value: value)
