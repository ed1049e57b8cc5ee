"""A TCP proxy with a byte rate, which can also cut or alter what passes: a bad line on one host."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 16 << 10


class SlowLink:
    """Passes connections on to `host`:`port`, answers at `rate_bytes_s` in all (None: unbounded).

    `cut_after` ends every connection once so many bytes of answers passed, `cuts` times; `flip_at`
    flips a bit of the answers' byte with that number, once.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rate_bytes_s: float | None = None,
        cut_after: int | None = None,
        cuts: int = 1,
        flip_at: int | None = None,
    ) -> None:
        self._to = (host, port)
        self._rate_bytes_s = rate_bytes_s
        self._cut_after, self.cuts_left = cut_after, cuts if cut_after is not None else 0
        self._flip_at = flip_at
        self.passed_bytes = 0
        self._since_cut = 0
        self._free_s = 0.0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        _end(self._listener)
        with self._lock:
            for one in self._open:
                _end(one)

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
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                _end(near)
                continue
            with self._lock:
                self._open += [near, far]
            for source, sink, answers in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pump, args=(source, sink, answers), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if answers:
                    data = self._spoilt(data)
                    self._wait(len(data))
                    if self._is_cut(len(data)):
                        break
                sink.sendall(data)
        _end(source)
        _end(sink)

    def _spoilt(self, data: bytes) -> bytes:
        with self._lock:
            at = -1 if self._flip_at is None else self._flip_at - self.passed_bytes
            if not 0 <= at < len(data):
                return data
            self._flip_at = None
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def _wait(self, count: int) -> None:
        """Until so many bytes have passed at the rate; all connections share it."""
        with self._lock:
            self.passed_bytes += count
            if self._rate_bytes_s is None:
                return
            now_s = time.monotonic()
            self._free_s = max(now_s, self._free_s) + count / self._rate_bytes_s
            wait_s = self._free_s - now_s
        threading.Event().wait(wait_s)

    def _is_cut(self, count: int) -> bool:
        with self._lock:
            self._since_cut += count
            if self.cuts_left and self._since_cut >= (self._cut_after or 0):
                self.cuts_left -= 1
                self._since_cut = 0
                return True
            return False


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
