"""Goal: one actor appends for a whole cluster: commits are shared, and no append stands twice.

Method: many threads append through clients of their own; the actor is stopped until a client gives
up, and killed while every thread waits for an answer. What its errors promise must hold in the
ledger: an append in doubt stands once after its retry, whether or not it stood before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import AppendInDoubt, IdempotencyConflict
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.scheduler.writer import WriterClient, start_writer
from tests.scheduler.waiting import until

pytestmark = pytest.mark.ray
THREADS, APPENDS = 16, 5
LIMIT_S = 60.0


@pytest.fixture
def url(ray_cluster: Any, tmp_path: Path) -> Iterator[str]:
    """A ledger of its own; its actor ends with the test."""
    import ray

    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.open(url).close()
    yield url
    ray.kill(start_writer(url), no_restart=True)


def pid_of(url: str) -> int:
    import ray

    return int(ray.get(start_writer(url).pid.remote(), timeout=LIMIT_S))


def fork(reason: str) -> list[ExperimentForked]:
    return [ExperimentForked(parent="p", reason=reason)]


def keys(url: str) -> Counter[str | None]:
    with Ledger.open(url, read_only=True) as ledger:
        return Counter(event.key for event in ledger.read())


def test_appends_of_many_share_commits(url: str) -> None:
    receipts: dict[str, int] = {}
    told = threading.Lock()
    ready = threading.Barrier(THREADS)
    pid_of(url)

    def work(thread: int) -> None:
        client = WriterClient(url, limit_s=LIMIT_S)
        ready.wait()
        for number in range(APPENDS):
            key = f"{thread}:{number}"
            receipt = client.append("job", fork(key), key=key)
            with told:
                receipts[key] = receipt.first

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    with Ledger.open(url, read_only=True) as ledger:
        stored = list(ledger.read())
    assert len(receipts) == THREADS * APPENDS
    assert {event.key: event.position for event in stored} == receipts
    assert len({event.writer for event in stored}) == 1, "one handle wrote them all"
    commits = len({event.recorded_ns for event in stored})
    assert commits < len(stored), "a transaction has one time"
    with pytest.raises(IdempotencyConflict):
        WriterClient(url, limit_s=LIMIT_S).append("job", fork("other content"), key="0:0")


def test_no_answer_in_time_is_doubt_and_the_append_may_stand(url: str) -> None:
    pid = pid_of(url)
    client = WriterClient(url, limit_s=LIMIT_S)
    client.append("job", fork("before"), key="before")
    os.kill(pid, signal.SIGSTOP)
    try:
        hasty = WriterClient(url, limit_s=0.5)
        with pytest.raises(AppendInDoubt, match="same key"):
            hasty.append("job", fork("late"), key="late")
        assert keys(url) == {"before": 1}
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: keys(url)["late"], LIMIT_S)
    assert client.append("job", fork("late"), key="late").repeated
    assert keys(url) == {"before": 1, "late": 1}


def test_a_killed_writer_doubles_and_loses_nothing(url: str) -> None:
    pid = pid_of(url)
    acknowledged: set[str] = set()
    waiting: set[int] = set()
    doubts: list[str] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def work(thread: int) -> None:
        client = WriterClient(url, limit_s=LIMIT_S)
        number = 0
        try:
            while not done.is_set():
                key = f"{thread}:{number}"
                waiting.add(thread)
                try:
                    client.append("job", fork(key), key=key)
                except AppendInDoubt:
                    doubts.append(key)
                    continue  # the same again
                waiting.discard(thread)
                acknowledged.add(key)
                number += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(acknowledged) >= THREADS or failed, LIMIT_S)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: len(waiting) == THREADS or failed, LIMIT_S)
        before = len(acknowledged)
        os.kill(pid, signal.SIGKILL)
        until(lambda: len(acknowledged) >= before + THREADS or failed, LIMIT_S)
    finally:
        done.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not failed, failed
    assert pid_of(url) != pid
    assert doubts, "somebody was waiting for an answer"
    found = keys(url)
    assert set(found) >= acknowledged
    assert set(found.values()) == {1}
