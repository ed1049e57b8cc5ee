"""The numba loops of patches: find what differs between two tensors, and what that does to sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from shiftbook.checkpoint.kernel import compiled
from shiftbook.checkpoint.positions import GAMMA, KEY, MIX_1, MIX_2

_U64 = np.uint64
_ONE = _U64(1)
_LOW_32 = _U64(0xFFFF_FFFF)
_S30, _S27, _S31, _S32 = _U64(30), _U64(27), _U64(31), _U64(32)
_KEY, _GAMMA, _MIX_1, _MIX_2 = _U64(KEY), _U64(GAMMA), _U64(MIX_1), _U64(MIX_2)
_LINE = _U64(8)  # words that are compared without a branch: few lines hold a change
_BLOCK = _U64(512)  # words whose changed ones are listed before any is taken apart
BLOCK_WORDS = int(_BLOCK)


def _trailing_zeros_code(typing_context: Any, word: Any) -> Any:
    """Number of zero bits below the lowest set bit of a word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


_trailing_zeros: Any = intrinsic(_trailing_zeros_code)


@compiled
def scan_words(
    base: Any, new: Any, start: Any, filled: Any, out: Any, log2_bits: Any, mask: Any, summed: Any
) -> tuple[Any, Any, Any, Any]:
    """Collect the units that differ, from 64-bit word `start` on, until the output is full.

    `base` and `new` hold units of `2**log2_bits` bits, of which `mask` covers one. `out` holds
    positions, old units and new units; `filled` of each are taken. Returns the word to go on from
    (the number of words when done), how many are filled now, and, where `summed`, what the words of
    `new` that were passed add to both sums of its fingerprint: they are in the cache just then.
    """
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    positions, old, fresh = out
    words = _U64(base.size)
    per_word = _U64(64) >> log2_bits
    room = np.int64(positions.size) - np.int64(_BLOCK * per_word)  # below 0: not even a block's
    changed = np.empty(BLOCK_WORDS, np.uint64)
    at = _U64(start)
    count = _U64(filled)
    while at < words and np.int64(count) <= room:
        end = min(at + _BLOCK, words)
        if summed:
            for word in range(at, end):
                z = _KEY + (_U64(2) * word + _ONE) * _GAMMA
                y = z + _GAMMA
                z = (z ^ (z >> _S30)) * _MIX_1
                y = (y ^ (y >> _S30)) * _MIX_1
                z = (z ^ (z >> _S27)) * _MIX_2
                y = (y ^ (y >> _S27)) * _MIX_2
                z = z ^ (z >> _S31)
                y = y ^ (y >> _S31)
                lower = new[word] & _LOW_32
                upper = new[word] >> _S32
                sum_0 += (z & _LOW_32) * lower + (y & _LOW_32) * upper
                sum_1 += (z >> _S32) * lower + (y >> _S32) * upper
        listed = _U64(0)
        while at < end:
            line_end = min(at + _LINE, end)
            different = _U64(0)
            if line_end - at == _LINE:
                for k in range(_LINE):
                    different |= base[at + k] ^ new[at + k]
            else:
                different = _ONE
            if different:
                for word in range(at, line_end):
                    # Written always, kept when it differs: no branch that is guessed wrongly.
                    changed[listed] = word
                    listed += _U64(base[word] != new[word])
            at = line_end
        for index in range(listed):
            word = changed[index]
            before = base[word]
            after = new[word]
            different = before ^ after
            while different:
                unit = _trailing_zeros(different) >> log2_bits
                shift = unit << log2_bits
                positions[count] = word * per_word + unit
                old[count] = (before >> shift) & mask
                fresh[count] = (after >> shift) & mask
                count += _ONE
                different &= ~(mask << shift)
    return at, count, sum_0, sum_1


