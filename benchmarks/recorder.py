"""Time the record of one training step of 512 samples, fingerprints of tensors apart.

Run: ``python -m benchmarks.recorder [--steps N] [--tokens N] [--directory DIR]``. A step draws 64
prompts in groups of 8, generates, rewards and consumes 512 samples of 64 tokens each, updates and
syncs; its rows go into three segments and its events into one append, all durable. Parts of the
state are handed in as roots, so no tensor is read. Bound: 10 ms, median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shiftbook.checkpoint.recorder import Consumed, Generated, Recorder, uid
from shiftbook.ledger.events.training import Transform
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, UpdatePlan

BOUND_MS = 10.0
PROMPTS, GROUP = 64, 8
RAW = Transform(temperature=1.0, top_p=1.0, log_probs="raw")


def plan() -> Plan:
    """A plan for the step."""
    return Plan(
        seed=0,
        iterations=1000,
        data=DataPlan(
            dataset_digest="d",
            tokenizer_digest="t",
            dataset_size=1 << 20,
            sampler_rule="sequential-v1",
            seed=0,
        ),
        sampling=SamplingPlan(),
        update=UpdatePlan(
            prompts_per_update=PROMPTS, group_size=GROUP, virtual_ranks=1, learning_rate=1e-6
        ),
    )


def one(record: Recorder, step: int, tokens: np.ndarray, logps: np.ndarray) -> float:
    """Record one step; milliseconds."""
    roots = [f"{step + n:032x}" for n in range(2)]
    states = iter([dict.fromkeys(("model", "masters", "optimizer"), roots[n]) for n in range(2)])
    sampled = np.ones(tokens.shape[1], dtype=bool)
    names = [uid(step * PROMPTS + p, m) for p in range(PROMPTS) for m in range(GROUP)]
    begun = time.perf_counter()
    with record.iteration(step):
        record.drawn(
            step,
            start=step * PROMPTS,
            indices=range(step * PROMPTS, (step + 1) * PROMPTS),
            epoch=0,
            prompts=list(tokens[:PROMPTS, :16]),
        )
        samples = [
            Generated(
                name, tokens[n], logps[n], step, "engine", "engine#1", sampled=sampled, stream=name
            )
            for n, name in enumerate(names)
        ]
        record.generated(step, samples, version=step, transform=RAW)
        record.rewarded(
            step,
            dict.fromkeys(names, 1.0),
            {name: tokens[n] for n, name in enumerate(names)},
            by="benchmark",
        )
        record.consumed(
            step,
            [
                Consumed(name, tokens[n], 1.0, 0.0, trained=sampled, logps=logps[n])
                for n, name in enumerate(names)
            ],
            version=step,
        )
        with record.update(step, lambda: next(states)) as update:
            update.micro_batch(
                tokens=tokens.size, samples=len(names), divisor=tokens.size, groups=PROMPTS
            )
            update.applied(
                version=step + 1,
                optimizer_step=step + 1,
                learning_rate=1e-6,
                loss=0.0,
                grad_norm=1.0,
            )
        with record.sync(step + 1, roots[1], ["engine"]) as sync:
            sync.delivered("engine", "engine#1", roots[1], caches_flushed=("prefix",))
    return (time.perf_counter() - begun) * 1e3


def main() -> int:
    """The benchmark; 1 where the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--directory", type=Path, default=None)
    chosen = parser.parse_args()
    random = np.random.default_rng(0)
    tokens = random.integers(0, 150_000, (PROMPTS * GROUP, chosen.tokens), dtype=np.uint32)
    logps = random.random(tokens.shape, dtype=np.float32)
    with tempfile.TemporaryDirectory(dir=chosen.directory) as place:
        url = f"sqlite:///{place}/ledger.db"
        with Recorder.open(url, "benchmark", plan(), policy="0" * 32) as record:
            times_ms = [one(record, step, tokens, logps) for step in range(chosen.steps)]
    median = statistics.median(times_ms[5:])
    print(
        f"one step of {PROMPTS * GROUP} samples of {chosen.tokens} tokens: {median:.2f} ms median"
    )
    print(f"bound {BOUND_MS:g} ms: {'met' if median <= BOUND_MS else 'MISSED'}")
    return 0 if median <= BOUND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
