"""Says how two saved states differ: parts, tensors, and how many of their elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.patch_places import place_of
from shiftbook.checkpoint.stored_state import StoredState, StoredTensor

What = Literal["only in A", "only in B", "dtype", "shape", "elements"]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not the same in both states."""

    part: str
    tensor: str
    what: What
    a: str
    """Dtype and shape, or the fingerprint where those agree; empty where it is absent."""
    b: str
    differing: int | None
    """Elements with other bits; None where the tensors cannot be laid side by side."""
    elements: int


def compare_states(a: StoredState, b: StoredState) -> Iterator[TensorDifference]:
    """Every difference, by part and tensor. Fingerprints that manifests give save reading."""
    for part in sorted({*a.parts, *b.parts}):
        in_a, in_b = a.parts.get(part, {}), b.parts.get(part, {})
        for name in sorted({*in_a, *in_b}):
            found = _compare(part, name, in_a.get(name), in_b.get(name))
            if found is not None:
                yield found


def _compare(
    part: str, name: str, a: StoredTensor | None, b: StoredTensor | None
) -> TensorDifference | None:
    if a is None or b is None:
        one = a if a is not None else b
        assert one is not None
        what: What = "only in A" if b is None else "only in B"
        size = math.prod(one.shape)
        return TensorDifference(part, name, what, _form(a), _form(b), None, size)
    if a.dtype != b.dtype or a.shape != b.shape:
        what = "dtype" if a.dtype != b.dtype else "shape"
        return TensorDifference(part, name, what, _form(a), _form(b), None, math.prod(a.shape))
    if a.fingerprint is not None and a.fingerprint == b.fingerprint:
        return None
    left, right = a.read(), b.read()
    differing = _differing(left, right)
    if not differing:
        return None
    prints = (fingerprint(left).hex, fingerprint(right).hex)
    return TensorDifference(part, name, "elements", *prints, differing, left.numel())


def _differing(left: torch.Tensor, right: torch.Tensor) -> int:
    units = place_of(left).read() != place_of(right).read()
    if left.numel() and units.size == 2 * left.numel():  # halves of 16-byte elements
        units = units.reshape(-1, 2).any(axis=1)
    return int(np.count_nonzero(units))


def _form(tensor: StoredTensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
