"""Makes, applies and composes patches: what leads from one version of named tensors to another.

A patch names its base by version and fingerprints and is refused elsewhere. `apply_patch` checks
everything, the fingerprints that will come out included, before it writes the first element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from shiftbook.checkpoint.compare import FingerprintMap, check_hex, root
from shiftbook.checkpoint.errors import PatchDamaged, PatchRefused, PatchUnencodable
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint, fingerprint_tensors
from shiftbook.checkpoint.kernel import hashes_are_cheap
from shiftbook.checkpoint.patch_codec import (
    Positions,
    Units,
    decode_bits,
    decode_changes,
    encode_bits,
    encode_changes,
    sums_of_changes,
)
from shiftbook.checkpoint.patch_format import (
    Header,
    Lossy,
    Patch,
    TensorPatch,
    read_patch,
    write_patch,
)
from shiftbook.checkpoint.patch_numbers import count_nan, decode_int8, encode_int8
from shiftbook.checkpoint.patch_places import (
    Place,
    changes_between,
    check_writable,
    place_of,
)
from shiftbook.checkpoint.positions import ITEM_BYTES, MASK_64

__all__ = [
    "Applied",
    "Lossy",
    "Patch",
    "apply_patch",
    "encode_anchor",
    "encode_patch",
    "read_patch",
]

NaN = Literal["refuse", "carry"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Applied:
    """What a patch made of the tensors."""

    version: int
    fingerprints: dict[str, str]
    changed: int
    """Units written."""


def encode_patch(
    base: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    base_version: int,
    version: int,
    base_fingerprints: Mapping[str, str] | None = None,
    lossy: Lossy | None = None,
    nan: NaN = "refuse",
    threads: int = 1,
) -> bytes:
    """The patch that turns tensors `base` into `new`, bit for bit unless `lossy` is declared.

    `base_fingerprints` (recorded when `base` was made) save reading the base once more; those of
    the result are always taken from `new`, and that one leads to the other is checked. NaNs that
    `new` brings are refused unless they are to be carried. A lossy patch codes a tensor in the
    shorter of both ways, and keeps to the declared bound. Raises PatchUnencodable.
    """
    bases = {name: place_of(tensor) for name, tensor in base.items()}
    news = {name: place_of(tensor) for name, tensor in new.items()}
    _same_tensors(bases, news)
    before = base_fingerprints or _fingerprints(base, threads)
    # Where hashing a position costs little, the comparison takes the fingerprint along.
    after = {} if hashes_are_cheap() else _fingerprints(new, threads)
    encoded = _each(
        lambda name: _encode_tensor(
            name, bases[name], news[name], before[name], after.get(name), lossy, nan
        ),
        sorted(new, key=lambda name: -math.prod(news[name].shape)),
        threads,
    )
    records = {name: record for name, (record, _) in encoded.items()}
    payload = {name: stored for name, (_, stored) in encoded.items()}
    results = {name: record.result for name, record in records.items()}
    header = Header.model_construct(  # right by construction; the reader checks
        version=version,
        base_version=base_version,
        base_root=root({name: before[name] for name in records}),
        result_root=root(results),
        lossy=lossy if lossy and any(r.encoding == "int8" for r in records.values()) else None,
        tensors=records,
    )
    return write_patch(header, payload)


def encode_anchor(
    tensors: Mapping[str, Any], *, version: int, nan: NaN = "refuse", threads: int = 1
) -> bytes:
    """A patch that holds everything and needs no base. Raises PatchUnencodable."""
    if not tensors:
        raise PatchUnencodable("expected tensors, found none; name what the anchor should hold")
    results = _fingerprints(tensors, threads)
    units = {name: place_of(tensor) for name, tensor in tensors.items()}
    return _write_anchor(units, results, version, nan)


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
    _check_aliases(header, places)
    if patch.anchor:
        _apply_anchor(patch, places)
    else:
        _check_base(header, fingerprints or _fingerprints(tensors, threads), version)
        stored = {name: (record, data) for name, record, data in patch.sections()}
        names = sorted(stored, key=lambda name: -stored[name][0].changed)
        writes = _each(
            lambda name: _checked_write(name, *stored[name], places[name]), names, threads
        )
        _write(places, {name: write for name, write in writes.items() if write}, threads)
    return Applied(header.version, header.result_fingerprints, patch.changed)


def _each(job: Callable[[str], T], names: Sequence[str], threads: int) -> dict[str, T]:
    """The job's result for each name; large tensors first, so that threads end together."""
    if threads <= 1:
        return {name: job(name) for name in names}
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(job, names), strict=True))


def _fingerprints(tensors: Mapping[str, Any], threads: int) -> dict[str, str]:
    placed = {n: t for n, t in tensors.items() if isinstance(t, Place)}
    found = fingerprint_tensors(
        {n: t for n, t in tensors.items() if n not in placed}, threads=threads
    )
    return found | {n: _of_units(p.dtype, p.shape, p.read()).hex for n, p in placed.items()}


def _of_units(dtype: str, shape: tuple[int, ...], units: Units) -> Fingerprint:
    """The fingerprint of a whole tensor, given its flat units."""
    if ITEM_BYTES[dtype] == 16:
        units = units.view(np.complex128)
    return fingerprint(units, offset=0, shape=shape, dtype=dtype)


