"""The reference job as a target of ``shiftbook replay``: in one process, without Ray and ledger.

Rollout workers are engines that take turns, trainer ranks are accumulators that own blocks of
virtual ranks; moves hand half-done turns from engine to engine and half-done sums from rank to
rank, as the job on Ray does. The draws are the declared sampler's, so the samples and the states
are those of the job on Ray with the same configuration.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftbook.checkpoint.bundle import restore_bundle
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.checkpoint.sampler import HASH_SORT, Sampler
from shiftbook.checkpoint.virtual_ranks import (
    GradientAccumulator,
    RankSum,
    VirtualRankPlan,
    reduce_tree,
)
from shiftbook.jobs.config import DATASET_SIZE, GROUP_SIZE
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.engine_types import Caches
from shiftbook.jobs.errors import JobError
from shiftbook.jobs.grpo import GroupBatch, GrpoConfig, GrpoLoss, reference_logps
from shiftbook.jobs.iteration import Iteration
from shiftbook.jobs.lossy_sync import PART, LossySource
from shiftbook.jobs.model import ModelConfig, parameter_shapes
from shiftbook.jobs.policy_file import BASE_POLICY, load_policy
from shiftbook.jobs.toolbox import Toolbox
from shiftbook.jobs.trainer_state import adam_of, make_trainer
from shiftbook.ledger.digests import logp_digest, token_digest
from shiftbook.ledger.errors import InvalidInput
from shiftbook.scheduler.channels import Work
from shiftbook.verify.replay.protocol import (
    Conditions,
    Job,
    Numbers,
    Observation,
    Sample,
    Samples,
    Start,
    Step,
    Tensors,
    component,
)

SCHEDULES = ("phases", "streamed")
"""``phases``: all samples, then all gradients. ``streamed``: a group trains once it is complete."""
RAY_SCHEDULES = ("ray-static", "ray-timeshared", "ray-dynamic")
"""The job itself, on a Ray cluster of its own (``jobs/replay_on_ray.py``)."""
WORKERS = {"rollout": (1, 2, 4), "trainer": (1, 2, 4)}
SMALL = {"groups": 4, "lanes": 4, "virtual_ranks": 4, "learning_rate": 3e-4, "clip_norm": 1.0}
"""What a replay runs where no ledger says otherwise: a few seconds for two steps."""
OPTIONS = {"caches": "flush"}
"""What a replay also takes of a recorded configuration, where it is not this."""
MOVE_EVERY = 40
"""Decode steps between two moves, in the mean."""
IDLE_S = 0.0005
ENVIRONMENT = {
    # The same instructions on every processor of a kind: bits are for the program to decide.
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}


def reference_job(config: Mapping[str, Any] | None = None) -> Job:
    """The reference job with a recorded configuration, or a small one of its own.

    Of a recorded configuration what decides about bits is taken; where the job ran is not. Raises
    InvalidInput for a job on another engine than the reference one, whose last bits depend on what
    else is in a batch, and for one with unordered sums.
    """
    given = dict(config or {})
    engine = given.get("engine", "torch")
    if engine != "torch":
        raise InvalidInput(
            f"expected a job on the engine torch, found {engine!r}, of which no replay and no "
            "shadow gives the same bits; `shiftbook verify` judges it within its tolerance"
        )
    if given.get("reduction", "tree") != "tree":
        raise InvalidInput(
            f"expected a job whose gradients are summed in the fixed tree, found the reduction "
            f"{given['reduction']!r}, of which no replay and no shadow gives the same bits; "
            "`shiftbook verify` judges it within its tolerance"
        )
    values = {name: given.get(name, value) for name, value in SMALL.items()}
    values |= {n: given[n] for n, usual in OPTIONS.items() if given.get(n, usual) != usual}
    if given.get("sync_encoding") == "lossy":  # of the encodings the only one that bits depend on
        values |= {name: given[name] for name in ("sync_encoding", "max_error", "anchor_every")}
    ranks = int(values["virtual_ranks"])
    trainers = tuple(count for count in WORKERS["trainer"] if count <= ranks)
    base = str(given.get("base_policy", BASE_POLICY))

    def run(conditions: Conditions) -> Iterator[Step]:
        if conditions.schedule in RAY_SCHEDULES:
            from shiftbook.jobs.replay_on_ray import steps_on_ray

            return steps_on_ray(values, base, conditions)
        return _Replay(values, base, conditions).steps()

    return Job(
        run=run,
        seed=int(given.get("seed", 0)),
        steps=int(given.get("iterations", 2)) or 1,
        schedules=(*SCHEDULES, *RAY_SCHEDULES),
        partial=RAY_SCHEDULES,  # what ledger and bundles hold
        workers={**WORKERS, "trainer": trainers},
        movable=True,
        restorable=True,
        equality="bits",
        environment=ENVIRONMENT if config is None else {"OMP_NUM_THREADS": "1"},
        config=values,
    )


def _begun(policy: Mapping[str, Tensor], start: Start | None) -> dict[str, Any]:
    """The trainer's state at the beginning, or as a bundle has it."""
    if start is None:
        return {"policy": policy}
    manifest = load_manifest(start.path)
    also = [PART] if PART in manifest.parts else []
    parts = restore_bundle(start.path, ["model", "masters", "optimizer", *also])
    return {
        "served": parts.get(PART),
        "policy": parts["model"],
        "masters": parts["masters"],
        "moments": parts["optimizer"],
        "updates": int(manifest.scheduler["step"]),
    }


