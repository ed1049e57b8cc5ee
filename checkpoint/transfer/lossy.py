"""Versions with a declared loss: what a rank serves of its boxes, and the steps that lead there.

The loss is made once, when a rank publishes: each box is coded against the box of the version
before as it was served, so what was left over then is part of the difference now. Receivers of any
layout get slices of one result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.patch import Lossy, encode_patch
from shiftbook.checkpoint.patch_numbers import Steps, StepsOf, coded_steps
from shiftbook.checkpoint.transfer.boxes import Box
from shiftbook.checkpoint.transfer.catalogue import BoxLoss, HeldBits
from shiftbook.checkpoint.transfer.parcel import BoxName, host_place


def lossy_box(
    name: str,
    exact: HeldBits,
    before: Mapping[str, Sequence[HeldBits]],
    lossy: Lossy,
    threads: int = 1,
) -> tuple[HeldBits, BoxLoss | None]:
    """What is served of a box, and how far that is from it.

    The box itself where there is none like it among those of the version `before`, where its steps
    would be no shorter than what goes without loss, and where an element would end further away
    than the bound allows.
    """
    base = next((one for one in before.get(name, ()) if _alike(one, exact)), None)
    if base is None:
        return exact, None
    target = exact.bits.reshape(-1)
    coded = coded_steps(exact.dtype, base.bits.reshape(-1), target, lossy.max_error)
    if coded is None or coded.largest_error == 0 or not _shorter(coded, base, exact):
        return exact, None
    served = replace(exact, bits=coded.result.reshape(exact.bits.shape), steps=coded)
    part = fingerprint(
        exact.bits, offset=exact.box.offset, shape=exact.shape, dtype=exact.dtype, threads=threads
    )
    return served, BoxLoss(sums=part.sums, largest_error=coded.largest_error)


def steps_of(held: Sequence[HeldBits], asked: Sequence[BoxName]) -> dict[str, StepsOf]:
    """The steps of those boxes that were coded so, by their number in a parcel."""
    return {
        str(number): StepsOf(one.steps, one.box.size, _offset(box.box, one.box), box.size)
        for number, (one, box) in enumerate(zip(held, asked, strict=True))
        if one.steps is not None
    }


def _alike(one: HeldBits, other: HeldBits) -> bool:
    return (one.box, one.dtype, one.shape) == (other.box, other.dtype, other.shape)


def _offset(inner: Box, outer: Box) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(inner.offset, outer.offset, strict=True))


def _shorter(coded: Steps, base: HeldBits, exact: HeldBits) -> bool:
    """Whether the steps take fewer bytes than the difference without loss, both compressed."""
    old, new = ({"x": host_place(held.dtype, held.bits)} for held in (base, exact))
    whole = StepsOf(coded, exact.box.size, (0,) * len(exact.box.size), exact.box.size)
    plain = encode_patch(old, new, base_version=0, version=1, nan="carry")
    return sum(map(len, whole.encoded()[1])) < len(plain)
