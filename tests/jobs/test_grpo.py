"""Goal: the gradient of a group is that of the declared loss, and an update has the same bits in
whatever order and on however many physical ranks the groups' gradients are added.

Method: real episodes of the base policy; gradients are compared with a loss written out by hand,
Adam with torch's own, and the bits of three updates over worlds of 1, 2 and 4.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from shiftbook.checkpoint.elastic import GroupLoss, Place, VirtualRanks
from shiftbook.checkpoint.virtual_ranks import RankSum, VirtualRankError, reduce_tree
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.errors import TrainingError
from shiftbook.jobs.grpo import (
    GroupBatch,
    GrpoConfig,
    GrpoLoss,
    advantages,
    make_group_batch,
    reference_logps,
)
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.local_run import roll_out
from shiftbook.jobs.model import ModelConfig, forward_train, upcast
from shiftbook.jobs.optimizer import Adam, masters_of, publish
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.task import EpisodeState, new_episode
from shiftbook.jobs.toolbox import Toolbox
from shiftbook.jobs.trainer_state import make_trainer

SEED = 17
GROUPS = 8
CONFIG = ModelConfig()


@dataclass
class Gradient:
    """One group's gradient, flat and by name, and its loss."""

    flat: torch.Tensor
    loss: GroupLoss
    uids: list[str]
    grads: dict[str, torch.Tensor]


def trainer_of(
    policy: dict[str, torch.Tensor],
    seed: int = 0,
    loss: GrpoConfig | None = None,
    clip_norm: float | None = None,
    place: Place | None = None,
) -> VirtualRanks:
    return make_trainer(
        policy,
        CONFIG,
        GrpoLoss(loss or GrpoConfig(), seed),
        virtual_ranks=4,
        groups=GROUPS,
        clip_norm=clip_norm,
        place=place,
    )


def group_gradient(
    policy: dict[str, torch.Tensor],
    batch: GroupBatch,
    step: int = 0,
    seed: int = 0,
    loss: GrpoConfig | None = None,
) -> Gradient:
    trainer = trainer_of(policy, seed, loss)
    flat, found = trainer.gradient(0, (batch, step))
    sizes = [p.numel() for p in trainer.parameters.values()]
    parts = zip(trainer.parameters.items(), torch.split(flat, sizes), strict=True)
    return Gradient(flat, found, batch.uids, {n: part.view(p.shape) for (n, p), part in parts})


@pytest.fixture(scope="module")
def policy() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return load_policy()


@pytest.fixture(scope="module")
def episodes(policy: dict[str, torch.Tensor]) -> list[EpisodeState]:
    print("seed", SEED)
    made = [new_episode(SEED, format_uid(g, m), g) for g in range(GROUPS) for m in range(8)]
    engine = TorchEngine(CONFIG)
    engine.load(policy, 0)
    with Toolbox(SEED) as toolbox:
        roll_out(engine, toolbox, made)
    return made


@pytest.fixture(scope="module")
def batches(policy: dict[str, torch.Tensor], episodes: list[EpisodeState]) -> list[GroupBatch]:
    made = [make_group_batch(episodes[8 * g : 8 * g + 8]) for g in range(GROUPS)]
    return [batch.with_reference(reference_logps(policy, batch)) for batch in made]


@pytest.fixture(scope="module")
def gradients(policy: dict[str, torch.Tensor], batches: list[GroupBatch]) -> list[Gradient]:
    return [group_gradient(policy, batch) for batch in batches]


def test_batches_hold_the_episodes(batches: list[GroupBatch], episodes: list[EpisodeState]) -> None:
    for batch in batches:
        assert batch.tokens.shape[1] % 16 == 0 or batch.tokens.shape[1] == CONFIG.context
        for row, uid in enumerate(batch.uids):
            episode = next(e for e in episodes if e.uid == uid)
            length = len(episode.tokens)
            assert batch.tokens[row, :length].tolist() == episode.tokens
            assert batch.mask[row].sum() == sum(episode.mask)
            assert not batch.mask[row, length:].any()
            assert batch.rewards[row] == episode.reward
        copy = pickle.loads(pickle.dumps(batch))
        assert np.array_equal(copy.behaviour_logps, batch.behaviour_logps)
    assert make_group_batch(episodes[:8][::-1]).uids == batches[0].uids


def test_training_pass_agrees_with_the_engine(
    batches: list[GroupBatch], gradients: list[Gradient]
) -> None:
    """The reference here is the policy itself: its log-probabilities are the engine's, nearly."""
    for batch, gradient in zip(batches, gradients, strict=True):
        assert batch.reference_logps is not None
        assert np.abs(batch.reference_logps - batch.behaviour_logps).max() < 1e-3
        assert gradient.loss.notes["logp_gap_max"] < 1e-3
        assert gradient.loss.stats["kl_sum"] < 1e-4
        assert gradient.loss.stats["clipped_tokens"] == 0


