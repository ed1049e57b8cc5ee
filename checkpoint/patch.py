"""Makes patches: what leads from one version of named tensors to another.

A patch names its base by version and fingerprints and is refused elsewhere (`patch_apply`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import PatchUnencodable
from shiftbook.checkpoint.fingerprint import Fingerprint
from shiftbook.checkpoint.patch_apply import Applied, apply_patch
from shiftbook.checkpoint.patch_blocks import Compared, Pair, compare_pairs, fits
from shiftbook.checkpoint.patch_codec import (
    Sums,
    Units,
    encode_bits,
    encode_changes,
    encode_packed,
    sums_of_changes,
)
from shiftbook.checkpoint.patch_format import (
    Header,
    Lossy,
    Patch,
    TensorPatch,
    format_of,
    read_patch,
    write_patch,
)
from shiftbook.checkpoint.patch_numbers import NO_NUMBER, count_nan, encode_int8, nan_rule
from shiftbook.checkpoint.patch_places import (
    HostPlace,
    Place,
    changes_on_device,
    fingerprint_of_units,
    fingerprints_of,
    moved_hex,
    place_of,
)

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
Encoded = tuple[dict[str, Any], list[bytes]]


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
    before = base_fingerprints or fingerprints_of(base, threads)
    records: dict[str, TensorPatch] = {}
    payload: dict[str, list[bytes]] = {}
    for name, (fields, stored), change, sums in _differences(bases, news, nan, threads):
        place = news[name]
        result = Fingerprint.whole(place.dtype, place.shape, sums).hex
        _check_leads(name, before[name], change, result)
        if lossy is not None and stored:
            coded = encode_int8(place.dtype, bases[name].read(), place.read(), lossy.max_error)
            if coded is not None and sum(map(len, coded[1])) < sum(map(len, stored)):
                fields, stored, units = coded
                result = fingerprint_of_units(place.dtype, place.shape, units).hex
        records[name] = TensorPatch.model_construct(
            dtype=place.dtype, shape=place.shape, base=before[name], result=result, **fields
        )
        payload[name] = stored
    results = {name: record.result for name, record in records.items()}
    header = Header.model_construct(  # right by construction; the reader checks
        format=format_of(records),
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
    results = fingerprints_of(tensors, threads)
    units = {name: place_of(tensor) for name, tensor in tensors.items()}
    return _write_anchor(units, results, version, nan)


def _differences(
    bases: Mapping[str, Place],
    news: Mapping[str, Place],
    nan: NaN,
    threads: int,
) -> Iterator[tuple[str, Encoded, Sums, Sums]]:
    """Of each tensor, by name: its changes as sections, what they add to both sums of the
    fingerprint, and those of the new version.
    """
    pairs = {
        name: _pair(bases[name], new, nan)
        for name, new in news.items()
        if _fits(bases[name]) and _fits(new)
    }
    compared = compare_pairs(pairs, threads)
    for name in sorted(news):
        base, new = bases[name], news[name]
        found = None if name in compared else changes_on_device(base, new)
        if found is not None:
            if nan == "refuse":
                _refuse_nan(name, count_nan(new.dtype, found.new))
            change = sums_of_changes(found.positions, found.old, found.new)
            yield name, encode_changes(found.changes, new.count), change, found.sums
            continue
        # Strided ones are copied one by one, so that few copies are held.
        pair = pairs.get(name) or _pair(base, new, nan)
        one: Compared = compared.get(name) or compare_pairs({name: pair}, threads)[name]
        _refuse_nan(name, one.refused)
        encoded = encode_packed(one.packed, pair.new.size, pair.new.dtype)
        yield name, encoded, one.change, one.new


def _pair(base: Place, new: Place, nan: NaN) -> Pair:
    """Flat units of both in aligned memory: as they lie where that will do."""
    rule = nan_rule(new.dtype) if nan == "refuse" else NO_NUMBER
    return Pair(_flat(base), _flat(new), rule)


def _fits(place: Place) -> bool:
    return isinstance(place, HostPlace) and fits(place.units)


def _flat(place: Place) -> Units:
    units = place.read()
    return units if fits(units) else units.copy()


def _check_leads(name: str, before: str, change: Sums, after: str) -> None:
    if moved_hex(name, before, change) != after:
        raise PatchUnencodable(
            f"{name}: expected a base with fingerprint {before}, found tensors that do not lead "
            f"from it to {after}; the base changed since it was fingerprinted: send an anchor",
            tensor=name,
        )


def _refuse_nan(name: str, count: int) -> None:
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
            _refuse_nan(name, count_nan(place.dtype, units))
        fields, payload[name] = encode_bits(units)
        records[name] = TensorPatch(
            dtype=place.dtype, shape=place.shape, result=results[name], **fields
        )
    header = Header(
        format=format_of(records), version=version, result_root=root(results), tensors=records
    )
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
