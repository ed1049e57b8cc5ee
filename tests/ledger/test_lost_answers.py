"""Goal: an append whose answer was lost stands once, whatever broke, with a key and without.

Method: a proxy between the ledger and a real server cuts the connection before the COMMIT reaches
the server, or swallows its answer and then cuts or hangs; the server terminates sessions; it is
crashed with ``pg_ctl stop -m immediate`` and started again.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from shiftbook.ledger import postgres_session
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import AppendInDoubt, LedgerUnreachable
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Decision, Ledger
from tests.ledger.gate_cases import await_
from tests.postgres_server import PostgresServer, running_server

DEADLINE_S = 30.0


def fork(reason: object = "r") -> Event:
    return ExperimentForked(parent="p", reason=str(reason))


class Proxy:
    """Forwards a port to a server's socket; told to, it breaks at the next COMMIT, once.

    ``request``: the connection is cut before the server sees the COMMIT. ``answer``: the server
    commits, its answer is swallowed and the connection cut. ``silence``: the same, and the
    connection stays open and mute. ``away``: like answer, and nobody is let in until ``back``.
    """

    def __init__(self, upstream: Path) -> None:
        self.upstream = upstream
        self.mode: str | None = None
        self.broke = 0
        self._closed_door = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._closed_door.is_set():
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self.upstream))
                self._sockets += [client, server]
                silent = threading.Event()
                for source, target, asks in ((client, server, True), (server, client, False)):
                    threading.Thread(
                        target=self._pump, args=(source, target, asks, silent), daemon=True
                    ).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, asks: bool, silent: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                mode = self.mode
                if asks and mode is not None and b"COMMIT\0" in data:
                    self.mode = None
                    self.broke += 1
                    if mode == "request":
                        break
                    silent.set()
                    target.sendall(data)
                    if mode == "away":
                        self._closed_door.set()
                    if mode != "silence":
                        # The server has answered once its next word would be read by nobody.
                        self._await_commit()
                        break
                elif not (silent.is_set() and not asks):
                    target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _await_commit(self) -> None:
        with psycopg.connect(host=str(self.upstream.parent), user="postgres") as probe:
            probe.autocommit = True
            busy = (
                "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted "
                "AND classid = 1397245524"
            )
            await_(lambda: probe.execute(busy).fetchone() is None, DEADLINE_S)

    def back(self) -> None:
        """Let clients in again."""
        self._closed_door.clear()

    def close(self) -> None:
        self._listener.close()
        for end in self._sockets:
            end.close()


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[Proxy]:
    made = Proxy(postgres.socket)
    yield made
    made.close()


@pytest.fixture
def url(postgres: PostgresServer, proxy: Proxy) -> str:
    """Ledger behind the proxy."""
    schema = f"t_{secrets.token_hex(6)}"
    return postgres.url(schema, host="127.0.0.1", port=proxy.port)


def reasons(url: str) -> list[str]:
    with Ledger.open(url, read_only=True) as ledger:
        stored = list(ledger.read())
        assert [e.position for e in stored] == list(range(len(stored)))
        return [e.body["reason"] for e in stored]


@pytest.mark.parametrize("mode", ["request", "answer", "silence"])
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("count", [1, 30])
def test_an_append_stands_once(
    url: str, proxy: Proxy, mode: str, key: str | None, count: int
) -> None:
    with Ledger.open(url, lock_timeout_s=1.0) as ledger:
        ledger.append("a", fork("first"))
        proxy.mode = mode
        receipt = ledger.append("a", [fork("x")] * count, key=key)
        assert proxy.broke == 1
        assert list(receipt.positions) == list(range(1, 1 + count))
        assert not receipt.repeated
        assert ledger.append("a", fork("last")).first == 1 + count
        assert (ledger.event(count).sequence, ledger.event(count + 1).sequence) == (
            count,
            count + 1,
        )
        if key is not None:
            assert ledger.append("a", [fork("x")] * count, key=key).repeated
    assert reasons(url) == ["first", *["x"] * count, "last"]


@pytest.mark.parametrize("mode", ["request", "answer", "silence"])
def test_a_decision_stands_once(url: str, proxy: Proxy, mode: str) -> None:
    """Where the first commit was not made, the decision is made again at the head of then."""
    heads: list[int] = []

    def fn(state) -> Decision:
        heads.append(state.size)
        return Decision("a", [Draft(fork(f"at {state.size}"))])

    with Ledger.open(url, lock_timeout_s=1.0) as ledger:
        ledger.append("a", fork("first"))
        proxy.mode = mode
        receipt = ledger.decide(fn)
        assert receipt is not None
        assert receipt.first == 1
        assert proxy.broke == 1
        assert heads == ([1, 1] if mode == "request" else [1])
    assert reasons(url) == ["first", "at 1"]


@pytest.mark.parametrize("mode", ["request", "answer"])
def test_a_group_of_threads_stands_once(url: str, proxy: Proxy, mode: str) -> None:
    """The break meets a commit that many appends share; one of them is refused, and stays so."""
    receipts: dict[str, int] = {}
    refused: list[Exception] = []
    with Ledger.open(url, lock_timeout_s=5.0) as ledger:
        ledger.append("a", fork("first"), key="taken")
        started, go = threading.Event(), threading.Event()

        def hold(state) -> None:
            started.set()
            assert go.wait(DEADLINE_S)

        def append(number: int) -> None:
            try:
                if number == 0:
                    ledger.append("a", fork("other"), key="taken")
                receipts[str(number)] = ledger.append("a", fork(number)).first
            except Exception as error:
                refused.append(error)

        threads = [threading.Thread(target=lambda: ledger.decide(hold))]
        threads += [threading.Thread(target=append, args=(n,)) for n in range(8)]
        threads[0].start()
        assert started.wait(DEADLINE_S)
        for thread in threads[1:]:
            thread.start()
        await_(lambda: len(ledger._group._queue) == 8, DEADLINE_S)
        proxy.mode = mode
        go.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert proxy.broke == 1
        assert [type(error).__name__ for error in refused] == ["IdempotencyConflict"]
        assert sorted(receipts.values()) == list(range(1, 8))
        for number, position in receipts.items():
            assert ledger.event(position).body["reason"] == number
    assert Counter(reasons(url)) == Counter(["first", *receipts])


def test_what_cannot_be_settled_in_time_is_in_doubt_and_a_key_settles_it(
    url: str, proxy: Proxy
) -> None:
    with Ledger.open(url, lock_timeout_s=0.5) as ledger:
        ledger.append("a", fork("first"))
        proxy.mode = "away"
        with pytest.raises(AppendInDoubt, match="same key"):
            ledger.append("a", fork("x"), key="k")
        began_s = time.monotonic()
        with pytest.raises(LedgerUnreachable):
            ledger.append("a", fork("x"), key="k")
        assert time.monotonic() - began_s < 0.4, (
            "a server that is known to be away is not waited for"
        )
        proxy.back()
        again = ledger.append("a", fork("x"), key="k")
        assert (again.first, again.repeated) == (1, True)
        assert ledger.append("a", fork("last")).first == 2
    assert reasons(url) == ["first", "x", "last"]


def test_sessions_that_the_server_ends_are_replaced(url: str, postgres: PostgresServer) -> None:
    """pg_terminate_backend at random moments of four threads' appends; seeds do not matter here."""
    stop = threading.Event()
    acknowledged: list[list[int]] = [[] for _ in range(4)]
    failed: list[BaseException] = []
    ended = 0
    with Ledger.open(url, lock_timeout_s=5.0) as ledger, psycopg.connect(
        **postgres.parameters, autocommit=True
    ) as killer:  # fmt: skip

        def work(number: int) -> None:
            try:
                while not stop.is_set():
                    text = f"{number}:{len(acknowledged[number])}"
                    receipt = ledger.append(f"job-{number}", fork(text))
                    acknowledged[number].append(receipt.first)
                    assert ledger.event(receipt.first).body["reason"] == text
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(acknowledged))]
        for thread in threads:
            thread.start()
        for round_ in range(25):
            target = sum(map(len, acknowledged)) + 1 + round_ % 5
            await_(lambda target=target: sum(map(len, acknowledged)) >= target, DEADLINE_S)
            found = killer.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE "
                "application_name = 'shiftbook'"
            ).fetchone()
            assert found is not None
            ended += found[0]
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert failed == [], "no thread ever notices"
        positions = sorted(position for own in acknowledged for position in own)
        assert positions == list(range(ledger.head().size)), "each once, and nothing more"
    print("sessions ended", ended, "appends", len(positions))
    assert ended >= 25


