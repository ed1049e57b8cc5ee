"""Long lists of an event: rows of its evidence segment, where the event has no room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from shiftbook.ledger.canonical import MAX_EVENT_BYTES, encode, encode_quickly
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events.base import Event, Part, shallow_part
from shiftbook.ledger.events.probes import RandomStatesRecorded
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.events.training import UpdateApplied
from shiftbook.ledger.spool import ENVELOPE_BYTES

MAX_BODY_BYTES = MAX_EVENT_BYTES - ENVELOPE_BYTES
"""Largest body of an event, spooled or not."""

COLUMNS: Mapping[str, type] = {"field": str, "value": str}
"""Columns of such a segment: the field, and one value of it as JSON, in order."""

LONG: Mapping[type[Event], tuple[str, ...]] = {
    CheckpointSaved: ("in_flight",),
    RandomStatesRecorded: ("states",),
    UpdateApplied: (
        "micro_batches",
        "ranks",
        "model_parallel",
        "moved_frozen",
        "unmoved",
        "virtual_ranks",
    ),
}
"""Fields of each type that may stand in its segment; the first ones leave the event first."""

E = TypeVar("E", bound=Event)


def body_bytes(event: Event) -> int:
    """Size of an event's body; raise InvalidEvent for one that cannot be written faithfully."""
    data = encode_quickly(event.shallow(), shallow_part)
    return len(encode(event.plain()) if data is None else data)


def set_apart(event: E) -> tuple[E, dict[str, list[str]] | None]:
    """The event with as many of its long fields left out as it takes to fit, and their rows.

    None for the rows where it fits as it is. Raises InvalidEvent where nothing makes it fit.
    """
    size = body_bytes(event)
    if size <= MAX_BODY_BYTES:
        return event, None
    rows: dict[str, list[str]] = {"field": [], "value": []}
    # The segment that the event will name needs some room too.
    for name in LONG.get(type(event), ()):
        if size <= MAX_BODY_BYTES - ENVELOPE_BYTES:
            break
        values = _values(getattr(event, name))
        rows["field"] += [name] * len(values)
        rows["value"] += values
        event = event.model_copy(update={name: _empty(event, name)})
        size = body_bytes(event)
    if size > MAX_BODY_BYTES:
        raise InvalidEvent(
            f"{event.type_()} is {size} bytes, the limit is {MAX_BODY_BYTES}; record less in it, "
            "or roots instead of many parts"
        )
    return event, rows


def brought_back(event: E, rows: Mapping[str, Sequence[Any]]) -> E:
    """The event as it was before ``set_apart``; as it stands where the rows are none of its own."""
    allowed = LONG.get(type(event), ())
    lists: dict[str, Any] = {}
    try:
        for name, value in zip(rows["field"], rows["value"], strict=True):
            if name not in allowed:
                return event
            lists.setdefault(name, []).append(orjson.loads(value))
        if isinstance(event, RandomStatesRecorded) and "states" in lists:
            lists["states"] = dict(lists["states"])
        return type(event).model_validate(event.model_dump() | lists)
    except (KeyError, TypeError, ValueError, ValidationError):
        return event


def _values(found: Any) -> list[str]:
    plain = found.items() if isinstance(found, Mapping) else found or ()
    return [
        value.model_dump_json(exclude_none=True)
        if isinstance(value, Part)
        else orjson.dumps(value).decode()
        for value in plain
    ]


def _empty(event: Event, name: str) -> Any:
    if not type(event).model_fields[name].is_required():
        return None
    return {} if isinstance(getattr(event, name), Mapping) else ()
