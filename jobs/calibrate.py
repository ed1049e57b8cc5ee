"""Measures how far an engine's log-probabilities stand from the training side's on this machine.

``python -m shiftbook.jobs.calibrate --engine vllm --lanes 3`` prints a line of JSON. The same
prompts go through the engine in several batch compositions, with and without cached prefixes, under
the base policy and under perturbed ones; every log-probability is compared with a plain forward.
What a job declares as its tolerance follows from the largest mean gap (``jobs/noise.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from shiftbook.jobs.components import one_thread
from shiftbook.jobs.engine_types import Engine
from shiftbook.jobs.engines import ENGINES, make_engine
from shiftbook.jobs.keyed_rng import hash64
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.noise import Noise
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.probe import expected_logps, probe_prompts

POLICIES = 4
"""The base policy, and perturbed ones as training might make them."""
DEVIATION = 0.02
LENGTHS = (12, 24, 35, 40, 52, 64, 71, 80)


def measure(engine: Engine, name: str, config: ModelConfig) -> Noise:
    """The noise of an engine without requests; it holds the last policy afterwards."""
    prompts = probe_prompts(config, LENGTHS)
    mean_gap = largest = between = 0.0
    compared = 0
    for version, weights in enumerate(_policies(config)):
        engine.load(weights, version)
        engine.flush()
        expected = expected_logps(weights, config, LENGTHS)
        found: list[np.ndarray] = []
        for order in _compositions(len(prompts), engine.lanes):
            logps = np.empty_like(expected)
            for batch in order:
                logps[list(batch)] = engine.probe([prompts[row] for row in batch])
            gaps = np.abs(logps - expected)
            mean_gap, largest = max(mean_gap, gaps.mean()), max(largest, gaps.max())
            compared += gaps.size
            found.append(logps)
        between = max(between, *(np.abs(other - found[0]).max() for other in found[1:]))
    lanes = engine.lanes
    return Noise(name, lanes, compared, float(mean_gap), float(largest), float(between))


def _policies(config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    base = load_policy(config=config)
    for number in range(POLICIES):
        generator = torch.Generator().manual_seed(hash64(0xCA11B, number) >> 1)
        yield {
            name: (
                t.float() * (1 + number * DEVIATION * torch.randn(t.shape, generator=generator))
            ).to(torch.bfloat16)
            for name, t in base.items()
        }


def _compositions(prompts: int, lanes: int) -> list[list[Sequence[int]]]:
    """Ways to cut the prompts into batches: fresh, cached, alone, reversed, in unequal parts."""
    rows: Sequence[int] = range(prompts)
    full = [rows[i : i + lanes] for i in range(0, prompts, lanes)]
    back = [rows[::-1][i : i + lanes] for i in range(0, prompts, lanes)]
    parts = [rows[:1], rows[1:3], *[rows[i : i + lanes] for i in range(3, prompts, lanes)]]
    return [full, full, [[row] for row in rows], back, parts]


def main(arguments: list[str] | None = None) -> int:
    """The command: measure, and print the figures and the tolerance that follows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--lanes", type=int, default=3)
    options = parser.parse_args(arguments)
    config = ModelConfig()
    engine = make_engine(options.engine, config, options.lanes)
    one_thread()
    noise = measure(engine, options.engine, config)
    sys.stdout.write(json.dumps(asdict(noise)) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
