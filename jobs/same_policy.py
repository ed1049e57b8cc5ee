"""Whether schedules made the same policy, as closely as the engine of their jobs promises.

The reference engine gives bits, so the fingerprints of the last policies are equal. The last bits
of vLLM's log-probabilities may depend on what else is in a batch: one bfloat16 weight rounds the
other way after an update, later one token in many thousands is drawn otherwise, and the policies
part. What must hold then is that the first iteration, which every schedule begins with the same
policy, has the same tokens but for a few samples, and that rewards differ by no more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shiftbook.ledger.evidence import read_segment
from shiftbook.ledger.ledger import Ledger

OTHER_SHARE = 0.02
"""Samples of the first iteration that may have other tokens."""
STANDARD_ERRORS = 4.0
"""How far apart mean rewards may be: by chance one pair of honest runs in 15,000 is further."""


@dataclass(frozen=True)
class Likeness:
    """Two schedules side by side."""

    first: str
    second: str
    samples: int
    """Of the first iteration, in both."""
    other: int
    """Those of them with other tokens."""
    reward_gap: float
    allowed_gap: float

    @property
    def alike(self) -> bool:
        """Within what an engine without bits promises."""
        few = self.other <= OTHER_SHARE * self.samples
        return bool(self.samples) and few and abs(self.reward_gap) <= self.allowed_gap

    def text(self) -> str:
        """In a line."""
        return (
            f"{self.first} and {self.second}: {self.samples - self.other} of {self.samples} "
            f"samples of the first iteration with the same tokens, mean reward "
            f"{self.reward_gap:+.4f} apart (chance allows {self.allowed_gap:.4f})"
        )


def first_tokens(ledger: Ledger, job: str) -> dict[str, str]:
    """Token digest by uid, of a job's first iteration."""
    for stored in ledger.read(job=job, types={"SamplesGenerated"}):
        event = stored.parsed()
        segment = getattr(event, "segment", None)
        if getattr(event, "iteration", None) == 0 and segment is not None:
            table = read_segment(ledger, segment).to_pydict()
            return dict(zip(table["uid"], table["token_digest"], strict=True))
    return {}


def likeness(
    names: tuple[str, str],
    tokens: tuple[Mapping[str, str], Mapping[str, str]],
    rewards: tuple[Sequence[float], Sequence[float]],
    samples_an_iteration: float,
) -> Likeness:
    """Compare two runs; ``rewards`` are means by iteration.

    The bound is that of two independent sets of draws, sqrt(2 p (1 - p) / n); the prompts are the
    same, so the true spread is smaller.
    """
    both = tokens[0].keys() & tokens[1].keys()
    other = sum(tokens[0][uid] != tokens[1][uid] for uid in both)
    pairs = list(zip(*rewards, strict=False))
    count = max(1.0, len(pairs) * samples_an_iteration)
    means = [sum(pair[side] for pair in pairs) / max(1, len(pairs)) for side in (0, 1)]
    p = (means[0] + means[1]) / 2
    allowed = STANDARD_ERRORS * math.sqrt(max(2 * p * (1 - p), 1e-6) / count)
    return Likeness(names[0], names[1], len(both), other, means[0] - means[1], allowed)
