"""The base of every event body, the kinds of field, and the registry of types."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events.upcasters import lift

Hex128 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""A 128-bit value, such as a fingerprint, as 32 hex digits."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 as 64 hex digits."""

HexBytes = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$")]
"""Bytes of any length, such as the state of a generator, as hex digits."""

Count = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""A whole number from 0 to 2**64 - 1."""

REGISTRY: dict[str, type[Event]] = {}


_HELD: dict[type, bool] = {}


def _held_as_written(kind: type) -> bool:
    """Whether what models of a class hold is what they are written as; looked at once for each."""
    known = _HELD.get(kind)
    if known is None:
        known = _HELD[kind] = _look_how_held(kind)
    return known


def _look_how_held(kind: type) -> bool:
    if not issubclass(kind, BaseModel) or kind.model_config.get("extra") == "allow":
        return False
    decorators, mro = kind.__pydantic_decorators__, [vars(base) for base in kind.__mro__]
    return not (
        decorators.field_serializers
        or decorators.model_serializers
        or decorators.computed_fields
        or any(info.exclude or info.serialization_alias for info in kind.model_fields.values())
        or any(isinstance(value, cached_property) for held in mro for value in held.values())
        or (issubclass(kind, Event) and kind.plain is not Event.plain)
    )


def shallow_part(model: object) -> dict[str, Any]:
    """Fields of a model as they are held, the absent ones left out; one level deep.

    What orjson calls for each model that it meets, so that serialising makes no second copy of a
    body, which takes longer than to write it. Raises TypeError for what is not held as written.
    """
    if not _held_as_written(type(model)):
        raise TypeError(f"expected a model held as it is written, found {type(model).__name__}")
    fields: dict[str, Any] = model.__dict__
    if None in fields.values():
        return {name: value for name, value in fields.items() if value is not None}
    return fields


class Event(BaseModel):
    """Body of an event. Subclasses register themselves under their class name."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    schema_: ClassVar[int] = 1
    """Version of the fields; a higher one needs an upcaster (upcasters.py) from the one before."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__name__ in REGISTRY:
            raise TypeError(f"two event types named {cls.__name__}")
        REGISTRY[cls.__name__] = cls

    @classmethod
    def type_(cls) -> str:
        """Name of the type as it stands in the envelope."""
        return cls.__name__

    def plain(self) -> dict[str, Any]:
        """Body as plain values; absent optional fields are left out."""
        # What model_dump does, without its handling of options, which takes as long again.
        plain: dict[str, Any] = self.__pydantic_serializer__.to_python(self, exclude_none=True)
        return plain

    def shallow(self) -> dict[str, Any]:
        """The same with its parts as the models that they are, for ``shallow_part`` to go on."""
        return shallow_part(self) if _held_as_written(type(self)) else self.plain()


class UnknownEvent(Event):
    """An event of a type or schema that this build does not know: kept and shown as it stands."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def plain(self) -> dict[str, Any]:
        """Body as it stands."""
        return dict(self.model_extra or {})


class Part(BaseModel):
    """A structured value inside a body."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Segment(Part):
    """A content-addressed Parquet file beside the ledger, bound by its hash and by its schema."""

    sha256: Sha256
    rows: Count
    columns: tuple[str, ...]
    types: tuple[str, ...] | None = None
    """Kind of each column (`evidence.column_types`); absent where schema 1 bound the segment."""
    bytes: Count


def lifted(type_: str, schema: int, body: dict[str, Any]) -> dict[str, Any]:
    """A stored body as the present schema of its type has it; one that is not known, as it is.

    Raises InvalidEvent for a schema that no version has written.
    """
    model = REGISTRY.get(type_)
    if model is None or schema >= model.schema_ or model is UnknownEvent:
        return body
    try:
        return lift(type_, schema, body, model.schema_)
    except KeyError as error:
        raise InvalidEvent(
            f"{type_}: expected a schema from 1 to {model.schema_} or a newer one, found {schema}"
        ) from error


def parse(type_: str, schema: int, body: dict[str, Any]) -> Event:
    """Lift a stored body to its model; unknown types and newer schemas become UnknownEvent.

    Older schemas pass through their upcasters first. Raises InvalidEvent.
    """
    model = REGISTRY.get(type_)
    if model is None or schema > model.schema_ or model is UnknownEvent:
        return UnknownEvent.model_validate(body)
    try:
        return model.model_validate(lifted(type_, schema, body))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidEvent(f"{type_}: field {where}: {first['msg']}") from error