@compiled
def change_sums(positions: Any, old: Any, new: Any, log2_per_word: Any) -> tuple[Any, Any]:
    """What changes of units of 1, 2 or 4 bytes add to both sums of a fingerprint."""
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    width_bits = _S32 >> log2_per_word
    within = (_ONE << log2_per_word) - _ONE
    for k in range(positions.size):
        position = _U64(positions[k])
        z = _KEY + ((position >> log2_per_word) + _ONE) * _GAMMA
        z = (z ^ (z >> _S30)) * _MIX_1
        z = (z ^ (z >> _S27)) * _MIX_2
        z = z ^ (z >> _S31)
        delta = (_U64(new[k]) - _U64(old[k])) << ((position & within) * width_bits)
        sum_0 += (z & _LOW_32) * delta
        sum_1 += (z >> _S32) * delta
    return sum_0, sum_1


@compiled
def moved_units(
    units: Any, positions: Any, differences: Any, new: Any, log2_per_word: Any
) -> tuple[Any, Any]:
    """Fill `new` with the units at some positions plus their differences; their `change_sums`."""
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    width_bits = _S32 >> log2_per_word
    within = (_ONE << log2_per_word) - _ONE
    for k in range(positions.size):
        position = _U64(positions[k])
        before = units[position]
        new[k] = before + differences[k]
        z = _KEY + ((position >> log2_per_word) + _ONE) * _GAMMA
        z = (z ^ (z >> _S30)) * _MIX_1
        z = (z ^ (z >> _S27)) * _MIX_2
        z = z ^ (z >> _S31)
        delta = (_U64(new[k]) - _U64(before)) << ((position & within) * width_bits)
        sum_0 += (z & _LOW_32) * delta
        sum_1 += (z >> _S32) * delta
    return sum_0, sum_1


@compiled
def put_units(units: Any, positions: Any, new: Any) -> None:
    """Write units at positions."""
    for k in range(positions.size):
        units[_U64(positions[k])] = new[k]


@compiled
def widest(positions: Any, differences: Any, sign_bit: Any) -> tuple[Any, Any]:
    """The bits that any gap has, and those that any folded difference has (see `split_planes`)."""
    gaps = _U64(0)
    folded = _U64(0)
    unit = ((_ONE << sign_bit) << _ONE) - _ONE
    after = np.int64(0)
    for k in range(positions.size):
        gaps |= _U64(positions[k] - after)
        after = positions[k] + 1
        difference = _U64(differences[k])
        folded |= ((difference << _ONE) ^ (_U64(0) - (difference >> sign_bit))) & unit
    return gaps, folded


@compiled
def split_planes(
    positions: Any, differences: Any, sign_bit: Any, gap_planes: Any, value_planes: Any
) -> None:
    """Fill byte planes with the gaps before positions and with the folded differences.

    A difference d of a unit of `sign_bit + 1` bits is folded to 2d, or to -2d - 1 where its sign
    bit is set: small steps in both directions become small numbers.
    """
    after = np.int64(0)
    for k in range(positions.size):
        gap = _U64(positions[k] - after)
        after = positions[k] + 1
        for plane in range(gap_planes.shape[0]):
            gap_planes[plane, k] = gap & _U64(0xFF)
            gap >>= _U64(8)
        difference = _U64(differences[k])
        folded = (difference << _ONE) ^ (_U64(0) - (difference >> sign_bit))
        for plane in range(value_planes.shape[0]):
            value_planes[plane, k] = folded & _U64(0xFF)
            folded >>= _U64(8)


@compiled
def join_planes(gap_planes: Any, value_planes: Any, units: Any, positions: Any, folded: Any) -> Any:
    """The reverse: positions and differences; False when a position lies outside of the units."""
    after = np.int64(0)
    for k in range(positions.size):
        gap = _U64(0)
        for plane in range(gap_planes.shape[0]):
            gap |= _U64(gap_planes[plane, k]) << _U64(8 * plane)
        if gap >= _U64(units - after):
            return False
        positions[k] = after + np.int64(gap)
        after = positions[k] + 1
        value = _U64(0)
        for plane in range(value_planes.shape[0]):
            value |= _U64(value_planes[plane, k]) << _U64(8 * plane)
        folded[k] = (value >> _ONE) ^ (_U64(0) - (value & _ONE))
    return True
