"""Goal: every call over the line is executed once, whatever happens to its connection.

Method: a real server and real callers on sockets; a proxy between them breaks connections at
random, before and after the call went through. What the server counted must be what the callers
got. Strangers, silent connections and servers that were replaced are tried as well.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client
from typing import Any

import pytest

from shiftbook.ledger.errors import InvalidInput
from shiftbook.scheduler.errors import WorkerError, WorkerLost
from shiftbook.scheduler.workers.line import Address, Line, LineServer

SEED = 20261129
CALLS = 300


class Counter:
    """Hands out numbers, each once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.handed: list[int] = []

    def take(self, padding: bytes) -> tuple[int, bytes]:
        with self._lock:
            self.handed.append(len(self.handed))
            return self.handed[-1], padding

    def refuse(self) -> None:
        raise InvalidInput("expected nothing, found a call; do not call")

    def fail(self) -> None:
        raise KeyError("lost")


class Proxy:
    """Passes bytes on, and cuts a connection now and then, in either direction."""

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self._target, self._random = target, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if self._random.random() < 0.1:
                    self.cuts += 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        for link in (source, sink):
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        source.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def server(counter: Counter) -> Iterator[LineServer]:
    served = LineServer(
        {"take": counter.take, "refuse": counter.refuse, "fail": counter.fail}, "127.0.0.1"
    )
    yield served
    served.close()


@pytest.mark.parametrize("size", [0, 20_000, 200_000])
def test_answers_come_back(server: LineServer, size: int) -> None:
    line = Line(lambda: server.address)
    assert line.call("take", bytes(size)) == (0, bytes(size))
    assert line.call("take", b"x") == (1, b"x")


def test_each_call_is_executed_once_over_connections_that_break(
    server: LineServer, counter: Counter
) -> None:
    print(f"seed {SEED}")
    proxy = Proxy((server.address.host, server.address.port), SEED)
    address = Address("127.0.0.1", proxy.port, server.address.key)
    got: list[int] = []
    lock = threading.Lock()

    def caller() -> None:
        line = Line(lambda: address)
        for _ in range(CALLS // 4):
            number, _ = line.call("take", b"")
            with lock:
                got.append(number)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.close()
    assert proxy.cuts > 10, "the proxy must have cut some"
    assert sorted(got) == counter.handed == list(range(CALLS))


def test_errors_come_back_as_they_are(server: LineServer) -> None:
    line = Line(lambda: server.address)
    with pytest.raises(InvalidInput, match="do not call"):
        line.call("refuse")
    with pytest.raises(WorkerError, match="KeyError: 'lost'"):
        line.call("fail")
    with pytest.raises(WorkerError, match="KeyError: 'absent'"):
        line.call("absent")
    assert line.call("take", b"")[0] == 0


def test_a_stranger_is_refused_and_a_silent_one_holds_up_nobody(
    server: LineServer, counter: Counter
) -> None:
    silent = socket.create_connection((server.address.host, server.address.port))
    wrong = Address(server.address.host, server.address.port, b"another key")
    with pytest.raises(WorkerLost, match="AuthenticationError"):
        Line(lambda: wrong, limit_s=0.0).call("take", b"")
    raw: Any = Client((server.address.host, server.address.port))
    raw.send_bytes(b"no handshake")
    assert counter.handed == []
    assert Line(lambda: server.address).call("take", b"")[0] == 0
    silent.close()
    raw.close()


def test_a_caller_finds_the_server_that_took_over(server: LineServer, counter: Counter) -> None:
    serving = [server.address]
    looks = []

    def find() -> Address:
        looks.append(len(looks))
        if len(looks) == 2:
            raise ConnectionError("being replaced")
        return serving[-1]

    line = Line(find)
    line.call("take", b"")
    successor = LineServer({"take": counter.take}, "127.0.0.1")
    serving.append(successor.address)
    line.close()  # as the death of the first process closes it
    assert line.call("take", b"")[0] == 1
    successor.close()


def test_nobody_there(server: LineServer) -> None:
    def find() -> Address:
        raise ConnectionError("no loop")

    with pytest.raises(WorkerLost, match=r"answer take within 0 s.*no loop"):
        Line(find, limit_s=0.0).call("take", b"")
