"""Goal: a key makes an append happen once, for ever, in every process; versions guard the rest.

Method: the same and other content under one key, alone and in batches, in one handle, in a new
handle, in another process at the same time, through decide, and within one group of appends.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import IdempotencyConflict, InvalidEvent, LedgerError, VersionConflict
from shiftbook.ledger.events import life
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.group_commit import GroupCommit
from shiftbook.ledger.ledger import Decision, Ledger


def fork(reason: str) -> Event:
    return ExperimentForked(parent="p", reason=reason)


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


@pytest.fixture
def ledger(url: str):
    with Ledger.open(url) as opened:
        yield opened


def test_the_same_content_gives_the_first_receipt(ledger: Ledger, url: str) -> None:
    batch = [fork("1"), fork("2"), fork("3")]
    ledger.append("other", fork("0"))
    first = ledger.append("job", batch, key="k")
    ledger.append("job", fork("between"))
    again = ledger.append("job", batch, key="k")
    assert not first.repeated
    assert again.repeated
    assert (again.first, again.last) == (first.first, first.last) == (1, 3)
    assert (again.first_version, again.last_version) == (0, 2)
    assert list(again.positions) == [1, 2, 3]
    with Ledger.open(url) as later:
        assert later.append("job", batch, key="k") == again
    assert ledger.head().size == 5


def test_the_scope_is_job_and_key(ledger: Ledger) -> None:
    assert not ledger.append("a", fork("1"), key="k").repeated
    assert not ledger.append("b", fork("1"), key="k").repeated
    assert not ledger.append("a", fork("1"), key="K").repeated
    assert ledger.head().size == 3


@pytest.mark.parametrize(
    "offered",
    [
        [fork("2")],
        [fork("1"), fork("2")],
        [life.NodeLost(node="n", devices=(), cause="c")],
    ],
    ids=["body", "longer", "type"],
)
def test_other_content_names_both_sides(ledger: Ledger, offered: list[Event]) -> None:
    ledger.append("job", fork("1"), key="k")
    with pytest.raises(IdempotencyConflict) as caught:
        ledger.append("job", offered, key="k")
    error = caught.value
    assert (error.job, error.key, error.position) == ("job", "k", 0)
    assert "1 event(s)" in error.stored
    assert f"{len(offered)} event(s)" in error.offered
    assert error.stored != error.offered
    assert ledger.head().size == 1


def test_a_shorter_batch_and_another_operation_conflict(ledger: Ledger) -> None:
    ledger.append("job", [fork("1"), fork("2")], key="k")
    with pytest.raises(IdempotencyConflict):
        ledger.append("job", [fork("1")], key="k")
    ledger.append("job", fork("1"), key="op", operation="op-1")
    with pytest.raises(IdempotencyConflict, match="op-2"):
        ledger.append("job", fork("1"), key="op", operation="op-2")


def test_time_cause_and_writer_are_no_content(ledger: Ledger, url: str) -> None:
    ledger.append("other", [fork("1"), fork("2")])
    ledger.append("job", fork("1"), key="k", cause=0, occurred_ns=1)
    with Ledger.open(url, writer="another") as later:
        assert later.append("job", fork("1"), key="k", cause=1, occurred_ns=2).repeated


def test_nan_is_the_same_content_as_nan(ledger: Ledger) -> None:
    event = life.LedgerRestored(since_ns=2**63, outage_s=float("nan"), spooled=0)
    ledger.append("job", event, key="k")
    assert ledger.append("job", event, key="k").repeated


def test_the_key_is_looked_at_before_the_version(ledger: Ledger) -> None:
    first = ledger.append("job", fork("1"), key="k", expected_version=-1)
    ledger.append("job", fork("2"))
    again = ledger.append("job", fork("1"), key="k", expected_version=-1)
    assert again.repeated
    assert again.first == first.first
    with pytest.raises(IdempotencyConflict):
        ledger.append("job", fork("other"), key="k", expected_version=-1)


def test_version_conflict_names_both_sides(ledger: Ledger) -> None:
    ledger.append("job", fork("1"), expected_version=-1)
    ledger.append("job", fork("2"), expected_version=0)
    with pytest.raises(VersionConflict) as caught:
        ledger.append("job", fork("3"), expected_version=0)
    assert (caught.value.job, caught.value.expected, caught.value.found) == ("job", 0, 1)
    with pytest.raises(VersionConflict):
        ledger.append("new", fork("3"), expected_version=0)
    assert ledger.head().size == 2


def test_a_decision_repeats_under_its_key(ledger: Ledger, url: str) -> None:
    def decide(state: object) -> Decision:
        return Decision("job", [Draft(fork("1"), operation="op")], key="decision")

    first = ledger.decide(decide)
    with Ledger.open(url) as later:
        again = later.decide(decide)
        assert first is not None
        assert again is not None
        assert again.repeated
        assert again.first == first.first
        with pytest.raises(IdempotencyConflict):
            later.decide(lambda state: Decision("job", [Draft(fork("2"))], key="decision"))
    assert ledger.append("job", fork("1"), key="decision", operation="op").repeated
    assert ledger.head().size == 1


def test_two_of_one_key_in_one_transaction_stand_once(ledger: Ledger) -> None:
    """Both requests are queued while a decision holds the lock, so one group has both."""
    results: list[object] = []
    barrier = threading.Barrier(4)

    def append(reason: str) -> None:
        barrier.wait()
        try:
            results.append(ledger.append("job", fork(reason), key="k"))
        except LedgerError as error:
            results.append(error)

    threads = [threading.Thread(target=append, args=(r,)) for r in ("same", "same", "other")]
    group: GroupCommit = ledger._group

    def hold(state: object) -> None:
        for thread in threads:
            thread.start()
        barrier.wait()
        while len(group._queue) < 3:
            pass

    ledger.decide(hold)
    for thread in threads:
        thread.join()
    receipts = [r for r in results if not isinstance(r, LedgerError)]
    assert ledger.head().size == 1
    assert sorted(r.repeated for r in receipts) in ([False], [False, True])
    assert len(receipts) + sum(isinstance(r, IdempotencyConflict) for r in results) == 3


CHILD = """
import sys
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
with Ledger.open(sys.argv[1]) as ledger:
    sys.stdin.readline()
    for number in range(20):
        receipt = ledger.append("job", ExperimentForked(parent="p", reason=str(number)),
                                key=f"k{number}")
        print(receipt.first, receipt.repeated)
"""


def test_processes_that_offer_the_same_keys_append_each_once(url: str) -> None:
    Ledger.open(url).close()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = [child.communicate(timeout=60)[0].splitlines() for child in children]
    with Ledger.open(url) as ledger:
        assert [event.key for event in ledger.read()] == [f"k{n}" for n in range(20)]
    for lines in zip(*outputs, strict=True):
        assert len({line.split()[0] for line in lines}) == 1, "all processes name one position"
        assert sorted(line.split()[1] for line in lines) == ["False", "True", "True"]


def test_empty_input_is_refused(ledger: Ledger) -> None:
    for job, events, key in (("", [fork("1")], None), ("job", [], None), ("job", [fork("1")], "")):
        with pytest.raises(InvalidEvent):
            ledger.append(job, events, key=key)
    assert ledger.decide(lambda state: Decision("job", [])) is None
    assert ledger.head().size == 0
