"""A small job that draws rewards, its live record, and the program that its shadow runs.

The state is a counter in a JSON file, so that its checkpoints have a form of their own. With
``equality`` ``bits`` everything follows from seed and counter; else each side draws its rewards
and losses by itself, under one law or two.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shiftbook.ledger.digests import (
    consumed_digest,
    generated_digest,
    logp_digest,
    rewarded_digest,
    token_digest,
)
from shiftbook.ledger.events.job import AttemptStarted, JobClosed, JobOpened
from shiftbook.ledger.events.lease import LeaseGranted
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved
from shiftbook.ledger.events.training import (
    BatchConsumed,
    SamplesGenerated,
    SamplesRewarded,
    UpdateApplied,
)
from shiftbook.ledger.evidence import write_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, ShadowPlan, UpdatePlan
from shiftbook.ledger.topology import Device, Topology
from shiftbook.verify.replay.protocol import Conditions, Job, Numbers, Sample, Samples, Step

JOB, SEED, SAMPLES = "small", 3, 64
TARGET = "tests.verify.shadow_run:as_declared"
BITS = {"equality": "bits", "law": 0.5}
NOISE = {"equality": "tolerance", "law": 0.5}
GAP = 1e-3
"""Median log-probability gap in nats; it moves by a third from one iteration to the next."""


def h128(*parts: object) -> str:
    """32 hex digits that depend on the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def shown(number: int, counter: int, law: float, draw: random.Random) -> dict[str, Any]:
    """What an iteration gives, from the counter that it begins with."""
    uids = [f"{number:06d}/{m:02d}" for m in range(SAMPLES)]
    rewards = [float(draw.random() < law) for _ in uids]
    return {
        "uid": uids,
        "tokens": [token_digest([number, counter, m]) for m in range(SAMPLES)],
        "logps": [logp_digest([-0.5 - counter]) for _ in uids],
        "reward": rewards,
        "loss": 1.0 / (1 + counter) + 0.01 * draw.random(),
        "kl": 0.001 * draw.random(),
        "logp_gap": GAP * math.exp(draw.gauss(0.0, 0.3)),
    }


def drawn_by(equality: str, number: int, counter: int, side: str) -> random.Random:
    """The generator of an iteration: the same on both sides, or each side's own noise."""
    of = counter if equality == "bits" else side
    return random.Random(f"{SEED}/{number}/{of}")


def as_declared(config: Mapping[str, Any] | None = None) -> Job:
    """The program that the ledger names."""
    values = dict(config or BITS)

    def run(conditions: Conditions) -> Iterator[Step]:
        start = conditions.start
        if values.get("fails"):
            raise ZeroDivisionError("a loss over no tokens")
        counter = 0
        if start is not None:
            state = json.loads(Path(start.path).read_text(encoding="utf-8"))
            assert state["bundle"] == start.bundle
            counter = int(state["counter"])
        first = 0 if start is None or values.get("numbers") == "from 0" else start.iteration
        for number in range(first, first + conditions.steps):
            draw = drawn_by(values["equality"], number, counter, "shadow")
            seen = shown(number, counter, float(values["law"]), draw)
            columns = zip(seen["uid"], seen["tokens"], seen["logps"], seen["reward"], strict=True)
            numbers = {name: seen[name] for name in ("loss", "kl", "logp_gap")}
            yield Step(
                number,
                [
                    Samples("rollout", [Sample(*one) for one in columns]),
                    Numbers("trainer", numbers),
                ],
            )
            counter += 1

    return Job(
        run,
        seed=SEED,
        equality=values["equality"],
        config=values,
        restorable=values.get("restorable", True),
    )


