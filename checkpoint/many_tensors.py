"""The sums of many whole tensors at once: work shared evenly by threads, hashes by tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.elements import element_view
from shiftbook.checkpoint.host_sums import sum_block
from shiftbook.checkpoint.kernel import hashes_are_cheap, sum_words, sum_words_shared
from shiftbook.checkpoint.positions import MASK_64

Sums = tuple[int, int]

_PIECE_WORDS = 1 << 20  # a thread takes this many words at a time: 4 MB
_HASH_BLOCK = 1024  # positions hashed at a time when hashes are shared: 8 KB of first-level cache


@dataclass(frozen=True, slots=True)
class _Words:
    """A whole tensor as words in memory, and the few bytes after the last whole word."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: NDArray[np.uint32]
    tail: NDArray[Any]
    tail_start: int


def whole_sums(
    tensors: Mapping[str, Any], threads: int, share_hashes: bool | None
) -> dict[str, tuple[str, tuple[int, ...], Sums]]:
    """dtype, shape and both sums (mod 2^64) of each tensor, in the order given."""
    from shiftbook.checkpoint.fingerprint import fingerprint

    found: dict[str, tuple[str, tuple[int, ...], Sums]] = {}
    plain: list[_Words] = []
    for name, tensor in tensors.items():
        words = _as_words(name, tensor)
        if words is None:  # strided, unaligned or on a device: one by one
            alone = fingerprint(tensor, threads=threads)
            found[name] = (alone.dtype, alone.shape, alone.sums)
            continue
        zero = np.full(1, words.tail_start, dtype=np.uint64)
        tail = sum_block(words.tail.reshape(1, -1), zero, 1) if words.tail.size else (0, 0)
        found[name] = (words.dtype, words.shape, tail)
        plain.append(words)
    shared = not hashes_are_cheap() if share_hashes is None else share_hashes
    add = _shared_sums if shared and len(plain) > 1 else _separate_sums
    for words, more in zip(plain, add(plain, threads), strict=True):
        dtype, shape, sums = found[words.name]
        both = ((sums[0] + more[0]) & MASK_64, (sums[1] + more[1]) & MASK_64)
        found[words.name] = (dtype, shape, both)
    return {name: found[name] for name in tensors}


def _as_words(name: str, tensor: Any) -> _Words | None:
    """The tensor's memory as words, or None when it cannot be read so."""
    if getattr(getattr(tensor, "device", "cpu"), "type", "cpu") != "cpu":
        return None
    array, dtype = element_view(tensor, None)
    if not array.flags.c_contiguous or array.__array_interface__["data"][0] % 4:
        return None
    flat = array.reshape(-1)
    per_word = max(1, 4 // flat.dtype.itemsize)
    whole = flat.size // per_word * per_word
    return _Words(name, dtype, array.shape, flat[:whole].view(np.uint32), flat[whole:], whole)


def _run(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    if threads <= 1 or len(jobs) <= 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def _separate_sums(plain: Sequence[_Words], threads: int) -> list[Sums]:
    """Each tensor by itself, large ones in pieces."""
    pieces: list[list[Sums]] = [[] for _ in plain]

    def piece(index: int, first: int, last: int) -> Callable[[], None]:
        def job() -> None:
            words = plain[index].words[first:last].reshape(1, -1)
            low, high = sum_words(words, np.full(1, first, dtype=np.uint64))
            pieces[index].append((int(low), int(high)))

        return job

    step = _PIECE_WORDS if threads > 1 else 1 << 62
    _run(
        [
            piece(index, first, min(first + step, one.words.size))
            for index, one in enumerate(plain)
            for first in range(0, one.words.size, step)
        ],
        threads,
    )
    return [(sum(low for low, _ in some), sum(high for _, high in some)) for some in pieces]


def _shared_sums(plain: Sequence[_Words], threads: int) -> list[Sums]:
    """All tensors side by side, block of positions after block, each block hashed once."""
    order = sorted(range(len(plain)), key=lambda index: -plain[index].words.size)
    counts = np.array([plain[index].words.size for index in order], dtype=np.int64)
    addresses = np.array(
        [plain[index].words.__array_interface__["data"][0] for index in order], dtype=np.uint64
    )
    partial: list[NDArray[np.uint64]] = []

    def stretch(first: int, last: int) -> Callable[[], None]:
        def job() -> None:
            sums = np.zeros((len(order), 2), dtype=np.uint64)
            scratch = np.empty(_HASH_BLOCK, dtype=np.uint64)
            sum_words_shared(addresses, counts, first, last, scratch, sums)
            partial.append(sums)

        return job

    _run([stretch(*edges) for edges in _stretches(counts, threads)], threads)
    total = sum(partial, start=np.zeros((len(order), 2), dtype=np.uint64))
    result: list[Sums] = [(0, 0)] * len(plain)
    for place, index in enumerate(order):
        result[index] = (int(total[place, 0]), int(total[place, 1]))
    return result


def _stretches(counts: NDArray[np.int64], threads: int) -> list[tuple[int, int]]:
    """Ranges of word positions with about `_PIECE_WORDS` words of all tensors in each."""
    longest = int(counts[0])
    if threads <= 1:
        return [(0, longest)] if longest else []
    edges = [0]
    while edges[-1] < longest:
        active = int((counts > edges[-1]).sum())
        step = max(_HASH_BLOCK, _PIECE_WORDS // active // _HASH_BLOCK * _HASH_BLOCK)
        edges.append(min(edges[-1] + step, longest))
    return list(itertools.pairwise(edges))
