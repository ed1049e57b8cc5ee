"""Codes the changes of one tensor: positions as gaps, new bits as differences.

A gap is the number of units left alone between two changed ones. A difference is that of the new
bits and the base's, as integers of the unit's width. An optimizer makes scattered steps of one in
the last place: those are packed into bits, block by block (`patch_bits`). Where changes stand in
runs or steps are long, gaps and differences are coded in byte planes instead, the sign in the
lowest bit, planes of zeros at the top left out, and zstd shortens what it can. Differences add up,
so patches compose without a look at the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import PatchDamaged
from shiftbook.checkpoint.patch_changes import (
    moved_units,
    pack_blocks,
    sums_of_units,
    unpack_blocks,
)
from shiftbook.checkpoint.patch_format import (
    BLOCK,
    INDEX_BYTES,
    Fields,
    Planes,
    Section,
    TensorPatch,
    pack,
    unpack,
)
from shiftbook.checkpoint.patch_planes import join_planes, split_planes, widest
from shiftbook.checkpoint.positions import MASK_64

Units = NDArray[Any]
Positions = NDArray[np.int64]
Words = NDArray[np.uint64]
Sums = tuple[int, int]
Encoded = tuple[Fields, list[bytes]]
"""Fields of a TensorPatch, those that differ from their defaults, and the bytes of its sections."""

MOST_CHANGES = 32  # in a word: each takes two bits at least
_FEW_CHANGES = 1024
_FEW_BYTES = 16  # more than planes would take, which nobody minds
_LEAST_WORDS = 1024  # that room is made for at a time
COUNTS = 5  # what `pack_blocks` and `compare_blocks` tell of a block


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed units of one tensor: rising flat positions and integer differences (new - old)."""

    positions: Positions
    differences: Units


@dataclass(frozen=True, slots=True)
class Packed:
    """Changes of one tensor as bits."""

    found: NDArray[np.int64]
    """Per block: changes, words, changes next to another, differences other than one, refused."""
    words: Words

    def section(self) -> bytes:
        """The bytes of a section: an index of the blocks, then their words."""
        return self.found[:, :2].astype("<u4").tobytes() + self.words.astype("<u8").tobytes()


def sums_of_changes(positions: Positions, old: Units, new: Units) -> Sums:
    """What the changes add to both sums of the tensor's fingerprint (mod 2^64)."""
    low, high = sums_of_units(positions, np.ascontiguousarray(old), np.ascontiguousarray(new))
    return int(low) & MASK_64, int(high) & MASK_64


def moved(units: Units, changes: Changes) -> tuple[Units, Sums]:
    """New bits of the changed units of a flat tensor, and `sums_of_changes`, in one pass."""
    new = np.empty_like(changes.differences)
    low, high = moved_units(units, changes.positions, changes.differences, new)
    return new, (int(low) & MASK_64, int(high) & MASK_64)


