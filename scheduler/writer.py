"""The named writer actor: all processes of a cluster append through one, which groups commits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shiftbook.ledger.dialect import public_url
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import AppendInDoubt, ShiftbookError
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Receipt
from shiftbook.scheduler.cluster import NAMESPACE, import_ray

APPEND_LIMIT_S = 3.0
"""How long a writer's client waits before it says that it does not know what came of an append."""
LOCK_LIMIT_S = 2.0


class LedgerWriter:
    """The Ray actor that owns the cluster's writing handle. Concurrent calls share a commit."""

    def __init__(self, url: str) -> None:
        self._ledger = Ledger.open(url, create=False, lock_timeout_s=LOCK_LIMIT_S)

    def append(
        self,
        job: str,
        events: Sequence[Event | Draft],
        key: str | None,
        expected_version: int | None = None,
    ) -> Receipt:
        """Append durably; the errors of Ledger.append come through as they are."""
        return self._ledger.append(job, list(events), key=key, expected_version=expected_version)

    def pid(self) -> int:
        """Process id."""
        return os.getpid()


def writer_name(ledger_url: str) -> str:
    """Name of the writer actor of a ledger; names are shown, so it holds no credentials."""
    return f"writer:{public_url(ledger_url)}"


class WriterClient:
    """Appends through the named writer actor, with the errors of ``Ledger.append``.

    AppendInDoubt where the actor does not answer in time, or ends before it answers: the append may
    stand then, now or later; retry it with its key.
    """

    def __init__(self, ledger_url: str, *, limit_s: float = APPEND_LIMIT_S) -> None:
        self._url = ledger_url
        self._limit_s = limit_s
        self._handle: Any = None

    def append(
        self,
        job: str,
        events: Sequence[Event | Draft],
        *,
        key: str | None = None,
        expected_version: int | None = None,
    ) -> Receipt:
        """Append through the actor, which is started when there is none."""
        ray = import_ray()
        try:
            if self._handle is None:
                self._handle = start_writer(self._url)
            reply = self._handle.append.remote(job, list(events), key, expected_version)
            return ray.get(reply, timeout=self._limit_s)  # type: ignore[no-any-return]
        except ray.exceptions.GetTimeoutError as error:
            raise AppendInDoubt(
                f"expected the ledger's writer to answer within {self._limit_s} s, it did not; the "
                "append may stand; retry it with the same key"
            ) from error
        except ray.exceptions.RayActorError as error:
            self._handle = None
            raise AppendInDoubt(
                f"expected an answer of the ledger's writer process, it ended before ({error}); "
                "the append may stand; retry it with the same key, the next process takes it"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ShiftbookError):
                raise cause from None
            raise


def start_writer(ledger_url: str) -> Any:
    """Handle of the ledger's writer actor, started when there is none."""
    ray = import_ray()
    actor = ray.remote(LedgerWriter).options(
        name=writer_name(ledger_url),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_concurrency=32,
        num_cpus=0,
        max_restarts=-1,
    )
    return actor.remote(ledger_url)
