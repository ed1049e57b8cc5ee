"""The numba loops that multiply each 32-bit word of a tensor by a hash of its position and add.

`shiftbook.checkpoint.fingerprint` explains the arithmetic and its bound. The hash needs two
multiplications of 64 bits a word. With AVX-512 they are one instruction each; with AVX2 each is
seven, and `sum_words` is bound by them. `sum_words_shared` hashes a position once for all tensors
that have a word there and reads as fast as memory gives, or nearly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from shiftbook.checkpoint.positions import GAMMA, KEY, MIX_1, MIX_2

_numba: Any = numba  # its type hints leave out some of what it offers
_cgutils: Any = cgutils
_U64 = np.uint64
_ONE = _U64(1)
_LOW_32 = _U64(0xFFFF_FFFF)
_S30, _S27, _S31, _S32 = _U64(30), _U64(27), _U64(31), _U64(32)
_STRIP = 128  # words between two requests for lines
_KEY, _GAMMA, _MIX_1, _MIX_2 = _U64(KEY), _U64(GAMMA), _U64(MIX_1), _U64(MIX_2)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
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


def part(function: Callable[..., Any]) -> Any:
    """Compile a loop that only compiled loops call."""
    return numba.njit(nogil=True)(function)


@compiled
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


@compiled
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


def _pointer_code(typing_context: Any, address: Any) -> Any:
    """Turn an address into a pointer that `numba.carray` reads from."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


def _prefetch_code(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        ask = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(ask, [pointer, number(0), number(3), number(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(address), generate


pointer: Any = intrinsic(_pointer_code)
prefetch: Any = intrinsic(_prefetch_code)


@part
def hash_positions(first: Any, hashes: Any) -> None:
    """Fill `hashes` with those of the words from `first` on."""
    counter = _KEY + (_U64(first) + _ONE) * _GAMMA
    for j in range(hashes.size):
        z = counter
        counter += _GAMMA
        z = (z ^ (z >> _S30)) * _MIX_1
        z = (z ^ (z >> _S27)) * _MIX_2
        hashes[j] = z ^ (z >> _S31)


@part
def sum_hashed(words: Any, hashes: Any) -> tuple[Any, Any]:
    """What words add to both sums, their positions being hashed already."""
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    for j in range(words.size):
        value = _U64(words[j])
        sum_0 += (hashes[j] & _LOW_32) * value
        sum_1 += (hashes[j] >> _S32) * value
    return sum_0, sum_1


@part
def sum_run(words: Any, first: Any) -> tuple[Any, Any]:
    """What words from position `first` on add to both sums."""
    counter = _KEY + (_U64(first) + _ONE) * _GAMMA
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    for j in range(words.size):
        z = counter
        counter += _GAMMA
        z = (z ^ (z >> _S30)) * _MIX_1
        z = (z ^ (z >> _S27)) * _MIX_2
        z = z ^ (z >> _S31)
        value = _U64(words[j])
        sum_0 += (z & _LOW_32) * value
        sum_1 += (z >> _S32) * value
    return sum_0, sum_1


@compiled
def sum_words_shared(
    addresses: Any, counts: Any, first: Any, last: Any, hashes: Any, sums: Any
) -> None:
    """Adds to `sums[t]` the sums over the words `first` to `last` of each tensor `t`.

    `addresses` (uint64) point to the tensors' words, 4-byte aligned; `counts` (int64, falling) say
    how many each has. `hashes` (uint64) is scratch for one block of positions; it must stay in the
    first-level cache beside the words of two blocks, which 2048 entries do.
    """
    block = hashes.size
    active = counts.size
    for start in range(first, last, block):
        while active > 0 and counts[active - 1] <= start:
            active -= 1
        if active <= 1:  # nobody to share with: the rest of the longest tensor in one go
            size = min(last, counts[0]) - start
            words = _numba.carray(pointer(addresses[0] + _U64(4 * start)), (size,), np.uint32)
            sum_0, sum_1 = sum_run(words, start)
            sums[0, 0] += sum_0
            sums[0, 1] += sum_1
            return
        end = min(start + block, last)
        hash_positions(start, hashes[: end - start])
        for t in range(active):
            # The jumps defeat the automatic prefetch. So the lines that come next but one are
            # asked for a few at a time, as many as are read here: a burst would fill the queue.
            after = t + 2
            if after < active:
                line = addresses[after] + _U64(4 * start)
            else:
                line = addresses[(after - active) % active] + _U64(4 * end)
            size = min(end, counts[t]) - start
            words = _numba.carray(pointer(addresses[t] + _U64(4 * start)), (size,), np.uint32)
            for k in range(0, size, _STRIP):
                for byte in range(4 * k, 4 * (k + _STRIP), 64):
                    prefetch(line + _U64(byte))
                stop = min(k + _STRIP, size)
                sum_0, sum_1 = sum_hashed(words[k:stop], hashes[k:stop])
                sums[t, 0] += sum_0
                sums[t, 1] += sum_1
