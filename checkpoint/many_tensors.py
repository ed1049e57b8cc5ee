"""The sums of many whole tensors at once: work shared evenly by threads, hashes by tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.elements import element_view, is_plain
from shiftbook.checkpoint.host_sums import sum_block
from shiftbook.checkpoint.kernel import sum_words_shared
from shiftbook.checkpoint.positions import ITEM_BYTES, MASK_64

Sums = tuple[int, int]

_PIECE_WORDS = 1 << 20  # a thread takes this many words at a time: 4 MB
_HASH_BLOCK = 2048  # positions hashed at a time when hashes are shared: 16 KB of first-level cache


@dataclass(slots=True)
class _Words:
    """A whole tensor as words in memory, and the sums of the few bytes after the last whole one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    count: int
    tail: Sums
    owner: Any
    """What keeps the memory."""


def whole_sums(
    tensors: Mapping[str, Any], threads: int, share_hashes: bool | None
) -> dict[str, tuple[str, tuple[int, ...], Sums]]:
    """dtype, shape and both sums (mod 2^64) of each tensor, in the order given."""
    from shiftbook.checkpoint.fingerprint import fingerprint

    found: dict[str, tuple[str, tuple[int, ...], Sums]] = {}
    plain: list[_Words] = []
    for name, tensor in tensors.items():
        words = _torch_words(name, tensor) or _array_words(name, tensor)
        if words is None:  # strided, unaligned or on a device: one by one
            alone = fingerprint(tensor, threads=threads)
            found[name] = (alone.dtype, alone.shape, alone.sums)
            continue
        found[name] = (words.dtype, words.shape, words.tail)
        plain.append(words)
    plain.sort(key=lambda words: -words.count)
    together = len(plain) if share_hashes is not False else 1
    for words, more in zip(plain, _sums(plain, together, threads), strict=True):
        low, high = words.tail
        both = ((low + more[0]) & MASK_64, (high + more[1]) & MASK_64)
        found[words.name] = (words.dtype, words.shape, both)
    return found


def _torch_words(name: str, tensor: Any) -> _Words | None:
    """The memory of a plain torch tensor, in few calls: a model has hundreds of small ones."""
    torch = sys.modules.get("torch")
    if torch is None or not is_plain(tensor, torch) or not tensor.is_contiguous():
        return None
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        return None
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if address % 4 or size % 4:
        return None
    return _Words(name, dtype, tuple(tensor.shape), address, size // 4, (0, 0), tensor)


def _array_words(name: str, tensor: Any) -> _Words | None:
    """The memory of anything that can be read in place, or None."""
    if getattr(getattr(tensor, "device", "cpu"), "type", "cpu") != "cpu":
        return None
    array, dtype = element_view(tensor, None)
    address = int(array.__array_interface__["data"][0])
    if not array.flags.c_contiguous or address % 4:
        return None
    count, loose = divmod(array.nbytes, 4)
    tail = (0, 0)
    if loose:
        first = array.size - loose // array.dtype.itemsize
        start = np.full(1, first, dtype=np.uint64)
        tail = sum_block(array.reshape(-1)[first:].reshape(1, -1), start, 1)
    return _Words(name, dtype, array.shape, address, count, tail, array)


def _sums(order: Sequence[_Words], together: int, threads: int) -> list[Sums]:
    """So many tensors at a time side by side, block of positions after block, each hashed once.

    The longest come first. Threads take stretches of positions until none is left.
    """
    counts = np.array([words.count for words in order], dtype=np.int64)
    addresses = np.array([words.address for words in order], dtype=np.uint64)
    groups = [slice(first, first + together) for first in range(0, len(order), together or 1)]
    jobs = [(group, *edges) for group in groups for edges in _stretches(counts[group], threads)]
    waiting, lock = iter(jobs), Lock()

    def work() -> NDArray[np.uint64]:
        sums = np.zeros((len(order), 2), dtype=np.uint64)
        scratch = np.empty(_HASH_BLOCK, dtype=np.uint64)
        while True:
            with lock:
                job = next(waiting, None)
            if job is None:
                return sums
            group, first, last = job
            sum_words_shared(addresses[group], counts[group], first, last, scratch, sums[group])

    helpers = min(threads, len(jobs)) - 1
    if helpers < 1:
        total = work()
    else:
        with ThreadPoolExecutor(helpers) as pool:
            others = [pool.submit(work) for _ in range(helpers)]
            total = work()
            for other in others:
                total += other.result()
    return [(int(low), int(high)) for low, high in total.tolist()]


def _stretches(counts: NDArray[np.int64], threads: int) -> list[tuple[int, int]]:
    """Ranges of word positions with about `_PIECE_WORDS` words of all tensors in each."""
    longest = int(counts[0]) if counts.size else 0
    if threads <= 1:
        return [(0, longest)] if longest else []
    edges = [0]
    while edges[-1] < longest:
        active = int((counts > edges[-1]).sum())
        step = max(_HASH_BLOCK, _PIECE_WORDS // active // _HASH_BLOCK * _HASH_BLOCK)
        edges.append(min(edges[-1] + step, longest))
    return list(itertools.pairwise(edges))
