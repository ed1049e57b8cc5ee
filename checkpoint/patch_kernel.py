"""The numba loops of patches: find what differs between two tensors, and what that does to sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from shiftbook.checkpoint.kernel import compiled, prefetch, sum_run
from shiftbook.checkpoint.positions import GAMMA, KEY, MIX_1, MIX_2

_U64 = np.uint64
_ONE = _U64(1)
_LOW_32 = _U64(0xFFFF_FFFF)
_S30, _S27, _S31, _S32 = _U64(30), _U64(27), _U64(31), _U64(32)
_KEY, _GAMMA, _MIX_1, _MIX_2 = _U64(KEY), _U64(GAMMA), _U64(MIX_1), _U64(MIX_2)
_MASKS = 32  # comparisons of 64 units that are made before any mask is looked at
BLOCK_UNITS = 64 * _MASKS
SLACK = 4  # units that a scan may write after the last one
_AHEAD = 128  # units whose lines are asked for before they are needed
_MOVED = 1024  # units that are gathered before they are hashed


def _bits_code(instruction: str) -> Any:
    """An instruction that takes a word and gives a number of bits."""

    def code(typing_context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if instruction == "ctpop":
                return builder.ctpop(arguments[0])
            return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

        return types.uint64(types.uint64), generate

    return code


def _differing_code(typing_context: Any, base: Any, new: Any, index: Any) -> Any:
    """Bit k is set where unit `index + k` of two arrays differs, for 64 units of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(base.dtype.bitwidth), 64)
        loaded = []
        for kind, value in zip(signature.args[:2], arguments[:2], strict=True):
            data = context.make_array(kind)(context, builder, value).data
            place = builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer())
            units = builder.load(place)
            units.align = 1
            loaded.append(units)
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(base, new, types.int64), generate


_trailing_zeros: Any = intrinsic(_bits_code("cttz"))
_ones: Any = intrinsic(_bits_code("ctpop"))
_differing: Any = intrinsic(_differing_code)


@compiled
def scan_units(
    base: Any, new: Any, start: Any, filled: Any, out: Any, words: Any, block_words: Any
) -> tuple[Any, Any, Any, Any]:
    """Collect the units that differ, from unit `start` on, until the output is full.

    `out` holds positions, old units and new units; `filled` of each are taken. `words` are those of
    `new` whose fingerprint is wanted, `block_words` of them to `BLOCK_UNITS` units; empty for none.
    Returns the unit to go on from (the number of units when done), how many are filled now, and
    what the words that were passed add to both sums: they are in the cache just then.
    """
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    positions, old, fresh = out
    masks = np.empty(_MASKS, np.uint64)
    at = start
    count = filled
    while at < base.size and count + BLOCK_UNITS + SLACK <= positions.size:
        end = min(at + BLOCK_UNITS, base.size)
        full = (end - at) // 64
        for k in range(full):
            masks[k] = _differing(base, new, at + 64 * k)
        first_word = at // BLOCK_UNITS * block_words
        more_0, more_1 = sum_run(words[first_word : first_word + block_words], first_word)
        sum_0 += more_0
        sum_1 += more_1
        first = count
        for k in range(full):
            mask = masks[k]
            here = count
            count += np.int64(_ones(mask))
            while mask:
                # Written always, kept when there are so many: few branches are guessed wrongly.
                for _ in range(SLACK):
                    positions[here] = at + 64 * k + np.int64(_trailing_zeros(mask))
                    here += 1
                    mask &= mask - _ONE
        for unit in range(at + 64 * full, end):
            if base[unit] != new[unit]:
                positions[count] = unit
                count += 1
        for k in range(first, count):
            old[k] = base[positions[k]]
            fresh[k] = new[positions[k]]
        at = end
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
    old = np.empty(_MOVED, units.dtype)
    start, width = _U64(units.ctypes.data), _U64(units.itemsize)
    last = positions.size - 1
    for first in range(0, positions.size, _MOVED):
        size = min(_MOVED, positions.size - first)
        for k in range(size):  # waits for memory; what follows is in the cache
            ahead = positions[min(first + k + _AHEAD, last)]
            prefetch(start + width * _U64(ahead))
            old[k] = units[positions[first + k]]
        for k in range(size):
            new[first + k] = old[k] + differences[first + k]
        for k in range(size):
            position = _U64(positions[first + k])
            z = _KEY + ((position >> log2_per_word) + _ONE) * _GAMMA
            z = (z ^ (z >> _S30)) * _MIX_1
            z = (z ^ (z >> _S27)) * _MIX_2
            z = z ^ (z >> _S31)
            delta = (_U64(new[first + k]) - _U64(old[k])) << ((position & within) * width_bits)
            sum_0 += (z & _LOW_32) * delta
            sum_1 += (z >> _S32) * delta
    return sum_0, sum_1