def test_the_gap_is_the_mean_distance_to_the_engine(
    policy: dict[str, torch.Tensor], batches: list[GroupBatch], gradients: list[Gradient]
) -> None:
    """By token, whichever way it lies; another value of one token moves it by that token's part."""
    for batch, gradient in zip(batches, gradients, strict=True):
        apart = np.abs(reference_logps(policy, batch) - batch.behaviour_logps)[batch.mask].mean()
        gap = gradient.loss.stats["logp_gap_sum"] / batch.sampled_tokens
        assert gap == pytest.approx(float(apart), abs=2e-7)
        assert 0 < gap < 1e-5
    batch = batches[0]
    told = batch.behaviour_logps.copy()
    row, place = np.argwhere(batch.mask)[3]
    told[row, place] -= 0.5
    other = group_gradient(policy, replace(batch, behaviour_logps=told))
    more = other.loss.stats["logp_gap_sum"] - gradients[0].loss.stats["logp_gap_sum"]
    assert more == pytest.approx(0.5, abs=1e-5)
    # Outside the mask the engine says nothing, and nothing is compared.
    told = np.where(batch.mask, batch.behaviour_logps, 9.0).astype(np.float32)
    outside = group_gradient(policy, replace(batch, behaviour_logps=told))
    assert outside.loss.stats["logp_gap_sum"] == gradients[0].loss.stats["logp_gap_sum"]


def test_gradient_is_that_of_the_policy_gradient_loss(
    policy: dict[str, torch.Tensor], batches: list[GroupBatch], gradients: list[Gradient]
) -> None:
    """At a ratio of 1 and no divergence the gradient is that of -sum(advantage x log π)."""
    index = max(range(GROUPS), key=lambda g: float(batches[g].rewards.std()))
    batch = batches[index]
    assert batch.rewards.std() > 0
    leaves = {name: tensor.requires_grad_() for name, tensor in upcast(policy).items()}
    tokens = torch.tensor(batch.tokens)
    logps = torch.log_softmax(forward_train(CONFIG, leaves, tokens[:, :-1]), -1)
    said = logps.gather(2, tokens[:, 1:, None])[:, :, 0]
    weight = torch.tensor(batch.mask[:, 1:]) * torch.tensor(advantages(batch.rewards))[:, None]
    wanted = torch.autograd.grad(-(said * weight).sum(), list(leaves.values()))
    for (name, found), other in zip(gradients[index].grads.items(), wanted, strict=True):
        scale = float(other.abs().max())
        assert torch.allclose(found, other, atol=1e-3 * scale + 1e-6), name


def test_clip_and_kl_enter_the_loss(
    policy: dict[str, torch.Tensor], batches: list[GroupBatch]
) -> None:
    batch = max(batches, key=lambda b: float(b.rewards.std()))
    shifted = GroupBatch(**{**vars(batch), "behaviour_logps": batch.behaviour_logps - 1.0})
    found = group_gradient(policy, shifted)
    assert found.loss.stats["clipped_tokens"] == batch.sampled_tokens
    assert batch.reference_logps is not None
    apart = batch.with_reference(batch.reference_logps - 0.5)
    near = group_gradient(policy, apart, loss=GrpoConfig(kl_coefficient=0.0))
    far = group_gradient(policy, apart, loss=GrpoConfig(kl_coefficient=1.0))
    assert far.loss.stats["kl_sum"] == near.loss.stats["kl_sum"]
    assert far.loss.stats["kl_sum"] == pytest.approx(
        batch.sampled_tokens * (np.exp(-0.5) - 0.5), rel=1e-2
    )
    added = float(far.loss.total - near.loss.total)
    assert added == pytest.approx(far.loss.stats["kl_sum"], rel=1e-3)


def test_groups_without_contrast_have_no_advantage() -> None:
    assert np.array_equal(advantages(np.ones(8, np.float32)), np.zeros(8, np.float32))
    mixed = advantages(np.array([1, 0, 0, 0], np.float32))
    assert mixed[0] > 0 > mixed[1]
    assert abs(mixed.sum()) < 1e-6


def test_dropout_is_keyed_by_seed_step_and_group(
    policy: dict[str, torch.Tensor], batches: list[GroupBatch]
) -> None:
    loss = GrpoConfig(dropout=0.1)
    batch = max(batches, key=lambda b: float(b.rewards.std()))
    torch.manual_seed(1)
    one = group_gradient(policy, batch, step=3, seed=1, loss=loss)
    torch.manual_seed(2)
    again = group_gradient(policy, batch, step=3, seed=1, loss=loss)
    assert torch.equal(one.flat, again.flat)
    for step, seed in ((4, 1), (3, 2)):
        other = group_gradient(policy, batch, step=step, seed=seed, loss=loss)
        assert not torch.equal(one.flat, other.flat)


