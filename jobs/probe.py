"""The probe of a weight sync: what the policy says after a few fixed prompts, by two forwards.

An engine says it through its own caches and kernels, the training side by a plain forward of the
weights that it sent. Prompts are longer than a block of a prefix cache, so that values cached under
older weights are read, and seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shiftbook.jobs import tokenizer
from shiftbook.jobs.keyed_rng import hash64
from shiftbook.jobs.model import ModelConfig, forward_train, upcast

LENGTHS = (35, 37, 40, 44)
"""Tokens of each prompt; blocks of the engines' prefix caches hold 32."""
TOLERANCE = 2e-5
"""Largest mean gap where nothing was calibrated: float32 sums of a few dozen terms in two orders.
The same as the verifier's, so that an engine refuses what a verdict would name."""
SPREAD = 10.0
"""A single gap may be this many times the tolerance of the mean."""
_STREAM = 0x9B0B


def probe_prompts(config: ModelConfig, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """The fixed prompts: ``<bos>`` and tokens drawn by a fixed key, as many as lengths."""
    first = tokenizer.ERROR + 1
    return [
        [
            tokenizer.BOS,
            *(
                first + hash64(_STREAM, row, place) % (config.vocabulary - first)
                for place in range(min(length, config.context - 1) - 1)
            ),
        ]
        for row, length in enumerate(lengths)
    ]


def expected_logps(
    weights: Mapping[str, Tensor], config: ModelConfig, lengths: Sequence[int] = LENGTHS
) -> np.ndarray:
    """Log-probabilities float64 [P, V] of the next token after each prompt, by a plain forward."""
    prompts = probe_prompts(config, lengths)
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([p + [tokenizer.PAD] * (longest - len(p)) for p in prompts])
    with torch.inference_mode():
        logits = forward_train(config, upcast(weights), tokens)
    last = torch.stack([logits[row, len(p) - 1] for row, p in enumerate(prompts)])
    logps: np.ndarray = torch.log_softmax(last.double(), dim=-1).numpy()
    return logps


@dataclass(frozen=True)
class Probe:
    """What an engine must say: the training side's log-probabilities [P, V], and how closely."""

    expected: np.ndarray
    tolerance: float = TOLERANCE

    def compare(self, found: np.ndarray) -> Gap:
        """Both sides, number for number; NaN anywhere makes the gap infinite."""
        gaps = np.abs(np.asarray(found, np.float64) - self.expected)
        gaps = np.where(np.isfinite(gaps), gaps, np.inf)
        return Gap(len(gaps), int(gaps.size), float(gaps.mean()), float(gaps.max()), self.tolerance)


@dataclass(frozen=True)
class Gap:
    """|engine - training side| over all probed log-probabilities."""

    prompts: int
    tokens: int
    mean: float
    largest: float
    tolerance: float

    @property
    def good(self) -> bool:
        """Within the tolerance."""
        return self.mean <= self.tolerance and self.largest <= SPREAD * self.tolerance
