"""Prompts in the declared order, one batch drawn ahead; the buffer is part of the saved state."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from shiftbook.checkpoint.sampler import HASH_SORT, Sampler

DATASET, PROMPTS, GROUP = 10, 4, 4
TOKENIZER = "digits-v1"


def data_set(seed: int) -> list[list[int]]:
    """Prompts of four digits (tokens 2 to 9)."""
    draw = random.Random(seed)
    return [[draw.randrange(2, 10) for _ in range(4)] for _ in range(DATASET)]


@dataclass(frozen=True)
class Drawn:
    """One prompt on its way."""

    ordinal: int
    epoch: int
    index: int
    prompt: tuple[int, ...]


class Loader:
    """Draws batches and keeps one ahead, as a prefetching data loader does."""

    def __init__(self, seed: int) -> None:
        self.prompts = self.build(seed)
        self.sampler = Sampler(DATASET, seed, rule=HASH_SORT)
        self.buffer: list[Drawn] = []

    def build(self, seed: int) -> list[list[int]]:
        """The tokenised data set."""
        return data_set(seed)

    def draw(self) -> list[Drawn]:
        """The next prompts from the sampler."""
        return [
            Drawn(d.ordinal, d.epoch, d.index, self.fetch(d.index))
            for d in self.sampler.draw(PROMPTS)
        ]

    def fetch(self, index: int) -> tuple[int, ...]:
        """Tokens of a prompt."""
        return tuple(self.prompts[index])

    def fill(self) -> list[Drawn]:
        """Draw one batch ahead into the buffer; what was drawn."""
        drawn = self.draw()
        self.buffer.extend(drawn)
        return drawn

    def take(self) -> list[Drawn]:
        """The batch for this iteration, out of the buffer."""
        batch, self.buffer = self.buffer[:PROMPTS], self.buffer[PROMPTS:]
        return batch

    def state(self) -> dict[str, Any]:
        """Sampler and buffer, of one moment."""
        return {
            "sampler": self.sampler.state().plain(),
            "buffer": [[d.ordinal, d.epoch, d.index] for d in self.buffer],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.sampler.restore(state["sampler"])
        self.buffer = [Drawn(o, e, i, self.fetch(i)) for o, e, i in state["buffer"]]
