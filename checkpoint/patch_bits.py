"""The numba loops that pack the changes of one block of units into bits, and read them back.

A block is 2^18 units of a tensor (the last one is shorter). With U of them, n of which change at
rising positions p_0, p_1, ..., and k the largest number with n * 2^k <= U, its bits are

    32         how many differences are neither +1 nor -1
    n + H      bit (p_i >> k) + i is set for each i, H = (U - 1) >> k: the gaps of the high parts,
               unary
    n * k      the low k bits of each position
    n          the signs of the differences (1: negative)
               only when there are others: their indices among the n, as the positions are, and of
               each the magnitude less one, m: as many zeros as m has bits after its first, then m,
               its first bit, which is set, before the others

in words of 64 bits, lowest bit first. Positions take about two bits more than k (Elias, "Efficient
storage and retrieval by content and address of static files", 1974; Fano, 1971), magnitudes 2
log2(m) + 1 (Elias, "Universal codeword sets", 1975). Reading trusts nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shiftbook.checkpoint.bit_instructions import leading_zeros, ones, trailing_zeros
from shiftbook.checkpoint.kernel import part

_U64 = np.uint64
_I64: Any = np.int64  # what a count of bits becomes
_ZERO, _ONE, _63, _64 = _U64(0), _U64(1), _U64(63), _U64(64)
_COUNT_BITS = 32
_ALL = _U64(0xFFFF_FFFF_FFFF_FFFF)


@part
def _put(words: Any, at: Any, value: Any, width: Any) -> Any:
    """Write a number of `width` <= 64 bits where zeros are; the bit after it."""
    word = at >> 6
    shift = _U64(at & 63)
    words[word] |= value << shift
    if shift + _U64(width) > _64:
        words[word + 1] |= value >> (_64 - shift)
    return at + width


@part
def _get(words: Any, at: Any) -> Any:
    """The 64 bits from one on; zeros after the last word."""
    word = at >> 6
    shift = _U64(at & 63)
    value = words[word] >> shift if word < words.size else _ZERO
    if shift and word + 1 < words.size:
        value |= words[word + 1] << (_64 - shift)
    return value


@part
def _low_bits(count: Any, universe: Any) -> Any:
    """The largest k with `count * 2**k <= universe`."""
    k = 0
    while (count << (k + 1)) <= universe:
        k += 1
    return k


@part
def _rising_bits(count: Any, universe: Any) -> Any:
    """What `count` rising numbers below `universe` take."""
    k = _low_bits(count, universe)
    return count + ((universe - 1) >> k) + count * k


@part
def _put_rising(words: Any, at: Any, values: Any, count: Any, universe: Any) -> Any:
    k = _low_bits(count, universe)
    for i in range(count):
        bit = at + (_I64(values[i]) >> k) + i
        words[bit >> 6] |= _ONE << _U64(bit & 63)
    at += count + ((universe - 1) >> k)
    if k == 0:
        return at
    low = (_ONE << _U64(k)) - _ONE
    word = at >> 6
    filled = _U64(at & 63)
    held = words[word]
    for i in range(count):
        value = _U64(values[i]) & low
        held |= value << filled
        filled += _U64(k)
        if filled >= _64:
            words[word] = held
            word += 1
            filled -= _64
            held = value >> (_U64(k) - filled)
    if filled:
        words[word] = held
    return at + count * k


@part
def _get_rising(words: Any, at: Any, values: Any, count: Any, universe: Any) -> Any:
    """Fill `values`; False when they do not rise below `universe`. All bits lie in `words`."""
    k = _low_bits(count, universe)
    bits = count + ((universe - 1) >> k)
    i = 0
    for first in range(0, bits, 64):
        mask = _get(words, at + first)
        if bits - first < 64:
            mask &= (_ONE << _U64(bits - first)) - _ONE
        if i + _I64(ones(mask)) > count:
            return False
        while mask:
            values[i] = (first + _I64(trailing_zeros(mask)) - i) << k
            i += 1
            mask &= mask - _ONE
    if i != count:
        return False
    if k:
        at += bits
        low = (_ONE << _U64(k)) - _ONE
        # Nearly always both words are there: what the last value needs is looked up with care.
        safe = min(count, max(0, (64 * (words.size - 1) - at) // k))
        for i in range(safe):
            bit = at + i * k
            shift = _U64(bit & 63)
            value = words[bit >> 6] >> shift
            value |= (words[(bit >> 6) + 1] << (_63 - shift)) << _ONE
            values[i] |= np.uint32(value & low)
        for i in range(safe, count):
            values[i] |= np.uint32(_get(words, at + i * k) & low)
    rising = _I64(values[count - 1]) < universe
    for i in range(1, count):
        rising &= values[i] > values[i - 1]
    return rising


@part
def list_others(differences: Any, sign_bit: Any, others: Any, magnitudes: Any) -> tuple[Any, Any]:
    """Fill indices and magnitudes of the differences other than +1 and -1; how many, their bits."""
    count = 0
    bits = 0
    unit = ((_ONE << sign_bit) << _ONE) - _ONE
    for i in range(differences.size):
        difference = _U64(differences[i])
        others[count] = i
        count += _I64((difference != _ONE) & (difference != unit))
    for j in range(count):
        difference = _U64(differences[others[j]])
        negative = difference >> sign_bit
        magnitude = (difference ^ (_ZERO - negative)) + negative
        magnitudes[j] = (magnitude & unit) - _ONE
        bits += 127 - 2 * _I64(leading_zeros(magnitudes[j]))
    return count, bits


@part
def packed_words(count: Any, units: Any, others: Any, other_bits: Any) -> Any:
    """Words that a block takes; `other_bits` are those of the magnitudes."""
    if count == 0:
        return 0
    bits = _COUNT_BITS + _rising_bits(count, units) + count
    if others:
        bits += _rising_bits(others, count) + other_bits
    return (bits + 63) >> 6


@part
def pack_block(
    positions: Any,
    differences: Any,
    units: Any,
    sign_bit: Any,
    others: Any,
    magnitudes: Any,
    words: Any,
) -> None:
    """Fill `words`, as many as `packed_words` says, with changes at `positions` below `units`.

    `others` and `magnitudes` are what `list_others` found.
    """
    count = differences.size
    if count == 0:
        return
    words[:] = 0
    words[0] = _U64(others.size)  # the lower 32 bits
    at = _I64(_COUNT_BITS)
    at = _put_rising(words, at, positions, count, units)
    for first in range(0, count, 64):
        signs = _ZERO
        size = _I64(min(64, count - first))
        for j in range(size):
            signs |= (_U64(differences[first + j]) >> sign_bit) << _U64(j)
        at = _put(words, at, signs, size)
    if others.size == 0:
        return
    at = _put_rising(words, at, others, others.size, count)
    for j in range(others.size):
        magnitude = magnitudes[j]
        top = 63 - _I64(leading_zeros(magnitude))
        # The zeros are there. The first bit and the others are one number, that first bit lowest.
        rest = magnitude ^ (_ONE << _U64(top))
        at = _put(words, at + top, (rest << _ONE) | _ONE, top + 1)


@part
def unpack_block(
    words: Any, units: Any, sign_bit: Any, others: Any, positions: Any, differences: Any
) -> Any:
    """Fill positions and differences, one each for every change; False for bits that say nothing.

    `others` is scratch with as much room.
    """
    count = differences.size
    bits = 64 * words.size
    if count == 0:
        return words.size == 0
    if count > units:
        return False
    at = _I64(_COUNT_BITS)
    end = at + _rising_bits(count, units) + count
    if end > bits or not _get_rising(words, at, positions, count, units):
        return False
    at = end - count
    for first in range(0, count, 64):
        signs = _get(words, at + first)
        for j in range(first, min(first + 64, count)):
            differences[j] = _ONE - ((signs & _ONE) << _ONE)
            signs >>= _ONE
    other = _I64(words[0] & _U64(0xFFFF_FFFF))
    at = end
    if other > count:
        return False
    if other:
        end = at + _rising_bits(other, count)
        if end > bits or not _get_rising(words, at, others, other, count):
            return False
        at = end
        for j in range(other):
            zeros = _get(words, at)
            if zeros == _ZERO:
                return False
            top = _I64(trailing_zeros(zeros))
            at += top + 1
            if at + top > bits or _U64(top) > sign_bit:
                return False
            magnitude = (_get(words, at) & ((_ONE << _U64(top)) - _ONE)) | (_ONE << _U64(top))
            at += top
            sign = _U64(differences[others[j]]) >> sign_bit & _ONE
            differences[others[j]] = ((magnitude + _ONE) ^ (_ZERO - sign)) + sign
    return words.size == (at + 63) >> 6
