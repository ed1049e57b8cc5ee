"""Follows a chain of patch messages: all that is needed is checked before anything is written.

Messages may be lost, cut off, doubled, mixed up or of another series. From the last anchor on each
must stand on the one before it; what came before that anchor does not matter any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from shiftbook.checkpoint.errors import PatchDamaged, PatchRefused
from shiftbook.checkpoint.patch_apply import apply_patch, check_aliases
from shiftbook.checkpoint.patch_format import Patch, read_patch
from shiftbook.checkpoint.patch_places import HostPlace, check_writable, host_copy, place_of
from shiftbook.checkpoint.patch_series import compose


@dataclass(frozen=True, slots=True)
class Followed:
    """Where a chain led."""

    version: int
    fingerprints: dict[str, str]
    first: int
    """Place of the first message that was used: the last anchor, or what stands on the version
    that the tensors had. Those before it were not needed."""


def follow(
    messages: Sequence[Patch | bytes],
    tensors: Mapping[str, Any],
    *,
    version: int | None,
    accept_error: float | None = None,
    threads: int = 1,
) -> Followed:
    """Bring tensors of `version` (None: there is none yet) to the end of a chain, or leave them.

    `messages` are anchors and patches in the order in which they were made; see `apply_patch` for
    the other parameters. Lossless ones are composed and written once; with lossy ones among them
    a copy of the tensors in host memory is led along. Raises PatchDamaged and PatchRefused, which
    say what is wrong with which message, counted from 1; the tensors then hold what they held.
    """
    read = [_read(message) for message in messages]
    first = _start(read, version)
    chain: list[Patch] = []
    for place in range(first, len(read)):
        message = read[place]
        if isinstance(message, PatchDamaged):
            raise PatchDamaged(f"{_which(place, read)}: {message}", tensor=message.tensor)
        if chain:
            _check_stands(chain[-1], message, _which(place, read))
        chain.append(message)
    if version is not None and chain[-1].version < version:
        raise PatchRefused(
            f"expected messages that lead on from version {version}, found that they end at "
            f"{chain[-1].version}; they are older than the tensors, or of another series"
        )
    if any(message.header.lossy is not None for message in chain):
        return _led_along(chain, tensors, version, accept_error, threads, first)
    whole = reduce(lambda one, two: read_patch(compose(one, two)), chain)
    done = apply_patch(whole, tensors, version=version, threads=threads)
    return Followed(done.version, done.fingerprints, first)


def _led_along(
    chain: Sequence[Patch],
    tensors: Mapping[str, Any],
    version: int | None,
    accept_error: float | None,
    threads: int,
    first: int,
) -> Followed:
    """What a lossy patch leads to depends on the tensors, so each has its turn, on copies."""
    places = {name: place_of(tensor) for name, tensor in tensors.items()}
    for name, place in places.items():
        check_writable(name, place)
    copies: dict[str, HostPlace] = {name: host_copy(tensor) for name, tensor in tensors.items()}
    prints: dict[str, str] | None = None
    for message in chain:
        done = apply_patch(
            message,
            copies,
            version=version,
            accept_error=accept_error,
            fingerprints=prints,
            threads=threads,
        )
        version, prints = done.version, done.fingerprints
    check_aliases(chain[-1].header, places)
    for name, place in places.items():
        place.write(None, copies[name].read())
    return Followed(done.version, done.fingerprints, first)


def _read(message: Patch | bytes) -> Patch | PatchDamaged:
    try:
        return message if isinstance(message, Patch) else read_patch(message)
    except PatchDamaged as error:
        return error


def _which(place: int, read: Sequence[Patch | PatchDamaged]) -> str:
    message = read[place]
    what = "" if isinstance(message, PatchDamaged) else f", version {message.version}"
    return f"message {place + 1} of {len(read)}{what}"


def _start(read: Sequence[Patch | PatchDamaged], version: int | None) -> int:
    """Place of the message to begin with. Raises PatchRefused where there is none."""
    whole = [(place, one) for place, one in enumerate(read) if isinstance(one, Patch)]
    anchors = [place for place, one in whole if one.anchor]
    if anchors:
        anchor = anchors[-1]
        newest = max(one.version for place, one in whole if place <= anchor)
        found = read[anchor]
        assert isinstance(found, Patch)
        if found.version < newest:
            raise PatchRefused(
                f"{_which(anchor, read)}: expected an anchor of a version after those before it, "
                f"up to {newest}; the messages are out of order: sort them by version, or ask for "
                "a new anchor"
            )
        return anchor
    mine = [place for place, one in whole if one.base_version == version]
    if mine:
        return mine[-1]
    if version is None:
        found_there = f"{len(read)} messages without one that can be read" if read else "none"
        raise PatchRefused(f"expected an anchor to begin with, found {found_there}; ask for one")
    if not whole:
        raise next((one for one in read if isinstance(one, PatchDamaged)), _none(version))
    bases = sorted({one.base_version for _, one in whole if one.base_version is not None})
    raise PatchRefused(
        f"expected a message on version {version}, which the tensors have, found some on {bases}; "
        "those between are lost, or they are of another series: ask for an anchor"
    )


def _none(version: int) -> PatchRefused:
    return PatchRefused(f"expected messages that lead on from version {version}, found none")


def _check_stands(before: Patch, message: Patch, which: str) -> None:
    """Raise PatchRefused, with the likely cause, where a message is not made on the one before."""
    base, last = message.base_version, before.version
    if base == last and message.header.base_fingerprints == before.header.result_fingerprints:
        return
    if base == last:
        cause = (
            f"with root {message.header.base_root}, where {before.header.result_root} came out: it "
            "is of another series"
        )
    elif message.data == before.data:
        cause = "it is there twice: leave one out"
    elif message.version <= last:
        cause = "it comes too late: sort the messages by version"
    else:
        cause = "what leads there is lost, or comes later: send it again"
    raise PatchRefused(
        f"{which}: expected a patch on version {last}, found one on {base}; {cause}, or ask for an "
        "anchor"
    )
