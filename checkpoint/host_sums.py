"""The sums of a fingerprint over blocks of elements that the processor reads in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_THREADED_BYTES = 1 << 20  # below this a second thread costs more than it saves


def sum_block(block: NDArray[Any], starts: NDArray[np.uint64], threads: int) -> tuple[int, int]:
    """Both sums over the bits `block[run, element]`; `starts` are the runs' first flat indices."""
    item_bytes = block.dtype.itemsize
    if item_bytes >= 4:
        words_per_item = item_bytes // 4
        return _sum_words(block.view(np.uint32), starts * np.uint64(words_per_item), threads)
    per_word = 4 // item_bytes
    if block.shape[0] == 1:  # one long range: loose elements up to a word's edge, words, the rest
        head = min(-int(starts[0]) % per_word, block.shape[1])
        body_end = head + (block.shape[1] - head) // per_word * per_word
        body = block[:, head:body_end]
        if body.size and _address(body) % 4 == 0:
            sums = _sum_words(
                body.view(np.uint32), (starts + np.uint64(head)) // np.uint64(per_word), threads
            )
            for edge, first in ((block[:, :head], 0), (block[:, body_end:], body_end)):
                if edge.size:
                    more = _sum_narrow(edge, starts + np.uint64(first), per_word)
                    sums = (sums[0] + more[0], sums[1] + more[1])
            return sums
    whole_words = block.shape[1] % per_word == 0 and _address(block) % 4 == 0
    if whole_words and not (starts % np.uint64(per_word)).any():
        return _sum_words(block.view(np.uint32), starts // np.uint64(per_word), threads)
    return _sum_narrow(block, starts, per_word)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _sum_words(
    words: NDArray[np.uint32], first_words: NDArray[np.uint64], threads: int
) -> tuple[int, int]:
    from shiftbook.checkpoint.kernel import sum_words  # numba: only where something is summed

    if threads <= 1 or words.shape[0] != 1 or words.nbytes < _THREADED_BYTES:
        sum_0, sum_1 = sum_words(words, first_words)
        return int(sum_0), int(sum_1)
    from concurrent.futures import ThreadPoolExecutor

    edges = [words.shape[1] * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        parts = list(
            pool.map(
                lambda k: sum_words(
                    words[:, edges[k] : edges[k + 1]], first_words + np.uint64(edges[k])
                ),
                range(threads),
            )
        )
    return sum(int(p[0]) for p in parts), sum(int(p[1]) for p in parts)


def _sum_narrow(
    elements: NDArray[Any], starts: NDArray[np.uint64], per_word: int
) -> tuple[int, int]:
    from shiftbook.checkpoint.kernel import sum_narrow

    sum_0, sum_1 = sum_narrow(elements, starts, np.uint64(per_word.bit_length() - 1))
    return int(sum_0), int(sum_1)
