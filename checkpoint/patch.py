"""Makes patches: what leads from one version of named tensors to another.

A patch names its base by version and fingerprints and is refused elsewhere (`patch_apply`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np

from shiftbook.checkpoint.compare import HEX_DIGITS, raw_fingerprints, root
from shiftbook.checkpoint.errors import PatchUnencodable
from shiftbook.checkpoint.fingerprint import Fingerprint, bindings
from shiftbook.checkpoint.patch_apply import Applied, apply_patch
from shiftbook.checkpoint.patch_blocks import Compared, Pair, compare_pairs
from shiftbook.checkpoint.patch_codec import (
    Encoded,
    encode_bits,
    encode_changes,
    sums_of_changes,
)
from shiftbook.checkpoint.patch_format import (
    Fields,
    Lossy,
    Patch,
    read_patch,
    write_patch,
)
from shiftbook.checkpoint.patch_numbers import (
    NO_NUMBER,
    StepsOf,
    count_nan,
    encode_int8,
    nan_rule,
)
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


def encode_patch(
    base: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    base_version: int,
    version: int,
    base_fingerprints: Mapping[str, str] | None = None,
    lossy: Lossy | None = None,
    steps: Mapping[str, StepsOf] | None = None,
    nan: NaN = "refuse",
    threads: int = 1,
) -> bytes:
    """The patch that turns tensors `base` into `new`, bit for bit unless `lossy` is declared.

    `base_fingerprints` (recorded when `base` was made) save reading the base once more; those of
    the result are always taken from `new`, and that one leads to the other is checked. NaNs that
    `new` brings are refused unless they are to be carried. A lossy patch codes a tensor in the
    shorter of both ways, and keeps to the declared bound. With `steps`, which led to tensors of
    `new` when they were coded, the loss is in `new` already: nothing more is lost, and such a
    tensor is coded as its steps where that is shorter. Raises PatchUnencodable.
    """
    _check_asked(nan, version, base_version)
    bases = {name: place_of(tensor) for name, tensor in base.items()}
    news = {name: place_of(tensor) for name, tensor in new.items()}
    _same_tensors(bases, news)
    before = base_fingerprints or fingerprints_of(base, threads)
    if unknown := sorted(bases.keys() - before.keys()):
        raise PatchUnencodable(
            f"expected the fingerprint of every tensor of the base, found none of {unknown[:5]}; "
            "give those of all, or none",
            tensor=unknown[0],
        )
    records: dict[str, Fields] = {}
    payload: dict[str, list[bytes]] = {}
    for name, (fields, stored), result in _differences(bases, news, before, nan, threads):
        place = news[name]
        if steps is not None:
            if stored and name in steps:
                fields, stored = min((fields, stored), steps[name].encoded(), key=_length)
        elif lossy is not None and stored:
            coded = encode_int8(place.dtype, bases[name].read(), place.read(), lossy.max_error)
            if coded is not None and sum(map(len, coded[1])) < sum(map(len, stored)):
                fields, stored, units = coded
                result = fingerprint_of_units(place.dtype, place.shape, units).hex
        fields["dtype"], fields["shape"] = place.dtype, place.shape
        fields["base"], fields["result"] = before[name], result
        records[name], payload[name] = fields, stored
    base_root = root({name: before[name] for name in records})
    return write_patch(version, (base_version, base_root), records, payload, lossy)


def _check_asked(nan: str, *versions: int) -> None:
    """Raise PatchUnencodable for a rule that is none, and for versions that no reader takes."""
    if nan not in get_args(NaN):
        raise PatchUnencodable(
            f'expected nan="refuse" or nan="carry", found {nan!r}; say what becomes of NaNs'
        )
    for version in versions:
        if not isinstance(version, int) or version < 0:
            raise PatchUnencodable(
                f"expected versions that are whole numbers from 0 on, found {version!r}"
            )


def _length(encoded: Encoded) -> int:
    return sum(map(len, encoded[1]))


def encode_anchor(
    tensors: Mapping[str, Any], *, version: int, nan: NaN = "refuse", threads: int = 1
) -> bytes:
    """A patch that holds everything and needs no base. Raises PatchUnencodable."""
    if not tensors:
        raise PatchUnencodable("expected tensors, found none; name what the anchor should hold")
    _check_asked(nan, version)
    results = fingerprints_of(tensors, threads)
    units = {name: place_of(tensor) for name, tensor in tensors.items()}
    return _write_anchor(units, results, version, nan)


def _differences(
    bases: Mapping[str, Place],
    news: Mapping[str, Place],
    before: Mapping[str, str],
    nan: NaN,
    threads: int,
) -> Iterator[tuple[str, Encoded, str]]:
    """Of each tensor: its changes as sections, and the fingerprint of its new version."""
    pairs: dict[str, Pair] = {}
    others: list[str] = []
    for name, new in news.items():
        if _fits(bases[name]) and _fits(new):
            pairs[name] = _pair(bases[name], new, nan)
        else:
            others.append(name)
    for compared in compare_pairs(pairs, threads):
        yield from _of_compared(compared, news, before)
    for name in others:
        base, new = bases[name], news[name]
        found = changes_on_device(base, new)
        if found is None:
            # Strided ones are copied one by one, so that few copies are held.
            for compared in compare_pairs({name: _pair(base, new, nan)}, threads):
                yield from _of_compared(compared, news, before)
            continue
        if nan == "refuse":
            _refuse_nan(name, count_nan(new.dtype, found.new))
        change = sums_of_changes(found.positions, found.old, found.new)
        result = Fingerprint.whole(new.dtype, new.shape, found.sums).hex
        if moved_hex(name, before[name], change) != result:
            raise _leads_elsewhere(name, before[name], result)
        yield name, encode_changes(found.changes, new.count), result


def _of_compared(
    compared: Compared, news: Mapping[str, Place], before: Mapping[str, str]
) -> Iterator[tuple[str, Encoded, str]]:
    """What `_differences` yields, for tensors that one call compared."""
    names = compared.names
    places = [news[name] for name in names]
    bound = compared.new + bindings([(place.dtype, place.shape) for place in places])
    results = bound.astype(">u8").tobytes().hex()
    started = np.frombuffer(raw_fingerprints(before, names), ">u8").reshape(-1, 2)
    leads = (started + compared.change == bound).all(axis=1).tolist()
    for k, name in enumerate(names):
        _refuse_nan(name, compared.totals[k][4])
        result = results[HEX_DIGITS * k : HEX_DIGITS * (k + 1)]
        if not leads[k]:
            raise _leads_elsewhere(name, before[name], result)
        yield name, compared.encoded(k), result


def _pair(base: Place, new: Place, nan: NaN) -> Pair:
    """Both in aligned memory: as they lie where that will do."""
    rule = nan_rule(new.dtype) if nan == "refuse" else NO_NUMBER
    return Pair(_flat(base), _flat(new), rule)


def _fits(place: Place) -> bool:
    return isinstance(place, HostPlace) and place.fits


def _flat(place: Place) -> HostPlace:
    """A place that the loops can read, with the same content."""
    if isinstance(place, HostPlace):
        return place.flat()
    return HostPlace(place.dtype, place.shape, place.read()).flat()


def _leads_elsewhere(name: str, before: str, after: str) -> PatchUnencodable:
    return PatchUnencodable(
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
    records: dict[str, Fields] = {}
    payload: dict[str, list[bytes]] = {}
    for name in sorted(places):
        place = places[name]
        units = place.read()
        if nan == "refuse":
            _refuse_nan(name, count_nan(place.dtype, units))
        fields, payload[name] = encode_bits(units)
        known = {"dtype": place.dtype, "shape": place.shape, "result": results[name]}
        records[name] = known | fields
    return write_patch(version, None, records, payload)


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
