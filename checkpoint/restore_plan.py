"""Which tensors a restore takes from a bundle, and which it may find missing: by kind of restore.

- ``resume``: the same job goes on. Every part and tensor of the bundle has its place, and every
  place its tensor.
- ``warm-start``: another run of the same model. Parts may be left out; in those that are taken,
  nothing may be missing but what is expected to be.
- ``transfer``: another model. It takes what has its name and its shape; tensors of the bundle that
  have no place stay where they are, and what is missing must be expected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from shiftbook.checkpoint.errors import BundleError, PartMismatch, PartMissing
from shiftbook.checkpoint.manifest import BundleManifest

RestoreKind = Literal["resume", "warm-start", "transfer"]
Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def plan_restore(
    manifest: BundleManifest,
    places: Mapping[str, Mapping[str, Form]],
    *,
    kind: RestoreKind,
    expected_missing: Collection[str] = (),
) -> dict[str, list[str]]:
    """The names to load, by part, into `places` by part and name.

    `expected_missing` lists what the model has and the bundle has not, as PART or PART/NAME: just
    that, no more and no less; a resume has none. Raises BundleError for another kind, PartMissing
    for a part that is absent, and PartMismatch for tensors that are missing, extra, or of another
    dtype or shape.
    """
    if kind not in get_args(RestoreKind):
        raise BundleError(
            f"expected a restore among {', '.join(get_args(RestoreKind))}, found {kind!r}"
        )
    expected = set(expected_missing)
    if kind == "resume" and expected:
        raise _mismatch(
            manifest,
            sorted(expected)[0],
            f"expected nothing to be missing in a resume, found {sorted(expected)[:5]} expected; "
            "use a warm start or a transfer",
        )
    unplaced = sorted(set(manifest.parts) - set(places))
    if kind == "resume" and unplaced:
        raise _mismatch(
            manifest,
            unplaced[0],
            f"expected a place for every part of the bundle in a resume, found none for {unplaced};"
            " restore them too, or use a warm start",
        )
    absent = sorted(set(places) - set(manifest.parts) - expected)
    if absent:
        raise PartMissing(
            f"bundle {manifest.bundle_id[:12]}: part {absent[0]}: expected it among the bundle's "
            f"parts ({', '.join(manifest.parts)}), found no such; name it as expected to be "
            "missing, or use another bundle",
            part=absent[0],
        )
    taken: dict[str, list[str]] = {}
    missing = {part for part in places if part not in manifest.parts}
    for part, wanted in places.items():
        if part in missing:
            continue
        held = manifest.parts[part].tensors
        lacking = [name for name in wanted if name not in held]
        missing |= {f"{part}/{name}" for name in lacking}
        extra = sorted(set(held) - set(wanted))
        if extra and kind != "transfer":
            raise _mismatch(
                manifest,
                part,
                f"expected a place for each of its tensors, found none for {extra[:5]}; "
                "use a transfer where the models differ",
            )
        for name in set(wanted) & set(held):
            record = held[name]
            if (record.dtype, record.shape) != wanted[name]:
                raise _mismatch(
                    manifest,
                    part,
                    f"tensor {name}: expected {wanted[name][0]} {wanted[name][1]}, found "
                    f"{record.dtype} {record.shape}; convert it first",
                )
        taken[part] = [name for name in wanted if name in held]
    surprising, present = sorted(missing - expected), sorted(expected - missing)
    if surprising or present:
        raise _mismatch(
            manifest,
            (surprising or present)[0].split("/")[0],
            f"expected one of its tensors for every place, found none for {surprising[:5]}; use "
            "another bundle, or a warm start or a transfer that expects them missing"
            if surprising
            else f"expected {present[:5]} to be missing, found them; leave them out of "
            "expected_missing",
        )
    return taken


def _mismatch(manifest: BundleManifest, part: str, what: str) -> PartMismatch:
    return PartMismatch(f"bundle {manifest.bundle_id[:12]}: part {part}: {what}", part=part)
