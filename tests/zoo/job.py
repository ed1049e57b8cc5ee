"""The job of the zoo: GRPO in plain PyTorch with two engines, recorded by the public Recorder.

One run is two process lives: the first is killed in its fifth iteration, after the update; the
second restores the last checkpoint on one rank, computes that iteration again and grows to two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shiftbook.checkpoint.recorder import (
    Consumed,
    Generated,
    Recorder,
    data_digests,
    dataset_digest,
    drawn_otherwise,
    uid,
)
from shiftbook.checkpoint.recorder_loss import PolicyLoss
from shiftbook.checkpoint.recorder_state import roots, value_digest
from shiftbook.checkpoint.recorder_step import StepProbe
from shiftbook.ledger.events.training import Transform
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, UpdatePlan
from tests.zoo import storage
from tests.zoo.engine import Engine, Made, keyed_uniform
from tests.zoo.loader import DATASET, GROUP, PROMPTS, TOKENIZER, Drawn, Loader
from tests.zoo.model import DROPOUT, PAD, digest_of, forward, logical
from tests.zoo.now import NOW
from tests.zoo.trainer import (
    ADAM,
    CLIP_NORM,
    CLIP_RANGE,
    EMA_DECAY,
    KL_FIRST,
    KL_GAIN,
    KL_LIMIT,
    KL_TARGET,
    RATE,
    TRUNCATION,
    VIRTUAL_RANKS,
    WARMUP,
    Batch,
    Trainer,
)

JOB = "zoo"
FLOOR = 1e-4
PROBED = (0, 2)
"""Members of each group whose draws are replayed; of reference and trainer the first alone."""
SCORER = "match"


@dataclass(frozen=True)
class Shape:
    """What a run does; a legitimate variant declares another one."""

    seed: int = 0
    iterations: int = 7
    saves: tuple[int, ...] = (1, 3)
    """Iterations after which a checkpoint is saved."""
    killed_in: int | None = 4
    ranks: tuple[tuple[int, int], ...] = ((0, 2), (4, 1), (6, 2))
    """From which iteration on how many physical ranks."""
    engines: int = 2
    plan: Mapping[str, Any] = field(default_factory=dict)

    def ranks_at(self, iteration: int) -> int:
        """Physical ranks in an iteration."""
        return [n for start, n in self.ranks if start <= iteration][-1]


def plan_of(shape: Shape) -> Plan:
    """What the job declares before it runs."""
    prompts = Loader(shape.seed).prompts
    plan = Plan(
        seed=shape.seed,
        iterations=shape.iterations,
        data=DataPlan(
            dataset_digest=dataset_digest(data_digests(prompts)),
            tokenizer_digest=TOKENIZER,
            dataset_size=DATASET,
            sampler_rule="hash-sort-v1",
            seed=shape.seed,
            epochs=3,
            first_streams={
                f"dropout/{v}": value_digest(
                    torch.Generator().manual_seed(shape.seed * 1000 + 17 + v).get_state()
                )
                for v in range(VIRTUAL_RANKS)
            },
        ),
        sampling=SamplingPlan(),
        update=UpdatePlan(
            prompts_per_update=PROMPTS,
            group_size=GROUP,
            virtual_ranks=VIRTUAL_RANKS,
            learning_rate=RATE,
            learning_rate_schedule=f"warmup:{WARMUP}",
            clip_norm=CLIP_NORM,
            loss_terms={"policy": 1.0, "kl": KL_FIRST},
            clip_range=CLIP_RANGE,
            truncation=TRUNCATION,
            ema_decay=EMA_DECAY,
            dropout=DROPOUT,
            dealing="blocks",
            model_parallel=False,
            controllers={
                "kl_coefficient": {
                    "rule": "adaptive-kl",
                    "first": KL_FIRST,
                    "target": KL_TARGET,
                    "gain": KL_GAIN,
                    "limit": KL_LIMIT,
                },
                "rewards_seen": {"rule": "count", "first": 0.0},
            },
        ),
        required_invariants=REQUIRED,
        tolerances={"advantage_floor": FLOOR},
        drop_rules=("zero-variance",),
    )
    return Plan.model_validate(_merged(plan.model_dump(), shape.plan))


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(base.get(name), dict)
        whole = name in ("controllers", "loss_terms") or not nested
        base[name] = value if whole else _merged(base[name], value)
    return base


REQUIRED = (
    "I1", "I1b", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "I9b", "I10", "I10b", "I11",
    "I12", "I12b", "I13", "I14", "I15", "I16", "I17", "I17b", "I18", "I19", "I20", "I21", "I22",
    "I23", "I24", "I25", "I26", "I27", "recomputed",
    "I11.masks", "I12.rescored", "I16.used", "I17.bundles", "I18.counter", "I19.parameters",
    "I5.fed", "I20.copies", "I20.gradient", "I21.micro-batches", "I23.parameters",
    "recomputed.loss", "recomputed.gradient", "recomputed.step", "recomputed.average",
    "recomputed.dropout",
)  # fmt: skip


class Scorer:
    """Rewards a completion by how much of it repeats the prompt's first digit."""

    def score(self, prompt: list[int], tokens: list[int], sampled: list[bool]) -> float:
        """Share of the sampled tokens that are the wanted one."""
        wanted = prompt[0]
        made = [t for t, s in zip(tokens, sampled, strict=True) if s]
        return sum(1.0 for t in made if t == wanted or t == wanted - 1) / 5

    def score_all(self, samples: list[Made]) -> dict[str, float]:
        """Rewards by uid."""
        return {s.uid: self.score(s.prompt, s.tokens, s.sampled) for s in samples}