def test_a_crash_of_the_server_is_ridden_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends without keys go on over crashes; what was acknowledged stands, once."""
    monkeypatch.setenv("PGUSER", "postgres")
    with running_server() as server, Ledger.open(server.url(), lock_timeout_s=20.0) as ledger:
        stop = threading.Event()
        acknowledged: list[tuple[int, str]] = []
        failed: list[BaseException] = []

        def work(number: int) -> None:
            count = 0
            try:
                while not stop.is_set():
                    text = f"{number}:{count}"
                    acknowledged.append((ledger.append("a", fork(text)).first, text))
                    count += 1
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            target = len(acknowledged) + 40
            await_(lambda target=target: len(acknowledged) >= target, DEADLINE_S)
            server.stop("immediate")
            server.start()
        target = len(acknowledged) + 40
        await_(lambda: len(acknowledged) >= target, DEADLINE_S)
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert failed == []
        stored = [(e.position, e.body["reason"]) for e in ledger.read()]
        assert stored == sorted(acknowledged), "nothing lost, nothing doubled"


def test_a_server_that_accepts_and_never_answers_does_not_hold_the_caller(
    postgres: PostgresServer,
) -> None:
    """As a host that stopped: bytes are taken, nothing comes back, not even a refusal."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began_s = time.monotonic()
        with pytest.raises(LedgerUnreachable):
            Ledger.open(
                postgres.url(host="127.0.0.1", port=mute.getsockname()[1]), lock_timeout_s=0.5
            )
        assert time.monotonic() - began_s < 10.0


def test_reading_goes_on_over_a_cut(url: str, postgres: PostgresServer) -> None:
    with Ledger.open(url, lock_timeout_s=5.0) as ledger:
        for number in range(3):
            ledger.append("a", [fork(number)] * 400)
        seen = []
        for event in ledger.read():
            seen.append(event.position)
            if event.position % 300 == 0:
                with psycopg.connect(**postgres.parameters, autocommit=True) as killer:
                    killer.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
                        "application_name = 'shiftbook'"
                    )
        assert seen == list(range(1200))


def test_the_limit_on_an_answer_is_the_clients_own() -> None:
    """The generator that psycopg waits on ends with an error once nothing came for so long."""

    def never():
        while True:
            yield 1

    waiting = postgres_session._limited(never(), 0.05)
    next(waiting)
    began_s = time.monotonic()
    with pytest.raises(postgres_session.AnswerLate):
        for _ in iter(lambda: waiting.send(0), None):
            pass
    assert 0.04 < time.monotonic() - began_s < 5.0
