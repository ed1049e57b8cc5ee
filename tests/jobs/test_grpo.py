"""Goal: the gradient of a group is that of the declared loss, and an update has the same bits in
whatever order and on however many physical ranks the groups' gradients are added.

Method: real episodes of the base policy; gradients are compared with a loss written out by hand,
Adam with torch's own, and the bits of three updates over worlds of 1, 2 and 4.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from shiftbook.checkpoint.virtual_ranks import GradientAccumulator, VirtualRankPlan, reduce_tree
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.errors import TrainingError
from shiftbook.jobs.grpo import (
    GroupBatch,
    GroupGradient,
    GrpoConfig,
    advantages,
    group_gradient,
    make_group_batch,
    reference_logps,
)
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.local_run import roll_out
from shiftbook.jobs.model import ModelConfig, forward_train, upcast
from shiftbook.jobs.optimizer import AdamState, apply_update, masters_of, publish
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.task import EpisodeState, new_episode
from shiftbook.jobs.toolbox import Toolbox

SEED = 17
GROUPS = 8
CONFIG = ModelConfig()


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
def gradients(policy: dict[str, torch.Tensor], batches: list[GroupBatch]) -> list[GroupGradient]:
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
    batches: list[GroupBatch], gradients: list[GroupGradient]
) -> None:
    """The reference here is the policy itself: its log-probabilities are the engine's, nearly."""
    for batch, gradient in zip(batches, gradients, strict=True):
        assert batch.reference_logps is not None
        assert np.abs(batch.reference_logps - batch.behaviour_logps).max() < 1e-3
        assert gradient.logp_gap_max < 1e-3
        assert gradient.kl_sum < 1e-4
        assert gradient.clipped_tokens == 0


def test_gradient_is_that_of_the_policy_gradient_loss(
    policy: dict[str, torch.Tensor], batches: list[GroupBatch], gradients: list[GroupGradient]
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
    assert found.clipped_tokens == batch.sampled_tokens
    assert batch.reference_logps is not None
    apart = batch.with_reference(batch.reference_logps - 0.5)
    near = group_gradient(policy, apart, loss=GrpoConfig(kl_coefficient=0.0))
    far = group_gradient(policy, apart, loss=GrpoConfig(kl_coefficient=1.0))
    assert far.kl_sum == near.kl_sum
    assert far.kl_sum == pytest.approx(batch.sampled_tokens * (np.exp(-0.5) - 0.5), rel=1e-2)
    assert far.loss_sum - near.loss_sum == pytest.approx(far.kl_sum, rel=1e-3)


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


def updated(gradients: list[GroupGradient], world: int, order_seed: int) -> dict[str, torch.Tensor]:
    """The policy after three updates by ``world`` physical ranks and shuffled arrivals."""
    masters = masters_of(load_policy())
    adam = AdamState.fresh(masters)
    plan = VirtualRankPlan(4, GROUPS)
    shuffle = random.Random(order_seed)
    for _ in range(3):
        ranks = [GradientAccumulator(plan, world, rank) for rank in range(world)]
        order = list(range(GROUPS))
        shuffle.shuffle(order)
        for index in order:
            one = gradients[index]
            owner = ranks[plan.physical_rank_of(index, world)]
            owner.add(index, one.flat, one.tokens, one.stats, one.uids)
        total = reduce_tree([reduce_tree(rank.local_sums()) for rank in ranks])
        apply_update(masters, adam, total.flat, total.tokens, 1e-3, 1.0)
    return publish(masters)


def test_updates_have_the_same_bits_in_any_order_and_world(gradients: list[GroupGradient]) -> None:
    wanted = updated(gradients, 1, 0)
    for world, order_seed in ((1, 1), (2, 2), (4, 3)):
        found = updated(gradients, world, order_seed)
        for name, tensor in wanted.items():
            assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


def test_gradients_have_the_same_bits_when_computed_again(
    policy: dict[str, torch.Tensor], batches: list[GroupBatch], gradients: list[GroupGradient]
) -> None:
    for index in (5, 0, 3):
        copy = pickle.loads(pickle.dumps(batches[index]))
        assert torch.equal(group_gradient(policy, copy).flat, gradients[index].flat)


def test_adam_agrees_with_torch(gradients: list[GroupGradient]) -> None:
    masters = masters_of(load_policy())
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in masters.items()}
    reference = torch.optim.Adam(list(theirs.values()), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    adam = AdamState.fresh(masters)
    for gradient in [one for one in gradients if one.flat.any()][:3]:
        info = apply_update(masters, adam, gradient.flat, gradient.tokens, 1e-3, 0.05)
        for name, leaf in theirs.items():
            leaf.grad = gradient.grads[name] / gradient.tokens
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.05)
        reference.step()
        assert info.grad_norm == pytest.approx(float(norm), rel=1e-4)
    for name, master in masters.items():
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


def test_optimizer_state_round_trips(gradients: list[GroupGradient]) -> None:
    masters = masters_of(load_policy())
    adam = AdamState.fresh(masters)
    apply_update(masters, adam, gradients[0].grads, gradients[0].tokens, 1e-3, 1.0)
    copy = AdamState.from_dict(adam.to_dict())
    twin = {name: tensor.clone() for name, tensor in masters.items()}
    apply_update(masters, adam, gradients[1].flat, gradients[1].tokens, 1e-3, 1.0)
    apply_update(twin, copy, gradients[1].flat, gradients[1].tokens, 1e-3, 1.0)
    assert copy.step == adam.step == 2
    for name in masters:
        assert torch.equal(masters[name], twin[name])


def test_bad_batches_and_gradients_are_refused(
    policy: dict[str, torch.Tensor], episodes: list[EpisodeState], gradients: list[GroupGradient]
) -> None:
    with pytest.raises(TrainingError, match="one draw"):
        make_group_batch(episodes[4:12])
    with pytest.raises(TrainingError, match="still open"):
        make_group_batch([new_episode(SEED, format_uid(0, 0), 0)])
    with pytest.raises(TrainingError, match="reference log-probabilities"):
        group_gradient(policy, make_group_batch(episodes[:8]))
    masters = masters_of(policy)
    before = {name: tensor.clone() for name, tensor in masters.items()}
    adam = AdamState.fresh(masters)
    broken = gradients[0].flat.clone()
    broken[7] = float("nan")
    with pytest.raises(TrainingError, match="finite"):
        apply_update(masters, adam, broken, 10, 1e-3, 1.0)
    with pytest.raises(TrainingError, match="divisor"):
        apply_update(masters, adam, gradients[0].flat, 0, 1e-3, 1.0)
    assert adam.step == 0
    assert all(torch.equal(masters[name], before[name]) for name in masters)