def updated(batches: list[GroupBatch], world: int, order_seed: int) -> dict[str, torch.Tensor]:
    """The policy after three updates by ``world`` physical ranks and shuffled arrivals."""
    loss = GrpoConfig(dropout=0.1)
    start = load_policy()
    ranks = [
        trainer_of(start, loss=loss, clip_norm=1.0, place=Place(rank, world))
        for rank in range(world)
    ]
    shuffle = random.Random(order_seed)
    for iteration in range(3):
        for rank in ranks:
            order = rank.missing()
            shuffle.shuffle(order)
            for index in order:
                rank.add(index, (batches[index], iteration), batches[index].uids)
        total = reduce_tree([reduce_tree(rank.accumulator.local_sums()) for rank in ranks])
        for rank in ranks:
            rank.apply(total, 1e-3)
    return ranks[-1].parts()["model"]


def test_updates_have_the_same_bits_in_any_order_and_world(batches: list[GroupBatch]) -> None:
    wanted = updated(batches, 1, 0)
    for world, order_seed in ((1, 1), (2, 2), (4, 3)):
        found = updated(batches, world, order_seed)
        for name, tensor in wanted.items():
            assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


def test_gradients_have_the_same_bits_when_computed_again(
    policy: dict[str, torch.Tensor], batches: list[GroupBatch], gradients: list[Gradient]
) -> None:
    for index in (5, 0, 3):
        copy = pickle.loads(pickle.dumps(batches[index]))
        assert torch.equal(group_gradient(policy, copy).flat, gradients[index].flat)


def test_adam_agrees_with_torch(gradients: list[Gradient]) -> None:
    trainer = trainer_of(load_policy(), clip_norm=0.05)
    theirs = {name: t.clone().requires_grad_() for name, t in trainer.masters.items()}
    reference = torch.optim.Adam(list(theirs.values()), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for gradient in [one for one in gradients if one.flat.any()][:3]:
        report = trainer.apply(RankSum(gradient.flat, gradient.loss.weight), 1e-3)
        for name, leaf in theirs.items():
            leaf.grad = gradient.grads[name] / gradient.loss.weight
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.05)
        reference.step()
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
    for name, master in trainer.masters.items():
        # A gradient of nearly nothing has a sign that rounding decides; three steps of lr at most.
        close = (master - theirs[name]).abs() < 1e-5
        assert close.float().mean() > 0.99, name
        assert (master - theirs[name]).abs().max() <= 6e-3, name


def test_publishing_masters_of_a_policy_gives_the_policy() -> None:
    weights = load_policy()
    published = publish(masters_of(weights))
    assert list(published) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(published[name], tensor)


def test_optimizer_state_round_trips(gradients: list[Gradient]) -> None:
    one = trainer_of(load_policy())
    one.apply(RankSum(gradients[0].flat, gradients[0].loss.weight), 1e-3)
    adam = one.optimizer
    assert isinstance(adam, Adam)
    copy = make_trainer(
        one.parts()["model"],
        CONFIG,
        GrpoLoss(GrpoConfig(), 0),
        virtual_ranks=4,
        groups=GROUPS,
        masters=one.masters,
        moments=adam.tensors(one.masters),
        updates=1,
    )
    for trainer in (one, copy):
        trainer.apply(RankSum(gradients[1].flat, gradients[1].loss.weight), 1e-3)
    assert isinstance(copy.optimizer, Adam)
    assert copy.optimizer.updates == adam.updates == 2
    for name, master in one.masters.items():
        assert torch.equal(master, copy.masters[name])
        assert master.data_ptr() != copy.masters[name].data_ptr()


def test_bad_batches_and_gradients_are_refused(
    policy: dict[str, torch.Tensor], episodes: list[EpisodeState], gradients: list[Gradient]
) -> None:
    with pytest.raises(TrainingError, match="one draw"):
        make_group_batch(episodes[4:12])
    with pytest.raises(TrainingError, match="still open"):
        make_group_batch([new_episode(SEED, format_uid(0, 0), 0)])
    with pytest.raises(TrainingError, match="reference log-probabilities"):
        group_gradient(policy, make_group_batch(episodes[:8]))
    trainer = trainer_of(policy)
    before = {name: tensor.clone() for name, tensor in trainer.masters.items()}
    broken = gradients[0].flat.clone()
    broken[7] = float("nan")
    with pytest.raises(VirtualRankError, match="finite"):
        trainer.apply(RankSum(broken, 10), 1e-3)
    with pytest.raises(VirtualRankError, match="weight"):
        trainer.apply(RankSum(gradients[0].flat, 0), 1e-3)
    assert trainer.updates == 0
    assert all(torch.equal(trainer.masters[name], before[name]) for name in before)