class _Replay:
    """One run of the job."""

    def __init__(self, values: Mapping[str, Any], base: str, conditions: Conditions) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self._conditions = conditions
        self._lanes, self._groups = int(values["lanes"]), int(values["groups"])
        self._rate, self._model = float(values["learning_rate"]), ModelConfig()
        self._caches: Caches = values.get("caches", "flush")
        path = Path(base)
        policy = load_policy(path if path.is_file() else BASE_POLICY, self._model)
        self._reference = {name: tensor.float() for name, tensor in policy.items()}
        self._plan = VirtualRankPlan(int(values["virtual_ranks"]), self._groups)
        start, begun = conditions.start, _begun(policy, conditions.start)
        self._first = 0 if start is None else start.iteration
        self._version = 0 if start is None else start.policy_version
        policy, served = begun.pop("policy"), begun.pop("served", None)
        self._lossy: LossySource | None = None
        if values.get("sync_encoding") == "lossy":
            self._lossy = LossySource(float(values["max_error"]), int(values["anchor_every"]))
            # A bundle has its tensors in another order than engines load them in.
            ordered = {name: policy[name] for name in parameter_shapes(self._model)}
            self._lossy.begin(ordered, self._version, served or ordered)
        self._trainer = make_trainer(
            policy,
            self._model,
            GrpoLoss(GrpoConfig(), conditions.seed),
            virtual_ranks=self._plan.virtual_ranks,
            groups=self._groups,
            clip_norm=float(values["clip_norm"]),
            **begun,
        )
        self._sampler = Sampler(DATASET_SIZE, conditions.seed, rule=HASH_SORT)
        self._sampler.seek(*divmod(0 if start is None else start.cursor, DATASET_SIZE))
        self._moves = None if conditions.moves is None else random.Random(conditions.moves)
        self._engines = [self._engine() for _ in range(conditions.workers["rollout"])]
        self._world = conditions.workers["trainer"]
        self._ranks = self._fresh_ranks()
        self._turn = 0

    def steps(self) -> Iterator[Step]:
        """Run all iterations."""
        with Toolbox(self._conditions.seed) as toolbox:
            for number in range(self._first, self._first + self._conditions.steps):
                yield Step(number, self._step(number, toolbox))

    def _step(self, number: int, toolbox: Toolbox) -> list[Observation]:
        version = self._version + number - self._first
        policy = self._served(self._trainer.parts()["model"], version)
        for engine in self._engines:
            engine.load(policy, version)
        iteration = Iteration(
            number, self._conditions.seed, self._sampler.draw(self._groups), GROUP_SIZE
        )
        streamed = self._conditions.schedule == "streamed"
        for group in self._roll_out(iteration, toolbox):
            if streamed:
                self._train(group, iteration)
        if not streamed:
            for group in range(self._groups):
                self._train(group, iteration)
        with component("trainer"):
            return [*self._samples(iteration), *self._update(number)]

    def _served(self, policy: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """What engines hold of a version."""
        if self._lossy is None:
            return policy
        if self._lossy.held.version != version:
            self._lossy.settle(policy, version)
        return self._lossy.held.served

    def _engine(self) -> TorchEngine:
        return TorchEngine(self._model, self._lanes, caches=self._caches)

    def _fresh_ranks(self) -> list[GradientAccumulator]:
        return [GradientAccumulator(self._plan, self._world, rank) for rank in range(self._world)]

    # ---- rollout ---------------------------------------------------------------------------

    def _roll_out(self, iteration: Iteration, toolbox: Toolbox) -> Iterator[int]:
        """Run every episode to its end; gives each group once it is complete."""
        waiting = deque(work.item for work in iteration.first_turns())
        while not iteration.generated:
            ready: list[tuple[str, Any] | None] = []
            with component("rollout"):
                for engine in self._engines:
                    while waiting and engine.running + engine.waiting < self._lanes:
                        engine.submit(waiting.popleft())
                    if engine.running or engine.waiting:
                        results = engine.step()
                        ready += [iteration.turn_done(one, ("", "")) for one in results]
            with component("tool"):
                for outcome in toolbox.ready(now=math.inf):
                    ready.append(iteration.tool_done(outcome.key, outcome.tokens))
            for following in ready:
                if following is None:
                    continue
                kind, what = following
                if kind == "group":
                    yield int(what)
                    continue
                assert isinstance(what, Work)
                if kind == "tool":
                    key = what.key
                    assert isinstance(key, tuple)
                    toolbox.start_call((str(key[0]), int(key[1])), what.item)
                else:
                    waiting.append(what.item)
            if not ready and not waiting and not any(e.running for e in self._engines):
                time.sleep(IDLE_S)  # the calculator's process works
            self._maybe_move(waiting)

    def _maybe_move(self, waiting: deque[Any]) -> None:
        """Now and then hand the turns of an engine to the others, or resize the trainer."""
        if self._moves is None or self._moves.random() * MOVE_EVERY >= 1.0:
            return
        if self._moves.random() < 0.5:
            engine = self._moves.choice(self._engines)
            waiting.extendleft(reversed(engine.drain()))
            return
        counts = [n for n in WORKERS["trainer"] if n <= self._plan.virtual_ranks]
        self._reshard(self._moves.choice(counts))

    def _reshard(self, world: int) -> None:
        snapshots = [rank.snapshot() for rank in self._ranks]
        self._world = world
        self._ranks = self._fresh_ranks()
        for rank in self._ranks:
            rank.restore(snapshots)

    # ---- training --------------------------------------------------------------------------

    def _train(self, group: int, iteration: Iteration) -> None:
        with component("inference"):
            batch: GroupBatch = iteration.batches[group]
            batch = batch.with_reference(reference_logps(self._reference, batch, self._model))
        with component("trainer"):
            flat, loss = self._trainer.gradient(group, (batch, iteration.number))
            owner = self._ranks[self._plan.physical_rank_of(group, self._world)]
            owner.add(group, flat, loss.weight, loss.stats, batch.uids)

    def _update(self, number: int) -> Iterator[Observation]:
        sums: dict[int, RankSum] = {}
        for rank in self._ranks:
            sums |= rank.local_sums()
        if len(sums) != self._plan.virtual_ranks:
            raise JobError(f"expected all virtual ranks in update {number}, found {sorted(sums)}")
        total = reduce_tree(sums)
        yield Tensors("trainer", "gradient", self._named(total.flat))
        report = self._trainer.apply(total, self._rate)
        self._ranks = self._fresh_ranks()
        yield Numbers(
            "trainer",
            {
                "learning_rate": self._rate,
                "loss": total.stats["loss_sum"] / total.tokens,
                "kl": total.stats["kl_sum"] / total.tokens,
                "logp_gap": total.stats["logp_gap_sum"] / total.tokens,
                "grad_norm": report.grad_norm,
                "tokens": total.tokens,
            },
        )
        parts = self._trainer.parts()
        yield Tensors("trainer", "model", parts["model"], each=False)
        yield Tensors("trainer", "masters", parts["masters"])
        moments = adam_of(self._trainer).tensors(self._trainer.masters)
        yield Tensors("trainer", "optimizer", moments, each=False)

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        named, start = {}, 0
        for name, master in self._trainer.masters.items():
            named[name] = flat[start : start + master.numel()].view(master.shape)
            start += master.numel()
        return named

    def _samples(self, iteration: Iteration) -> Iterator[Observation]:
        samples = []
        for uid, sample in iteration.rows():
            episode = sample.episode
            logps = np.asarray(episode.logps, np.float32).tolist()
            digests = token_digest(episode.tokens), logp_digest(logps)
            samples.append(Sample(uid, *digests, float(episode.reward)))
        yield Samples("rollout", samples)