def blocks_of(units: int) -> int:
    """Blocks that a tensor of so many units is cut into."""
    return -(-units // BLOCK)


def encode_changes(changes: Changes, units: int) -> Encoded:
    """The fields of a TensorPatch that describe the changes, and the bytes of its sections."""
    found = np.zeros((blocks_of(units), COUNTS), np.int64)
    pieces = []
    done, wanted = 0, changes.positions.size // 4
    while done < found.shape[0]:
        room = np.empty(max(wanted, _LEAST_WORDS), np.uint64)
        done, used, wanted = pack_blocks(
            changes.positions, changes.differences, units, done, room, found
        )
        pieces.append(room[:used])
    packed = Packed(found, np.concatenate(pieces) if pieces else np.empty(0, np.uint64))
    width = changes.differences.dtype.itemsize
    return encode_found(found.sum(axis=0).tolist(), width, packed.section, lambda: changes)


def encode_found(
    total: Sequence[int],
    width: int,
    section: Callable[[], bytes],
    changes: Callable[[], Changes],
) -> Encoded:
    """As `encode_changes`, for changes that are packed already.

    `total` adds up `Packed.found` over the tensor's blocks, `width` is that of a unit in bytes.
    `section` and `changes` are only called where they are needed.
    """
    changed = total[0]
    if not changed:
        return {"encoding": "same"}, []
    if not bits_are_short(total, width):
        return _encode_planes(changes())
    stored = section()
    sizes = {"stored": len(stored), "plain": len(stored)}
    return {"encoding": "packed", "changed": changed, "sections": [sizes]}, [stored]


def bits_are_short(total: Sequence[int], width: int) -> bool:
    """True where changes are stored as packed bits, False where as byte planes.

    Bits are short where few changes stand in runs and most steps are of one. Few changes of any
    sort stay in bits too, unless planes without zstd would be shorter: a call of zstd for each of
    their planes would cost more time than the bytes that it saves.
    """
    changed, words, neighbours, others = total[:4]
    if 2 * neighbours <= changed and 4 * others <= changed:
        return True
    return changed < _FEW_CHANGES and 8 * words <= changed * (1 + width) + _FEW_BYTES


def _encode_planes(changes: Changes) -> Encoded:
    positions, differences = changes.positions, changes.differences
    sign_bit = np.uint64(8 * differences.dtype.itemsize - 1)
    bits = [int(n) for n in widest(positions, differences, sign_bit)]
    gap_planes, value_planes = (
        np.empty(((n.bit_length() + 7) // 8, positions.size), np.uint8) for n in bits
    )
    split_planes(positions, differences, sign_bit, gap_planes, value_planes)
    packed = [pack(plane) for plane in [*gap_planes, *value_planes]]
    fields: Fields = {
        "encoding": "changes",
        "changed": int(positions.size),
        "value_planes": len(value_planes),
        "sections": [section for section, _ in packed],
    }
    if len(gap_planes):
        fields["gap_planes"] = len(gap_planes)
    return fields, [stored for _, stored in packed]


def decode_changes(name: str, tensor: TensorPatch, stored: list[memoryview]) -> Changes:
    """Positions and differences of one tensor. Raises PatchDamaged."""
    packed = packed_section(name, tensor, stored[0]) if tensor.encoding == "packed" else None
    positions = np.empty(tensor.changed, dtype=np.int64)
    differences = np.empty(tensor.changed, dtype=f"u{tensor.unit_bytes}")
    if packed is not None:
        index, words = packed
        right = unpack_blocks(words, index, tensor.units, positions, differences)
    else:
        planes = np.empty((len(stored), tensor.changed), dtype=np.uint8)
        for plane, section, data in zip(planes, tensor.sections, stored, strict=True):
            plane[:] = unpack(name, section, data)
        right = join_planes(planes, tensor.gap_planes, tensor.units, positions, differences)
    if not right:
        raise changes_outside(name, tensor)
    return Changes(positions, differences)


def packed_section(
    name: str, tensor: TensorPatch, stored: memoryview
) -> tuple[NDArray[np.uint32], Words]:
    """The index of a section's blocks, and their words. Raises PatchDamaged."""
    edge = INDEX_BYTES * tensor.blocks
    index = np.frombuffer(stored[:edge], "<u4").reshape(-1, 2)
    words = np.frombuffer(stored[edge:], "<u8").astype(np.uint64)  # copied: aligned in memory
    told = index.sum(axis=0, dtype=np.int64).tolist()
    if told != [tensor.changed, words.size] or tensor.changed > MOST_CHANGES * words.size:
        raise changes_outside(name, tensor)
    return index.astype(np.uint32), words


def changes_outside(name: str, tensor: TensorPatch) -> PatchDamaged:
    """The error for a section that does not say which units change."""
    return PatchDamaged(
        f"patch of {name}: expected {tensor.changed} rising positions below {tensor.units}, found "
        "others; it was not written by this program: ask for an anchor",
        tensor=name,
    )


def encode_bits(units: Units) -> Encoded:
    """The whole tensor in byte planes."""
    packed = [pack(plane) for plane in to_planes(units, units.dtype.itemsize)]
    fields: Fields = {"encoding": "bits", "sections": [section for section, _ in packed]}
    if units.size:
        fields["changed"] = int(units.size)
    return fields, [data for _, data in packed]


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
