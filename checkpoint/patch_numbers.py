"""Numbers behind bits: NaNs, and the declared lossy encoding by int8 differences.

The lossy encoding cuts a tensor into blocks of 4096 elements, divides the difference between what
the receiver has and what it should have by a scale per block (the declared bound, or what 127 steps
need where that is more), and sends the rounded quotient in 8 bits. Both sides add it with the same
float64 operations and one rounding to the dtype, so the sender knows the receiver's bits exactly.
What was left over is part of the next difference: the error is fed back and never adds up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import PatchDamaged
from shiftbook.checkpoint.patch_codec import Units
from shiftbook.checkpoint.patch_format import Fields, TensorPatch, pack, unpack
from shiftbook.checkpoint.positions import ITEM_BYTES

_BLOCK = 4096
_STEP = 64 * _BLOCK  # elements in flight at a time: bounds the memory for float64 numbers
_LARGEST = 127

# dtype: unsigned type of one number, its bits without the sign, the largest that is no NaN.
_NAN_ABOVE: dict[str, tuple[str, int, int]] = {
    "float16": ("u2", 0x7FFF, 0x7C00),
    "complex32": ("u2", 0x7FFF, 0x7C00),
    "bfloat16": ("u2", 0x7FFF, 0x7F80),
    "float32": ("u4", 0x7FFF_FFFF, 0x7F80_0000),
    "complex64": ("u4", 0x7FFF_FFFF, 0x7F80_0000),
    "float64": ("u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "complex128": ("u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "float8_e4m3fn": ("u1", 0x7F, 0x7E),
    "float8_e5m2": ("u1", 0x7F, 0x7C),
    "float8_e8m0fnu": ("u1", 0xFF, 0xFE),
}
_NAN_IS = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80}

Rule = tuple[int, int, int, int]

NO_NUMBER: Rule = (0, 1, 0, 0)
"""The rule that finds none."""

LOSSY_DTYPES = ("float64", "float32", "bfloat16", "float16")


def count_nan(dtype: str, units: Units) -> int:
    """How many numbers among the units of a tensor are NaN."""
    if dtype in _NAN_IS:
        return int(np.count_nonzero(units == _NAN_IS[dtype]))
    if dtype not in _NAN_ABOVE:
        return 0
    unsigned, magnitude, above = _NAN_ABOVE[dtype]
    numbers = np.ascontiguousarray(units).view(unsigned)
    kind = numbers.dtype.type
    return int(np.count_nonzero((numbers & kind(magnitude)) > kind(above)))


@cache
def nan_rule(dtype: str) -> Rule:
    """Which units are NaN: a mask, the least and the most behind it, and, where a unit holds two
    numbers, how far the second one is to be shifted.
    """
    if dtype in _NAN_IS:
        return 0xFF, _NAN_IS[dtype], _NAN_IS[dtype], 0
    if dtype not in _NAN_ABOVE:
        return NO_NUMBER
    unsigned, magnitude, above = _NAN_ABOVE[dtype]
    bits = 8 * np.dtype(unsigned).itemsize
    return magnitude, above + 1, magnitude, bits if bits < 8 * min(8, ITEM_BYTES[dtype]) else 0


@dataclass(frozen=True, slots=True)
class Steps:
    """What a lossy encoding makes of an array: the steps, and what the receiver has after them."""

    scales: NDArray[np.float32]
    """Of each block of 4096 elements in C order."""
    steps: NDArray[np.int8]
    """Of each element, flat."""
    result: Units
    """The bits that come out, flat."""
    largest_error: float
    """Of the elements that come out, from what was aimed at."""


@dataclass(frozen=True, slots=True)
class StepsOf:
    """A slice of coded steps: those of the elements at `at` in an array of the shape `grid`."""

    coded: Steps
    grid: tuple[int, ...]
    at: tuple[int, ...]
    shape: tuple[int, ...]

    def encoded(self) -> tuple[Fields, list[bytes]]:
        """Fields and sections of the TensorPatch of this slice."""
        ends = zip(self.at, self.shape, strict=True)
        window: tuple[Any, ...] = (..., *(slice(a, a + n) for a, n in ends))
        steps = np.ascontiguousarray(self.coded.steps.reshape(self.grid)[window])
        first, last = _blocks_of_slice(self.shape, self.grid, self.at)
        packed = _packed(self.coded.scales[first : last + 1], steps.reshape(-1))
        fields: Fields = {
            "encoding": "int8",
            "largest_error": self.coded.largest_error,
            "sections": packed[0],
        }
        if self.shape != self.grid:
            fields |= {"grid": self.grid, "at": self.at}
        return fields, packed[1]


def coded_steps(dtype: str, old: Units, target: Units, max_error: float) -> Steps | None:
    """Int8 steps from the bits `old` to about those of `target`, both flat.

    A step is as coarse as the bound allows: what comes out is rounded to the dtype, which is off by
    no more than half a step, since the target is a number of that dtype within half a step. None
    where the encoding does not fit: another dtype, a number that is not finite, or an element that
    would end further than `max_error` from its target.
    """
    if dtype not in LOSSY_DTYPES or not old.size:
        return None
    scales = np.zeros(-(-old.size // _BLOCK), dtype=np.float32)
    steps = np.zeros(old.size, dtype=np.int8)
    result = np.empty_like(old)
    coarsest = np.float32(max_error)
    if float(coarsest) > max_error:
        coarsest = np.nextafter(coarsest, np.float32(0))
    error = 0.0
    for first in range(0, old.size, _STEP):
        part = slice(first, first + _STEP)
        blocks = slice(first // _BLOCK, first // _BLOCK + _STEP // _BLOCK)
        before, after = numbers_of(dtype, old[part]), numbers_of(dtype, target[part])
        with np.errstate(all="ignore"):
            difference = after - before
            if not np.isfinite(difference).all():
                return None
            edges = np.arange(0, difference.size, _BLOCK)
            scale = (np.maximum.reduceat(np.abs(difference), edges) / _LARGEST).astype(np.float32)
            scale = np.where(scale > 0, np.maximum(scale, coarsest), scale)
            each = np.repeat(scale, _BLOCK)[: difference.size].astype(np.float64)
            quotient = np.rint(difference / np.where(each > 0, each, 1.0))
            steps[part] = np.clip(quotient, -_LARGEST, _LARGEST).astype(np.int8)
            scales[blocks] = scale
            result[part] = _moved(dtype, before, steps[part], each)
            left = np.abs(numbers_of(dtype, result[part]) - after)
        if not np.isfinite(scale).all() or not (left <= max_error).all():
            return None
        error = max(error, float(left.max()))
    return Steps(scales, steps, result, error)


def encode_int8(
    dtype: str, old: Units, target: Units, max_error: float
) -> tuple[Fields, list[bytes], Units] | None:
    """Fields and sections of a lossy TensorPatch, and the bits that the receiver will have; None
    where `coded_steps` has none."""
    coded = coded_steps(dtype, old, target, max_error)
    if coded is None:
        return None
    sections, stored = _packed(coded.scales, coded.steps)
    changed = int(np.count_nonzero(coded.result != old))
    fields: Fields = {
        "encoding": "int8",
        "largest_error": coded.largest_error,
        "sections": sections,
    }
    if changed:
        fields["changed"] = changed
    return fields, stored, coded.result


def _packed(
    scales: NDArray[np.float32], steps: NDArray[np.int8]
) -> tuple[list[Fields], list[bytes]]:
    packed = [pack(scales.view(np.uint8)), pack(steps.view(np.uint8))]
    return [section for section, _ in packed], [stored for _, stored in packed]


def decode_int8(name: str, tensor: TensorPatch, stored: list[memoryview], old: Units) -> Units:
    """The bits after a lossy patch of a tensor that had the bits `old`. Raises PatchDamaged."""
    grid, at = tensor.grid or tensor.shape, tensor.at or (0,) * len(tensor.shape)
    first_block, last_block = _blocks_of_slice(tensor.shape, grid, at)
    expected = [4 * (last_block + 1 - first_block), tensor.units]
    found = [section.plain for section in tensor.sections]
    if found != expected or tensor.dtype not in LOSSY_DTYPES:
        raise PatchDamaged(
            f"patch of {name}: expected int8 sections of {expected} bytes for a floating-point "
            f"tensor, found {found} for {tensor.dtype}; ask for an anchor",
            tensor=name,
        )
    planes = [unpack(name, s, data) for s, data in zip(tensor.sections, stored, strict=True)]
    scales, steps = planes[0].view(np.float32), planes[1].view(np.int8)
    result = np.empty_like(old)
    for first in range(0, old.size, _STEP):
        part = slice(first, min(first + _STEP, old.size))
        blocks = _places(part.start, part.stop, tensor.shape, grid, at) // _BLOCK - first_block
        each = scales[blocks].astype(np.float64)
        with np.errstate(all="ignore"):
            result[part] = _moved(
                tensor.dtype, numbers_of(tensor.dtype, old[part]), steps[part], each
            )
    return result


def _blocks_of_slice(
    shape: tuple[int, ...], grid: tuple[int, ...], at: tuple[int, ...]
) -> tuple[int, int]:
    """The first and the last block, in an array of the shape `grid`, that a slice has a part of;
    (0, -1) of an empty one."""
    count = math.prod(shape)
    if not count:
        return 0, -1
    ends = [int(_places(k, k + 1, shape, grid, at)[0]) for k in (0, count - 1)]
    return ends[0] // _BLOCK, ends[1] // _BLOCK


def _places(
    first: int, last: int, shape: tuple[int, ...], grid: tuple[int, ...], at: tuple[int, ...]
) -> NDArray[np.int64]:
    """Where the elements `first` to `last` of a slice, in C order, stand in the array of the shape
    `grid` that it is cut from at `at`, in C order as well."""
    flat = np.arange(first, last, dtype=np.int64)
    if shape == grid:
        return flat
    # Axes that the slice has in full, and the one before them, lie one after the other.
    axis = max(k for k in range(len(shape)) if shape[k] != grid[k])
    run = math.prod(shape[axis:])
    rows = np.arange(first // run, -(-last // run), dtype=np.int64)
    starts = np.full(rows.size, at[axis] * math.prod(grid[axis + 1 :]), dtype=np.int64)
    for k, index in enumerate(np.unravel_index(rows, shape[:axis]) if axis else ()):
        starts += (index + at[k]) * math.prod(grid[k + 1 :])
    return starts[flat // run - first // run] + flat % run


def _moved(
    dtype: str, before: NDArray[np.float64], steps: NDArray[np.int8], scale: NDArray[np.float64]
) -> Units:
    """Bits of before + step x scale, element by element. The operations are part of the format."""
    return bits_of_numbers(dtype, before + steps.astype(np.float64) * scale)


def numbers_of(dtype: str, units: Units) -> NDArray[np.float64]:
    """The numbers that the bits of a floating-point tensor stand for."""
    if dtype == "bfloat16":
        return (units.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return units.view(dtype).astype(np.float64)


def bits_of_numbers(dtype: str, numbers: NDArray[np.float64]) -> Units:
    """Numbers rounded to a floating-point dtype, ties to even (bfloat16: by way of float32)."""
    if dtype != "bfloat16":
        rounded = numbers.astype(dtype)
        return rounded.view(f"u{rounded.dtype.itemsize}")
    wide = numbers.astype(np.float32).view(np.uint32)
    odd = (wide >> np.uint32(16)) & np.uint32(1)
    return ((wide + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