def _encode_tensor(
    name: str,
    base: Place,
    new: Place,
    before: str,
    after: str | None,
    lossy: Lossy | None,
    nan: NaN,
) -> tuple[TensorPatch, list[bytes]]:
    found = changes_between(base, new, summed=after is None)
    if found.sums is not None:
        after = Fingerprint.whole(new.dtype, new.shape, found.sums).hex
    elif after is None:
        after = _of_units(new.dtype, new.shape, new.read()).hex
    if nan == "refuse":
        _refuse_nan(name, new.dtype, found.new)
    fields, stored = encode_changes(found.changes)
    sums = sums_of_changes(found.positions, found.old, found.new)
    if _moved_hex(check_hex(name, before), sums) != after:
        raise PatchUnencodable(
            f"{name}: expected a base with fingerprint {before}, found tensors that do not lead "
            f"from it to {after}; the base changed since it was fingerprinted: send an anchor",
            tensor=name,
        )
    result = after
    if lossy is not None and found.positions.size:
        coded = encode_int8(new.dtype, base.read(), new.read(), lossy.max_error)
        if coded is not None and sum(map(len, coded[1])) < sum(map(len, stored)):
            fields, stored, units = coded
            result = _of_units(new.dtype, new.shape, units).hex
    record = TensorPatch.model_construct(
        dtype=new.dtype, shape=new.shape, base=before, result=result, **fields
    )
    return record, stored


def _moved_hex(start: str, sums: tuple[int, int]) -> str:
    """The fingerprint of a tensor that had `start`; what binds it to dtype and shape stays."""
    halves = (int(start[:16], 16), int(start[16:], 16))
    return "".join(
        f"{(half + more) & MASK_64:016x}" for half, more in zip(halves, sums, strict=True)
    )


def _refuse_nan(name: str, dtype: str, units: Units) -> None:
    count = count_nan(dtype, units)
    if count:
        raise PatchUnencodable(
            f"{name}: expected numbers, found {count} NaN in the new version; do not send weights "
            'that have diverged, or pass nan="carry" where NaN is meant',
            tensor=name,
        )


def _write_anchor(
    places: Mapping[str, Place], results: Mapping[str, str], version: int, nan: NaN
) -> bytes:
    records: dict[str, TensorPatch] = {}
    payload: dict[str, list[bytes]] = {}
    for name in sorted(places):
        place = places[name]
        units = place.read()
        if nan == "refuse":
            _refuse_nan(name, place.dtype, units)
        fields, payload[name] = encode_bits(units)
        records[name] = TensorPatch(
            dtype=place.dtype, shape=place.shape, result=results[name], **fields
        )
    header = Header(version=version, result_root=root(results), tensors=records)
    return write_patch(header, payload)


def _same_tensors(base: Mapping[str, Place], new: Mapping[str, Place]) -> None:
    missing, extra = sorted(set(base) - set(new)), sorted(set(new) - set(base))
    if missing or extra or not new:
        raise PatchUnencodable(
            f"expected the same tensors in both versions, found {len(base)} and {len(new)}: "
            f"missing {missing[:5]}, extra {extra[:5]}; a change of names needs an anchor"
        )
    for name in sorted(new):
        one, other = base[name], new[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise PatchUnencodable(
                f"{name}: expected {one.dtype} {one.shape} as in the base, found {other.dtype} "
                f"{other.shape}; a change of dtype or shape needs an anchor",
                tensor=name,
            )


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


def _check_base(header: Header, found: Mapping[str, str], version: int | None) -> None:
    difference = FingerprintMap(header.base_fingerprints).compare(dict(found))
    if not difference.equal:
        raise PatchRefused(
            f"expected the patch's base, version {version} with root {header.base_root}, found "
            f"other contents ({difference.describe()}); ask for an anchor",
            tensor=difference.changed[0] if difference.changed else None,
        )


def _check_aliases(header: Header, places: Mapping[str, Place]) -> None:
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
    if record.encoding == "changes":
        changes = decode_changes(name, record, stored)
        new, sums = place.moved(changes)
        _check_result(name, record, _moved_hex(str(record.base), sums))
        return changes.positions, new
    if record.encoding == "int8":
        new = decode_int8(name, record, stored, place.read())
    else:
        new = decode_bits(name, record, stored)
    _check_result(name, record, _of_units(record.dtype, record.shape, new).hex)
    return None, new


def _write(
    places: Mapping[str, Place],
    writes: Mapping[str, tuple[Positions | None, Units]],
    threads: int,
) -> None:
    """Write what was checked. Names that are one tensor get one content, so threads may race."""
    _each(lambda name: places[name].write(*writes[name]), list(writes), threads)


def _apply_anchor(patch: Patch, places: Mapping[str, Place]) -> None:
    """Decode twice, tensor by tensor, so that checking all first needs no second copy of all."""
    for name, record, stored in patch.sections():
        units = decode_bits(name, record, stored)
        _check_result(name, record, _of_units(record.dtype, record.shape, units).hex)
    for name, record, stored in patch.sections():
        places[name].write(None, decode_bits(name, record, stored))


def _check_result(name: str, record: TensorPatch, found: str) -> None:
    if found != record.result:
        raise PatchDamaged(
            f"patch of {name}: expected a result with fingerprint {record.result}, it leads to "
            f"{found}; nothing was written: ask for an anchor",
            tensor=name,
        )
