"""Goal: what the handle promises: places, reading, following, folding, opening, closing.

Method: a real file in a temporary folder; each promise by itself, with a second handle where the
promise is about others.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shiftbook.ledger import errors
from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import (
    InvalidURL,
    LedgerError,
    LedgerUnreachable,
    NewerLedger,
    ShiftbookError,
    UnknownPosition,
)
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.events.life import NodeLost
from shiftbook.ledger.ledger import Decision, Head, Ledger
from shiftbook.ledger.receipt import Receipt
from shiftbook.ledger.state import fold
from shiftbook.ledger.store import READ_ROWS
from tests.ledger.stores import run_sql

DEADLINE_S = 30.0


def fork(reason: object = "r") -> Event:
    return ExperimentForked(parent="p", reason=str(reason))


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """Of a ledger in a file, for promises about files."""
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def ledger(url: str):
    with Ledger.open(url, writer="w", actor="me") as opened:
        yield opened


def test_places_are_gapless(ledger: Ledger, url: str) -> None:
    assert ledger.head() == Head(0, None)
    assert ledger.append("a", fork()) == Receipt("a", 0, 0, 0, 0)
    assert ledger.append("b", [fork(), fork()]) == Receipt("b", 1, 2, 0, 1)
    with Ledger.open(url, writer="v") as other:
        assert other.append("a", [fork(), fork(), fork()]) == Receipt("a", 3, 5, 1, 3)
    assert ledger.append("a", fork()) == Receipt("a", 6, 6, 4, 4)
    stored = list(ledger.read())
    assert [e.position for e in stored] == list(range(7))
    assert [(e.writer, e.sequence) for e in stored] == [
        ("w", 0), ("w", 1), ("w", 2), ("v", 0), ("v", 1), ("v", 2), ("w", 3)
    ]  # fmt: skip
    assert {e.actor for e in stored if e.writer == "w"} == {"me"}
    assert ledger.head() == Head(7, stored[-1].leaf)
    assert all(leaf_hash(e.data) == e.leaf for e in stored)
    assert ledger.jobs() == ["a", "b"]


def test_a_writer_that_comes_back_goes_on_counting(ledger: Ledger, url: str) -> None:
    ledger.append("a", [fork(), fork()])
    with Ledger.open(url, writer="w") as again:
        again.append("a", fork())
    ledger.append("a", fork())
    assert [e.sequence for e in ledger.read()] == [0, 1, 2, 3]


def test_writers_of_two_handles_differ_by_default(url: str) -> None:
    with Ledger.open(url) as one, Ledger.open(url) as two:
        assert one.writer != two.writer
        assert one.actor == two.actor


def test_defaults_fill_what_drafts_leave_open(ledger: Ledger) -> None:
    before = ledger.append("b", [fork(), fork()])
    ledger.append(
        "a",
        [fork(), Draft(fork(), operation="mine", occurred_ns=5), Draft(fork(), cause=0)],
        operation="op",
        cause=1,
        occurred_ns=7,
    )
    assert [(e.operation, e.cause, e.occurred_ns) for e in ledger.read(before.last)] == [
        ("op", 1, 7),
        ("mine", 1, 5),
        ("op", 0, 7),
    ]


def test_times_come_from_the_injected_clock(url: str) -> None:
    clock = itertools.count(1_000).__next__
    with Ledger.open(url, now_ns=clock) as ledger:
        ledger.append("a", [fork(), fork()])
        ledger.append("a", fork(), occurred_ns=3)
        assert [(e.recorded_ns, e.occurred_ns) for e in ledger.read()] == [
            (1_000, 1_000),
            (1_000, 1_000),
            (1_001, 3),
        ]


def test_a_spooled_draft_keeps_its_writer_and_must_follow(ledger: Ledger) -> None:
    ledger.append("a", [Draft(fork(), writer="x", sequence=0), Draft(fork(), writer="x")])
    with pytest.raises(errors.InvalidEvent, match="sequence 2"):
        ledger.append("a", Draft(fork(), writer="x", sequence=5))
    ledger.append("a", Draft(fork(), writer="x", sequence=2))
    assert [(e.writer, e.sequence) for e in ledger.read()] == [("x", 0), ("x", 1), ("x", 2)]


@pytest.mark.parametrize("reverse", [False, True])
def test_reading_equals_filtering_a_list(ledger: Ledger, reverse: bool) -> None:
    count = READ_ROWS + 60
    every = list(range(count))
    events = [fork(i) if i % 3 else NodeLost(node="n", devices=(), cause="") for i in every]
    for start in range(0, count, 4):
        operation = [None, "x", "y"][start // 4 % 3]
        ledger.append("ab"[start // 4 % 2], events[start : start + 4], operation=operation)
    stored = list(ledger.read())
    assert len(stored) == count
    for after, until, job, types, operation, limit in itertools.product(
        (-1, 3, READ_ROWS), (None, 100, 10**9), (None, "a"), (None, ["NodeLost"]),
        (None, "x"), (None, 0, 5),
    ):  # fmt: skip
        wanted = [
            e
            for e in stored
            if e.position > after
            and (until is None or e.position <= until)
            and job in (None, e.job)
            and (types is None or e.type in types)
            and operation in (None, e.operation)
        ]
        wanted = wanted[::-1] if reverse else wanted
        found = ledger.read(
            after,
            until=until,
            job=job,
            types=types,
            operation=operation,
            limit=limit,
            reverse=reverse,
        )
        assert list(found) == wanted[:limit]


def test_reading_ends_at_the_head_of_the_call(ledger: Ledger) -> None:
    ledger.append("a", [fork()] * 3)
    seen = []
    for event in ledger.read():
        seen.append(event.position)
        ledger.append("a", fork())
    assert seen == [0, 1, 2]
    assert list(ledger.read(types=[])) == []
    assert list(ledger.read(job="nobody")) == []


def test_event_by_position(ledger: Ledger) -> None:
    ledger.append("a", [fork(1), fork(2)])
    assert ledger.event(1).body["reason"] == "2"
    for position in (-1, 2, 2**62):
        with pytest.raises(UnknownPosition, match="0 to 1"):
            ledger.event(position)


def test_follow_sees_each_event_once_and_stops(ledger: Ledger, url: str) -> None:
    stop = threading.Event()
    seen: list[int] = []
    enough = threading.Event()

    def follow() -> None:
        for event in reader.follow(1, poll_s=0.001, stop=stop):
            seen.append(event.position)
            if event.position == 59:
                enough.set()

    with Ledger.open(url, read_only=True) as reader:
        thread = threading.Thread(target=follow)
        thread.start()
        for _ in range(20):
            ledger.append("a", [fork()] * 3)
        assert enough.wait(DEADLINE_S)
        stop.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert seen == list(range(2, 60))


def test_follow_ends_when_the_handle_closes(ledger: Ledger, url: str) -> None:
    ledger.append("a", fork())
    started = threading.Event()
    reader = Ledger.open(url, read_only=True)

    def follow() -> None:
        for _ in reader.follow(poll_s=60.0):
            started.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert started.wait(DEADLINE_S)
    reader.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_the_state_is_folded_on_and_never_twice(ledger: Ledger, url: str) -> None:
    ledger.append("a", [fork()] * 3)
    state = ledger.state()
    assert (state.size, state.job("a").version) == (3, 2)
    with Ledger.open(url) as other:
        other.append("b", fork())
    again = ledger.state()
    assert again is state
    assert again.size == 4
    assert again == fold(ledger.read())
    other_thread: list[object] = []
    thread = threading.Thread(target=lambda: other_thread.append(ledger.state()))
    thread.start()
    thread.join()
    assert other_thread[0] == again
    assert other_thread[0] is not again


def test_decide_sees_the_head_and_knows_its_positions(ledger: Ledger, url: str) -> None:
    with Ledger.open(url) as other:
        other.append("a", [fork()] * 2)

        def decide(state):
            assert state.size == 2
            assert ledger.head().size == 2, "reading inside is allowed"
            return Decision("b", [Draft(fork(state.size)), Draft(fork(state.size + 1))])

        receipt = ledger.decide(decide)
    assert receipt is not None
    assert list(receipt.positions) == [2, 3]
    assert [e.body["reason"] for e in ledger.read(1)] == ["2", "3"]
    assert ledger.decide(lambda state: None) is None


def test_an_error_inside_decide_writes_nothing(ledger: Ledger) -> None:
    def fail(state):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ledger.decide(fail)
    with pytest.raises(LedgerError, match="inside decide"):
        ledger.decide(lambda state: ledger.append("a", fork()))
    with pytest.raises(LedgerError, match="inside decide"):
        ledger.decide(lambda state: ledger.decide(lambda state: None))
    assert ledger.append("a", fork()).first == 0


def test_a_read_only_handle_reads_and_does_not_write(ledger: Ledger, url: str) -> None:
    ledger.append("a", fork())
    with Ledger.open(url, read_only=True) as reader:
        assert reader.head().size == 1
        with pytest.raises(LedgerUnreachable, match="reading only"):
            reader.append("a", fork())
        with pytest.raises(LedgerUnreachable, match="reading only"):
            reader.decide(lambda state: None)
        ledger.append("a", fork())
        assert reader.state().size == 2


def test_a_closed_handle_says_so(url: str) -> None:
    ledger = Ledger.open(url)
    ledger.append("a", fork())
    ledger.close()
    ledger.close()
    for use in (lambda: ledger.append("a", fork()), ledger.head, lambda: list(ledger.read())):
        with pytest.raises(LedgerUnreachable, match="closed"):
            use()


def test_closing_the_last_handle_leaves_one_file(tmp_path: Path, file_url: str) -> None:
    with Ledger.open(file_url) as ledger:
        ledger.append("a", [fork()] * 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger.db", "ledger.db.lock"]
    with Ledger.open(file_url) as ledger:
        assert ledger.head().size == 10


def test_a_handle_that_is_only_dropped_is_closed_under_the_lock(
    tmp_path: Path, file_url: str
) -> None:
    code = (
        "from shiftbook.ledger.ledger import Ledger\n"
        "from shiftbook.ledger.events.job import ExperimentForked as F\n"
        f"ledger = Ledger.open({file_url!r})\n"
        "ledger.append('a', F(parent='p', reason='r'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger.db", "ledger.db.lock"]


def _in_child(ledger: Ledger, results) -> None:
    for use in (lambda: ledger.append("a", fork()), ledger.head):
        try:
            use()
            results.put("no error")
        except LedgerUnreachable as error:
            results.put(str(error))


def test_a_forked_child_is_told_to_open_its_own(ledger: Ledger) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(ledger, results))
    child.start()
    assert all("fork" in results.get(timeout=DEADLINE_S) for _ in range(2))
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    assert ledger.append("a", fork()).first == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ledger.db",
        "/tmp/ledger.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=ro",
        "sqlite://host/x.db",
        "mysql://u:secret@h/db",
        "postgresql://user:secret@host/db",
        "postgresql+psycopg://user:secret@host",
        "postgresql+psycopg://user:secret@host/db?schema=Bad-One",
        "postgresql+psycopg://user:secret@host/db?options=-csearch_path%3Dsecret",
        "::::",
    ],
)
def test_a_wrong_url_names_those_that_work(text: str) -> None:
    with pytest.raises(InvalidURL) as caught:
        Ledger.open(text)
    assert "sqlite:///" in str(caught.value) or "schema" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "user@" not in str(caught.value)


WRONG: dict[str, dict[str, object]] = {
    **{f"cause {value!r}": {"cause": value} for value in (2, 99, -1, 2**63, "0", True, 0.0)},
    **{
        f"occurred_ns {value!r}": {"occurred_ns": value}
        for value in (-1, 2**63, 1.5, "1", True, float("nan"))
    },
    **{f"operation {value!r}": {"operation": value} for value in (5, b"x", [])},
    **{f"writer {value!r}": {"writer": value} for value in (5, b"x", ["w"])},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_verifier_would_hold_against_the_ledger_is_refused(url: str, name: str) -> None:
    """Nothing can be taken out again, so nothing is taken in; the whole batch is left out."""
    with Ledger.open(url) as ledger:
        ledger.append("a", fork())
        with pytest.raises(errors.InvalidEvent, match="expected"):
            ledger.append("a", [fork(), Draft(fork(), **WRONG[name])])  # type: ignore[arg-type]
        assert ledger.append("a", [fork(), Draft(fork(), cause=1, occurred_ns=0)]).first == 1


@pytest.mark.parametrize("value", [5, b"x", [], 1.5])
def test_names_that_are_no_text_are_refused(url: str, value: object) -> None:
    with Ledger.open(url) as ledger:
        with pytest.raises(errors.InvalidEvent, match="text"):
            ledger.append(value or [5], fork())  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidEvent, match=r"text|key"):
            ledger.append("a", fork(), key=value)  # type: ignore[arg-type]
        assert ledger.append("a", fork()).first == 0


def test_a_newer_schema_is_refused(url: str) -> None:
    Ledger.open(url).close()
    run_sql(url, "UPDATE meta SET value = '99' WHERE name = 'storage_schema'")
    for read_only in (False, True):
        with pytest.raises(NewerLedger, match="99"):
            Ledger.open(url, read_only=read_only)


def _every_error() -> list[type[ShiftbookError]]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ShiftbookError)
    ]


VALUES = {"int": 3, "str": "x", "list[str]": ["a"], "tuple[str, ...]": ("a",)}


@pytest.mark.parametrize("kind", _every_error(), ids=lambda kind: kind.__name__)
def test_every_error_survives_the_way_to_another_process(kind: type[ShiftbookError]) -> None:
    error: ShiftbookError
    if "__init__" in vars(kind):
        parameters = list(inspect.signature(kind).parameters.values())
        error = kind(*(VALUES[str(parameter.annotation)] for parameter in parameters))
    else:
        error = kind("what was expected and found")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_receipts_and_decisions_can_be_sent(ledger: Ledger) -> None:
    receipt = ledger.append("a", fork())
    decision = Decision("a", [Draft(fork())], key="k")
    for value in (receipt, decision, ledger.head(), ledger.event(0), ledger.state()):
        assert pickle.loads(pickle.dumps(value)) == value


def test_the_log_is_copied_into_the_file_as_it_grows(tmp_path: Path, file_url: str) -> None:
    with Ledger.open(file_url) as ledger:
        small = os.stat(tmp_path / "ledger.db").st_size  # noqa: PTH116
        batch = [fork("x" * 20_000)] * 100
        for _ in range(4):
            ledger.append("a", batch)
        assert os.stat(tmp_path / "ledger.db").st_size > small + 4_000_000  # noqa: PTH116
        assert sum(1 for _ in ledger.read()) == 400
