"""Make the base policy: supervised training on synthetic transcripts that are often wrong.

``python -m shiftbook.jobs.make_base_policy --out FILE --seed 0`` writes the safetensors file that
the package carries as ``jobs/assets/base_policy.safetensors``. Seven in ten transcripts use the
calculator for every step, four in ten of those with a wrong first operand; the others answer at
once with random digits. So the policy knows the format and has much to gain from reinforcement.
Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shiftbook.jobs import tokenizer
from shiftbook.jobs.keyed_rng import hash64, uniform_at
from shiftbook.jobs.model import ModelConfig, forward_train, init_params
from shiftbook.jobs.policy_file import save_policy
from shiftbook.jobs.questions import (
    LARGEST_RESULT,
    operands,
    question,
    result_tokens,
)

CALLING_SHARE = 0.7
WRONG_OPERAND_SHARE = 0.4
DIRECT_ANSWER_BELOW = 400
STEPS = 1600
BATCH = 64
PEAK_RATE = 2e-3
WARMUP_STEPS = 60
_TRANSCRIPT_STREAM = 0x7A5C


def transcript(seed: int, index: int) -> tuple[list[int], list[int]]:
    """Tokens of synthetic transcript ``index`` and the mask of those that the policy says."""
    key = hash64(seed, _TRANSCRIPT_STREAM, index)
    calls_tool = uniform_at(key, 0) < CALLING_SHARE
    asked = question(seed, index)
    tokens = list(asked.tokens)
    mask = [0] * len(tokens)

    def say(part: list[int]) -> None:
        tokens.extend(part)
        mask.extend([1] * len(part))

    value = int(uniform_at(key, 1) * DIRECT_ANSWER_BELOW)
    if calls_tool:
        numbers, signs = operands(seed, index)
        if uniform_at(key, 2) < WRONG_OPERAND_SHARE:
            numbers[0] = _wrong_operand(key, numbers, signs)
        value = numbers[0]
        left = str(value)
        for sign, number in zip(signs, numbers[1:], strict=True):
            say([tokenizer.CALL, *tokenizer.encode(f"{left}{sign}{number}"), tokenizer.END])
            value = value + number if sign == "+" else value - number
            given = result_tokens(str(value))
            tokens.extend(given)
            mask.extend([0] * len(given))
            left = f"{value:03d}"
    say([tokenizer.ANSWER, *tokenizer.encode(f"{value:03d}"), tokenizer.END])
    return tokens, mask


def _wrong_operand(key: int, numbers: list[int], signs: list[str]) -> int:
    """Another two-digit first operand under which every intermediate result stays in range."""
    for attempt in range(3, 64):
        candidate = 10 + int(uniform_at(key, attempt) * 90)
        value, inside = candidate, candidate != numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            value = value + number if sign == "+" else value - number
            inside = inside and 0 <= value <= LARGEST_RESULT
        if inside:
            return candidate
    return numbers[0]


def _batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    rows = [transcript(seed, step * BATCH + row) for row in range(BATCH)]
    length = max(len(tokens) for tokens, _ in rows)
    tokens = torch.full((BATCH, length), tokenizer.PAD, dtype=torch.int64)
    mask = torch.zeros((BATCH, length))
    for row, (ids, said) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(said)] = torch.tensor(said, dtype=torch.float32)
    return tokens, mask


def train(
    config: ModelConfig, seed: int, steps: int, report: Callable[[int, float], None]
) -> dict[str, Tensor]:
    """Train from scratch for ``steps`` batches; the weights in bfloat16. One thread, seeded."""
    masters = init_params(config, seed)
    for tensor in masters.values():
        tensor.requires_grad_(True)
    adam = torch.optim.AdamW(
        list(masters.values()), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(steps):
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        rate = PEAK_RATE * warmup * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        for group in adam.param_groups:
            group["lr"] = rate
        tokens, mask = _batch(seed, step)
        logits = forward_train(config, masters, tokens[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        said = mask[:, 1:]
        loss = (losses * said).sum() / said.sum()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(masters.values()), 1.0)
        adam.step()
        report(step, loss.detach().item())
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in masters.items()}


def recipe(seed: int, steps: int) -> str:
    """How the file was made, as it stands in its metadata."""
    return f"shiftbook.jobs.make_base_policy --seed {seed} --steps {steps}"


def main(arguments: list[str] | None = None) -> int:
    """The command: train and write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    def report(step: int, loss: float) -> None:
        if step % 50 == 0 or step == options.steps - 1:
            sys.stderr.write(f"step {step:5d}  loss {loss:.4f}\n")

    weights = train(ModelConfig(), options.seed, options.steps, report)
    save_policy(options.out, weights, recipe(options.seed, options.steps))
    sys.stderr.write(f"wrote {options.out} ({options.out.stat().st_size} bytes)\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
