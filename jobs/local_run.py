"""The reference job's training in one process, without Ray and ledger: to choose sizes and rates.

``python -m shiftbook.jobs.local_run --iterations 10 --seed 0`` prints reward and stage times, an
iteration a line. Rollout, reference log-probabilities and training run one after the other here, on
questions in their own order; the job on Ray draws them by its declared sampler.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shiftbook.checkpoint.elastic import VirtualRanks
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.errors import JobError
from shiftbook.jobs.grpo import (
    GROUP_SIZE,
    GroupBatch,
    GrpoConfig,
    GrpoLoss,
    make_group_batch,
    reference_logps,
)
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.policy_file import BASE_POLICY, load_policy
from shiftbook.jobs.task import EpisodeState, new_episode
from shiftbook.jobs.toolbox import Toolbox
from shiftbook.jobs.trainer_state import make_trainer


@dataclass(frozen=True)
class LocalConfig:
    """What the training program declares; the defaults are the reference job's.

    Bits do not depend on ``lanes``. Three make rollout a little more than 70 % of the computing,
    as in real jobs; more of them decode faster and bring that share down.
    """

    seed: int = 0
    iterations: int = 10
    groups: int = 32
    lanes: int = 3
    virtual_ranks: int = 4
    learning_rate: float = 3e-4
    clip_norm: float = 1.0
    loss: GrpoConfig = field(default_factory=GrpoConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    base_policy: Path = BASE_POLICY


@dataclass(frozen=True)
class IterationRecord:
    """One iteration: mean reward, stage times in seconds, decode counters and the new policy.

    ``rollout_s`` is the time in which the engine worked, ``tool_wait_s`` that in which every open
    episode waited for a tool.
    """

    iteration: int
    reward_mean: float
    tokens_mean: float
    rollout_s: float
    tool_wait_s: float
    inference_s: float
    train_s: float
    update_s: float
    lane_steps: int
    steps: int
    sampled_tokens: int
    kl_mean: float
    grad_norm: float
    logp_gap_max: float
    policy_digest: str

    @property
    def rollout_share(self) -> float:
        """Rollout's part of the computing time."""
        return self.rollout_s / (self.rollout_s + self.inference_s + self.train_s + self.update_s)


