"""A live run of the reference job in one process, recorded as the job on Ray records it.

The trainer is the job's own worker and the records are the job's own; the engine takes turns in
groups of two. ``alter`` may change what the trainer holds behind the recorder's back: the record
then says what a faulty program would say of itself.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shiftbook.checkpoint.sampler import HASH_SORT, Sampler
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from shiftbook.jobs import trainer as job_trainer
from shiftbook.jobs.config import DATASET_SIZE, GROUP_SIZE, JobConfig, bundle_digests, opened
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.grpo import reference_logps
from shiftbook.jobs.iteration import Iteration
from shiftbook.jobs.local_run import roll_out
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.records import consumed, drawn, generated, updated
from shiftbook.jobs.runner import Place
from shiftbook.jobs.start import first_bundle
from shiftbook.jobs.state_records import saved_bundle
from shiftbook.jobs.toolbox import Toolbox
from shiftbook.jobs.trainer import TrainerWorker
from shiftbook.jobs.trainer_state import TrainerState
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.scheduler.workers.component import Layout
from shiftbook.scheduler.workers.host import HostSpec

JOB = "live"
DEVICES = ("local/0", "local/1")
ATTEMPT = f"{JOB}-a0"

Alter = Callable[[int, TrainerState], None]


class LiveRun:
    """The run; ``train`` goes on by some iterations. Its ledger stands at ``url``."""

    def __init__(
        self,
        folder: Path,
        *,
        alter: Alter | None = None,
        engine: type[TorchEngine] = TorchEngine,
        **values: Any,
    ) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        place = Place(folder)
        self.config: JobConfig = place.config(
            JOB, groups=4, lanes=8, virtual_ranks=2, schedule="dynamic", **values
        )
        self.url = place.ledger_url
        self.bundles = Path(self.config.bundles)
        self._alter = alter
        self._next = 0
        self._ranks = VirtualRankPlan(self.config.virtual_ranks, self.config.groups)
        self._model = ModelConfig()
        self._reference = {n: t.float() for n, t in load_policy().items()}
        self._sampler = Sampler(DATASET_SIZE, self.config.seed, rule=HASH_SORT)
        self._engine = engine(self._model, self.config.lanes)
        self.ledger = Ledger.open(self.url)
        self.gate = Gate(self.ledger, by="training-loop")
        self._open()

    def _open(self) -> None:
        declared = opened(self.config, DEVICES)
        self.gate.open_job(JOB, declared)
        saved = first_bundle(self.config, ATTEMPT)
        self.gate.start_attempt(
            JOB,
            ATTEMPT,
            parent=None,
            bundle=None,
            iteration=0,
            topology=declared.topology,
            policy_version=0,
            policy_fingerprint=saved["parts"]["model"],
            pid=os.getpid(),
        )
        self._parent = saved["bundle"]
        event = saved_bundle(ATTEMPT, saved, iteration=0, version=0, cursor=0)
        self.ledger.append(JOB, event)
        spec = HostSpec("trainer", "t0", None, "node", "shiftbook.jobs.trainer:TrainerWorker")
        self._trainer = TrainerWorker(spec, self.config.worker_config())
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        payload = {"store": ("127.0.0.1", self._store.port), "bundle": saved["path"]}
        self._trainer.prepare(Layout(0, 1, "live"), payload)
        self._trainer.activate()
        self._said = dict(saved["parts"])

    def train(self, iterations: int) -> None:
        """Train and record some more iterations."""
        with Toolbox(self.config.seed) as toolbox:
            for number in range(self._next, self._next + iterations):
                if self._alter is not None:
                    self._alter(number, self._trainer._held())
                self._one(number, toolbox)
        self._next += iterations

    def close(self) -> None:
        """Close the job."""
        self.gate.close_job(
            JOB,
            JobClosed(
                outcome="finished",
                iterations=self._next,
                policy_version=self._next,
                policy_fingerprint=self._said["model"],
            ),
        )

    def _one(self, number: int, toolbox: Toolbox) -> None:
        config = self.config
        iteration = Iteration(number, config.seed, self._sampler.draw(config.groups), GROUP_SIZE)
        self.ledger.append(JOB, drawn(ATTEMPT, iteration, HASH_SORT, config.seed))
        self._engine.load(self._trainer._held().parts()["model"], number)
        self._roll_out(iteration, toolbox)
        folder = self.ledger.beside(".evidence")
        self.ledger.append(JOB, list(generated(ATTEMPT, iteration, number, folder)))
        for group in reversed(range(config.groups)):
            batch = iteration.batches[group]
            batch = batch.with_reference(reference_logps(self._reference, batch, self._model))
            iteration.referenced[group] = batch
            self._trainer.submit((number, group), batch)
            self._trainer.step()
        report = self._trainer.call(
            "update",
            {
                "learning_rate": config.learning_rate,
                "clip_norm": config.clip_norm,
                "version": number + 1,
            },
        )
        # What the recorder believes to be there: the state that the last update left.
        report["before"] = {name: self._said[name] for name in report["before"]}
        self._said |= report["after"]
        epoch, position = divmod(self._sampler.state().ordinal, DATASET_SIZE)
        fields = {
            "job": JOB,
            "attempt": ATTEMPT,
            "parent": self._parent,
            "iteration": number + 1,
            "sampler": {"epoch": epoch, "position": position},
            "in_flight_uids": (),
            **bundle_digests(config),
        }
        saved = self._trainer.call("save", {"root_dir": config.bundles, "fields": fields})
        saved["parent"], self._parent = self._parent, saved["bundle"]
        status = {"pid": os.getpid(), "device": DEVICES[1]}
        pairs = [(report, status)]
        per_rank = self._ranks.groups_per_rank
        self.ledger.append(
            JOB,
            [
                consumed(ATTEMPT, iteration, number, self._ranks, folder),
                updated(ATTEMPT, number, number + 1, report, pairs, per_rank),
                saved_bundle(
                    ATTEMPT,
                    saved,
                    iteration=number + 1,
                    version=number + 1,
                    cursor=self._sampler.state().ordinal,
                ),
            ],
        )

    def _roll_out(self, iteration: Iteration, toolbox: Toolbox) -> None:
        waiting = deque(range(self.config.groups))
        while waiting:
            two = [waiting.popleft() for _ in range(min(2, len(waiting)))]
            episodes = [episode for group in two for episode in iteration.episodes(group)]
            roll_out(self._engine, toolbox, episodes)
            for episode in episodes:
                iteration._ended(episode.uid)


@pytest.fixture
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would go through Ray's object store is handed on as it is."""
    monkeypatch.setattr(job_trainer, "offer", lambda value: value)
    monkeypatch.setattr(job_trainer, "fetch", lambda value: value)
