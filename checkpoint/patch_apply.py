"""Applies patches: all is checked, what will come out included, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.compare import HEX_DIGITS, FingerprintMap, raw_fingerprints
from shiftbook.checkpoint.errors import PatchDamaged, PatchRefused
from shiftbook.checkpoint.fingerprint import bindings
from shiftbook.checkpoint.patch_blocks import Checked, Target, Writes
from shiftbook.checkpoint.patch_codec import (
    Positions,
    Units,
    changes_outside,
    decode_bits,
    decode_changes,
)
from shiftbook.checkpoint.patch_format import Header, Patch, TensorPatch, read_patch
from shiftbook.checkpoint.patch_numbers import decode_int8
from shiftbook.checkpoint.patch_places import (
    HostPlace,
    Place,
    check_writable,
    fingerprint_of_units,
    fingerprints_of,
    moved_hex,
    place_of,
)


@dataclass(frozen=True, slots=True)
class Applied:
    """What a patch made of the tensors."""

    version: int
    fingerprints: dict[str, str]
    changed: int
    """Units written."""


def apply_patch(
    patch: Patch | bytes,
    tensors: Mapping[str, Any],
    *,
    version: int | None,
    accept_error: float | None = None,
    fingerprints: Mapping[str, str] | None = None,
    threads: int = 1,
) -> Applied:
    """Turn tensors of `version` into the patch's version, in place: all of them or none.

    An anchor applies to any content (`version` None: there is none yet). A lossy patch needs
    `accept_error`, the largest error that its receiver declared. `fingerprints`, taken just now
    from these very tensors, save reading them again. Names that share memory must get one content.
    Raises PatchDamaged for bytes that are no patch and PatchRefused for one that does not belong
    here; the tensors then hold what they held.
    """
    patch = patch if isinstance(patch, Patch) else read_patch(patch)
    header = patch.header
    places = {name: place_of(tensor) for name, tensor in tensors.items()}
    _check_belongs(header, places, version, accept_error)
    for name, place in places.items():
        check_writable(name, place)
    check_aliases(header, places)
    if patch.anchor:
        _apply_anchor(patch, places)
    else:
        _apply_changes(patch, tensors, places, version, fingerprints, threads)
    return Applied(header.version, header.result_fingerprints, patch.changed)


def _apply_changes(
    patch: Patch,
    tensors: Mapping[str, Any],
    places: Mapping[str, Place],
    version: int | None,
    known: Mapping[str, str] | None,
    threads: int,
) -> None:
    """Check the base, and what comes of it, and write."""
    header = patch.header
    targets: dict[str, Target] = {}
    others: dict[str, tuple[TensorPatch, list[memoryview]]] = {}
    for name, record, stored in patch.sections():
        place = places[name]
        packed = record.encoding in ("same", "packed")
        if packed and isinstance(place, HostPlace) and place.fits:
            section = stored[0] if stored else memoryview(b"")
            targets[name] = Target(place, record.changed, section)
        else:
            others[name] = (record, stored)
    writes = Writes(targets, threads)
    checked = writes.check(summed=known is None)
    _check_base(header, tensors, checked, version, known, threads)
    for one in checked:
        _check_results(header, one)
    more = {name: _checked_write(name, *each, places[name]) for name, each in others.items()}
    writes.write()
    for name, write in more.items():
        if write is not None:
            places[name].write(*write)


def _check_base(
    header: Header,
    tensors: Mapping[str, Any],
    checked: list[Checked],
    version: int | None,
    known: Mapping[str, str] | None,
    threads: int,
) -> None:
    """Compare the fingerprints of the tensors as they are with those of the patch's base."""
    expected = header.base_fingerprints
    found = dict(known or {})
    if known is None:
        for one in checked:
            kinds = [(header.tensors[name].dtype, header.tensors[name].shape) for name in one.names]
            digits = (one.base + bindings(kinds)).astype(">u8").tobytes().hex()
            for k, name in enumerate(one.names):
                found[name] = digits[HEX_DIGITS * k : HEX_DIGITS * (k + 1)]
        left = {name: tensor for name, tensor in tensors.items() if name not in found}
        if left:
            found |= fingerprints_of(left, threads)
    if found == expected:
        return
    difference = FingerprintMap(expected).compare(found)
    raise PatchRefused(
        f"expected the patch's base, version {version} with root {header.base_root}, found "
        f"other contents ({difference.describe()}); ask for an anchor",
        tensor=difference.changed[0] if difference.changed else None,
    )