@compiled
def put_units(units: Any, positions: Any, new: Any) -> None:
    """Write units at positions."""
    for k in range(positions.size):
        units[positions[k]] = new[k]


@compiled
def widest(positions: Any, differences: Any, sign_bit: Any) -> tuple[Any, Any]:
    """The bits that any gap has, and those that any folded difference has (see `split_planes`)."""
    if positions.size == 0:
        return _U64(0), _U64(0)
    gaps = _U64(positions[0])
    folded = _U64(0)
    unit = ((_ONE << sign_bit) << _ONE) - _ONE
    for k in range(1, positions.size):
        gaps |= _U64(positions[k] - positions[k - 1] - 1)
    for k in range(positions.size):
        difference = _U64(differences[k])
        folded |= ((difference << _ONE) ^ (_U64(0) - (difference >> sign_bit))) & unit
    return gaps, folded


@compiled
def split_planes(
    positions: Any, differences: Any, sign_bit: Any, gap_planes: Any, value_planes: Any
) -> None:
    """Fill byte planes with the gaps before positions and with the folded differences.

    A difference d of a unit of `sign_bit + 1` bits is folded to 2d, or to -2d - 1 where its sign
    bit is set: small steps in both directions become small numbers. Plane after plane, so that each
    loop is one of vectors.
    """
    if positions.size == 0:
        return
    for index in range(gap_planes.shape[0]):
        plane = gap_planes[index]
        shift = _U64(8 * index)
        plane[0] = _U64(positions[0]) >> shift
        for k in range(1, positions.size):
            plane[k] = _U64(positions[k] - positions[k - 1] - 1) >> shift
    for index in range(value_planes.shape[0]):
        plane = value_planes[index]
        shift = _U64(8 * index)
        for k in range(positions.size):
            difference = _U64(differences[k])
            folded = (difference << _ONE) ^ (_U64(0) - (difference >> sign_bit))
            plane[k] = folded >> shift


@compiled
def join_planes(planes: Any, split: Any, units: Any, positions: Any, folded: Any) -> Any:
    """The reverse: positions and differences; False when a position lies outside of the units.

    `planes` holds those of gaps, `split` of them, and then those of differences.
    """
    positions[:] = 0
    for index in range(split):
        plane = planes[index]
        for k in range(positions.size):
            positions[k] |= np.int64(plane[k]) << (8 * index)
    after = np.int64(0)
    for k in range(positions.size):
        gap = positions[k]
        if gap < 0 or gap >= units - after:
            return False
        positions[k] = after + gap
        after += gap + 1
    folded[:] = 0
    for index in range(split, planes.shape[0]):
        plane = planes[index]
        shift = _U64(8 * (index - split))
        for k in range(folded.size):
            folded[k] |= _U64(plane[k]) << shift
    for k in range(folded.size):
        value = _U64(folded[k])
        folded[k] = (value >> _ONE) ^ (_U64(0) - (value & _ONE))
    return True
