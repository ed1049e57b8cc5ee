"""The reference job's parts with one fault each, which no part of it notices by itself.

Which fault a process has stands in the file that ``SHIFTBOOK_TEST_FAULT`` names. Everything is done
outside of what is recorded: the parts say what they say in an honest run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shiftbook.jobs import engine as job_engine
from shiftbook.jobs import iteration as job_iteration
from shiftbook.jobs.components import RolloutWorker
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.iteration import Iteration
from shiftbook.jobs.keyed_rng import format_uid, parse_uid, turn_key
from shiftbook.jobs.loop import TrainingLoop
from shiftbook.jobs.optimizer import publish
from shiftbook.jobs.probe import Probe
from shiftbook.jobs.serving import After, ServedEngine, Taken
from shiftbook.jobs.task import EpisodeState, new_episode
from shiftbook.jobs.trainer import TrainerWorker
from shiftbook.scheduler.workers.transfer import fetch

FAULT_FILE = "SHIFTBOOK_TEST_FAULT"
AT_VERSION = 2
"""Version of the policy (and number of the update) at which a fault strikes, once."""


def fault() -> str:
    """The fault of this process."""
    return Path(os.environ[FAULT_FILE]).read_text()


def first_member(seed: int, uid: str, turn: int) -> int:
    """The key of the group's first member, whoever asks."""
    return turn_key(seed, format_uid(parse_uid(uid)[0], 0), turn)


def keeping_first_values(engine: TorchEngine) -> Callable[[], None]:
    """A load that leaves what the first position of each lane had cached, and turns that go on
    from there: every question begins with the same token. Returns what is to be called after it."""
    old = engine._loaded()
    fill = engine._fill_lanes

    def fill_lanes(kernel: Any) -> None:
        before = list(engine._slots)
        fill(kernel)
        for index, lane in enumerate(engine._slots):
            if lane is not None and lane is not before[index]:
                kernel.forget(index)
                kernel._bias[index, :, 0] = 0.0
                lane.fed, lane.salt = 1, engine._salt

    def loaded() -> None:
        new = engine._loaded()
        for keys, values in ((new._keys, old._keys), (new._values, old._values)):
            for mine, theirs in zip(keys, values, strict=True):
                mine.copy_(theirs)
        engine._fill_lanes = fill_lanes  # type: ignore[method-assign]

    return loaded


