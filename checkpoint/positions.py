"""The keyed hash of a position, in plain integers and in numpy, and the element widths by dtype."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

# SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
GAMMA = 0x9E37_79B9_7F4A_7C15
MIX_1 = 0xBF58_476D_1CE4_E5B9
MIX_2 = 0x94D0_49BB_1331_11EB
MASK_64 = (1 << 64) - 1

# Part of the format: another key gives other fingerprints, so a change needs a new version.
KEY = int.from_bytes(hashlib.sha256(b"shiftbook-fingerprint-v1").digest()[:8], "little")
COVER_KEY = int.from_bytes(hashlib.sha256(b"shiftbook-cover-v1").digest()[:8], "little")

_U64 = np.uint64

ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def mix(key: int, index: int) -> int:
    """64 hash bits of one index under a key: output `index` of SplitMix64 seeded with the key."""
    z = (key + (index + 1) * GAMMA) & MASK_64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return z ^ (z >> 31)


def mix_array(key: int, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of many indices at once; uint64 in and out, same shape."""
    z = _U64(key) + (indices + _U64(1)) * _U64(GAMMA)
    z = (z ^ (z >> _U64(30))) * _U64(MIX_1)
    z = (z ^ (z >> _U64(27))) * _U64(MIX_2)
    return np.asarray(z ^ (z >> _U64(31)), dtype=np.uint64)
