"""A server of the S3 protocol on this machine, from the wheel ``moto``; requests can be failed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any
from urllib.request import Request, urlopen

import pytest

Respond = Callable[[str, list[tuple[str, str]]], Any]
Application = Callable[[dict[str, Any], Respond], Iterable[bytes]]
Fault = Callable[[dict[str, Any], Application, Respond], Iterable[bytes]]
"""Is given a request and the store, and answers instead of it."""


class S3Server:
    """The store behind one port; ``fault`` answers in its place, ``requests`` are those so far."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request otherwise
        self._store: Application = DomainDispatcherApplication(create_backend_app)
        self.fault: Fault | None = None
        self.requests: list[tuple[str, str]] = []
        self._port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, on the port that it had before; its objects are those that it had then."""
        from werkzeug.serving import make_server

        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(self, request: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        self.requests.append((request["REQUEST_METHOD"], request["PATH_INFO"]))
        # Read here once, so that a fault may ask the store and answer something else all the same.
        request["wsgi.input"] = BytesIO(
            request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        )
        if self.fault is not None:
            return self.fault(request, self._store, respond)
        return self._store(request, respond)

    def close(self) -> None:
        """Stop it; nobody listens on its port any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def refused(status: str, code: str) -> Fault:
    """A fault that answers every request with an error of S3."""

    def answer(request: dict[str, Any], _: Application, respond: Respond) -> Iterable[bytes]:
        body = f"<Error><Code>{code}</Code><Message>as the test asked</Message></Error>".encode()
        if request["REQUEST_METHOD"] == "HEAD":
            body = b""
        respond(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    return answer


DOWN = refused("503 Service Unavailable", "ServiceUnavailable")


@contextlib.contextmanager
def running_s3(patch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with the bucket ``book``, which s3fs takes for S3 meanwhile; skip without moto.

    Errors are not tried again, which would take seconds for each.
    """
    pytest.importorskip("moto", reason="a server of S3: pip install 'shiftbook[test]'")
    s3fs = pytest.importorskip("s3fs", reason="pip install 'shiftbook[test]'")
    server = S3Server()
    patch.setenv("AWS_ENDPOINT_URL", server.url)
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_MAX_ATTEMPTS", "1")
    patch.setattr(s3fs.S3FileSystem, "retries", 1)
    # One that another test left knows another port.
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        # What moto holds is the process's, and outlives a server.
        with urlopen(Request(f"{server.url}/moto-api/reset", method="POST")):
            pass
        s3fs.S3FileSystem().mkdir("book")
        yield server
    finally:
        server.close()
        s3fs.S3FileSystem.clear_instance_cache()
