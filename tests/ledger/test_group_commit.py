"""Goal: concurrent appends of a process share commits; a lone one is committed at once, by itself.

Method: a clock that counts gives each transaction its own time, so equal times mean one commit;
appends are made to queue by holding the commit lock in decide.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest

from shiftbook.ledger.errors import AppendInDoubt, LedgerUnreachable, VersionConflict
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.group_commit import MAX_REQUESTS, GroupCommit, Request
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Receipt
from tests.ledger.gate_cases import await_

DEADLINE_S = 30.0


def fork(reason: object) -> Event:
    return ExperimentForked(parent="p", reason=str(reason))


@pytest.fixture
def ledger(store_url: str):
    clock = itertools.count(1).__next__
    with Ledger.open(store_url, now_ns=clock) as opened:
        yield opened


def queued(ledger: Ledger, calls: Sequence, *, before: object = None) -> list[object]:
    """Start each call in a thread while a decision holds the lock; their results in order."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]

    def hold(state: object) -> None:
        for count, thread in enumerate(threads, start=1):
            thread.start()
            while len(ledger._group._queue) < count:
                assert thread.is_alive()

    ledger.decide(hold)
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return results


def test_appends_that_wait_together_are_committed_together(ledger: Ledger) -> None:
    calls = [lambda n=n: ledger.append(f"job-{n % 3}", [fork(n)] * 2) for n in range(24)]
    receipts = queued(ledger, calls)
    assert [r.first for r in receipts] == list(range(0, 48, 2)), "in the order of their arrival"
    stored = list(ledger.read())
    assert len({event.recorded_ns for event in stored}) == 1
    assert [event.version for event in stored if event.job == "job-1"] == list(range(16))
    assert [event.sequence for event in stored] == list(range(48))


def test_one_that_is_refused_does_not_touch_the_others(ledger: Ledger) -> None:
    ledger.append("a", fork(0))
    too_long = ExperimentForked(parent="p", reason="x" * 70_000)
    results = queued(
        ledger,
        [
            lambda: ledger.append("a", fork(1), expected_version=0),
            lambda: ledger.append("a", fork(2), expected_version=0),
            lambda: ledger.append("a", [fork(3), too_long]),
            lambda: ledger.append("a", fork(4), expected_version=1),
        ],
    )
    assert isinstance(results[0], Receipt)
    assert isinstance(results[1], VersionConflict)
    assert results[1].found == 1
    assert "70" in str(results[2])
    assert isinstance(results[3], Receipt)
    assert [event.body["reason"] for event in ledger.read()] == ["0", "1", "4"]


def test_a_lone_append_commits_in_its_own_thread() -> None:
    """No thread, no timer and no hand-over stand between a lone append and its commit."""
    seen: list[tuple[int, int]] = []

    def commit(group: Sequence[Request]) -> None:
        seen.append((threading.get_ident(), len(group)))
        for request in group:
            request.receipt = Receipt("a", 0, 0, 0, 0)

    group = GroupCommit(commit, 1.0)
    for _ in range(3):
        group.submit(Request("a", [], None, None))
    assert seen == [(threading.get_ident(), 1)] * 3


def test_those_that_were_taken_along_come_back_during_the_next_commit() -> None:
    """Each commit waits here until every other thread stands in the queue, as a slow disk would."""
    threads, appends = 8, 5
    alive = set(range(threads))
    sizes: list[int] = []

    def commit(group: Sequence[Request]) -> None:
        await_(lambda: len(shared._queue) + len(group) == len(alive), DEADLINE_S)
        sizes.append(len(group))
        for request in group:
            request.receipt = Receipt("a", 0, 0, 0, 0)

    shared = GroupCommit(commit, DEADLINE_S)

    def work(number: int) -> None:
        try:
            for _ in range(appends):
                shared.submit(Request("a", [], None, None))
        finally:
            alive.discard(number)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(DEADLINE_S)
    assert sum(sizes) == threads * appends
    assert len(sizes) <= 2 * appends, f"shared by those that wait: {sizes}"


def test_a_group_is_bounded() -> None:
    sizes: list[int] = []

    def commit(group: Sequence[Request]) -> None:
        sizes.append(len(group))
        for request in group:
            request.receipt = Receipt("a", 0, 0, 0, 0)

    group = GroupCommit(commit, 1.0)
    group._queue.extend(Request("a", [], None, None) for _ in range(MAX_REQUESTS + 5))
    group.submit(Request("a", [], None, None))
    assert sizes == [MAX_REQUESTS, 6]


def test_a_failed_commit_is_told_to_each_with_an_error_of_its_own(ledger: Ledger) -> None:
    real = ledger._store.transact
    failing = threading.Event()

    def transact(work):
        if failing.is_set():
            failing.clear()
            raise LedgerUnreachable("no space; nothing was written")
        failing.set()
        return real(work)

    ledger._store.transact = transact  # the decision passes, the group after it fails
    results = queued(ledger, [lambda n=n: ledger.append("a", fork(n)) for n in range(4)])
    assert all(isinstance(result, LedgerUnreachable) for result in results)
    assert len({id(result) for result in results}) == 4
    ledger._store.transact = real
    assert ledger.append("a", fork("after")).first == 0


def test_an_interrupted_commit_leaves_nobody_waiting() -> None:
    entered, go = threading.Event(), threading.Event()

    def commit(group: Sequence[Request]) -> None:
        entered.set()
        assert go.wait(DEADLINE_S)
        raise KeyboardInterrupt

    group = GroupCommit(commit, DEADLINE_S)
    caught: list[BaseException] = []

    def leader() -> None:
        try:
            group.submit(Request("a", [], None, None))
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=leader)
    thread.start()
    assert entered.wait(DEADLINE_S)
    follower = Request("a", [], None, None)
    group._queue.append(follower)
    go.set()
    thread.join(DEADLINE_S)
    assert isinstance(caught[0], KeyboardInterrupt)
    assert not follower.done, "it was not in the interrupted group and is still to be committed"
    with pytest.raises(KeyboardInterrupt):
        group.submit(Request("a", [], None, None))
    assert isinstance(follower.error, AppendInDoubt)


def test_waiting_for_the_lock_ends(store_url: str) -> None:
    ledger = Ledger.open(store_url, lock_timeout_s=0.05)
    caught: list[object] = []
    started, release = threading.Event(), threading.Event()

    def hold(state: object) -> None:
        started.set()
        assert release.wait(DEADLINE_S)

    holder = threading.Thread(target=lambda: ledger.decide(hold))
    holder.start()
    assert started.wait(DEADLINE_S)
    for use in (lambda: ledger.append("a", fork(1)), lambda: ledger.decide(lambda state: None)):
        try:
            use()
        except LedgerUnreachable as error:
            caught.append(error)
    release.set()
    holder.join(DEADLINE_S)
    assert len(caught) == 2
    assert ledger.head().size == 0, "what timed out was withdrawn"
    assert ledger.append("a", fork(2)).first == 0
    ledger.close()
