"""Transfers inside a Ray cluster: a trainer's actor is asked, parcels come by Ray's object store.

A source is an actor that inherits `RaySource`; it answers in threads of a concurrency group, beside
whatever it does else. Between processes of one node a parcel is not copied on its way: the receiver
reads it in shared memory. Who is connected to the cluster may pull, so it belongs on a network that
is trusted. Ray is imported where a link is used, and by nothing else of this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from shiftbook.checkpoint.errors import (
    SourceLost,
    TransferDamaged,
    TransferError,
    TransferRefused,
)
from shiftbook.checkpoint.transfer.link import Body, Link, raise_told, told
from shiftbook.checkpoint.transfer.parcel import Ticket
from shiftbook.checkpoint.transfer.source import Source

STALL_S = 20.0
GROUP = "transfer"
THREADS = 16
"""Questions that a source answers at once. A receiver that waits for a version or for its verdict
takes one, so there should be as many as receivers."""


def actor_options(threads: int = THREADS) -> dict[str, Any]:
    """What ``ray.remote`` has to be told about an actor that inherits `RaySource`."""
    return {"concurrency_groups": {GROUP: threads}}


class RaySource:
    """The part of a trainer's actor that answers receivers; `serve_transfers` begins."""

    _transfers: Source | None = None

    def serve_transfers(self, source: Source) -> None:
        """Answer for this source from now on."""
        self._transfers = source

    def transfer_answer(self, kind: str, body: dict[str, Any], peer: str) -> dict[str, Any]:
        """The answer to a question, or the error that it met."""
        try:
            return self._served().answer(kind, body, peer=peer)
        except TransferError as error:
            return told(error)

    def transfer_parcel(self, ticket: dict[str, Any]) -> NDArray[np.uint8] | dict[str, Any]:
        """The bytes of a parcel, or the error that it met."""
        try:
            with self._served().offers.parcel(Ticket.model_validate(ticket)) as buffers:
                parts = [np.frombuffer(part, np.uint8) for part in buffers]
                return np.concatenate(parts) if parts else np.empty(0, np.uint8)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            return told(TransferRefused(f"expected a ticket, found {first['msg']} at {place}"))
        except TransferError as error:
            return told(error)

    def _served(self) -> Source:
        if self._transfers is None:
            raise SourceLost("expected an actor that serves, found one that has not begun to")
        return self._transfers


class RayLink(Link):
    """A link to the source `rank`, the actor behind a handle; `name` is the receiver's.

    A call that takes longer than `stall_s` counts as lost. `group` is the concurrency group that
    the actor answers in (None: its only one).
    """

    def __init__(
        self,
        rank: int,
        actor: Any,
        *,
        name: str,
        stall_s: float = STALL_S,
        group: str | None = GROUP,
    ) -> None:
        self.rank = rank
        self._actor, self._name, self._stall_s, self._group = actor, name, stall_s, group

    def ask(self, kind: str, body: Body, *, wait_s: float = 0.0) -> dict[str, Any]:
        """As Link says."""
        limit_s = self._stall_s + wait_s
        answer = self._call("transfer_answer", (kind, dict(body), self._name), limit_s)
        if not isinstance(answer, Mapping):
            raise self._senseless("an answer", answer)
        if "error" in answer:
            raise_told(answer)
        return dict(answer)

    def fetch(self, ticket: Ticket, *, most_bytes: int) -> memoryview:
        """As Link says."""
        asked = ticket.model_dump(mode="json", exclude_defaults=True)
        parcel = self._call("transfer_parcel", (asked,), self._stall_s)
        if isinstance(parcel, Mapping):
            raise_told(parcel)
        if not isinstance(parcel, np.ndarray) or parcel.dtype != np.uint8 or parcel.ndim != 1:
            raise self._senseless("a parcel", parcel)
        if parcel.nbytes > most_bytes:
            raise TransferDamaged(
                f"rank {self.rank}: expected a parcel of at most {most_bytes} bytes, found "
                f"{parcel.nbytes}; the source answers something else than it was asked"
            )
        return parcel.data

    def close(self) -> None:
        """As Link says; Ray finds the actor again by itself, if it comes back."""

    def _call(self, method: str, arguments: tuple[Any, ...], limit_s: float) -> Any:
        import ray

        if not ray.is_initialized():
            raise TransferRefused(
                "expected a process of a Ray cluster, found one that is not connected; call "
                "ray.init(address=...) first"
            )
        try:
            options = {"concurrency_group": self._group} if self._group is not None else {}
            reference = getattr(self._actor, method).options(**options).remote(*arguments)
        except AttributeError as error:
            raise TransferRefused(
                f"rank {self.rank}: expected an actor whose class inherits RaySource, found "
                f"{self._actor!r}",
                where=self._where,
            ) from error
        try:
            return ray.get(reference, timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            ray.cancel(reference)  # what still waits in its queue need not be answered
            raise self._lost(f"nothing for {limit_s:g} s") from error
        except ray.exceptions.RayTaskError as error:
            said = str(error).strip().splitlines()[-1][:300]
            raise TransferDamaged(f"{self._where}: expected an answer, found {said}") from error
        except ray.exceptions.RayError as error:  # the actor died, its node left, a parcel was lost
            raise self._lost(str(error).strip().splitlines()[0][:300]) from error

    @property
    def _where(self) -> str:
        return f"rank {self.rank} in the Ray cluster"

    def _lost(self, found: str) -> SourceLost:
        return SourceLost(f"{self._where}: expected an answer, found {found}", where=self._where)

    def _senseless(self, expected: str, found: object) -> TransferDamaged:
        return TransferDamaged(
            f"{self._where}: expected {expected}, found {type(found).__name__}; something else "
            "than a Shiftbook of this version answers there"
        )
