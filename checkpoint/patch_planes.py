"""The numba loops that turn positions and differences into byte planes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from shiftbook.checkpoint.kernel import compiled

_U64 = np.uint64
_ONE = _U64(1)


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
