"""Goal: the job in one process learns, and the policy that comes out depends on its plan alone.

Method: short runs of the real job compared by the digest of the policy; the slow tests run the
reference configuration on three seeds and compare rewards, and make a base policy for a few steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shiftbook.jobs import make_base_policy
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.errors import ModelError
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.local_run import LocalConfig, main, reward_rise, roll_out, run_iterations
from shiftbook.jobs.model import ModelConfig, parameter_shapes
from shiftbook.jobs.policy_file import BASE_POLICY, load_policy
from shiftbook.jobs.task import new_episode
from shiftbook.jobs.toolbox import Toolbox

SHORT = LocalConfig(seed=8, iterations=2, groups=4)


@pytest.mark.slow
def test_the_policy_depends_on_the_seed_and_not_on_the_lanes() -> None:
    print("seed", SHORT.seed)
    wanted = [(r.policy_digest, r.reward_mean) for r in run_iterations(SHORT)]
    again = [(r.policy_digest, r.reward_mean) for r in run_iterations(replace(SHORT, lanes=8))]
    assert wanted == again
    other = [r.policy_digest for r in run_iterations(replace(SHORT, seed=9))]
    assert other[-1] != wanted[-1][0]


def test_base_policy_is_small_complete_and_says_how_it_was_made() -> None:
    assert BASE_POLICY.stat().st_size <= 3_000_000
    weights = load_policy()
    assert {n: tuple(t.shape) for n, t in weights.items()} == parameter_shapes(ModelConfig())
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    with safe_open(BASE_POLICY, framework="pt") as stored:
        assert stored.metadata() == {"made_by": make_base_policy.recipe(0, make_base_policy.STEPS)}


def test_base_policy_follows_the_format_and_is_often_wrong() -> None:
    engine = TorchEngine(ModelConfig())
    engine.load(load_policy(), 0)
    episodes = [new_episode(21, format_uid(g, m), g) for g in range(12) for m in range(8)]
    with Toolbox(21) as toolbox:
        roll_out(engine, toolbox, episodes)
    assert sum(episode.end_reason == "answer" for episode in episodes) >= 0.9 * len(episodes)
    reward = sum(episode.reward for episode in episodes) / len(episodes)
    assert 0.2 <= reward <= 0.6, reward
    calling = [episode for episode in episodes if episode.calls]
    assert 0.5 <= len(calling) / len(episodes) <= 0.9
    assert all(2 <= episode.calls <= 5 for episode in calling if episode.reward == 1.0)


def test_files_that_are_no_policy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="make_base_policy"):
        load_policy(tmp_path / "missing.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(BASE_POLICY.read_bytes()[:1000])
    with pytest.raises(ModelError, match="expected a safetensors file"):
        load_policy(tmp_path / "torn.safetensors")
    with pytest.raises(ModelError, match="expected"):
        load_policy(BASE_POLICY, ModelConfig(layers=2))


def test_command_prints_a_line_per_iteration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--iterations", "1", "--base-policy", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_making_a_base_policy_is_reproducible(tmp_path: Path) -> None:
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for path in files:
        assert make_base_policy.main(["--out", str(path), "--seed", "1", "--steps", "3"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size == BASE_POLICY.stat().st_size
    assert list(load_policy(files[0])) == list(load_policy())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_on_three_seeds(seed: int) -> None:
    # Eight lanes: the same bits as the default, sooner.
    records = list(run_iterations(LocalConfig(seed=seed, iterations=8, lanes=8)))
    print("seed", seed, "rewards", [round(record.reward_mean, 3) for record in records])
    assert reward_rise(records) >= 0.15
