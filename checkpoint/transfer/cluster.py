"""Transfers inside a cluster: torch.distributed point to point, gloo, or NCCL where there are GPUs.

Each source and each receiver that calls it have a process group of two for themselves, made over
one lasting store: one that dies or stalls breaks its own group and no other, and a new call makes a
new group. Who reaches the store may pull, so it belongs on a network that is trusted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError

from shiftbook.checkpoint.errors import (
    ServingFailed,
    SourceLost,
    TransferDamaged,
    TransferError,
    TransferRefused,
)
from shiftbook.checkpoint.transfer.catalogue import LocalCatalogue
from shiftbook.checkpoint.transfer.link import Body, Link, raise_told, read, told, written
from shiftbook.checkpoint.transfer.parcel import Ticket
from shiftbook.checkpoint.transfer.source import Source

STALL_S = 20.0
IDLE_S = 600.0
"""A source ends a link on which nobody asked for so long."""
MOST_QUESTION_BYTES = 64 << 20
MOST_PARTS = 1 << 16
CALLER, CALLED = 1, 0
_LONG = timedelta(seconds=IDLE_S)


def serve_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """The meeting place of sources and receivers; keep it where it outlives them. ServingFailed."""
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_LONG)
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
        raise ServingFailed(
            f"expected to serve the store on {host}:{port}, could not "
            f"({str(error).splitlines()[0]}); name a free port of this machine",
            where=f"{host}:{port}",
        ) from error


def over_group(
    group: dist.ProcessGroup | None = None,
) -> Callable[[LocalCatalogue], Iterable[LocalCatalogue]]:
    """The exchange of a trainer whose ranks stand in one group, for `Offers.publish`."""

    def exchange(local: LocalCatalogue) -> Iterable[LocalCatalogue]:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, local.model_dump(mode="json"), group=group)
        return [LocalCatalogue.model_validate(one) for one in every]

    return exchange


class _Wire:
    """One end of a group of two: messages of bytes, each after its length."""

    def __init__(self, store: dist.Store, place: int, backend: str, stall_s: float) -> None:
        self._other = 1 - place
        self._limit = timedelta(seconds=stall_s)
        self._device = torch.device("cpu")
        self._group: Any
        if backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            # Its watchdog ends the process after this; a source waits longest for a question.
            options._timeout = max(self._limit, _LONG)
            self._group = dist.ProcessGroupNCCL(store, place, 2, options)
        else:
            self._group = dist.ProcessGroupGloo(store, place, 2, self._limit)

    def send(self, *parts: Any) -> None:
        """The lengths of the parts in one message, and then the parts."""
        flat = [np.frombuffer(part, np.uint8) for part in parts]
        counts = torch.tensor([len(flat), sum(map(len, flat))], dtype=torch.int64)
        self._put(counts)
        self._put(torch.tensor([len(part) for part in flat], dtype=torch.int64))
        for part in flat:
            if len(part):
                self._put(_tensor(part))

    def receive(self, most_bytes: int, wait: timedelta | None = None) -> memoryview:
        """A message. Raises TransferDamaged for one that is longer than allowed."""
        count, total = (int(n) for n in self._get(2, torch.int64, wait))
        if not 0 < count <= MOST_PARTS or not 0 <= total <= most_bytes:
            raise TransferDamaged(
                f"expected a message of at most {most_bytes} bytes, found one of {total} in "
                f"{count} parts; something else speaks there"
            )
        lengths = [int(n) for n in self._get(count, torch.int64)]
        if min(lengths) < 0 or sum(lengths) != total:
            raise TransferDamaged(f"expected parts of {total} bytes in all, found {sum(lengths)}")
        room = np.empty(total, dtype=np.uint8)
        at = 0
        for length in lengths:
            part = room[at : at + length]
            if length and self._device.type == "cpu":
                self._wait(self._group.recv([torch.from_numpy(part)], self._other, 0))
            elif length:
                part[:] = self._get(length, torch.uint8).numpy()
            at += length
        return room.data

    def _put(self, tensor: torch.Tensor) -> None:
        self._wait(self._group.send([tensor.to(self._device)], self._other, 0))

    def _get(self, count: int, dtype: torch.dtype, wait: timedelta | None = None) -> torch.Tensor:
        tensor = torch.empty(count, dtype=dtype, device=self._device)
        self._wait(self._group.recv([tensor], self._other, 0), wait)
        return tensor.cpu()

    def _wait(self, work: Any, wait: timedelta | None = None) -> None:
        work.wait(wait or self._limit)


def _tensor(part: Any) -> torch.Tensor:
    """Bytes as a tensor without a copy; what cannot be written to is copied, being short."""
    return torch.from_numpy(part if part.flags.writeable else part.copy())


class ClusterSource:
    """Serves a source to whoever calls it over the store, a thread for each caller."""

    def __init__(
        self,
        source: Source,
        host: str,
        port: int,
        *,
        backend: str = "gloo",
        stall_s: float = STALL_S,
    ) -> None:
        self._source, self._host, self._port = source, host, port
        self._backend, self._stall_s = backend, stall_s
        self._closed = threading.Event()
        self._store = _store(host, port, stall_s)
        self._prefix = f"transfer/{source.offers.rank}"
        # Calls to one that served before under this rank are not for this one.
        self._next = int(self._store.add(f"{self._prefix}/calls", 0)) + 1
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls; links that exist end with their callers."""
        self._closed.set()
        # One more call, from nobody, ends the wait for the next.
        with contextlib.suppress(RuntimeError, SourceLost):
            store = _store(self._host, self._port, self._stall_s)
            _call(store, self._source.offers.rank, "")
        self._thread.join(self._stall_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            call = f"{self._prefix}/call/{self._next}"
            try:
                self._store.wait([call], _LONG)
                peer = self._store.get(call).decode()
            except dist.DistStoreError:
                continue  # nobody called
            except RuntimeError:
                return  # the store is gone, and with it the cluster
            if self._closed.is_set():
                return
            self._next += 1
            threading.Thread(target=self._serve, args=(call, peer), daemon=True).start()

    def _serve(self, call: str, peer: str) -> None:
        # A caller that dies or stalls ends its own thread; it finds out by itself, or is dead.
        with contextlib.suppress(RuntimeError, TransferDamaged):
            store = dist.PrefixStore(f"{call}/group", _store(self._host, self._port, self._stall_s))
            wire = _Wire(store, CALLED, self._backend, self._stall_s)
            while not self._closed.is_set():
                question = wire.receive(MOST_QUESTION_BYTES, _LONG)
                self._answer(wire, read(bytes(question)), peer)

    def _answer(self, wire: _Wire, question: Body, peer: str) -> None:
        kind, body = str(question.get("kind")), question.get("body")
        try:
            if kind != "fetch":
                wire.send(written(self._source.answer(kind, dict(body or {}), peer=peer)))
                return
            with self._source.offers.parcel(_ticket(body)) as buffers:
                wire.send(written({"parcel": True}))
                wire.send(*buffers)
        except TransferError as error:
            wire.send(written(told(error)))


def _ticket(body: Any) -> Ticket:
    try:
        return Ticket.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise TransferRefused(
            f"expected a ticket, found {first['msg']} at {'.'.join(map(str, first['loc']))}"
        ) from error


def _store(host: str, port: int, limit_s: float) -> dist.TCPStore:
    """A connection of one's own: a store's waits hold up everything else on their connection."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise SourceLost(
            f"expected the store at {host}:{port}, found none ({str(error).splitlines()[0]})",
            where=f"{host}:{port}",
        ) from error


def _call(store: dist.Store, rank: int, name: str) -> str:
    """Leave a call for a source; gives the key that it stands under."""
    call = f"transfer/{rank}/call/{store.add(f'transfer/{rank}/calls', 1)}"
    store.set(call, name)
    return call


class ClusterLink(Link):
    """A link to the source `rank` over the store at `host`:`port`; `name` is the receiver's."""

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        *,
        name: str,
        backend: str = "gloo",
        stall_s: float = STALL_S,
    ) -> None:
        self.rank = rank
        self._host, self._port, self._name = host, port, name
        self._backend, self._stall_s = backend, stall_s
        self._wire: _Wire | None = None

    def ask(self, kind: str, body: Body, *, wait_s: float = 0.0) -> dict[str, Any]:
        """As Link says."""
        wait = timedelta(seconds=self._stall_s + wait_s)
        answer = self._exchange({"kind": kind, "body": dict(body)}, MOST_QUESTION_BYTES, wait)
        return self._read(answer)

    def fetch(self, ticket: Ticket, *, most_bytes: int) -> memoryview:
        """As Link says."""
        body = ticket.model_dump(mode="json", exclude_defaults=True)
        wait = timedelta(seconds=self._stall_s)
        answer = self._exchange({"kind": "fetch", "body": body}, MOST_QUESTION_BYTES, wait)
        self._read(answer)
        assert self._wire is not None
        try:
            return self._wire.receive(most_bytes)
        except RuntimeError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """As Link says."""
        self._wire = None

    def _exchange(self, question: Body, most: int, wait: timedelta) -> memoryview:
        try:
            wire = self._connected()
            wire.send(written(question))
            return wire.receive(most, wait)
        except RuntimeError as error:  # gloo's, NCCL's and the store's errors are RuntimeErrors
            raise self._lost(error) from error

    def _connected(self) -> _Wire:
        if self._wire is None:
            store = _store(self._host, self._port, self._stall_s)
            group = dist.PrefixStore(f"{_call(store, self.rank, self._name)}/group", store)
            self._wire = _Wire(group, CALLER, self._backend, self._stall_s)
        return self._wire

    def _read(self, answer: memoryview) -> dict[str, Any]:
        value = read(bytes(answer))
        if "error" in value:
            raise_told(value)
        return value

    def _lost(self, error: Exception) -> SourceLost:
        self.close()
        where = f"rank {self.rank} by the store at {self._host}:{self._port}"
        said = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        return SourceLost(f"{where}: expected an answer, found {said}", where=where)