@dataclass
class Outcome:
    """What a run came to."""

    final: str
    """Digest of all of the final state."""
    rewards: list[float]
    """Mean reward by iteration."""
    params: list[str]


class Job:
    """One process life after the other, until the job is done."""

    def __init__(self, shape: Shape, folder: Path, url: str) -> None:
        self.shape, self.folder = shape, folder
        self.ledger = Ledger.open(url)
        self.plan = plan_of(shape)
        self.recorder: Recorder
        self.trainer: Trainer
        self.loader: Loader
        self.engines: list[Engine] = []
        self.scorer = Scorer()
        self.life = -1
        self.bundle: str | None = None
        self.saved: Path | None = None
        self.rewards: dict[int, float] = {}
        self.params: list[str] = []
        self.scores: dict[str, float] = {}
        self.history: dict[int | None, dict[str, torch.Tensor]] = {}
        """Policies by version, for the probes."""

    # -- lives -----------------------------------------------------------------------------

    def run(self) -> Outcome:
        """All lives of the job."""
        done = False
        while not done:
            self.life += 1
            NOW.life = self.life
            first = self.begin()
            done = self.train(first)
            self.recorder.close()
        self.ledger.close()
        return Outcome(self.final(), [self.rewards[i] for i in sorted(self.rewards)], self.params)

    def begin(self) -> int:
        """Start a life, from the newest checkpoint where there is one; the iteration to do."""
        held = None if self.saved is None else storage.load(self.saved)
        first = 0 if held is None else held["iteration"]
        NOW.iteration = first
        self.history.clear()
        self.trainer = Trainer(self.shape.seed, self.shape.ranks_at(first))
        self.loader = Loader(self.shape.seed)
        policy = self.trainer.published() if held is None else storage.parts(held)["model"]
        self.recorder = Recorder.open(
            self.ledger,
            JOB,
            self.plan,
            policy=policy,
            version=0 if held is None else held["version"],
            iteration=first,
            bundle=self.bundle,
            job_path="tests.zoo.job:Job",
        )
        self.recorder.data(data_digests(self.loader.prompts), tokenizer=TOKENIZER)
        if held is not None:
            storage.restore(held, self.trainer, self.loader, self.shape.ranks_at(first))
            assert self.bundle is not None
            self.recorder.restored(
                self.bundle,
                self.saved_state(),
                iteration=held["iteration"],
                version=self.trainer.version,
                cursor=self.loader.sampler.state().ordinal,
                file_state=storage.parts(held),
            )
        self.recorder.random_states(first, "start", self.trainer.random_states())
        self.start_engines()
        self.late_init()
        self.sync_weights()
        if held is None:
            self.fill(0)
        return first

    def late_init(self) -> None:
        """What a framework does between loading and training: nothing here."""

    def start_engines(self) -> None:
        """New processes for the engines."""
        self.engines = [
            Engine(f"engine-{n}", f"engine-{n}#{self.life}", self.shape.seed)
            for n in range(self.shape.engines)
        ]
        for engine in self.engines:
            self.recorder.started("rollout", engine.name, engine.incarnation)

    def train(self, first: int) -> bool:
        """Iterations until the end or until the process is killed; True at the end."""
        for iteration in range(first, self.shape.iterations):
            NOW.iteration = iteration
            if len(self.trainer.ranks) != self.shape.ranks_at(iteration):
                self.trainer.resize(self.shape.ranks_at(iteration))
                self.recorder.random_states(iteration, "start", self.trainer.random_states())
            with self.recorder.iteration(iteration):
                self.one(iteration)
                if self.life == 0 and iteration == self.shape.killed_in:
                    self.recorder.flush()
                    return False
            if iteration in self.shape.saves:
                self.save(iteration + 1)
        self.recorder.finish(
            iterations=self.shape.iterations,
            version=self.trainer.version,
            policy=self.trainer.published(),
        )
        return True

    def one(self, iteration: int) -> None:
        """One iteration."""
        prompts = self.loader.take()
        samples = self.roll_out(iteration, prompts)
        kept = self.filter(iteration, samples)
        batches = self.prepare(iteration, kept)
        self.optimize(iteration, batches)
        self.sync_weights()
        if iteration + 1 < self.shape.iterations:
            self.fill(iteration + 1)

    # -- samples ---------------------------------------------------------------------------

    def fill(self, iteration: int) -> None:
        """Draw the batch of an iteration ahead."""
        drawn = self.loader.fill()
        self.recorder.drawn(
            iteration,
            start=drawn[0].ordinal if drawn else 0,
            indices=[d.index for d in drawn],
            epoch=drawn[0].epoch if drawn else 0,
            prompts=[d.prompt for d in drawn],
        )

    def route(self, number: int) -> Engine:
        """Engine of a request."""
        return self.engines[number % len(self.engines)]

    def generate(self, prompts: list[Drawn]) -> list[Made]:
        """Samples of all prompts, in order of their uids."""
        made, number = [], 0
        for drawn in prompts:
            for member in range(GROUP):
                engine = self.route(number)
                made.append(engine.generate(uid(drawn.ordinal, member), list(drawn.prompt)))
                number += 1
        return made

    def roll_out(self, iteration: int, prompts: list[Drawn]) -> list[Made]:
        """Generate, score, and record both."""
        fresh = [engine for engine in self.engines if engine.fresh]
        samples = self.generate(prompts)
        for engine in fresh:
            self.recorder.first_use(
                "rollout",
                engine.name,
                engine.incarnation,
                {"model": engine.resident()},
                version=engine.version,
                use="generate",
            )
        self.recorder.generated(
            iteration,
            [
                Generated(
                    uid=s.uid,
                    tokens=s.tokens,
                    logps=s.logps,
                    version=s.versions,
                    replica=s.replica,
                    incarnation=s.incarnation,
                    sampled=s.sampled,
                    prompt=s.prompt,
                    stream=s.stream,
                    cache_version=s.cache_version,
                )
                for s in samples
            ],
            version=self.trainer.version,
            transform=Transform(
                temperature=self.engines[0].temperature, top_p=1.0, log_probs="raw"
            ),
        )
        rewards = self.scorer.score_all(samples)
        self.recorder.rewarded(iteration, rewards, {s.uid: s.tokens for s in samples}, by=SCORER)
        self.recorder.rescored(iteration, rewards, {s.uid: scored_alone(s) for s in samples})
        self.scores = rewards
        self.rewards[iteration] = sum(rewards.values()) / max(1, len(rewards))
        return samples

    def filter(self, iteration: int, samples: list[Made]) -> list[Made]:
        """Leave out groups whose rewards are all equal: their advantages are zero."""
        groups: dict[str, list[Made]] = {}
        for sample in samples:
            groups.setdefault(sample.uid.partition("/")[0], []).append(sample)
        flat = [
            members
            for members in groups.values()
            if len({self.scores.get(s.uid) for s in members}) == 1
        ]
        left_out = {s.uid for members in flat for s in members}
        if left_out and len(left_out) < len(samples):
            self.recorder.dropped(iteration, sorted(left_out), "zero-variance")
            return [s for s in samples if s.uid not in left_out]
        return samples

    def advantages(self, rewards: list[float]) -> list[float]:
        """Group-relative: less the mean, over the deviation."""
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        return [(r - mean) / (deviation + FLOOR) for r in rewards]

    def prepare(self, iteration: int, samples: list[Made]) -> dict[int, list[Batch]]:
        """Micro batches of one group each, dealt out to the virtual ranks in blocks."""
        groups: dict[str, list[Made]] = {}
        for sample in samples:
            groups.setdefault(sample.uid.partition("/")[0], []).append(sample)
        batches: dict[int, list[Batch]] = {v: [] for v in range(VIRTUAL_RANKS)}
        for number, members in enumerate(groups.values()):
            batch = self.collate(members)
            batches[self.deal(number, len(groups))].append(batch)
        return batches

    def deal(self, number: int, groups: int) -> int:
        """Virtual rank of the n-th group."""
        return number * VIRTUAL_RANKS // groups

    def trained_mask(self, sample: Made, width: int) -> list[bool]:
        """Which tokens are trained: those that the policy drew."""
        return sample.sampled + [False] * (width - len(sample.tokens))

    def pad(self, values: list[Any], width: int, fill: Any) -> list[Any]:
        """Values padded on the right."""
        return list(values) + [fill] * (width - len(values))

    def collate(self, members: list[Made]) -> Batch:
        """Tensors of one group, with log-probabilities of the trainer and of the reference."""
        width = max(len(s.tokens) for s in members)
        tokens = torch.tensor([self.pad(s.tokens, width, PAD) for s in members])
        rewards = [self.reward_of(s) for s in members]
        lead = self.trainer.ranks[0]
        return Batch(
            uids=[s.uid for s in members],
            tokens=tokens,
            trained=torch.tensor([self.trained_mask(s, width) for s in members]),
            engine=torch.tensor([self.pad(s.logps, width, 0.0) for s in members]),
            old=self.trainer.score(lead.model, tokens),
            reference=self.trainer.score(self.trainer.reference, tokens),
            advantages=torch.tensor(self.advantages(rewards)),
            rewards=rewards,
            lengths=[len(s.tokens) for s in members],
            groups=[s.uid.partition("/")[0] for s in members],
            versions=[_only_version(s) for s in members],
            scored_at=self.trainer.version,
        )

    def reward_of(self, sample: Made) -> float:
        """Reward of a sample, by uid."""
        return self.scores[sample.uid]

    # -- update ----------------------------------------------------------------------------

    def divisor(self, batches: dict[int, list[Batch]]) -> float:
        """Trained tokens of the whole batch."""
        return float(sum(int(b.trained.sum()) for micro in batches.values() for b in micro))

    def optimize(self, iteration: int, batches: dict[int, list[Batch]]) -> None:
        """Record what is consumed, probe it, and update."""
        self.recorder.consumed(
            iteration,
            [
                Consumed(
                    uid=batch.uids[row],
                    tokens=batch.tokens[row, : batch.lengths[row]],
                    reward=batch.rewards[row],
                    advantage=float(batch.advantages[row]),
                    trained=batch.trained[row, : batch.lengths[row]],
                    logps=batch.engine[row, : batch.lengths[row]],
                    virtual_rank=virtual_rank,
                    version_min=batch.versions[row],
                    old=batch.old[row, : batch.lengths[row]],
                )
                for virtual_rank, micro in batches.items()
                for batch in micro
                for row in range(len(batch.uids))
            ],
            version=self.trainer.version,
        )
        self.probe(iteration, batches)
        self.recorder.random_states(iteration, "before", self.trainer.random_states())
        declared = PolicyLoss(
            kl_coefficient=self.trainer.kl_coefficient,
            clip_range=CLIP_RANGE,
            truncation=TRUNCATION,
        )
        probe = StepProbe(ADAM, clip_norm=CLIP_NORM, elements=16)
        with self.recorder.update(
            iteration, self.trainer.state, probe=probe, loss=declared
        ) as record:
            self.trainer.update(batches, self.divisor(batches), record, declared, probe)
        self.recorder.random_states(iteration, "after", self.trainer.random_states())
        self.params.append(digest_of(logical_list(self.trainer)))

    def probe(self, iteration: int, batches: dict[int, list[Batch]]) -> None:
        """Replay behaviour, trainer's and reference's log-probabilities in the other code."""
        reference = logical(self.trainer.reference, tied=True)
        self.compare_all(iteration, batches)
        for virtual_rank, micro in batches.items():
            for batch in micro:
                probed = [n for n in PROBED if n < len(batch.uids)]
                # Each sample is replayed under the version that its stamps say.
                by_version: dict[int | None, list[int]] = {}
                for n in probed:
                    by_version.setdefault(batch.versions[n], []).append(n)
                for what, source, version, weights, rows in (
                    *(
                        ("behaviour", batch.engine, version, self.history.get(version), alike)
                        for version, alike in by_version.items()
                    ),
                    ("proximal", batch.old, None, self.history.get(batch.scored_at), probed[:1]),
                    ("reference", batch.reference, None, reference, probed[:1]),
                ):
                    if weights is None:
                        continue  # of several versions, or of one that is no longer kept
                    used, again, others = self.replay(weights, batch, source, rows)
                    self.recorder.replayed(
                        iteration,
                        what,  # type: ignore[arg-type]
                        used,
                        again,
                        replica=f"vrank-{virtual_rank}",
                        version=(batch.versions[0] if version is None else version) or 0,
                        other_tokens=others if what == "behaviour" else 0,
                    )

    def compare_all(self, iteration: int, batches: dict[int, list[Batch]]) -> None:
        """Engine's values against the trainer's of the same version: both are there already."""
        used, again = [], []
        for batch in (b for micro in batches.values() for b in micro):
            for row, version in enumerate(batch.versions):
                if version == batch.scored_at:
                    on = batch.trained[row]
                    used.extend(batch.engine[row][on].tolist())
                    again.extend(batch.old[row][on].tolist())
        if used:
            self.recorder.replayed(
                iteration, "behaviour", used, again, replica="all", version=self.trainer.version
            )

    def replay(
        self,
        weights: Mapping[str, torch.Tensor],
        batch: Batch,
        source: torch.Tensor,
        rows: Sequence[int],
    ) -> tuple[list[float], list[float], int]:
        """Log-probabilities of samples as used and again, and tokens drawn otherwise."""
        checker = Engine("probe", "probe", self.shape.seed)
        checker.load(weights, 0)
        w = checker.weights()
        used, again, others = [], [], 0
        for n in rows:
            h = np.zeros(w["embed"].shape[1], dtype=np.float32)
            row = [int(t) for t in batch.tokens[n, : batch.lengths[n]]]
            for place in range(len(row) - 1):
                h, logp = checker.step(w, h, row[place], place)
                if not bool(batch.trained[n, place + 1]):
                    continue
                used.append(float(source[n, place + 1]))
                again.append(float(logp[row[place + 1]]))
                u = keyed_uniform(self.shape.seed, batch.uids[n], place + 1)
                margin = 1e-5 + 8 * abs(used[-1] - again[-1])
                others += drawn_otherwise(logp, row[place + 1], u, margin)
        return used, again, others

    # -- sync, save ------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Deliver the present policy to all engines and empty their caches."""
        weights = self.trainer.published()
        version = self.trainer.version
        self.history[version] = self.kept_for_probes()
        with self.recorder.sync(version, weights, [e.name for e in self.engines]) as sync:
            for engine in self.engines:
                self.deliver(engine, weights, version)
                flushed = engine.flush()
                sync.delivered(
                    engine.name, engine.incarnation, engine.resident(), caches_flushed=flushed
                )

    def kept_for_probes(self) -> dict[str, torch.Tensor]:
        """The present policy, for probes of samples that are stamped with its version."""
        model = self.trainer.ranks[0].model
        return logical({n: t.detach().clone() for n, t in model.items()}, tied=True)

    def deliver(self, engine: Engine, weights: dict[str, torch.Tensor], version: int) -> None:
        """Hand the weights to one engine."""
        engine.load(weights, version)

    def saved_state(self) -> dict[str, Any]:
        """Parts that a checkpoint holds."""
        state = self.trainer.state()
        del state["cast"]
        state["loader"] = self.loader.state()
        for owner, stream in self.trainer.random_states().items():
            state[f"rng:{owner}"] = {"state": stream}
        return state

    def save(self, iteration: int) -> None:
        """Write a checkpoint after an iteration."""
        folder = self.folder / f"checkpoint-{iteration}"
        with self.recorder.checkpoint(
            folder,
            self.saved_state(),
            iteration=iteration,
            version=self.trainer.version,
            cursor=self.loader.sampler.state().ordinal,
            in_flight=[uid(d.ordinal, m) for d in self.loader.buffer for m in range(GROUP)],
            parent=self.bundle,
            read_back=lambda: storage.parts(storage.load(folder)),
        ) as bundle:
            storage.save(folder, bundle, self.trainer, self.loader, iteration)
        self.bundle, self.saved = bundle, folder

    def final(self) -> str:
        """Digest of everything that is left at the end."""
        drawn = [self.loader.sampler.state().ordinal, *(d.ordinal for d in self.loader.buffer)]
        states = [state.tolist() for state in self.trainer.random_states().values()]
        return digest_of(
            sorted(roots(self.trainer.state()).items()),
            drawn,
            states,
            [e.version for e in self.engines],
        )


def scored_alone(sample: Made) -> float:
    """The reward by other code than the scorer's, for the probe."""
    made = np.array(sample.tokens)[np.array(sample.sampled)]
    return float(np.isin(made, (sample.prompt[0], sample.prompt[0] - 1)).sum() / 5)


def _only_version(sample: Made) -> int | None:
    versions = {v for v, on in zip(sample.versions, sample.sampled, strict=True) if on}
    return versions.pop() if len(versions) == 1 else None


def logical_list(trainer: Trainer) -> list[Any]:
    """Published tensors as numbers."""
    return [t.float().sum().item() for t in trainer.published().values()]


__all__ = ["Job", "Outcome", "Shape", "forward", "plan_of"]