class Live:
    """Writes the record of a live run, an iteration after the other.

    ``gap_factor`` is what its log-probability gap is larger by; None where it records no gap.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        law: float = 0.5,
        gap_factor: float | None = 1.0,
        shadow: ShadowPlan | None = ShadowPlan(every_iterations=2),
        iterations: int = 4,
        replay: str | None = TARGET,
    ) -> None:
        self.folder, self.law, self.gap_factor = folder, law, gap_factor
        self.equality = str(config["equality"])
        self.counter = self.number = self.attempts = 0
        self.ledger = Ledger.open(f"sqlite:///{folder / 'live.db'}")
        self.last_bundle: str | None = None
        self.ledger.append(JOB, self._opened(dict(config), shadow, iterations, replay))
        self.attempt()
        self.save()

    @property
    def path(self) -> str:
        """The ledger's file."""
        return str(self.folder / "live.db")

    def _opened(
        self,
        config: dict[str, Any],
        shadow: ShadowPlan | None,
        iterations: int,
        replay: str | None,
    ) -> JobOpened:
        return JobOpened(
            components=("rollout", "trainer"),
            edges=(),
            devices=(Device(name="n/0"),),
            topology=Topology.of({"rollout": ["n/0"], "trainer": ["n/0"]}),
            elastic={},
            plan=Plan(
                seed=SEED,
                iterations=iterations,
                data=DataPlan(
                    dataset_digest="0" * 64,
                    tokenizer_digest="0" * 64,
                    dataset_size=64,
                    sampler_rule="sequential",
                    seed=SEED,
                ),
                sampling=SamplingPlan(
                    batch_composition="bitwise" if self.equality == "bits" else "distribution"
                ),
                update=UpdatePlan(
                    prompts_per_update=1, group_size=SAMPLES, virtual_ranks=1, learning_rate=1e-3
                ),
                shadow=shadow,
                required_invariants=("shadow",),
            ),
            job_path="mine:main",
            config=config,
            replay=replay,
        )

    def attempt(self) -> None:
        """Begin an attempt where the last bundle stands."""
        name = f"a{self.attempts}"
        holder = self.ledger.append(JOB, LeaseGranted(devices=("n/0",), holder=name))
        self.ledger.append(
            JOB,
            AttemptStarted(
                attempt=name,
                parent=None if not self.attempts else f"a{self.attempts - 1}",
                bundle=self.last_bundle,
                iteration=self.number,
                epoch=holder.first,
                topology=Topology.of({"rollout": ["n/0"], "trainer": ["n/0"]}),
                policy_version=self.number,
                policy_fingerprint=h128("model", self.counter),
                pid=1,
            ),
        )
        self.attempts += 1

    @property
    def name(self) -> str:
        """Name of the attempt."""
        return f"a{self.attempts - 1}"

    def save(self, place: str | None = None) -> Path:
        """Save and record a checkpoint; its file."""
        path = self.folder / (place or f"at-{self.number}.json")
        bundle = hashlib.sha256(f"{self.name}/{self.number}".encode()).hexdigest()
        path.write_text(json.dumps({"bundle": bundle, "counter": self.counter}), encoding="utf-8")
        self.ledger.append(
            JOB,
            CheckpointSaved(
                attempt=self.name,
                bundle=bundle,
                path=str(path),
                iteration=self.number,
                policy_version=self.number,
                parts={"model": h128("model", self.counter)},
                cursor=self.number,
                bytes=10,
                save_s=0.1,
            ),
        )
        self.last_bundle = bundle
        return path

    def restore(self, number: int) -> None:
        """Go back to a checkpoint within the attempt."""
        self.number = self.counter = number
        saved = [e.body for e in self.ledger.read(types={"CheckpointSaved"})]
        bundle = next(str(s["bundle"]) for s in saved if s["iteration"] == number)
        self.ledger.append(
            JOB,
            CheckpointRestored(
                attempt=self.name,
                bundle=bundle,
                kind="resume",
                iteration=number,
                policy_version=number,
                parts={"model": h128("model", number)},
                cursor=number,
                restore_s=0.1,
            ),
        )

    def train(self, iterations: int, place: str | None = None) -> None:
        """Record some more iterations, each with its checkpoint."""
        for _ in range(iterations):
            draw = drawn_by(self.equality, self.number, self.counter, "live")
            self._record(shown(self.number, self.counter, self.law, draw))
            self.counter += 1
            self.number += 1
            self.save(place)

    def _record(self, seen: dict[str, Any]) -> None:
        uids, tokens, rewards = seen["uid"], seen["tokens"], seen["reward"]
        count, of = len(uids), {"attempt": self.name, "iteration": self.number}
        made = {
            "uid": uids,
            "group": [0] * count,
            "turns": [1] * count,
            "tokens": [3] * count,
            "token_digest": tokens,
            "logp_digest": seen["logps"],
            "version_min": [self.number] * count,
            "version_max": [self.number] * count,
            "replica": ["r"] * count,
            "incarnation": ["r#1"] * count,
        }
        scored = {"uid": uids, "token_digest": tokens, "reward": rewards, "scorer": ["s"] * count}
        used = {
            "uid": uids,
            "token_digest": tokens,
            "reward": rewards,
            "advantage": [0.0] * count,
            "group": [0] * count,
            "virtual_rank": [0] * count,
            "tokens": [3] * count,
        }
        pairs = list(zip(uids, tokens, strict=True))
        self.ledger.append(
            JOB,
            [
                SamplesGenerated(
                    **of,
                    count=count,
                    tokens=3 * count,
                    sampled_tokens=3 * count,
                    policy_version=self.number,
                    digest=generated_digest(zip(uids, tokens, seen["logps"], strict=True)),
                    segment=write_segment(self.ledger, made),
                ),
                SamplesRewarded(
                    **of,
                    count=count,
                    reward_mean=sum(rewards) / count,
                    digest=rewarded_digest(zip(uids, tokens, rewards, strict=True)),
                    segment=write_segment(self.ledger, scored),
                ),
                BatchConsumed(
                    **of,
                    count=count,
                    tokens=3 * count,
                    policy_version=self.number,
                    version_min=self.number,
                    digest=consumed_digest(pairs),
                    segment=write_segment(self.ledger, used),
                ),
                self._update(seen),
            ],
        )

    def _update(self, seen: dict[str, Any]) -> UpdateApplied:
        before, after = self.counter, self.counter + 1
        return UpdateApplied(
            attempt=self.name,
            iteration=self.number,
            policy_version=self.number + 1,
            params_before=h128("model", before),
            params_after=h128("model", after),
            masters_before=h128("masters", before),
            masters_after=h128("masters", after),
            optimizer_before=h128("optimizer", before),
            optimizer_after=h128("optimizer", after),
            optimizer_step=after,
            learning_rate=1e-3,
            tokens=3 * SAMPLES,
            divisor=3.0 * SAMPLES,
            loss=seen["loss"],
            kl=seen["kl"],
            grad_norm=1.0,
            clipped=False,
            skipped=False,
            virtual_ranks=(),
            logp_gap=None if self.gap_factor is None else self.gap_factor * seen["logp_gap"],
        )

    def close(self) -> None:
        """Record the job's end."""
        closed = JobClosed(
            outcome="finished",
            iterations=self.number,
            policy_version=self.number,
            policy_fingerprint=h128("model", self.counter),
        )
        self.ledger.append(JOB, closed)
