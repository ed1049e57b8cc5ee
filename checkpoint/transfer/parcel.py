"""A parcel: some boxes of a version on their way, whole or as the difference from its base.

8 bytes   length of the head, little-endian
          head: JSON; the version, the base, the encoding, fingerprints of the boxes
          whole: the bits of each box in C order, box after box
          patch: one patch (checkpoint/patch_format.py) of the boxes, named by their number
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from pydantic import ValidationError

from shiftbook.checkpoint.errors import (
    BaseRefused,
    PatchDamaged,
    PatchRefused,
    TransferDamaged,
)
from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.patch import apply_patch
from shiftbook.checkpoint.patch_places import HostPlace
from shiftbook.checkpoint.positions import ITEM_BYTES
from shiftbook.checkpoint.transfer.boxes import Box
from shiftbook.checkpoint.transfer.catalogue import Message
from shiftbook.ledger.events.base import Count, Hex128

MOST_BOXES: Final = 512
"""In one parcel, so that its head stays small."""
_LENGTH = 8
_MOST_HEAD_BYTES = 1 << 20


class BoxName(Message):
    """A box of a logical tensor, as one asks for it."""

    name: str
    offset: tuple[Count, ...]
    size: tuple[Count, ...]

    @classmethod
    def of(cls, name: str, box: Box) -> BoxName:
        """A box of the tensor with this name."""
        return cls(name=name, offset=box.offset, size=box.size)

    @property
    def box(self) -> Box:
        """Where it stands in the logical tensor."""
        return Box(self.offset, self.size)


class Ticket(Message):
    """What a receiver asks of one source: boxes of a version, as a difference where it has a base.

    It names what the receiver stands on, so that a source refuses a difference from elsewhere.
    """

    version: Count
    base_version: Count | None = None
    boxes: tuple[BoxName, ...]


class Head(Message):
    """What a parcel says about itself."""

    version: Count
    base_version: Count | None = None
    encoding: Literal["whole", "patch"]
    boxes: Count
    fingerprints: tuple[Hex128, ...] = ()
    """Of each box as a tensor of its own; a patch carries them itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box goes: a view of the receiver's second copy, with the dtype that its bits mean."""

    dtype: str
    bits: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return int(self.bits.nbytes)


def sealed(head: Head, payload: Sequence[Any]) -> list[Any]:
    """The buffers of a parcel, one after the other; nothing is copied."""
    text = head.model_dump_json(exclude_defaults=True).encode()
    return [len(text).to_bytes(_LENGTH, "little") + text, *payload]


def box_fingerprint(dtype: str, bits: Any) -> str:
    """Of a box as a tensor of its own: cheaper to check than its place in the whole."""
    return fingerprint(bits, dtype=dtype).hex


def unpack(
    data: memoryview,
    ticket: Ticket,
    places: Sequence[Place],
    *,
    accept_error: float | None = None,
) -> int:
    """Check a parcel and put its boxes where they belong; the number of bytes is returned.

    Each box is checked before it is written. A difference that was coded with a loss needs
    `accept_error`, the bound that the receiver's plan declares. Raises TransferDamaged, or
    BaseRefused where a difference does not belong on what stands in the places.
    """
    head, payload = _opened(data)
    wanted = (ticket.version, ticket.base_version if head.encoding == "patch" else None)
    if (head.version, head.base_version) != wanted or head.boxes != len(places):
        raise TransferDamaged(
            f"expected {len(places)} boxes of version {wanted[0]} on base {wanted[1]}, found "
            f"{head.boxes} of version {head.version} on base {head.base_version}; the source "
            "answers something else than it was asked"
        )
    if head.encoding == "patch":
        _apply(payload, ticket, places, accept_error)
    else:
        _write(payload, head, ticket, places)
    return len(data)


def _opened(data: memoryview) -> tuple[Head, memoryview]:
    length = int.from_bytes(data[:_LENGTH], "little") if len(data) >= _LENGTH else 0
    if not 0 < length <= min(_MOST_HEAD_BYTES, len(data) - _LENGTH):
        raise TransferDamaged(
            f"expected a parcel, found {len(data)} bytes without a head; it was cut off: pull it "
            "again"
        )
    try:
        head = Head.model_validate_json(bytes(data[_LENGTH : _LENGTH + length]))
    except ValidationError as error:
        first = error.errors()[0]
        raise TransferDamaged(
            f"expected the head of a parcel, found {first['msg']} at "
            f"{'.'.join(map(str, first['loc'])) or 'its start'}; it was altered: pull it again"
        ) from error
    return head, data[_LENGTH + length :]


def _write(payload: memoryview, head: Head, ticket: Ticket, places: Sequence[Place]) -> None:
    expected = sum(place.nbytes for place in places)
    if len(payload) != expected or len(head.fingerprints) != len(places):
        raise TransferDamaged(
            f"expected {expected} bytes for {len(places)} boxes, found {len(payload)} bytes and "
            f"{len(head.fingerprints)} fingerprints; it was cut off: pull it again"
        )
    at = 0
    for place, asked, expected_hex in zip(places, ticket.boxes, head.fingerprints, strict=True):
        count = math.prod(asked.size)
        bits = np.frombuffer(payload, place.bits.dtype, count, at).reshape(asked.size)
        at += bits.nbytes
        found = box_fingerprint(place.dtype, bits)
        if found != expected_hex:
            raise TransferDamaged(
                f"{asked.name}: expected the box at {asked.offset} with fingerprint "
                f"{expected_hex}, found {found}; it was altered on its way: pull it again",
                where=asked.name,
            )
        place.bits[...] = bits


def _apply(
    payload: memoryview, ticket: Ticket, places: Sequence[Place], accept_error: float | None
) -> None:
    named = {str(number): _units(place) for number, place in enumerate(places)}
    try:
        done = apply_patch(
            bytes(payload), named, version=ticket.base_version, accept_error=accept_error
        )
    except PatchDamaged as error:
        name = _named(error.tensor, ticket)
        said = f"{name}: {error}" if name else str(error)
        raise TransferDamaged(said, where=name) from error
    except PatchRefused as error:
        raise BaseRefused(
            f"{_named(error.tensor, ticket) or 'a difference'}: {error}",
            where=_named(error.tensor, ticket),
        ) from error
    if done.version != ticket.version:
        raise TransferDamaged(
            f"expected a patch to version {ticket.version}, found one to {done.version}"
        )


def _named(number: str | None, ticket: Ticket) -> str | None:
    return None if number is None else ticket.boxes[int(number)].name


def _units(place: Place) -> HostPlace:
    """The place as a patch reads and writes it; elements of 16 bytes count as two units."""
    bits = place.bits
    shape = tuple(int(n) for n in bits.shape)
    if ITEM_BYTES[place.dtype] == 16:
        bits = bits[..., None].view(np.uint64)
    return HostPlace(place.dtype, shape, bits)


def host_place(dtype: str, bits: Any) -> HostPlace:
    """A box as a patch reads it."""
    return _units(Place(dtype, bits))
