"""The envelope of an event: what stands around the body, all of it inside the hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.canonical import MAX_EVENT_BYTES, decode, encode, encode_quickly, leaf_hash
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events.base import Event, lifted, parse, shallow_part

SYSTEM_JOB = "shiftbook"
"""The reserved job that owns ledger-wide events."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An event on its way into the ledger.

    ``occurred_ns`` is UTC nanoseconds on the writer's clock, the time of the append where absent.
    ``writer`` and ``sequence`` are set only for spooled events, which keep the order they had.
    """

    event: Event
    operation: str | None = None
    cause: int | None = None
    occurred_ns: int | None = None
    writer: str | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as it stands in the ledger; ``data`` is what was stored and hashed."""

    position: int
    job: str
    version: int
    type: str
    schema: int
    occurred_ns: int
    recorded_ns: int
    writer: str
    sequence: int
    actor: str
    operation: str | None
    cause: int | None
    key: str | None
    body: dict[str, Any]
    data: bytes = field(repr=False)
    leaf: bytes = field(repr=False)

    def parsed(self) -> Event:
        """Body as its model, lifted from an older schema; UnknownEvent where it is not known."""
        return parse(self.type, self.schema, self.body)

    def lifted(self) -> dict[str, Any]:
        """Body with the fields of the present schema; as it stands where that is not known."""
        return lifted(self.type, self.schema, self.body)

    def plain(self) -> dict[str, Any]:
        """Envelope with its body as plain values, as it is printed."""
        return decode(self.data)


ENVELOPE_FIELDS = (
    "position",
    "job",
    "version",
    "type",
    "schema",
    "occurred_ns",
    "recorded_ns",
    "writer",
    "sequence",
    "actor",
    "operation",
    "cause",
    "key",
)


def serialise(
    event: Event,
    operation: str | None,
    cause: int | None,
    occurred_ns: int | None,
    position: int,
    job: str,
    version: int,
    recorded_ns: int,
    writer: str,
    sequence: int,
    actor: str,
    key: str | None,
) -> bytes:
    """Bytes of an event at its place: what is stored and hashed. Raises InvalidEvent."""
    # In the order in which they are written, which spares the sorting some work.
    value: dict[str, Any] = {
        "actor": actor,
        "body": event.shallow(),
        "job": job,
        "occurred_ns": recorded_ns if occurred_ns is None else occurred_ns,
        "position": position,
        "recorded_ns": recorded_ns,
        "schema": event.schema_,
        "sequence": sequence,
        "type": event.type_(),
        "version": version,
        "writer": writer,
    }
    if operation is not None:
        value["operation"] = operation
    if cause is not None:
        value["cause"] = cause
    if key is not None:
        value["key"] = key
    data = encode_quickly(value, shallow_part)
    if data is None:
        value["body"] = event.plain()
        data = encode(value)
    if len(data) > MAX_EVENT_BYTES:
        raise InvalidEvent(
            f"{event.type_()} is {len(data)} bytes, the limit is {MAX_EVENT_BYTES}; "
            "put long lists into an evidence segment and keep its hash in the event"
        )
    return data


def seal(
    draft: Draft,
    *,
    position: int,
    job: str,
    version: int,
    recorded_ns: int,
    writer: str,
    sequence: int,
    actor: str,
    key: str | None,
) -> StoredEvent:
    """Give a draft its place and serialise it, once."""
    writer = draft.writer or writer
    sequence = sequence if draft.sequence is None else draft.sequence
    return unseal(
        serialise(
            draft.event,
            draft.operation,
            draft.cause,
            draft.occurred_ns,
            position,
            job,
            version,
            recorded_ns,
            writer,
            sequence,
            actor,
            key,
        )
    )


def unseal(data: bytes, leaf: bytes | None = None) -> StoredEvent:
    """Read an event back from its stored bytes; raise InvalidEvent where a field is missing.

    ``leaf`` is the stored leaf hash, which is kept unchecked; without it the hash is computed.
    """
    value = decode(data)
    try:
        body = value.pop("body")
        for name in ("operation", "cause", "key"):
            value.setdefault(name, None)
        return StoredEvent(
            **value, body=body, data=data, leaf=leaf_hash(data) if leaf is None else leaf
        )
    except (KeyError, TypeError) as error:
        raise InvalidEvent(
            f"expected an envelope with {', '.join(ENVELOPE_FIELDS)} and body, "
            f"found other fields ({error})"
        ) from error
