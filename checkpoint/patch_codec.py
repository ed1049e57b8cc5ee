"""Codes the changes of one tensor: positions as gaps, new bits as differences, both in byte planes.

A gap is the number of units left alone between two changed ones. A difference is that of the new
bits and the base's, as integers of the unit's width, with the sign in the lowest bit. Small gaps
and steps of one in the last place, which is what an optimizer makes, leave most planes nearly
constant; constant-zero planes are left out and zstd shortens the others where it can. Differences
add up, so patches compose without a look at the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import PatchDamaged
from shiftbook.checkpoint.host_sums import sum_block
from shiftbook.checkpoint.patch_format import Planes, Section, TensorPatch, pack, unpack
from shiftbook.checkpoint.patch_kernel import (
    BLOCK_UNITS,
    SLACK,
    change_sums,
    join_planes,
    moved_units,
    scan_units,
    split_planes,
    widest,
)
from shiftbook.checkpoint.positions import MASK_64

Units = NDArray[Any]
_LOG2_PER_WORD = {1: np.uint64(2), 2: np.uint64(1), 4: np.uint64(0)}
Positions = NDArray[np.int64]

_LEAST_ROOM = BLOCK_UNITS + SLACK  # units: one block fits in any case
_FIRST_ROOM = 2 * _LEAST_ROOM
_NO_WORDS = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed units of one tensor: rising flat positions and integer differences (new - old)."""

    positions: Positions
    differences: Units


@dataclass(frozen=True, slots=True)
class Found:
    """What a comparison of two tensors gives."""

    positions: Positions
    old: Units
    new: Units
    sums: tuple[int, int] | None = None
    """Both sums of the new tensor's fingerprint, where they were asked for and cost little."""

    @property
    def changes(self) -> Changes:
        """Without the values that the differences lead from and to."""
        return Changes(self.positions, self.new - self.old)


