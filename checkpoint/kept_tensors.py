"""Describes tensors in a line, keeps their bits in files, and says how two kept ones differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.elements import element_view
from shiftbook.checkpoint.fingerprint import fingerprint


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """Elements with other bits, of how many; ``largest`` is the greatest absolute difference of
    values and ``relative`` the same over the greatest absolute value of the first tensor. Both
    are None where the bits stand for no numbers here, and infinite where one value is finite and
    the other not."""

    differing: int
    elements: int
    largest: float | None
    relative: float | None


def describe(tensor: Any) -> dict[str, str]:
    """``form`` (dtype and shape), ``fingerprint`` (32 hex digits) and ``norm`` (the Euclidean one,
    summed in float64, as the shortest text that gives it back)."""
    bits, dtype = element_view(tensor, None)
    shape = ",".join(str(n) for n in bits.shape)
    values = values_of(bits, dtype)
    norm = "none" if values is None else repr(math.sqrt(float((values * values).sum())))
    return {"form": f"{dtype}[{shape}]", "fingerprint": fingerprint(tensor).hex, "norm": norm}


def keep(tensor: Any, path: Path) -> None:
    """Write a tensor's bits to ``path`` (.npy, unsigned integers of the element's width)."""
    bits, _ = element_view(tensor, None)
    np.save(path, np.ascontiguousarray(bits), allow_pickle=False)


def compare_kept(left: str, right: str, dtype: str) -> ElementDifference:
    """How two kept tensors of one dtype and shape differ; each is a file of ``keep`` or a name
    of ``manifest.tensor_place``. Raises BundleError where a bundle cannot be read."""
    return compare_bits(_read(left), _read(right), dtype)


def _read(place: str) -> NDArray[Any]:
    folder, mark, name = place.partition("#")
    if not mark:
        array: NDArray[Any] = np.load(place, allow_pickle=False)
        return array
    from shiftbook.checkpoint.stored_state import open_stored_state  # torch

    part, _, tensor = name.partition("#")
    return element_view(open_stored_state(folder).parts[part][tensor].read(), None)[0]


def compare_bits(left: NDArray[Any], right: NDArray[Any], dtype: str) -> ElementDifference:
    """How the bits of two tensors of one dtype and shape differ."""
    other = left != right
    if np.iscomplexobj(left):  # equal values of complex128 can have other bits (-0.0, NaN)
        other = (left.view(np.uint64) != right.view(np.uint64)).reshape(*left.shape, 2).any(-1)
    differing = int(np.count_nonzero(other))
    a, b = values_of(left, dtype), values_of(right, dtype)
    if a is None or b is None or not differing:
        return ElementDifference(differing, left.size, None if differing else 0.0, None)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)[other]
        apart = np.where(np.isnan(apart), math.inf, apart)
        scale = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
    largest = float(apart.max())
    return ElementDifference(
        differing, left.size, largest, largest / scale if scale else (math.inf if largest else 0.0)
    )


def values_of(bits: NDArray[Any], dtype: str) -> NDArray[np.float64] | None:
    """The values that bits of a dtype stand for, as float64; None for dtypes that numpy lacks."""
    if dtype == "bfloat16":
        whole = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.asarray(whole, np.float64)
    if dtype.startswith("complex"):
        whole = np.ascontiguousarray(bits).view(dtype) if bits.dtype.kind != "c" else bits
        return np.asarray(np.abs(whole), np.float64)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        return None  # an 8-bit float
    values = np.ascontiguousarray(bits).view(kind).reshape(bits.shape)
    return np.asarray(values, np.float64)
