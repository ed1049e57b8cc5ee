"""Numbers behind bits: NaNs, and the declared lossy encoding by int8 differences.

The lossy encoding cuts a tensor into blocks of 4096 elements, divides the difference between what
the receiver has and what it should have by a scale per block, and sends the rounded quotient in 8
bits. Both sides add it with the same float64 operations and one rounding to the dtype, so the
sender knows the receiver's bits exactly. What was left over is part of the next difference: the
error is fed back and never adds up.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import PatchDamaged
from shiftbook.checkpoint.patch_codec import Units
from shiftbook.checkpoint.patch_format import Fields, TensorPatch, pack, unpack
from shiftbook.checkpoint.positions import ITEM_BYTES

_BLOCK = 4096
_STEP = 256 * _BLOCK  # elements in flight at a time: bounds the memory for float64 numbers
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


def encode_int8(
    dtype: str, old: Units, target: Units, max_error: float
) -> tuple[Fields, list[bytes], Units] | None:
    """Fields and sections of a lossy TensorPatch, and the bits that the receiver will have.

    None where the encoding does not fit: another dtype, a number that is not finite, or an element
    that would end further than `max_error` from its target.
    """
    if dtype not in LOSSY_DTYPES or not old.size:
        return None
    scales = np.zeros(-(-old.size // _BLOCK), dtype=np.float32)
    steps = np.zeros(old.size, dtype=np.int8)
    result = np.empty_like(old)
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
            each = np.repeat(scale.astype(np.float64), _BLOCK)[: difference.size]
            quotient = np.rint(difference / np.where(each > 0, each, 1.0))
            steps[part] = np.clip(quotient, -_LARGEST, _LARGEST).astype(np.int8)
            scales[blocks] = scale
            result[part] = _moved(dtype, before, steps[part], scale)
            left = np.abs(numbers_of(dtype, result[part]) - after)
        if not np.isfinite(scale).all() or not (left <= max_error).all():
            return None
        error = max(error, float(left.max()))
    packed = [pack(scales.view(np.uint8)), pack(steps.view(np.uint8))]
    changed = int(np.count_nonzero(result != old))
    fields: Fields = {
        "encoding": "int8",
        "largest_error": error,
        "sections": [section for section, _ in packed],
    }
    if changed:
        fields["changed"] = changed
    return fields, [stored for _, stored in packed], result


def decode_int8(name: str, tensor: TensorPatch, stored: list[memoryview], old: Units) -> Units:
    """The bits after a lossy patch of a tensor that had the bits `old`. Raises PatchDamaged."""
    blocks = -(-tensor.units // _BLOCK)
    expected = [4 * blocks, tensor.units]
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
        part = slice(first, first + _STEP)
        blocks_of = slice(first // _BLOCK, first // _BLOCK + _STEP // _BLOCK)
        with np.errstate(all="ignore"):
            result[part] = _moved(
                tensor.dtype, numbers_of(tensor.dtype, old[part]), steps[part], scales[blocks_of]
            )
    return result


def _moved(
    dtype: str, before: NDArray[np.float64], steps: NDArray[np.int8], scale: NDArray[np.float32]
) -> Units:
    """Bits of before + step x scale. The operations are part of the format."""
    each = np.repeat(scale.astype(np.float64), _BLOCK)[: before.size]
    return bits_of_numbers(dtype, before + steps.astype(np.float64) * each)


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
