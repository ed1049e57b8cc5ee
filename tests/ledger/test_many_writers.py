"""Goal: with 16 writers, 4 followers, kills and a crash of the server nothing is missed or doubled.

Method: writers are threads of processes that are killed with SIGKILL at random and replaced; on
PostgreSQL the server is stopped with ``-m immediate`` in the middle and started again. Followers,
two threads and two processes, must see every position once and in order; every acknowledged append
must stand where its receipt said, whole, and no other twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from tests.ledger.gate_cases import await_
from tests.ledger.stores import STORES
from tests.ledger.writing_process import DIED, LOCK_LIMIT_S, seen_by_follower
from tests.postgres_server import PostgresServer, running_server

PROCESSES, THREADS = 4, 4
"""16 writers."""
CHILD = [sys.executable, "-m", "tests.ledger.writing_process"]
ROOT = Path(__file__).parents[2]


class Writers:
    """Writing processes and what they told of acknowledged appends."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.acknowledged: dict[str, tuple[int, int]] = {}
        self.events = 0
        self.started = 0
        self._lock = threading.Lock()
        self._children: list[tuple[subprocess.Popen[str], threading.Thread]] = []

    def start(self) -> None:
        self.started += 1
        name = f"w{self.started}"
        child = subprocess.Popen(
            [*CHILD, "write", self.url, name, str(THREADS), str(self.seed + self.started)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        listener = threading.Thread(target=self._listen, args=(child,))
        listener.start()
        self._children.append((child, listener))

    def _listen(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.endswith("\n"):  # a killed process may leave half a line
                text, first, last = line.split()
                with self._lock:
                    self.acknowledged[text] = int(first), int(last)
                    self.events += int(last) - int(first) + 1

    def kill(self, chance: random.Random) -> None:
        """End one at a moment of its own work, and let another take its place."""
        child, listener = self._children.pop(chance.randrange(len(self._children)))
        os.kill(child.pid, signal.SIGKILL)
        self._end(child, listener)
        self.start()

    def end_all(self) -> None:
        """Leave no process behind, whatever the test found."""
        for child, listener in self._children:
            child.kill()
            self._end(child, listener)

    def stop(self) -> None:
        for child, _ in self._children:
            assert child.stdin is not None
            child.stdin.close()
        while self._children:
            child, listener = self._children.pop()
            assert self._end(child, listener) == 0

    def _end(self, child: subprocess.Popen[str], listener: threading.Thread) -> int:
        listener.join(LOCK_LIMIT_S + 30)
        code = child.wait(30)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code


@pytest.fixture(params=STORES)
def book(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, PostgresServer | None]]:
    """URL of an empty ledger, and the server behind it, which is this test's own."""
    monkeypatch.setenv("PGUSER", "postgres")
    if request.param == "sqlite":
        Ledger.open(f"sqlite:///{tmp_path}/ledger.db").close()
        yield f"sqlite:///{tmp_path}/ledger.db", None
    else:
        with running_server() as server:
            Ledger.open(server.url()).close()
            yield server.url(), server


def run(url: str, server: PostgresServer | None, target: int, kills: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    limit_s = 60.0 + target / 100
    threads_saw: list[tuple[int, str]] = []
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(Ledger.open(url, lock_timeout_s=LOCK_LIMIT_S))
        threads = [
            threading.Thread(target=lambda: threads_saw.append(seen_by_follower(ledger, limit_s)))
            for _ in range(2)
        ]
        processes = [
            subprocess.Popen(
                [*CHILD, "follow", url, str(limit_s)], stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            for _ in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        for thread in threads:
            thread.start()
        for process in processes:
            # Before any crash of the server: a ledger that cannot be reached is not opened.
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
        writers = Writers(url, seed)
        stack.callback(writers.end_all)
        for _ in range(PROCESSES):
            writers.start()
        began_s, crashes = time.monotonic(), 0
        for at in sorted(chance.randint(0, target * 9 // 10) for _ in range(kills)):
            await_(lambda at=at: writers.events >= at, limit_s)
            if server is not None and at > target // 3:
                server.stop("immediate")
                server.start()
                crashes, server = crashes + 1, None
            writers.kill(chance)
        await_(lambda: writers.events >= target, limit_s)
        writers.stop()
        elapsed_s = time.monotonic() - began_s
        ledger.append("end", ExperimentForked(parent="p", reason="end"))

        rows = list(ledger.rows())
        saw = hashlib.sha256(b"".join(row.leaf for row in rows)).hexdigest()
        for thread in threads:
            thread.join(limit_s)
        told = [process.communicate(timeout=limit_s)[0].split() for process in processes]
    assert server is None, "the server crashed in the middle"
    assert threads_saw == [(len(rows), saw)] * 2
    assert told == [[str(len(rows)), saw]] * 2
    assert [row.position for row in rows] == list(range(len(rows)))

    places: dict[str, list[int]] = defaultdict(list)
    for row in rows[:-1]:
        places[row.event().body["reason"]].append(row.position)
    for text, (first, last) in writers.acknowledged.items():
        assert places[text] == list(range(first, last + 1)), f"{text} was acknowledged"
    for text, positions in places.items():
        assert positions == list(range(positions[0], positions[-1] + 1)), f"{text} stands twice"
    print(
        f"{len(rows)} events, {len(writers.acknowledged)} acknowledged appends, lost 0, "
        f"{len(places) - len(writers.acknowledged)} stand unacknowledged, {kills} kills, "
        f"{crashes} crashes of the server, "
        f"{elapsed_s:.1f} s"
    )
    assert len(places) - len(writers.acknowledged) <= kills * THREADS


def test_three_thousand_events(book: tuple[str, PostgresServer | None]) -> None:
    run(*book, target=3_000, kills=4, seed=20)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sixty_thousand_events(book: tuple[str, PostgresServer | None]) -> None:
    run(*book, target=60_000, kills=20, seed=random.randrange(10**6))


def test_a_writing_thread_that_dies_ends_its_process(tmp_path: Path) -> None:
    """The test of the test: an error that nobody expects is not taken for a thread that is slow."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger.open(url) as ledger:  # what the second thread will take for its own key
        ledger.append("job-1", ExperimentForked(parent="p", reason="other"), key="w1:1:0")
    child = subprocess.Popen(
        [*CHILD, "write", url, "w1", str(THREADS), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert child.wait(LOCK_LIMIT_S) == DIED
        assert child.stderr is not None
        assert "IdempotencyConflict" in child.stderr.read()
    finally:
        child.kill()
        for pipe in (child.stdin, child.stderr):
            assert pipe is not None
            pipe.close()