def find_changes(base: Units, new: Units, *, summed: bool = False) -> Found:
    """Compare two flat arrays of unsigned units of one size, bit by bit.

    `summed` takes the sums of the new one's fingerprint along; an array that does not begin at an
    edge of 4 bytes has none.
    """
    words, loose = _words_of(new) if summed else (_NO_WORDS, 0)
    block_words = BLOCK_UNITS * base.dtype.itemsize // 4
    out = _room(base.dtype, max(_FIRST_ROOM, base.size // 64))
    at = filled = low = high = 0
    while True:
        found = scan_units(base, new, at, filled, out, words, block_words)
        at, filled = int(found[0]), int(found[1])
        low, high = low + int(found[2]), high + int(found[3])
        if at == base.size:
            break
        # As much as the rest needs if it is like what was seen, and some.
        expected = min(base.size, filled * base.size // max(at, 1) * 5 // 4)
        out = _larger(out, filled, _LEAST_ROOM + max(filled, expected))
    positions, old, fresh = (part[:filled] for part in out)
    if not summed or not (words.size or loose):
        return Found(positions, old, fresh)
    if loose:
        start = np.full(1, base.size - loose, dtype=np.uint64)
        more = sum_block(new[base.size - loose :].reshape(1, -1), start, 1)
        low, high = low + more[0], high + more[1]
    return Found(positions, old, fresh, (low & MASK_64, high & MASK_64))


def _words_of(units: Units) -> tuple[NDArray[np.uint32], int]:
    """The whole words of a flat array, and how many units stand after them; none, if unaligned."""
    if units.__array_interface__["data"][0] % 4:
        return _NO_WORDS, 0
    loose = units.size % max(1, 4 // units.dtype.itemsize)
    return units[: units.size - loose].view(np.uint32), loose


def _room(dtype: np.dtype[Any], size: int) -> tuple[Positions, Units, Units]:
    return np.empty(size, np.int64), np.empty(size, dtype), np.empty(size, dtype)


def _larger(
    out: tuple[Positions, Units, Units], filled: int, size: int
) -> tuple[Positions, Units, Units]:
    larger = _room(out[1].dtype, size)
    for small, large in zip(out, larger, strict=True):
        large[:filled] = small[:filled]
    return larger


def sums_of_changes(positions: Positions, old: Units, new: Units) -> tuple[int, int]:
    """What the changes add to both sums of the tensor's fingerprint (mod 2^64)."""
    if old.dtype.itemsize == 8:
        # Two words each: the lower and upper half.
        words = (np.repeat(positions * 2, 2) + np.tile([0, 1], positions.size)).astype(np.int64)
        halves = (words, np.ascontiguousarray(old).view(np.uint32))
        low, high = change_sums(*halves, np.ascontiguousarray(new).view(np.uint32), np.uint64(0))
    else:
        low, high = change_sums(positions, old, new, _LOG2_PER_WORD[old.dtype.itemsize])
    return int(low) & MASK_64, int(high) & MASK_64


def moved(units: Units, changes: Changes) -> tuple[Units, tuple[int, int]]:
    """New bits of the changed units of a flat tensor, and `sums_of_changes`, in one pass."""
    if units.dtype.itemsize == 8:
        old = units[changes.positions]
        new = np.asarray(old + changes.differences)
        return new, sums_of_changes(changes.positions, old, new)
    new = np.empty_like(changes.differences)
    log2_per_word = _LOG2_PER_WORD[units.dtype.itemsize]
    low, high = moved_units(units, changes.positions, changes.differences, new, log2_per_word)
    return new, (int(low) & MASK_64, int(high) & MASK_64)


def encode_changes(changes: Changes) -> tuple[dict[str, Any], list[bytes]]:
    """The fields of a TensorPatch that describe the changes, and the bytes of its sections."""
    positions, differences = changes.positions, changes.differences
    sign_bit = np.uint64(8 * differences.dtype.itemsize - 1)
    bits = [int(n) for n in widest(positions, differences, sign_bit)]
    gap_planes, value_planes = (
        np.empty(((n.bit_length() + 7) // 8, positions.size), np.uint8) for n in bits
    )
    split_planes(positions, differences, sign_bit, gap_planes, value_planes)
    packed = [pack(plane) for plane in [*gap_planes, *value_planes]]
    fields = {
        "encoding": "changes" if positions.size else "same",
        "changed": int(positions.size),
        "gap_planes": len(gap_planes),
        "value_planes": len(value_planes),
        "sections": tuple(section for section, _ in packed),
    }
    return fields, [stored for _, stored in packed]


def decode_changes(name: str, tensor: TensorPatch, stored: list[memoryview]) -> Changes:
    """Positions and differences of one tensor. Raises PatchDamaged."""
    planes = np.empty((len(stored), tensor.changed), dtype=np.uint8)
    for plane, section, data in zip(planes, tensor.sections, stored, strict=True):
        plane[:] = unpack(name, section, data)
    positions = np.empty(tensor.changed, dtype=np.int64)
    differences = np.empty(tensor.changed, dtype=f"u{tensor.unit_bytes}")
    if not join_planes(planes, tensor.gap_planes, tensor.units, positions, differences):
        raise PatchDamaged(
            f"patch of {name}: expected positions below {tensor.units}, found one outside; it was "
            "not written by this program: ask for an anchor",
            tensor=name,
        )
    return Changes(positions, differences)


def encode_bits(units: Units) -> tuple[dict[str, Any], list[bytes]]:
    """The whole tensor in byte planes."""
    packed = [pack(plane) for plane in to_planes(units, units.dtype.itemsize)]
    fields = {"encoding": "bits", "changed": int(units.size)}
    return fields | {"sections": tuple(s for s, _ in packed)}, [data for _, data in packed]


def decode_bits(name: str, tensor: TensorPatch, stored: list[memoryview]) -> Units:
    """The whole tensor again, flat. Raises PatchDamaged."""
    sections: tuple[Section, ...] = tensor.sections
    planes = [unpack(name, s, data) for s, data in zip(sections, stored, strict=True)]
    return from_planes(planes, tensor.units, np.dtype(f"u{tensor.unit_bytes}"))


def merge_changes(first: Changes, second: Changes) -> Changes:
    """The changes that lead from the first one's base to the second one's result."""
    positions, inverse = np.unique(
        np.concatenate([first.positions, second.positions]), return_inverse=True
    )
    total = np.zeros(positions.size, dtype=first.differences.dtype)
    total[inverse[: first.positions.size]] += first.differences
    total[inverse[first.positions.size :]] += second.differences  # distinct within each
    kept = total != 0
    return Changes(positions[kept], total[kept])


def to_planes(values: Units, least: int = 0) -> list[Planes]:
    """Plane k holds byte k of every value; planes of zeros at the top are left out."""
    width = values.dtype.itemsize
    used = max(least, (int(values.max()).bit_length() + 7) // 8 if values.size else 0)
    table = np.ascontiguousarray(values).view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(table[:, k]) for k in range(used)]


def from_planes(planes: list[Planes], count: int, dtype: np.dtype[Any]) -> Units:
    """The values again."""
    values = np.zeros(count, dtype=dtype)
    table = values.view(np.uint8).reshape(-1, dtype.itemsize)
    for k, plane in enumerate(planes):
        table[:, k] = plane
    return values
