"""The numba loops that multiply each 32-bit word of a tensor by a hash of its position and add.

`shiftbook.checkpoint.fingerprint` explains the arithmetic and its bound; nothing else calls this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import numba
import numpy as np

from shiftbook.checkpoint.positions import GAMMA, KEY, MIX_1, MIX_2

_U64 = np.uint64
_ONE = _U64(1)
_LOW_32 = _U64(0xFFFF_FFFF)
_S30, _S27, _S31, _S32 = _U64(30), _U64(27), _U64(31), _U64(32)
_KEY, _GAMMA, _MIX_1, _MIX_2 = _U64(KEY), _U64(GAMMA), _U64(MIX_1), _U64(MIX_2)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the interpreter lock; keep the machine code on disk where that works."""
    try:
        fast = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written: compile in each process
        return cast(Callable[..., Any], numba.njit(nogil=True)(function))

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return fast(*arguments)
        except OSError:  # compiled, but the cache could not be read or written (a full disk)
            return fast(*arguments)

    return call


@_compiled
def sum_words(words: Any, first_words: Any) -> tuple[Any, Any]:
    """Sums over rows of whole words: `words[r, j]` stands at word index `first_words[r] + j`."""
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    for row in range(words.shape[0]):
        counter = _KEY + (_U64(first_words[row]) + _ONE) * _GAMMA
        for column in range(words.shape[1]):
            z = counter
            counter += _GAMMA
            z = (z ^ (z >> _S30)) * _MIX_1
            z = (z ^ (z >> _S27)) * _MIX_2
            z = z ^ (z >> _S31)
            value = _U64(words[row, column])
            sum_0 += (z & _LOW_32) * value
            sum_1 += (z >> _S32) * value
    return sum_0, sum_1


@_compiled
def sum_narrow(elements: Any, first_elements: Any, log2_per_word: Any) -> tuple[Any, Any]:
    """The same for elements of 1 or 2 bytes at any position: `2**log2_per_word` share a word."""
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    width_bits = _S32 >> log2_per_word
    within = (_ONE << log2_per_word) - _ONE
    for row in range(elements.shape[0]):
        first = _U64(first_elements[row])
        for column in range(elements.shape[1]):
            index = first + _U64(column)
            z = _KEY + ((index >> log2_per_word) + _ONE) * _GAMMA
            z = (z ^ (z >> _S30)) * _MIX_1
            z = (z ^ (z >> _S27)) * _MIX_2
            z = z ^ (z >> _S31)
            value = _U64(elements[row, column]) << ((index & within) * width_bits)
            sum_0 += (z & _LOW_32) * value
            sum_1 += (z >> _S32) * value
    return sum_0, sum_1
