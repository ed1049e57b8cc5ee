"""The numba loops over known changes of one tensor: to bits and back, onto units, into sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from shiftbook.checkpoint.kernel import compiled
from shiftbook.checkpoint.patch_bits import (
    list_others,
    pack_block,
    packed_words,
    unpack_block,
)
from shiftbook.checkpoint.patch_format import BLOCK
from shiftbook.checkpoint.patch_kernel import change_sums, count_neighbours

_U64 = np.uint64
_I64: Any = np.int64


@compiled
def pack_blocks(
    positions: Any, differences: Any, units: Any, first_block: Any, words: Any, found: Any
) -> tuple[Any, Any, Any]:
    """As `compare_blocks`, for changes of one tensor that are known: from block `first_block` on.

    `positions` (int64) rise below `units`. `found` has no refused numbers here.
    """
    sign_bit = _U64(8 * differences.itemsize - 1)
    inside = np.empty(BLOCK, np.uint32)
    others = np.empty(BLOCK + 1, np.uint32)
    magnitudes = np.empty(BLOCK, np.uint64)
    used = 0
    at = np.searchsorted(positions, first_block * BLOCK)
    for block in range(first_block, found.shape[0]):
        first = block * BLOCK
        size = min(BLOCK, units - first)
        end = at
        while end < positions.size and positions[end] < first + size:
            inside[end - at] = positions[end] - first
            end += 1
        these = differences[at:end]
        other, other_bits = list_others(these, sign_bit, others, magnitudes)
        wanted = packed_words(end - at, size, other, other_bits)
        if used + wanted > words.size:
            return block, used, wanted
        place = words[used : used + wanted]
        pack_block(inside, these, size, sign_bit, others[:other], magnitudes, place)
        used += wanted
        found[block, 0] = end - at
        found[block, 1] = wanted
        found[block, 2] = count_neighbours(inside[: end - at])
        found[block, 3] = other
        at = end
    return found.shape[0], used, 0


@compiled
def unpack_blocks(words: Any, index: Any, units: Any, positions: Any, differences: Any) -> Any:
    """Fill positions (int64) and differences of one tensor; False for bits that say nothing.

    `index` has the changes and the words of each block, which add up to the arrays' sizes.
    """
    sign_bit = _U64(8 * differences.itemsize - 1)
    inside = np.empty(BLOCK, np.uint32)
    others = np.empty(BLOCK, np.uint32)
    at = 0
    word = 0
    for block in range(index.shape[0]):
        count, taken = _I64(index[block, 0]), _I64(index[block, 1])
        first = block * BLOCK
        size = min(BLOCK, units - first)
        if count > size or not unpack_block(
            words[word : word + taken],
            size,
            sign_bit,
            others,
            inside,
            differences[at : at + count],
        ):
            return False
        for k in range(count):
            positions[at + k] = first + _I64(inside[k])
        at += count
        word += taken
    return True


@compiled
def put_units(units: Any, positions: Any, new: Any) -> None:
    """Write units at positions."""
    for k in range(positions.size):
        units[positions[k]] = new[k]


@compiled
def sums_of_units(positions: Any, old: Any, new: Any) -> Any:
    """What changes of a whole tensor add to both sums of its fingerprint."""
    return change_sums(positions, 0, old, new)


@compiled
def moved_units(units: Any, positions: Any, differences: Any, new: Any) -> Any:
    """Fill `new` with the units at some positions plus their differences; their `change_sums`."""
    old = np.empty(positions.size, units.dtype)
    for k in range(positions.size):
        old[k] = units[positions[k]]
    for k in range(positions.size):
        new[k] = old[k] + differences[k]
    return change_sums(positions, 0, old, new)
