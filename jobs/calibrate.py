"""Measures how far an engine's log-probabilities stand from the training side's on this machine.

``python -m shiftbook.jobs.calibrate --engine vllm --lanes 3`` prints a line of JSON. The same
prompts, and turns sampled after them, go through the engine in several batch compositions, with and
without cached prefixes, under the base policy and under perturbed ones; every log-probability is
compared with a plain forward, and with itself in the other compositions.
What a job declares as its tolerance follows from the largest mean gap (``jobs/noise.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from shiftbook.jobs.components import one_thread
from shiftbook.jobs.engine_types import Engine, TurnRequest, TurnResult
from shiftbook.jobs.engines import ENGINES, make_engine
from shiftbook.jobs.keyed_rng import format_uid, hash64
from shiftbook.jobs.model import ModelConfig, forward_train, upcast
from shiftbook.jobs.noise import Noise
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.probe import expected_logps, probe_prompts

POLICIES = 4
"""The base policy, and perturbed ones as training might make them."""
DEVIATION = 0.02
LENGTHS = (12, 24, 35, 40, 52, 64, 71, 80)
TURN_TOKENS = 12


def measure(engine: Engine, name: str, config: ModelConfig) -> Noise:
    """The noise of an engine without requests; it holds the last policy afterwards."""
    prompts = probe_prompts(config, LENGTHS)
    orders = _compositions(len(prompts), engine.lanes)
    mean_gap = largest = between = 0.0
    compared = 0
    for version, weights in enumerate(_policies(config)):
        engine.load(weights, version)
        engine.flush()
        expected = expected_logps(weights, config, LENGTHS)
        probed = [_probed(engine, prompts, order) for order in orders]
        turns = [_generated(engine, prompts, order) for order in orders]
        gaps = [np.abs(logps - expected) for logps in probed]
        gaps += [_turn_gaps(weights, config, prompts, made) for made in turns]
        mean_gap = max(mean_gap, *(float(gap.mean()) for gap in gaps))
        largest = max(largest, *(float(gap.max()) for gap in gaps))
        compared += sum(gap.size for gap in gaps)
        between = max(between, *(float(np.abs(other - probed[0]).max()) for other in probed[1:]))
        between = max(between, *(_apart(turns[0], other) for other in turns[1:]))
    return Noise(name, engine.lanes, compared, mean_gap, largest, between)


def _probed(
    engine: Engine, prompts: Sequence[Sequence[int]], order: Sequence[Sequence[int]]
) -> np.ndarray:
    """Log-probabilities [P, V] after each prompt, in batches of these rows."""
    found: dict[int, np.ndarray] = {}
    for batch in order:
        found |= zip(batch, engine.probe([prompts[row] for row in batch]), strict=True)
    return np.array([found[row] for row in range(len(prompts))])


def _generated(
    engine: Engine, prompts: Sequence[Sequence[int]], order: Sequence[Sequence[int]]
) -> list[TurnResult]:
    """A turn after each prompt, decoded in batches of these rows."""
    found: dict[str, TurnResult] = {}
    for batch in order:
        for row in batch:
            engine.submit(
                TurnRequest(format_uid(row, 0), 0, list(prompts[row]), max_new=TURN_TOKENS)
            )
        while engine.running or engine.waiting:
            found |= {result.uid: result for result in engine.step()}
    return [found[format_uid(row, 0)] for row in range(len(prompts))]


def _turn_gaps(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    turns: Sequence[TurnResult],
) -> np.ndarray:
    """|log-probability, engine - plain forward| of every token of the turns [N]."""
    gaps: list[float] = []
    parameters = upcast(weights)
    for prompt, turn in zip(prompts, turns, strict=True):
        with torch.inference_mode():
            logits = forward_train(config, parameters, torch.tensor([[*prompt, *turn.tokens]]))[0]
        logps = torch.log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1)
        own = logps[torch.arange(len(turn.tokens)), torch.tensor(turn.tokens)].numpy()
        gaps += np.abs(own - np.array(turn.logps)).tolist()
    return np.array(gaps)


def _apart(one: Sequence[TurnResult], other: Sequence[TurnResult]) -> float:
    """Largest difference of a log-probability in two compositions, where the tokens are the same:
    after a draw on the edge of an interval fell otherwise, the contexts are others."""
    apart = 0.0
    for a, b in zip(one, other, strict=True):
        for place, (x, y) in enumerate(zip(a.logps, b.logps, strict=False)):
            if a.tokens[: place + 1] != b.tokens[: place + 1]:
                break
            apart = max(apart, abs(x - y))
    return apart


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
