"""Transfers across clusters: Arrow Flight over TLS, a token for each receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
from pydantic import ValidationError

from shiftbook.checkpoint.errors import (
    ServingFailed,
    SourceLost,
    TokenRefused,
    TransferDamaged,
    TransferError,
    TransferRefused,
)
from shiftbook.checkpoint.transfer.certificates import ServerFiles
from shiftbook.checkpoint.transfer.link import Body, Link, raise_told, read, told, written
from shiftbook.checkpoint.transfer.parcel import Ticket
from shiftbook.checkpoint.transfer.source import Source
from shiftbook.checkpoint.transfer.tokens import check_token

BATCH_BYTES = 1 << 20
STALL_S = 20.0
LEAST_BYTES_S = 128 << 10
"""A link that is slower than this counts as lost."""
CLOSE_S = 5.0
_SCHEMA = pa.schema([("bytes", pa.uint8())])
_MIDDLEWARE = "token"


class FlightSource:
    """Serves a source until it is closed; receivers need the authority's file and a token.

    `port` 0 takes a free one. Raises ServingFailed for a port in use and for files of no use.
    """

    def __init__(
        self,
        source: Source,
        files: ServerFiles,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        try:
            pair = (files.certificate.read_bytes(), files.key.read_bytes())
        except OSError as error:
            raise ServingFailed(
                f"expected a certificate and its key, could not read {error.filename} "
                f"({error.strerror}); make them with `shiftbook checkpoint transfer certificates`",
                where=str(error.filename),
            ) from error
        try:
            self._server = _Server(
                source,
                location=f"grpc+tls://{host}:{port}",
                tls_certificates=[pair],
                middleware={_MIDDLEWARE: _TokenCheck(secret)},
            )
        except (OSError, pa.ArrowException) as error:
            raise ServingFailed(
                f"expected to serve on {host}:{port} with {files.certificate.name}, could not "
                f"({error}); the port is in use, the host is not this machine's, or certificate "
                "and key do not belong together",
                where=f"{host}:{port}",
            ) from error
        self.host, self.port = host, int(self._server.port)

    def close(self) -> None:
        """Serve no more. A receiver that stalls in mid-parcel holds this up for `CLOSE_S`."""
        ending = threading.Thread(target=self._server.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Peer(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._secret = secret

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> _Peer:
        values = headers.get("authorization", [])
        kind, _, token = str(values[0]).partition(" ") if values else ("", "", "")
        try:
            if kind != "Bearer":
                raise TransferRefused("expected a token, found none; issue one for this receiver")
            return _Peer(check_token(self._secret, token))
        except TransferError as error:
            raise flight.FlightUnauthenticatedError(str(error)) from error


class _Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, source: Source, **how: Any) -> None:
        super().__init__(**how)
        self._source = source

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        """Questions: the kind is the action's type, question and answer are JSON."""
        peer = context.get_middleware(_MIDDLEWARE).name
        try:
            body = read(action.body.to_pybytes())
            answer = self._source.answer(action.type, body, peer=peer)
        except TransferError as error:
            answer = told(error)
        yield flight.Result(written(answer))

    def do_get(self, context: Any, ticket: Any) -> Any:
        """A parcel, as batches of bytes; an error goes with the status."""
        try:
            asked = _ticket(ticket.ticket)
            stack = ExitStack()
            buffers = stack.enter_context(self._source.offers.parcel(asked))
        except TransferError as error:
            raise flight.FlightServerError(str(error)[:2000], written(told(error))) from error
        return flight.GeneratorStream(_SCHEMA, _batches(buffers, stack))


def _ticket(data: bytes) -> Ticket:
    try:
        return Ticket.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise TransferRefused(
            f"expected a ticket, found {first['msg']} at {'.'.join(map(str, first['loc']))}"
        ) from error


