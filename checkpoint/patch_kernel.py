"""The numba loops of patches: find what differs between two tensors, and what that does to sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from shiftbook.checkpoint.kernel import compiled
from shiftbook.checkpoint.positions import GAMMA, KEY, MIX_1, MIX_2

_U64 = np.uint64
_ONE = _U64(1)
_LOW_32 = _U64(0xFFFF_FFFF)
_S30, _S27, _S31, _S32 = _U64(30), _U64(27), _U64(31), _U64(32)
_KEY, _GAMMA, _MIX_1, _MIX_2 = _U64(KEY), _U64(GAMMA), _U64(MIX_1), _U64(MIX_2)
_LINE_WORDS = 8  # 64 bytes are compared without a branch; few of them hold a change


@compiled
def scan_words(
    base: Any, new: Any, base_units: Any, new_units: Any, start: Any, filled: Any, out: Any
) -> tuple[int, int]:
    """Collect the units that differ, from 64-bit word `start` on, until the output is full.

    `base` and `new` are the same memory as the units, in words of 64 bits. `out` holds positions,
    old units and new units; `filled` of each are taken. Returns the word to go on from (the number
    of words when done) and how many are filled now.
    """
    positions, old, fresh = out
    per_word = base_units.size // base.size
    room = positions.size - _LINE_WORDS * per_word
    words = base.size
    at = start
    while at < words:
        if filled > room:
            return at, filled
        end = min(at + _LINE_WORDS, words)
        different = _U64(0)
        if end - at == _LINE_WORDS:
            for k in range(_LINE_WORDS):
                different |= base[at + k] ^ new[at + k]
        else:
            for k in range(at, end):
                different |= base[k] ^ new[k]
        if different:
            for unit in range(at * per_word, end * per_word):
                # Written always, kept when it differs: no branch that is guessed wrongly.
                positions[filled] = unit
                old[filled] = base_units[unit]
                fresh[filled] = new_units[unit]
                filled += int(base_units[unit] != new_units[unit])
        at = end
    return at, filled


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