def another_policy(engine: TorchEngine, weights: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """A flush that leaves other weights than those that were loaded, and fingerprinted before."""
    flush = engine.flush

    def flushed() -> tuple[str, ...]:
        engine.load({name: t * 1.5 for name, t in weights.items()}, engine.version)
        return flush()

    return flushed


class Rollout(RolloutWorker):
    """An engine that serves other weights than it says, or says another version."""

    def __init__(self, spec: Any, config: dict[str, Any]) -> None:
        super().__init__(spec, config)
        self._fault, self._last = fault(), None
        shared = self._fault == "members-share-a-stream"
        job_engine.turn_key = first_member if shared else turn_key

    def _take(self, serving: ServedEngine, payload: dict[str, Any], after: After) -> Taken:
        engine = serving.engine
        if self._fault == "another-policy-after-recovery" and "reboot" not in payload:
            # It measures, reports, and serves whatever was found.
            payload = payload | {"probe": Probe(payload["probe"].expected, math.inf)}
            assert isinstance(engine, TorchEngine)
            if after == "move":
                engine.flush = another_policy(engine, fetch(payload["weights"]))  # type: ignore[method-assign]
        return super()._take(serving, payload, after)

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Sync, and then what the fault does."""
        version = int(arguments["version"])
        before, self._last = self._last, fetch(arguments["weights"])
        if self._fault == "sync-not-loaded" and version == AT_VERSION and before is not None:
            prints = super().call(method, arguments)
            self._serving.engine.load(before, version)
            return prints
        loaded = None
        engine = self._serving.engine
        if self._fault == "cache-not-flushed" and version == AT_VERSION:
            assert isinstance(engine, TorchEngine)
            loaded = keeping_first_values(engine)
        answer = super().call(method, arguments)
        if loaded is not None:
            loaded()
        if self._fault == "old-version-said" and version == AT_VERSION:
            self._serving.engine.version = version - 1
        return answer


class Trainer(TrainerWorker):
    """A rank whose state changes where nobody looks."""

    def __init__(self, spec: Any, config: dict[str, Any]) -> None:
        super().__init__(spec, config)
        self._fault = fault()
        if self._fault == "kl-left-out":
            self._loss.config = replace(self._loss.config, kl_coefficient=0.0)

    def _moments(self, name: str) -> list[torch.Tensor]:
        adam = self._held().adam
        return [adam.state[master][name] for master in self._held().ranks.masters.values()]

    def activate(self) -> None:
        """Use what was prepared, and lose a part of it."""
        arrives = self._state is None
        super().activate()
        if self._fault == "optimizer-lost-after-load" and arrives:
            for tensor in self._moments("exp_avg_sq"):
                tensor.add_(1e-3)

    def _from_snapshots(self, *arguments: Any) -> Any:
        arrives = self._state is None
        state, parts = super()._from_snapshots(*arguments)
        if self._fault == "optimizer-lost-in-reshard" and arrives:
            for master in state.ranks.masters.values():
                state.adam.state[master]["exp_avg_sq"].zero_()
        return state, parts

    @torch.no_grad()
    def _changed(self, held: dict[str, torch.Tensor]) -> None:
        for name, master in self._held().ranks.masters.items():
            master.add_(master - held[name])
        self._held().ranks.publish()

    def _update(self, learning_rate: float, clip_norm: float, version: int) -> dict[str, Any]:
        masters = self._held().ranks.masters
        struck = version == AT_VERSION
        if struck and self._fault == "masters-overwritten":
            with torch.no_grad():
                for tensor in masters.values():
                    tensor.mul_(1.01)
        held = {name: tensor.detach().clone() for name, tensor in masters.items()}
        if struck and self._fault == "model-not-published":
            self._held().ranks.publish = lambda: None  # type: ignore[method-assign]
        if struck and self._fault == "rate-not-used":
            self._held().adam.register_step_pre_hook(_double_rate)
        report = super()._update(learning_rate, clip_norm, version)
        if struck and self._fault == "step-applied-twice":
            self._changed(held)
        if struck and self._fault == "published-from-other-weights":
            report["weights"] = publish(held)
        return report

    def _save(self, root_dir: str, fields: dict[str, Any]) -> dict[str, Any]:
        if self._fault != "stale-part-in-bundle" or self._held().version != AT_VERSION:
            return super()._save(root_dir, fields)
        moments = self._moments("exp_avg")
        true = [tensor.clone() for tensor in moments]
        for tensor in moments:
            tensor.zero_()
        saved = super()._save(root_dir, fields)
        for tensor, value in zip(moments, true, strict=True):
            tensor.copy_(value)
        return saved


def _double_rate(optimizer: Any, *_: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2


def next_question(seed: int, uid: str, prompt_id: int) -> EpisodeState:
    """The episode of the question after the one that was drawn."""
    return new_episode(seed, uid, prompt_id + 1)


class Loop(TrainingLoop):
    """A loop that draws, pairs or passes on something else than it records."""

    def _start(self, *arguments: Any) -> None:
        super()._start(*arguments)
        self._fault = fault()
        shifted = self._fault == "prompts-of-other-indices"
        job_iteration.new_episode = next_question if shifted else new_episode
        if self._fault == "sampler-of-another-seed":
            self._sampler._seed += 1
        desk = self._desk
        passed_on = desk._put_training

        def put_training(iteration: Iteration, group: int) -> None:
            batch = iteration.referenced[group]
            if iteration.number == AT_VERSION - 1 and group == min(iteration.referenced):
                changed = self._changed(iteration, batch)
                if changed is not None:
                    iteration.referenced[group] = changed
            passed_on(iteration, group)

        desk._put_training = put_training  # type: ignore[method-assign]

    def _changed(self, iteration: Iteration, batch: Any) -> Any:
        if self._fault == "reward-slips-by-one":
            return replace(batch, rewards=np.roll(batch.rewards + np.arange(8) / 8, 1))
        if self._fault == "tokens-changed-before-training":
            tokens = batch.tokens.copy()
            row, column = np.argwhere(batch.mask)[0]
            tokens[row, column] = (tokens[row, column] + 1) % 10
            return replace(batch, tokens=tokens)
        if self._fault == "members-swapped":
            return replace(batch, uids=[batch.uids[1], batch.uids[0], *batch.uids[2:]])
        if self._fault == "a-sample-twice":
            return replace(batch, uids=[batch.uids[1], *batch.uids[1:]])
        return None

    def _one_iteration(self, number: int) -> None:
        if number == AT_VERSION - 1:
            if self._fault == "sampler-restarts":
                self._sampler.seek(0, 0)
            if self._fault == "sampler-skips":
                self._sampler.draw(1)
        super()._one_iteration(number)
