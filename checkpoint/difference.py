"""Says how two saved states differ: fields of the manifests, tensors, and how many elements."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.manifest import BundleFields, BundleManifest
from shiftbook.checkpoint.patch_places import place_of
from shiftbook.checkpoint.stored_state import StoredState, StoredTensor
from shiftbook.ledger import canonical

What = Literal["only in A", "only in B", "dtype", "shape", "elements", "value"]
_SHOWN_CHARACTERS = 64
"""Of a field's value; the state of a generator is far longer and is shown by its digest."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, or one value of the manifests, that is not the same in both states."""

    part: str
    """Part of the tensor, or name of the field."""
    name: str
    """The tensor, the owner or the key in the field; empty where the field is one value."""
    what: What
    a: str
    """Dtype and shape, the fingerprint where those agree, or the value; empty where absent."""
    b: str
    differing: int | None = None
    """Elements with other bits; None where nothing can be laid side by side."""
    elements: int | None = None
    """Of the tensor; None for a value."""


def compare_states(
    a: StoredState, b: StoredState, *, ignored: Collection[str] = ()
) -> Iterator[Difference]:
    """Every difference: the fields of `BundleFields` first, then tensors by part and name.

    Fields are compared where both states are bundles; `ignored` names those that are not (where a
    state was saved, `job` and `attempt`, say). Fingerprints that manifests give save reading.
    Raises BundleError for an ignored field that no bundle has.
    """
    unknown = sorted(set(ignored) - set(BundleFields.model_fields))
    if unknown:
        raise BundleError(
            f"expected fields to ignore among {', '.join(BundleFields.model_fields)}, found "
            f"{unknown[0]!r}"
        )
    if a.manifest is not None and b.manifest is not None:
        yield from _compare_manifests(a.manifest, b.manifest, ignored)
    for part in sorted({*a.parts, *b.parts}):
        in_a, in_b = a.parts.get(part, {}), b.parts.get(part, {})
        for name in sorted({*in_a, *in_b}):
            found = _compare(part, name, in_a.get(name), in_b.get(name))
            if found is not None:
                yield found


def _compare_manifests(
    a: BundleManifest, b: BundleManifest, ignored: Collection[str]
) -> Iterator[Difference]:
    for field in BundleFields.model_fields:
        if field in ignored:
            continue
        left, right = _values(a, field), _values(b, field)
        for key in sorted({*left, *right}):
            one, other = left.get(key), right.get(key)
            if one == other:
                continue
            what: What = "only in B" if one is None else "only in A" if other is None else "value"
            yield Difference(field, key, what, _shown(one), _shown(other))
    for part in sorted(set(a.parts) & set(b.parts)):
        kinds = a.parts[part].kind, b.parts[part].kind
        if kinds[0] != kinds[1]:
            yield Difference(part, "", "value", f"kind {kinds[0]}", f"kind {kinds[1]}")


def _values(manifest: BundleManifest, field: str) -> dict[str, str]:
    """A field's values as text, in which a NaN equals itself and -0.0 is not 0.0."""
    value: Any = getattr(manifest, field)
    if field == "snapshot" and value == root(manifest.part_roots):
        return {}  # made from the tensors, which are compared themselves
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {key: _text(each) for key, each in value.items()}
    if isinstance(value, BaseModel):
        return {key: _text(each) for key, each in value.model_dump().items()}
    return {"": _text(value)}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return canonical.encode({"": value})[len(b'{"":') : -1].decode()


def _shown(text: str | None) -> str:
    if text is None or len(text) <= _SHOWN_CHARACTERS:
        return text or ""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}, {len(text)} characters"


def _compare(
    part: str, name: str, a: StoredTensor | None, b: StoredTensor | None
) -> Difference | None:
    if a is None or b is None:
        one = a if a is not None else b
        assert one is not None
        what: What = "only in A" if b is None else "only in B"
        size = math.prod(one.shape)
        return Difference(part, name, what, _form(a), _form(b), None, size)
    if a.dtype != b.dtype or a.shape != b.shape:
        what = "dtype" if a.dtype != b.dtype else "shape"
        return Difference(part, name, what, _form(a), _form(b), None, math.prod(a.shape))
    if a.fingerprint is not None and a.fingerprint == b.fingerprint:
        return None
    left, right = a.read(), b.read()
    differing = _differing(left, right)
    if not differing:
        return None
    prints = (fingerprint(left).hex, fingerprint(right).hex)
    return Difference(part, name, "elements", *prints, differing, left.numel())


def _differing(left: torch.Tensor, right: torch.Tensor) -> int:
    units = place_of(left).read() != place_of(right).read()
    if left.numel() and units.size == 2 * left.numel():  # halves of 16-byte elements
        units = units.reshape(-1, 2).any(axis=1)
    return int(np.count_nonzero(units))


def _form(tensor: StoredTensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
