"""What a receiver sees of a source, whatever carries it: questions with short answers, parcels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from shiftbook.checkpoint import errors
from shiftbook.checkpoint.errors import TransferDamaged, TransferError
from shiftbook.checkpoint.transfer.parcel import Ticket
from shiftbook.ledger import canonical
from shiftbook.ledger.errors import InvalidEvent

Body = Mapping[str, Any]

_TELLABLE = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TransferError)
}


class Link(ABC):
    """A connection to one source; it is made when it is first needed, and again when it broke.

    Raises SourceLost where the source is out of reach or silent, TransferRefused where it refuses,
    and TransferDamaged for answers that make no sense.
    """

    rank: int
    """Of the source."""

    @abstractmethod
    def ask(self, kind: str, body: Body, *, wait_s: float = 0.0) -> dict[str, Any]:
        """The answer to a question; the source may take `wait_s` before it answers."""

    @abstractmethod
    def fetch(self, ticket: Ticket, *, most_bytes: int) -> memoryview:
        """The bytes of a parcel, at most so many."""

    @abstractmethod
    def close(self) -> None:
        """End the connection; the next call makes a new one."""


def told(error: TransferError) -> dict[str, Any]:
    """An error as a source tells it to a receiver."""
    return {"error": type(error).__name__, "message": str(error), "where": error.where}


def raise_told(value: Body) -> None:
    """Raise what a source told."""
    kind = _TELLABLE.get(str(value.get("error")), TransferError)
    raise kind(str(value.get("message")), where=value.get("where"))


def written(value: Body) -> bytes:
    """A question or an answer as bytes."""
    return canonical.encode(dict(value))


def read(data: bytes) -> dict[str, Any]:
    """A question or an answer from bytes. Raises TransferDamaged."""
    try:
        value: Any = canonical.decode(data)
    except InvalidEvent as error:
        raise TransferDamaged(
            f"expected JSON, found {len(data)} other bytes ({error}); something else than a "
            "Shiftbook of this version speaks there"
        ) from error
    if not isinstance(value, dict):
        raise TransferDamaged(f"expected a JSON object, found {type(value).__name__}")
    return value