def _batches(buffers: list[Any], stack: ExitStack) -> Iterator[Any]:
    """The buffers in slices; nothing is copied here."""
    with stack:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            for first in range(0, len(view), BATCH_BYTES):
                part = view[first : first + BATCH_BYTES]
                array = pa.Array.from_buffers(pa.uint8(), len(part), [None, pa.py_buffer(part)])
                yield pa.record_batch([array], schema=_SCHEMA)


class FlightLink(Link):
    """A link to a source that is served by Flight.

    `authority` is the PEM file that the source's certificate has to stand under; `token` is this
    receiver's, or gives one that is still good. A call that takes longer than `stall_s` and what
    its bytes take at `least_bytes_s` counts as lost.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        *,
        authority: Path,
        token: str | Callable[[], str],
        stall_s: float = STALL_S,
        least_bytes_s: int = LEAST_BYTES_S,
    ) -> None:
        self.rank = rank
        self._where = f"grpc+tls://{host}:{port}"
        self._token = token
        self._stall_s, self._least_bytes_s = stall_s, least_bytes_s
        self._client: Any = None
        try:
            self._roots = authority.read_bytes()
        except OSError as error:
            raise TransferRefused(
                f"expected the authority's certificate, could not read {authority} "
                f"({error.strerror}); copy it from where it was made",
                where=str(authority),
            ) from error

    def ask(self, kind: str, body: Body, *, wait_s: float = 0.0) -> dict[str, Any]:
        """As Link says."""
        action = flight.Action(kind, written(body))
        try:
            results = list(self._connected().do_action(action, self._options(wait_s)))
        except (pa.ArrowException, OSError) as error:
            raise self._lost(error) from error
        answer = read(results[0].body.to_pybytes() if len(results) == 1 else b"")
        if "error" in answer:
            raise_told(answer)
        return answer

    def fetch(self, ticket: Ticket, *, most_bytes: int) -> memoryview:
        """As Link says."""
        asked = flight.Ticket(ticket.model_dump_json(exclude_defaults=True).encode())
        options = self._options(most_bytes / self._least_bytes_s)
        parts: list[Any] = []
        total = 0
        try:
            reader = self._connected().do_get(asked, options)
            for chunk in reader:
                part = chunk.data.column(0).buffers()[1]
                total += len(chunk.data)
                if total > most_bytes:
                    reader.cancel()
                    raise TransferDamaged(
                        f"rank {self.rank}: expected a parcel of at most {most_bytes} bytes, found "
                        "more; the source answers something else than it was asked"
                    )
                parts.append(np.frombuffer(part, np.uint8, len(chunk.data)))
        except (pa.ArrowException, OSError) as error:
            raise self._lost(error) from error
        return np.concatenate(parts).data if parts else memoryview(b"")

    def close(self) -> None:
        """As Link says."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> Any:
        if self._client is None:
            self._client = flight.FlightClient(self._where, tls_root_certs=self._roots)
        return self._client

    def _options(self, more_s: float) -> Any:
        token = self._token if isinstance(self._token, str) else self._token()
        bearer = (b"authorization", f"Bearer {token}".encode())
        return flight.FlightCallOptions(timeout=self._stall_s + more_s, headers=[bearer])

    def _lost(self, error: Exception) -> TransferError:
        """What a failed call means."""
        where = f"rank {self.rank} at {self._where}"
        if isinstance(error, flight.FlightUnauthenticatedError):
            return TokenRefused(f"{where}: {str(error).partition('. Detail:')[0]}", where=where)
        said = getattr(error, "extra_info", None)
        if isinstance(error, flight.FlightServerError) and said:
            try:
                raise_told(read(bytes(said)))
            except TransferError as one:
                return one
        reason = str(error).partition(". gRPC client debug")[0].partition(". Client context")[0]
        if "certificate verify failed" in reason or "CERTIFICATE_VERIFY_FAILED" in reason:
            return TransferRefused(
                f"{where}: expected a certificate under the given authority that is good now and "
                f"names this host, found another ({reason.rpartition('routines::')[2][:120]}); "
                "use the authority's file of this source, or make new certificates",
                where=where,
            )
        return SourceLost(f"{where}: expected an answer, found {reason[:300]}", where=where)
