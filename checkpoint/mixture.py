"""The declared order of draws from several sources: exact shares, and stages of a curriculum.

Shares are whole numbers: of each block of sum(shares) draws, exactly that many come from each
source, in an order shuffled by key. A stage begins at an ordinal and has shares of its own. Each
source goes through permutations of its own, epoch after epoch. All of it is a pure function of the
declaration, the seed and the ordinal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from shiftbook.checkpoint.errors import SamplerStateError
from shiftbook.ledger.plan import MixturePlan, StagePlan

_BLOCKS = b"shiftbook-mixture-block-v1"
_SOURCES = b"shiftbook-mixture-source-v1"


def source_seed(seed: int, name: str) -> int:
    """Seed of one source's permutations: 64 bits of SHA-256 over domain, seed and name."""
    digest = hashlib.sha256(_SOURCES + b":%d:" % seed + name.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big")


def offsets(mixture: MixturePlan) -> dict[str, int]:
    """Where each source begins among the indices of the whole data set."""
    starts = accumulate((source.size for source in mixture.sources), initial=0)
    return {source.name: start for source, start in zip(mixture.sources, starts, strict=False)}


@lru_cache(maxsize=64)
def _block(seed: int, start: int, block: int, shares: tuple[tuple[str, int], ...]) -> list[str]:
    """Names of the sources in the order of one block's draws: sorted by SHA-256 of their slots."""
    slots = [name for name, share in shares for _ in range(share)]
    prefix = hashlib.sha256(_BLOCKS + b":%d:%d:%d:" % (seed, start, block))

    def key(slot: int) -> bytes:
        digest = prefix.copy()
        digest.update(b"%d" % slot)
        return digest.digest()

    return [slots[slot] for slot in sorted(range(len(slots)), key=key)]


def _shares(stage: StagePlan) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(stage.shares.items()))


def _drawn_within(seed: int, stage: StagePlan, length: int) -> dict[str, int]:
    """How many of the first ``length`` draws of a stage come from each source."""
    size = sum(stage.shares.values())
    blocks, rest = divmod(length, size)
    counts = {name: share * blocks for name, share in stage.shares.items()}
    for name in _block(seed, stage.start, blocks, _shares(stage))[:rest]:
        counts[name] += 1
    return counts


def mixture_draws(
    mixture: MixturePlan, seed: int, start: int, n: int
) -> Iterator[tuple[int, str, int, int]]:
    """(ordinal, source, draws from it so far, its size) of ``n`` draws from ordinal ``start`` on.

    Raises SamplerStateError for a negative start.
    """
    if start < 0:
        raise SamplerStateError(f"expected a start of at least 0, found {start}")
    sizes = {source.name: source.size for source in mixture.sources}
    counts = dict.fromkeys(sizes, 0)
    ends = [stage.start for stage in mixture.stages[1:]] + [start + n]
    for stage, end in zip(mixture.stages, ends, strict=True):
        if stage.start >= start + n:
            return
        first = max(stage.start, min(start, end))
        for name, count in _drawn_within(seed, stage, first - stage.start).items():
            counts[name] += count
        size = sum(stage.shares.values())
        for ordinal in range(first, min(end, start + n)):
            block, slot = divmod(ordinal - stage.start, size)
            name = _block(seed, stage.start, block, _shares(stage))[slot]
            yield ordinal, name, counts[name], sizes[name]
            counts[name] += 1
