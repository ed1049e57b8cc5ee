"""The one serialisation of an event: sorted keys, 64-bit integers, non-finite numbers as strings.

The bytes that this module makes are stored, hashed and never made again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import orjson

from shiftbook.ledger.errors import InvalidEvent

MAX_EVENT_BYTES = 60_000

_OPTIONS = orjson.OPT_SORT_KEYS


def _named_non_finite(value: Any) -> Any:
    """Replace NaN and the infinities by their names, everywhere in a plain value."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _named_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named_non_finite(item) for item in value]
    return value


def encode(value: dict[str, Any]) -> bytes:
    """Serialise a plain dictionary; raise InvalidEvent where it cannot be written faithfully."""
    try:
        data = orjson.dumps(value, option=_OPTIONS)
        # orjson writes NaN and the infinities as null. A walk over the value is needed only when
        # a null stands in the output, which events without optional fields rarely have.
        if b"null" in data:
            data = orjson.dumps(_named_non_finite(value), option=_OPTIONS)
    except (TypeError, ValueError) as error:
        raise InvalidEvent(
            f"expected JSON values with integers in 64 bits, found one that is not ({error}); "
            "write wider values as hex strings"
        ) from error
    return data


def encode_quickly(value: dict[str, Any], plain: Callable[[Any], Any]) -> bytes | None:
    """The same bytes, where ``plain`` makes each object plain that orjson meets; else None.

    None where ``encode`` has to look at each value: a number that is not finite, or no such value.
    """
    try:
        data = orjson.dumps(value, option=_OPTIONS, default=plain)
    except (TypeError, ValueError):
        return None
    return None if b"null" in data else data


def decode(data: bytes) -> dict[str, Any]:
    """Parse stored bytes; raise InvalidEvent where they are no JSON object."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidEvent(
            f"expected a JSON object, found bytes that are none ({error})"
        ) from error
    if not isinstance(value, dict):
        raise InvalidEvent(f"expected a JSON object, found {type(value).__name__}")
    return value


def leaf_hash(data: bytes) -> bytes:
    """RFC 6962 section 2.1 leaf hash of an event: SHA-256(0x00 || bytes), 32 bytes."""
    return hashlib.sha256(b"\x00" + data).digest()