def _check_results(header: Header, checked: Checked) -> None:
    """What the changes of packed tensors say, and lead to, before any is written."""
    names = checked.names
    expected = _halves(header.result_fingerprints, names)
    leads_to = _halves(header.base_fingerprints, names) + checked.change
    right = (leads_to == expected).all(axis=1)
    if (right & checked.good).all():
        return
    k = int(np.argmin(right & checked.good))
    record = header.tensors[names[k]]
    if not checked.good[k]:
        raise changes_outside(names[k], record)
    _check_result(names[k], record, leads_to[k].astype(">u8").tobytes().hex())


def _halves(fingerprints: Mapping[str, str], names: list[str]) -> NDArray[np.uint64]:
    """Both halves of some fingerprints as numbers: `[tensor, 2]`."""
    raw = np.frombuffer(raw_fingerprints(fingerprints, names), ">u8")
    return raw.astype(np.uint64).reshape(-1, 2)


def _check_belongs(
    header: Header, places: Mapping[str, Place], version: int | None, accept_error: float | None
) -> None:
    """Names, dtypes, shapes, base version, and whether a loss is accepted."""
    missing = sorted(set(header.tensors) - set(places))
    extra = sorted(set(places) - set(header.tensors))
    if missing or extra:
        raise PatchRefused(
            f"expected the patch's {len(header.tensors)} tensors, found {len(places)}: missing "
            f"{missing[:5]}, extra {extra[:5]}; it is of another model: ask for its anchor"
        )
    for name, record in header.tensors.items():
        place = places[name]
        if (place.dtype, place.shape) != (record.dtype, record.shape):
            raise PatchRefused(
                f"{name}: expected {record.dtype} {record.shape} as in the patch, found "
                f"{place.dtype} {place.shape}; it is of another model or another dtype",
                tensor=name,
            )
    if header.base_version is not None and header.base_version != version:
        raise PatchRefused(
            f"expected version {header.base_version}, on which this patch to {header.version} "
            f"stands, found {version}; apply the patches between, or ask for an anchor"
        )
    if header.lossy is not None and (accept_error is None or accept_error < header.lossy.max_error):
        raise PatchRefused(
            f"expected a patch with errors of at most {accept_error or 0}, found one that declares "
            f"{header.lossy.max_error} ({header.lossy.encoding}); declare the loss, or ask for a "
            "lossless patch"
        )


def check_aliases(header: Header, places: Mapping[str, Place]) -> None:
    """Raise PatchRefused where names that are one tensor here would get several contents."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, place in places.items():
        key = place.key()
        if key is None:
            continue
        first = seen.setdefault(key, name)
        if header.tensors[first].result != header.tensors[name].result:
            raise PatchRefused(
                f"{first} and {name} are one tensor here, but the patch gives them different "
                "contents; untie them, or ask for a patch of the tied model",
                tensor=name,
            )


def _checked_write(
    name: str, record: TensorPatch, stored: list[memoryview], place: Place
) -> tuple[Positions | None, Units] | None:
    """What to write where, after it was checked against the result's fingerprint."""
    if record.encoding == "same":
        return None
    if record.encoding in ("changes", "packed"):
        changes = decode_changes(name, record, stored)
        new, sums = place.moved(changes)
        _check_result(name, record, moved_hex(name, str(record.base), sums))
        return changes.positions, new
    if record.encoding == "int8":
        new = decode_int8(name, record, stored, place.read())
    else:
        new = decode_bits(name, record, stored)
    _check_result(name, record, fingerprint_of_units(record.dtype, record.shape, new).hex)
    return None, new


def _apply_anchor(patch: Patch, places: Mapping[str, Place]) -> None:
    """Decode twice, tensor by tensor, so that checking all first needs no second copy of all."""
    for name, record, stored in patch.sections():
        units = decode_bits(name, record, stored)
        _check_result(name, record, fingerprint_of_units(record.dtype, record.shape, units).hex)
    for name, record, stored in patch.sections():
        places[name].write(None, decode_bits(name, record, stored))


def _check_result(name: str, record: TensorPatch, found: str) -> None:
    if found != record.result:
        raise PatchDamaged(
            f"patch of {name}: expected a result with fingerprint {record.result}, it leads to "
            f"{found}; nothing was written: ask for an anchor",
            tensor=name,
        )
