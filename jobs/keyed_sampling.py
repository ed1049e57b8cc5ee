"""Sampling inside vLLM by the job's keyed numbers: imported by vLLM's process alone.

Each request carries its turn's key and how many tokens of the turn were sampled before; the token
is the one that the reference engine would draw from the same logits, so a turn goes on in any
engine and any batch. The log-probabilities that vLLM reports are taken before this processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from shiftbook.jobs.keyed_rng import uniform_at

KEY, BEGUN = "shiftbook_key", "shiftbook_begun"
"""Names of the request's extra arguments."""


class KeyedSampler(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leaves one token to choose: the keyed draw, by a float64 cumulative sum."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Requests without a key (probes) are let through as they are."""

    def is_argmax_invariant(self) -> bool:
        """It changes which token is chosen."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The draw of one request; None without a key."""
        extra: dict[str, Any] = params.extra_args or {}
        if KEY not in extra:
            return None
        key, begun = int(extra[KEY]), int(extra[BEGUN])

        def draw(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = drawn_token(logits, key, begun + len(output))
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
            return logits

        return draw


def drawn_token(logits: torch.Tensor, key: int, position: int) -> int:
    """Token drawn from logits [V] for ``position`` of the turn with ``key``."""
    shifted = logits.detach().to("cpu", torch.float64).numpy()
    cumulative = np.cumsum(np.exp(shifted - shifted.max()))
    last = len(cumulative) - 1
    point = uniform_at(key, position) * cumulative[last]
    return min(int(np.searchsorted(cumulative, point, side="right")), last)
