"""Legitimate variants: runs that differ from the plain one in a declared way; none is a finding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shiftbook.checkpoint.recorder import Recorder
from shiftbook.checkpoint.sampler import SEQUENTIAL, Sampler
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.ledger import Ledger
from tests.zoo import job as job_module
from tests.zoo import legitimate_batches as _batches  # noqa: F401 - it registers variants
from tests.zoo import legitimate_groups as _groups  # noqa: F401 - it registers one
from tests.zoo import legitimate_losses as _losses  # noqa: F401 - it registers variants
from tests.zoo import storage
from tests.zoo.engine import Engine
from tests.zoo.job import REQUIRED, Job
from tests.zoo.loader import DATASET, GROUP, Loader
from tests.zoo.model import Tensors
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher
from tests.zoo.straddling import straddle
from tests.zoo.trainer import Batch, Trainer
from tests.zoo.variants import VARIANTS, Variant, shaped, variant

WIDE = {"I16": 5.0, "I16.tokens": 1.0}
"""Tolerances of runs whose cached values are old on purpose: no replay gives their bits."""

shaped("plain", "crash, replay, reshard and growth as the plain run has them")
shaped("never_killed", "one process life", killed_in=None)
shaped("one_rank", "one physical rank throughout", ranks=((0, 1),))
shaped("two_ranks", "two physical ranks throughout", ranks=((0, 2),))
shaped("shrinks_and_grows", "ranks change twice in one life", ranks=((0, 2), (1, 1), (3, 2)))
shaped("restored_on_more_ranks", "one rank saves, two restore", ranks=((0, 1), (4, 2)))
shaped("one_engine", "one rollout engine", engines=1)
shaped("three_engines", "three rollout engines", engines=3)
shaped("saves_always", "a checkpoint after every iteration", saves=tuple(range(7)))
shaped("crash_without_checkpoint", "the second life begins at the beginning", saves=(), killed_in=2)
shaped("crash_right_after_save", "killed in the iteration after a save", killed_in=2)
shaped(
    "killed_in_2",
    "killed soon: an epoch less is behind the restored save",
    killed_in=2,
    saves=(0, 1),
    ranks=((0, 2), (2, 1), (4, 2)),
)
shaped(
    "killed_in_5",
    "the last save is three iterations old, and the first life has shrunk to one rank",
    killed_in=5,
    saves=(1, 2),
    ranks=((0, 2), (3, 1), (6, 2)),
)
shaped("longer", "more epochs over the data", iterations=9, saves=(1, 3, 6))
shaped("no_iterations_after_restore", "the restored life ends soon", iterations=5)


@variant("engines are restarted: new incarnations, synced before they serve")
def _engines_restarted(p: Patcher) -> None:
    def one(original: Any, self: Job, iteration: int) -> None:
        if iteration == 2 and self.life == 0:
            self.engines = []
            for number in range(2):
                name = f"engine-{number}"
                engine = Engine(name, f"{name}#again", self.shape.seed)
                self.recorder.lost("rollout", name, f"{name}#0", "restarted")
                self.recorder.started("rollout", name, engine.incarnation)
                self.engines.append(engine)
            self.sync_weights()
        original(self, iteration)

    p.wrap(Job, "one", one)


@variant("the same version is delivered twice")
def _synced_twice(p: Patcher) -> None:
    def sync(original: Any, self: Job) -> None:
        original(self)
        original(self)

    p.wrap(Job, "sync_weights", sync)


@variant("one engine does not take a version, says so, and does not serve")
def _one_engine_out(p: Patcher) -> None:
    def sync(original: Any, self: Job) -> None:
        if NOW.iteration != 2 or self.life > 0:
            return original(self)
        weights, version = self.trainer.published(), self.trainer.version
        engine = self.engines[0]
        with self.recorder.sync(version, weights, [e.name for e in self.engines]) as record:
            self.deliver(engine, weights, version)
            record.delivered(
                engine.name, engine.incarnation, engine.resident(), caches_flushed=engine.flush()
            )
            record.failed("engine-1", "out of memory")

    def route(original: Any, self: Job, number: int) -> Engine:
        out = NOW.iteration == 3 and self.life == 0
        return self.engines[0] if out else original(self, number)

    p.wrap(Job, "sync_weights", sync)
    p.wrap(Job, "route", route)


@variant("requests go to other engines: randomness is the sample's, not the engine's")
def _routed_otherwise(p: Patcher) -> None:
    p.wrap(Job, "route", lambda original, self, n: original(self, n * 7 + 1))


@variant("groups are dealt out in another order, for balance", plan={"update": {"dealing": "any"}})
def _balanced(p: Patcher) -> None:
    def deal(original: Any, self: Job, number: int, groups: int) -> int:
        return original(self, groups - 1 - number, groups)

    p.wrap(Job, "deal", deal)


@variant("samples are answered in another order", plan={"update": {"dealing": "any"}})
def _answered_in_any_order(p: Patcher) -> None:
    def roll_out(original: Any, self: Job, iteration: int, prompts: Any) -> Any:
        return original(self, iteration, list(reversed(prompts)))

    p.wrap(Job, "roll_out", roll_out)


@variant("micro batches are half a group")
def _smaller_micro_batches(p: Patcher) -> None:
    def prepare(original: Any, self: Job, *args: Any) -> Any:
        batches = original(self, *args)
        return {
            v: [half for batch in micro for half in _halves(batch)] for v, micro in batches.items()
        }

    p.wrap(Job, "prepare", prepare)


def _halves(batch: Any) -> list[Any]:
    cut = max(1, len(batch.uids) // 2)
    return [
        replace(
            batch,
            **{
                name: getattr(batch, name)[part]
                for name in (
                    "uids", "tokens", "trained", "engine", "old", "reference", "advantages",
                    "rewards", "lengths", "groups", "versions",
                )
            },
        )
        for part in (slice(0, cut), slice(cut, None))
        if batch.uids[part]
    ]  # fmt: skip


@variant("rows are padded further than they need")
def _padded(p: Patcher) -> None:
    def pad(original: Any, self: Job, values: Any, width: int, fill: Any) -> Any:
        return original(self, values, width, fill) + [fill] * (12 - width)

    def mask(original: Any, self: Job, sample: Any, width: int) -> Any:
        return original(self, sample, width) + [False] * (12 - width)

    p.wrap(Job, "pad", pad)
    p.wrap(Job, "trained_mask", mask)


@variant("a step is skipped for overflow, and says so")
def _step_skipped(p: Patcher) -> None:
    p.wrap(
        Trainer,
        "overflow",
        lambda original, self, norm: NOW.iteration == 2 or original(self, norm),
    )


@variant("all rewards of an iteration are equal: advantages are zero")
def _flat_rewards(p: Patcher) -> None:
    from tests.zoo.job import Scorer

    def score(original: Any, self: Scorer, *args: Any) -> float:
        return 0.25 if NOW.iteration == 3 else original(self, *args)

    p.wrap(Scorer, "score", score)
    p.wrap(
        job_module,
        "scored_alone",
        lambda original, sample: 0.25 if NOW.iteration == 3 else original(sample),
    )


@variant("the learning rate is halved by an amendment", killed_in=None)
def _rate_amended(p: Patcher) -> None:
    def one(original: Any, self: Job, iteration: int) -> None:
        if iteration == 3:
            self.recorder.amend("update.learning_rate", 1e-2, "the loss is noisy")
        original(self, iteration)

    p.wrap(Job, "one", one)
    p.wrap(
        Trainer,
        "learning_rate",
        lambda original, self: original(self) * (0.5 if NOW.iteration >= 3 else 1.0),
    )


@variant(
    "long samples are dropped by a rule that says so",
    plan={"drop_rules": ("zero-variance", "length")},
)
def _long_samples_dropped(p: Patcher) -> None:
    _dropping(p, lambda samples: [s for s in samples if len(s.tokens) >= 10], "length: too long")


@variant(
    "samples are aborted without regard to length, by a declared rule",
    plan={"drop_rules": ("zero-variance", "aborted")},
)
def _aborted(p: Patcher) -> None:
    _dropping(p, lambda samples: samples[2:3] + samples[9:10], "aborted: engine was preempted")


def _dropping(p: Patcher, which: Callable[[list[Any]], list[Any]], reason: str) -> None:
    def select(original: Any, self: Job, iteration: int, samples: list[Any]) -> list[Any]:
        left = {s.uid for s in which(samples)}
        if left and len(left) < len(samples):
            self.recorder.dropped(iteration, sorted(left), reason)
            samples = [s for s in samples if s.uid not in left]
        return original(self, iteration, samples)

    p.wrap(Job, "filter", select)


@variant("the reference is refreshed every two updates", plan={"update": {"reference_refresh": 2}})
def _reference_refreshed(p: Patcher) -> None:
    def optimize(original: Any, self: Job, *args: Any) -> None:
        original(self, *args)
        if self.trainer.version % 2 == 0:
            model = self.trainer.ranks[0].model
            self.trainer.reference = {n: t.detach().clone() for n, t in model.items()}

    p.wrap(Job, "optimize", optimize)


@variant("there is no KL term", plan={"update": {"loss_terms": {"policy": 1.0}, "controllers": {}}})
def _no_kl(p: Patcher) -> None:
    def init(original: Any, self: Trainer, *args: Any) -> None:
        original(self, *args)
        self.kl_coefficient = 0.0

    p.wrap(Trainer, "__init__", init)


@variant(
    "engines are one version behind, within the bound",
    plan={"sampling": {"staleness_bound": 1}},
)
def _asynchronous(p: Patcher) -> None:
    def sync(original: Any, self: Job) -> None:
        starting = self.engines[0].version < 0
        if starting or self.trainer.version % 2 == 0:
            original(self)

    p.wrap(Job, "sync_weights", sync)


@variant(
    "samples are of two versions where partial rollouts are declared",
    plan={
        "sampling": {
            "staleness_bound": 1,
            "partial_rollouts": True,
            "batch_composition": "distribution",
        }
    },
)
def _partial_rollouts(p: Patcher) -> None:
    straddle(p, lambda uid: uid.endswith("/2"))


@variant(
    "caches are kept over syncs, as declared",
    plan={
        "sampling": {
            "cache_policy": "keep",
            "staleness_bound": 6,
            "batch_composition": "distribution",
        },
        "tolerances": WIDE,
    },
)
def _caches_kept(p: Patcher) -> None:
    p.wrap(Engine, "flush", lambda original, self: [])


@variant(
    "two passes over each batch, as declared",
    plan={
        "update": {"epochs_per_batch": 2},
        "sampling": {"staleness_bound": 1},
        "required_invariants": (*REQUIRED, "I16.proximal"),
    },
)
def _two_passes(p: Patcher) -> None:
    def optimize(original: Any, self: Job, iteration: int, batches: Any) -> None:
        original(self, iteration, batches)
        between_passes(self, batches)
        original(self, iteration, batches)

    p.wrap(Job, "optimize", optimize)


def between_passes(job: Job, batches: dict[int, list[Batch]]) -> None:
    """What a loop does between two passes over a batch: nothing here."""


@variant("the second life goes back to an older checkpoint after a bad loss")
def _rolled_back(p: Patcher) -> None:
    def save(original: Any, self: Job, iteration: int) -> None:
        original(self, iteration)
        NOW.notes.setdefault("oldest", (self.bundle, self.saved))

    def begin(original: Any, self: Job) -> int:
        if self.life == 1:
            self.bundle, self.saved = NOW.notes["oldest"]
        return original(self)

    p.wrap(Job, "save", save)
    p.wrap(Job, "begin", begin)


@variant("the second life is a warm start with a fresh optimizer and schedule")
def _warm_start(p: Patcher) -> None:
    def restore_rank(original: Any, rank: Any, held: Any) -> None:
        original(rank, held)
        for tensors in (rank.first, rank.second):
            for tensor in tensors.values():
                tensor.zero_()
        for name, tensor in rank.ema.items():
            tensor.copy_(rank.masters[name])
        rank.step = 0

    def restore_rest(original: Any, held: Any, trainer: Trainer) -> None:
        original({**held, "scheduled": 0}, trainer)

    def restored(original: Any, self: Recorder, bundle: str, state: Any, **more: Any) -> None:
        kept = ("model", "masters", "reference", "loader", "scaler", "controllers")
        original(self, bundle, {n: state[n] for n in kept}, **{**more, "kind": "warm-start"})

    p.wrap(storage, "restore_rank", restore_rank)
    p.wrap(storage, "restore_rest", restore_rest)
    p.wrap(Recorder, "restored", restored)


@variant("an evaluation draws from a stream of its own")
def _evaluation_of_its_own(p: Patcher) -> None:
    generator = torch.Generator().manual_seed(99)

    def one(original: Any, self: Job, iteration: int) -> None:
        torch.rand(5, generator=generator)
        torch.rand(3)
        original(self, iteration)

    p.wrap(Job, "one", one)


@variant("checkpoints are pruned once they are restored")
def _pruned(p: Patcher) -> None:
    def late(original: Any, self: Job) -> None:
        if self.life == 1:
            for old in self.folder.glob("checkpoint-*"):
                shutil.rmtree(old)

    p.wrap(Job, "late_init", late)


@variant("prompts come in the data set's own order", plan={"data": {"sampler_rule": SEQUENTIAL}})
def _sequential(p: Patcher) -> None:
    def init(original: Any, self: Loader, seed: int) -> None:
        original(self, seed)
        self.sampler = Sampler(DATASET, seed, rule=SEQUENTIAL)

    p.wrap(Loader, "__init__", init)


@variant("the ledger is away for two iterations; records are spooled")
def _outage(p: Patcher) -> None:
    def append(original: Any, self: Ledger, *args: Any, **kwargs: Any) -> Any:
        if NOW.life == 0 and NOW.iteration in (1, 2):
            raise LedgerUnreachable("expected a ledger, found none: the test took it away")
        return original(self, *args, **kwargs)

    p.wrap(Ledger, "append", append)


@variant("the engine computes in half precision, and its noise was calibrated")
def _half_precision_engine(p: Patcher) -> None:
    def step(original: Any, self: Engine, *args: Any) -> Any:
        h, logp = original(self, *args)
        if self.name == "probe":
            return h, logp
        return h, logp.astype("float16").astype("float32")

    def replayed(original: Any, self: Recorder, *args: Any, **kwargs: Any) -> None:
        first = NOW.iteration == 0
        original(self, *args, **{**kwargs, "calibrating": first})

    p.wrap(Engine, "step", step)
    p.wrap(Recorder, "replayed", replayed)


@variant("the copies of the tied head are made anew in each load")
def _head_copied(p: Patcher) -> None:
    def tie(original: Any, self: Engine, weights: Tensors) -> torch.Tensor:
        return original(self, weights).clone()

    p.wrap(Engine, "tie", tie)


__all__ = ["GROUP", "VARIANTS", "Variant"]