def policy_digest(policy: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bfloat16 bytes in declared order, in hex."""
    digest = hashlib.sha256()
    for name, tensor in policy.items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def roll_out(
    engine: TorchEngine, toolbox: Toolbox, episodes: list[EpisodeState]
) -> tuple[float, float]:
    """Run ``episodes`` to their end; seconds of engine work and of waiting for tools alone."""
    by_uid = {episode.uid: episode for episode in episodes}
    for episode in episodes:
        engine.submit(episode.next_request())
    tool_wait_s, began = 0.0, time.perf_counter()
    while engine.running or engine.waiting or toolbox.waiting:
        for result in engine.step():
            episode = by_uid[result.uid]
            episode.absorb_turn(result)
            if episode.pending_call is not None:
                toolbox.start_call((episode.uid, episode.turn), episode.pending_call)
        if not engine.running and not engine.waiting and (due := toolbox.next_due()) is not None:
            waited = time.perf_counter()
            time.sleep(max(0.0, min(due - time.monotonic(), 0.3)))
            tool_wait_s += time.perf_counter() - waited
        for outcome in toolbox.ready():
            episode = by_uid[outcome.key[0]]
            episode.absorb_tool(outcome.tokens)
            if not episode.done:
                engine.submit(episode.next_request())
    return time.perf_counter() - began - tool_wait_s, tool_wait_s


def run_iterations(
    config: LocalConfig, on_policy: Callable[[dict[str, Tensor]], None] | None = None
) -> Iterator[IterationRecord]:
    """Train for ``config.iterations`` iterations, giving a record after each.

    ``on_policy`` is called with the policy that each iteration starts from, and at last with the
    one that came out. Uses one thread and deterministic algorithms (set here for the process).
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    base = load_policy(config.base_policy, config.model)
    reference = {name: tensor.float() for name, tensor in base.items()}
    trainer = make_trainer(
        base,
        config.model,
        GrpoLoss(config.loss, config.seed),
        virtual_ranks=config.virtual_ranks,
        groups=config.groups,
        clip_norm=config.clip_norm,
    )
    engine = TorchEngine(config.model, config.lanes)
    with Toolbox(config.seed) as toolbox:
        for iteration in range(config.iterations):
            policy = trainer.parts()["model"]
            if on_policy is not None:
                on_policy(policy)
            engine.load(policy, iteration)
            before = (engine.lane_steps, engine.steps, engine.sampled_tokens)
            first = iteration * config.groups
            episodes = [
                new_episode(config.seed, format_uid(first + g, m), first + g, config.model.context)
                for g in range(config.groups)
                for m in range(GROUP_SIZE)
            ]
            rollout_s, tool_wait_s = roll_out(engine, toolbox, episodes)
            groups = [
                make_group_batch(episodes[start : start + GROUP_SIZE])
                for start in range(0, len(episodes), GROUP_SIZE)
            ]
            groups, inference_s = _with_reference(groups, reference, config)
            train_s, gap = _accumulate(groups, trainer, iteration)
            began = time.perf_counter()
            report = trainer.update(config.learning_rate)
            policy = trainer.parts()["model"]
            update_s = time.perf_counter() - began
            yield IterationRecord(
                iteration=iteration,
                reward_mean=report.stats["reward_sum"] / report.stats["samples"],
                tokens_mean=sum(len(e.tokens) for e in episodes) / len(episodes),
                rollout_s=rollout_s,
                tool_wait_s=tool_wait_s,
                inference_s=inference_s,
                train_s=train_s,
                update_s=update_s,
                lane_steps=engine.lane_steps - before[0],
                steps=engine.steps - before[1],
                sampled_tokens=engine.sampled_tokens - before[2],
                kl_mean=report.stats["kl_sum"] / report.weight,
                grad_norm=report.grad_norm,
                logp_gap_max=gap,
                policy_digest=policy_digest(policy),
            )
        if on_policy is not None:
            on_policy(trainer.parts()["model"])


def _with_reference(
    groups: list[GroupBatch], reference: Mapping[str, Tensor], config: LocalConfig
) -> tuple[list[GroupBatch], float]:
    began = time.perf_counter()
    done = [
        group.with_reference(reference_logps(reference, group, config.model)) for group in groups
    ]
    return done, time.perf_counter() - began


def _accumulate(
    groups: list[GroupBatch], trainer: VirtualRanks, iteration: int
) -> tuple[float, float]:
    """Add all groups' gradients; seconds, and the largest gap to the engine's log-probabilities."""
    began = time.perf_counter()
    gap = 0.0
    for index, group in enumerate(groups):
        loss = trainer.add(index, (group, iteration), group.uids)
        gap = max(gap, loss.notes["logp_gap_max"])
    return time.perf_counter() - began, gap


def reward_rise(records: list[IterationRecord]) -> float:
    """Mean reward of the last 3 iterations minus that of the first 3."""
    rewards = [record.reward_mean for record in records]
    if len(rewards) < 6:
        raise JobError(f"expected at least 6 iterations to compare, found {len(rewards)}")
    return sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3


def main(arguments: list[str] | None = None) -> int:
    """The command: run and print a line per iteration; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=LocalConfig.lanes)
    parser.add_argument("--learning-rate", type=float, default=LocalConfig.learning_rate)
    parser.add_argument("--base-policy", type=Path, default=BASE_POLICY)
    options = parser.parse_args(arguments)
    config = LocalConfig(
        seed=options.seed,
        iterations=options.iterations,
        lanes=options.lanes,
        learning_rate=options.learning_rate,
        base_policy=options.base_policy,
    )
    records: list[IterationRecord] = []
    write: Callable[[str], int] = sys.stdout.write
    try:
        for record in run_iterations(config):
            records.append(record)
            write(_line(record) + "\n")
            sys.stdout.flush()
    except JobError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if len(records) >= 6:
        write(f"reward rise, last 3 minus first 3: {reward_rise(records):+.3f}\n")
    return 0


def _line(record: IterationRecord) -> str:
    return (
        f"{record.iteration:3d}  reward {record.reward_mean:.3f}  tokens {record.tokens_mean:.1f}  "
        f"rollout {record.rollout_s:.2f} s  tools {record.tool_wait_s:.2f} s  "
        f"inference {record.inference_s:.2f} s  train {record.train_s:.2f} s  "
        f"update {record.update_s:.3f} s  rollout share {record.rollout_share:.2f}  "
        f"{record.lane_steps / record.rollout_s:.0f} lane-steps/s  "
        f"fill {record.lane_steps / max(record.steps, 1):.1f}  kl {record.kl_mean:.4f}  "
        f"norm {record.grad_norm:.2f}  gap {record.logp_gap_max:.1e}  {record.policy_digest[:12]}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
