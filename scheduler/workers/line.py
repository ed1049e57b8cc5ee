"""The line between a job's loop and its workers: work out and answers in, over plain sockets.

A call through Ray costs the cores about twelve times as much (``benchmarks/line.py``), and there
are hundreds in a second of rollout. Ray still starts, names, watches and ends the processes, and
tells a worker where the line is and what its key is.

A call is executed once in the life of a server: a caller that did not get the answer calls again
under the same number and gets the answer that was made.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from shiftbook.ledger.errors import ShiftbookError
from shiftbook.scheduler.errors import WorkerError, WorkerLost, first_line

KEY_BYTES = 32
WAITING_CLIENTS = 128
LIMIT_S = 30.0
"""How long a caller looks for a loop that is being replaced."""
FIND_LIMIT_S = 10.0
"""How long it is asked where it serves."""
RETRY_S = 0.1
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A peer whose node vanished is noticed after these seconds and tries."""
BROKEN = (OSError, EOFError, AuthenticationError)
"""How a connection fails."""


@dataclass(frozen=True)
class Address:
    """Where a line is served, and the key that a caller must know."""

    host: str
    port: int
    key: bytes = field(repr=False)


@dataclass
class _Caller:
    """The last call of one caller, and its answer."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = -1
    answer: bytes = b""


class LineServer:
    """Serves methods to callers that know the key, a thread for each connection."""

    def __init__(self, methods: Mapping[str, Callable[..., Any]], host: str) -> None:
        self._methods = dict(methods)
        self._callers: dict[str, _Caller] = {}
        self._lock = threading.Lock()
        # The key is asked for in the connection's own thread: one that connects and keeps silent
        # holds up nobody.
        self._listener = Listener((host, 0), backlog=WAITING_CLIENTS)
        self.address = Address(host, int(self._listener.address[1]), secrets.token_bytes(KEY_BYTES))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that exist end with their callers."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(*BROKEN):
            _tune(connection)
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            while True:
                caller, number, method, arguments = pickle.loads(connection.recv_bytes())
                connection.send_bytes(self._answer(caller, number, method, arguments))

    def _answer(self, caller: str, number: int, method: str, arguments: tuple[Any, ...]) -> bytes:
        with self._lock:
            known = self._callers.setdefault(caller, _Caller())
        with known.lock:
            if known.number != number:
                known.answer = self._run(method, arguments)
                known.number = number
            return known.answer

    def _run(self, method: str, arguments: tuple[Any, ...]) -> bytes:
        try:
            answer = (True, self._methods[method](*arguments))
        except ShiftbookError as error:
            answer = (False, error)
        except Exception as error:  # the caller is told, whatever it was
            answer = (False, WorkerError(f"{method} failed: {type(error).__name__}: {error}"))
        return pickle.dumps(answer)


class Line:
    """One caller of a line; ``find`` says where it is now, or raises OSError.

    Calls of several threads take turns. A call is repeated while its connection breaks, for
    ``limit_s`` seconds.
    """

    def __init__(self, find: Callable[[], Address], limit_s: float = LIMIT_S) -> None:
        self._find, self._limit_s = find, limit_s
        self._name = uuid.uuid4().hex
        self._number = 0
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; raises what it raised, or WorkerLost when the loop cannot be reached."""
        with self._lock:
            self._number += 1
            request = pickle.dumps((self._name, self._number, method, arguments))
            deadline = time.monotonic() + self._limit_s
            while True:
                try:
                    done, value = self._ask(request)
                    break
                except BROKEN as error:
                    self._hang_up()
                    if time.monotonic() > deadline:
                        raise WorkerLost(
                            f"expected the job's loop to answer {method} within "
                            f"{self._limit_s:.0f} s, found no connection "
                            f"({type(error).__name__}: {error})"
                        ) from error
                    threading.Event().wait(RETRY_S)
        if not done:
            raise value
        return value

    def _ask(self, request: bytes) -> tuple[bool, Any]:
        if self._connection is None:
            self._connection = _connect(self._find())
        self._connection.send_bytes(request)
        answer: tuple[bool, Any] = pickle.loads(self._connection.recv_bytes())
        return answer

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._hang_up()


def line_of(loop_name: str) -> Callable[[], Address]:
    """Finds the line of a job's loop, whichever process serves it now."""

    def find() -> Address:
        import ray  # the extra `job`; a caller of another kind of line needs none

        from shiftbook.scheduler.cluster import NAMESPACE

        try:
            loop = ray.get_actor(loop_name, namespace=NAMESPACE)
            address: Any = ray.get(loop.line.remote(), timeout=FIND_LIMIT_S)
        except (ray.exceptions.RayError, ValueError) as error:
            raise ConnectionError(f"no loop {loop_name}: {first_line(error)}") from error
        assert isinstance(address, Address)
        return address

    return find


def _connect(address: Address) -> Connection:
    connection = Client((address.host, address.port))
    try:
        _tune(connection)
        answer_challenge(connection, address.key)
        deliver_challenge(connection, address.key)
    except BaseException:
        connection.close()
        raise
    return connection


def _tune(connection: Connection) -> None:
    """Send small messages at once, and notice a peer whose machine is gone."""
    with _socket_of(connection) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    link = socket.socket(fileno=connection.fileno())
    try:
        yield link
    finally:
        link.detach()
