"""The numba loops of patches: one pass over blocks of many tensors, without the interpreter lock.

Encoding compares, gathers, checks and packs a block while it is in the cache; applying sums it,
unpacks its changes and gathers what they change, and writes in a second pass, when all is checked.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from shiftbook.checkpoint.bit_instructions import differing, ones, trailing_zeros
from shiftbook.checkpoint.kernel import (
    compiled,
    hash_positions,
    part,
    pointer,
    prefetch,
    sum_hashed,
)
from shiftbook.checkpoint.patch_bits import (
    list_others,
    pack_block,
    packed_words,
    unpack_block,
)
from shiftbook.checkpoint.positions import GAMMA, KEY, MIX_1, MIX_2

_numba: Any = numba  # its type hints leave out some of what it offers
_U64 = np.uint64
_I64: Any = np.int64  # what a count of bits becomes
_ONE = _U64(1)
_LOW_32 = _U64(0xFFFF_FFFF)
_S30, _S27, _S31, _S32 = _U64(30), _U64(27), _U64(31), _U64(32)
_KEY, _GAMMA, _MIX_1, _MIX_2 = _U64(KEY), _U64(GAMMA), _U64(MIX_1), _U64(MIX_2)
_MASKS = 32  # comparisons of 64 units that are made before any mask is looked at
_STRIP = 64 * _MASKS
_TOGETHER = 8  # blocks of different tensors that share the hashes of their positions
_SLACK = 4  # units that a scan may write after the last one
_AHEAD = 64  # changes whose lines are asked for before they are needed


@part
def _hashed(word: Any) -> Any:
    """SplitMix64 of a word's position."""
    z = _KEY + (word + _ONE) * _GAMMA
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@part
def change_sums(positions: Any, first: Any, old: Any, new: Any) -> tuple[Any, Any]:
    """What changes add to both sums of a fingerprint; unit `first + positions[i]` changes."""
    sum_0 = _U64(0)
    sum_1 = _U64(0)
    start = _U64(first)
    if old.itemsize == 8:
        for k in range(positions.size):
            word = (start + _U64(positions[k])) << _ONE
            for half in range(2):
                z = _hashed(word + _U64(half))
                shift = _S32 * _U64(half)
                delta = ((_U64(new[k]) >> shift) & _LOW_32) - ((_U64(old[k]) >> shift) & _LOW_32)
                sum_0 += (z & _LOW_32) * delta
                sum_1 += (z >> _S32) * delta
        return sum_0, sum_1
    log2_per_word = _U64(2 // old.itemsize)  # 1, 2, 4 bytes: 4, 2, 1 units a word
    width_bits = _S32 >> log2_per_word
    within = (_ONE << log2_per_word) - _ONE
    for k in range(positions.size):
        position = start + _U64(positions[k])
        z = _hashed(position >> log2_per_word)
        delta = (_U64(new[k]) - _U64(old[k])) << ((position & within) * width_bits)
        sum_0 += (z & _LOW_32) * delta
        sum_1 += (z >> _S32) * delta
    return sum_0, sum_1


@part
def _strip_sums(address: Any, item_bytes: Any, low: Any, high: Any, hashes: Any) -> Any:
    """Both sums over the whole words of units `low` to `high` of a block.

    `low` stands at an edge of a word; `hashes` are those of the words from there on.
    """
    size = (high - low) * item_bytes // 4
    start = address + _U64(low * item_bytes)
    return sum_hashed(_numba.carray(pointer(start), (size,), np.uint32), hashes[:size])


@part
def _differing_units(
    base: Any, new: Any, low: Any, high: Any, filled: Any, out: Any, next_base: Any, next_new: Any
) -> Any:
    """Add the units from `low` to `high` that differ to positions, old and new ones in `out`.

    The memory at `next_base` and `next_new` is looked at soon.
    """
    positions, old, fresh = out
    masks = np.empty(_MASKS, np.uint64)
    full = (high - low) // 64
    line = _U64(64 * base.itemsize)
    for k in range(full):
        ahead = _U64(k) * line
        for byte in range(0, 64 * base.itemsize, 64):
            prefetch(next_base + ahead + _U64(byte))
            prefetch(next_new + ahead + _U64(byte))
        masks[k] = differing(base, new, low + 64 * k)
    count = filled
    for k in range(full):
        mask = masks[k]
        here = count
        count += _I64(ones(mask))
        while mask:
            # Written always, kept when there are so many: few branches are guessed wrongly.
            for _ in range(_SLACK):
                positions[here] = low + 64 * k + _I64(trailing_zeros(mask))
                here += 1
                mask &= mask - _ONE
    for unit in range(low + 64 * full, high):
        if base[unit] != new[unit]:
            positions[count] = unit
            count += 1
    for k in range(filled, count):
        old[k] = base[positions[k]]
        fresh[k] = new[positions[k]]
    return count


@part
def _longest(spans: Any) -> Any:
    """Units of the longest block: room for it is enough, and fresh memory is not free."""
    longest = _I64(0)
    for block in range(spans.shape[0]):
        longest = max(longest, spans[block, 1])
    return longest


@part
def _group_end(spans: Any, begin: Any) -> Any:
    """The end of the blocks from `begin` on that begin at one unit of their tensors."""
    end = begin + 1
    most = min(begin + _TOGETHER, spans.shape[0])
    while end < most and spans[end, 0] == spans[begin, 0]:
        end += 1
    return end


@part
def _strip_after_next(begin: Any, end: Any, block: Any, low: Any) -> tuple[Any, Any]:
    """Block and unit two steps on when a group of blocks is gone through strip by strip."""
    after = block + 2
    if after < end:
        return after, low
    return begin + (after - end) % (end - begin), low + _STRIP


@part
def _count_between(units: Any, rule: Any) -> Any:
    """How many numbers are in `rule`: mask, least, most, and the shift of a second one or zero."""
    mask, least, most, shift = rule[0], rule[1], rule[2], rule[3]
    count = 0
    for k in range(units.size):
        number = _U64(units[k]) & mask
        count += _I64((number >= least) & (number <= most))
    if shift:
        for k in range(units.size):
            number = (_U64(units[k]) >> shift) & mask
            count += _I64((number >= least) & (number <= most))
    return count


@part
def count_neighbours(positions: Any) -> Any:
    """Changes that follow another without a gap."""
    count = 0
    for k in range(1, positions.size):
        count += _I64(positions[k] - positions[k - 1] == 1)
    return count


@compiled
def compare_blocks(
    kind: Any, addresses: Any, spans: Any, rules: Any, words: Any, found: Any, sums: Any
) -> tuple[Any, Any, Any]:
    """Pack what differs between blocks of two versions, until `words` is full.

    Blocks that begin at one unit of their tensors stand side by side, the longest first. Per block:
    `addresses` of its units in both versions, `spans` with its first unit in the tensor and its
    units, `rules` that say which numbers are refused (see `_count_between`). `found` gets changes,
    words, neighbours, differences other than one, and refused numbers among the new units; `sums`
    what the changes add to both sums of the fingerprint, and both sums of the new block, over whole
    words. `kind` is an empty array of the units' type. Returns how many blocks are done, the words
    they took, and the words that the next one takes.
    """
    sign_bit = _U64(8 * kind.itemsize - 1)
    longest = _longest(spans)
    positions = np.empty((_TOGETHER, longest + _SLACK), np.uint32)
    old = np.empty((_TOGETHER, longest + _SLACK), kind.dtype)
    fresh = np.empty((_TOGETHER, longest + _SLACK), kind.dtype)
    counts = np.empty(_TOGETHER, np.int64)
    hashes = np.empty(_STRIP * kind.itemsize // 4, np.uint64)
    differences = np.empty(longest, kind.dtype)
    others = np.empty(longest + 1, np.uint32)
    magnitudes = np.empty(longest, np.uint64)
    used = _I64(0)
    begin = _I64(0)
    while begin < addresses.shape[0]:
        end = _group_end(spans, begin)
        first = spans[begin, 0]
        counts[:] = 0
        sums[begin:end] = 0
        for low in range(0, spans[begin, 1], _STRIP):
            hash_positions(first * kind.itemsize // 4 + low * kind.itemsize // 4, hashes)
            for block in range(begin, end):
                size = spans[block, 1]
                if low >= size:
                    continue
                high = min(low + _STRIP, size)
                base = _numba.carray(pointer(addresses[block, 0]), (size,), kind.dtype)
                new = _numba.carray(pointer(addresses[block, 1]), (size,), kind.dtype)
                after, after_low = _strip_after_next(begin, end, block, low)
                ahead = _U64(after_low * kind.itemsize)
                k = block - begin
                counts[k] = _differing_units(
                    base,
                    new,
                    low,
                    high,
                    counts[k],
                    (positions[k], old[k], fresh[k]),
                    addresses[after, 0] + ahead,
                    addresses[after, 1] + ahead,
                )
                # The strip is in the first-level cache now.
                sum_0, sum_1 = _strip_sums(addresses[block, 1], kind.itemsize, low, high, hashes)
                sums[block, 2] += sum_0
                sums[block, 3] += sum_1
        for block in range(begin, end):
            count = counts[block - begin]
            where = positions[block - begin, :count]
            was = old[block - begin, :count]
            now = fresh[block - begin, :count]
            for k in range(count):
                differences[k] = now[k] - was[k]
            other, other_bits = list_others(differences[:count], sign_bit, others, magnitudes)
            wanted = packed_words(count, spans[block, 1], other, other_bits)
            if used + wanted > words.size:
                return block, used, wanted
            pack_block(
                where,
                differences[:count],
                spans[block, 1],
                sign_bit,
                others[:other],
                magnitudes,
                words[used : used + wanted],
            )
            used += wanted
            found[block, 0] = count
            found[block, 1] = wanted
            found[block, 2] = count_neighbours(where)
            found[block, 3] = other
            found[block, 4] = _count_between(now, rules[block])
            sums[block, 0], sums[block, 1] = change_sums(where, first, was, now)
        begin = end
    return addresses.shape[0], used, 0


@compiled
def check_blocks(
    addresses: Any,
    spans: Any,
    summed: Any,
    words: Any,
    positions: Any,
    fresh: Any,
    good: Any,
    sums: Any,
) -> None:
    """Unpack the changes of blocks, gather what comes out, and sum both sides.

    Blocks are ordered as `compare_blocks` wants them. Per block: the address of its units; `spans`
    with its first unit in the tensor, its units, its changes and their first place in `positions`
    (within the block) and `fresh`, which are filled, its first word in `words` and how many it has.
    `good` gets whether the bits say something; `sums` both sums over the whole words of the block
    as it is, if `summed`, and what the changes add to them.
    """
    sign_bit = _U64(8 * fresh.itemsize - 1)
    width = fresh.itemsize
    longest = _longest(spans)
    differences = np.empty((_TOGETHER, longest), fresh.dtype)
    old = np.empty((_TOGETHER, longest), fresh.dtype)
    gathered = np.empty(_TOGETHER, np.int64)
    hashes = np.empty(_STRIP * width // 4, np.uint64)
    others = np.empty(longest, np.uint32)
    begin = _I64(0)
    while begin < addresses.size:
        end = _group_end(spans, begin)
        first = spans[begin, 0]
        gathered[:] = 0
        for block in range(begin, end):
            size, count, place = spans[block, 1], spans[block, 2], spans[block, 3]
            packed = words[spans[block, 4] : spans[block, 4] + spans[block, 5]]
            good[block] = count <= size and unpack_block(
                packed,
                size,
                sign_bit,
                others,
                positions[place : place + count],
                differences[block - begin, :count],
            )
        for low in range(0, spans[begin, 1], _STRIP):
            if summed:
                hash_positions(first * width // 4 + low * width // 4, hashes)
            for block in range(begin, end):
                size, count, place = spans[block, 1], spans[block, 2], spans[block, 3]
                if low >= size or not (summed or count):
                    continue
                high = min(low + _STRIP, size)
                units = _numba.carray(pointer(addresses[block]), (size,), fresh.dtype)
                after, after_low = _strip_after_next(begin, end, block, low)
                ahead = addresses[after] + _U64(after_low * width)
                for byte in range(0, _STRIP * width, 64):
                    prefetch(ahead + _U64(byte))
                if summed:
                    sum_0, sum_1 = _strip_sums(addresses[block], width, low, high, hashes)
                    sums[block, 0] += sum_0
                    sums[block, 1] += sum_1
                if good[block]:
                    k = gathered[block - begin]
                    while k < count and positions[place + k] < high:
                        old[block - begin, k] = units[positions[place + k]]
                        k += 1
                    gathered[block - begin] = k
        for block in range(begin, end):
            count, place = spans[block, 2], spans[block, 3]
            if not good[block]:
                continue
            was, change = old[block - begin], differences[block - begin]
            new = fresh[place : place + count]
            for k in range(count):
                new[k] = was[k] + change[k]
            sums[block, 2], sums[block, 3] = change_sums(
                positions[place : place + count], first, was[:count], new
            )
        begin = end


@compiled
def put_blocks(addresses: Any, spans: Any, positions: Any, fresh: Any) -> None:
    """Write what `check_blocks` filled."""
    for block in range(addresses.size):
        size, count, place = spans[block, 1], spans[block, 2], spans[block, 3]
        units = _numba.carray(pointer(addresses[block]), (size,), fresh.dtype)
        for k in range(place, place + count):
            units[positions[k]] = fresh[k]
