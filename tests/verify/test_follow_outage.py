"""Goal: the judge of a live run outlives its ledger's outages and loses no finding by them.

Method: a real PostgreSQL server is stopped, crashed and started in the middle of a followed run
with a fault: while the judge reads, and at the moment at which it has a finding to write down. The
verdict is held against one made afterwards. The command itself follows and freezes a ledger in a
file, as a process of its own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify import patient
from shiftbook.verify.errors import OutOfReach
from shiftbook.verify.findings import Finding
from shiftbook.verify.guard import Guard
from shiftbook.verify.patient import outlive
from shiftbook.verify.verdict import Verdict, follow, verify
from tests.postgres_server import PostgresServer, running_server
from tests.verify.honest_run import JOB, Entry, Run, _final

DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresServer]:
    monkeypatch.setenv("PGUSER", "postgres")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with running_server(fsync="off") as running:
        yield running


@pytest.fixture
def faulty(run: Run) -> Run:
    run.get("UpdateApplied", 1).change(learning_rate=9.0)
    return run


def append(url: str, entries: list[Entry]) -> None:
    with Ledger.open(url, writer="writer-1", actor="tester") as ledger:
        ledger.append(JOB, [Draft(_final(e, ledger), e.operation) for e in entries])


def test_following_goes_on_after_outages(faulty: Run, server: PostgresServer) -> None:
    """Stopped and crashed, before the fault is written and before the job ends."""
    url = server.url()
    at, closing = faulty.at("UpdateApplied", 1), faulty.at("JobClosed")
    parts = [faulty.entries[:at], faulty.entries[at : at + 5], faulty.entries[at + 5 :]]
    assert at + 5 < closing
    append(url, parts[0])
    reached, away = threading.Semaphore(0), threading.Semaphore(0)
    targets = {at - 1, at + 4}
    seen: list[int] = []
    made: list[str] = []
    verdicts: list[Verdict] = []

    def take(position: int) -> None:
        seen.append(position)
        if position in targets:
            reached.release()

    def watch() -> None:
        verdicts.append(
            follow(
                url,
                stop=threading.Event(),
                poll_s=0.01,
                on_finding=lambda finding: made.append(finding.invariant),
                on_event=take,
                on_problem=lambda error: away.release(),
            )
        )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    for how, part in zip(("fast", "immediate"), parts[1:], strict=True):
        assert reached.acquire(timeout=DEADLINE_S)
        server.stop(how)
        assert away.acquire(timeout=DEADLINE_S)
        server.start()
        append(url, part)
    watcher.join(DEADLINE_S)
    assert not watcher.is_alive()
    assert seen == list(range(len(faulty.entries))), "each event once"
    assert made == ["I18"]
    assert verdicts[0].plain() == verify(url).plain()


def test_a_finding_of_an_outage_is_written_when_it_ends(
    faulty: Run, server: PostgresServer
) -> None:
    """The server goes at the moment of the finding, before the guard can write it down."""
    url, closing = server.url(), faulty.at("JobClosed")
    append(url, faulty.entries[:closing])
    ended = threading.Event()
    told: list[Exception] = []
    outages: list[str] = []

    def at_finding(finding: Finding) -> None:
        if not outages:
            server.stop("fast")
            outages.append(finding.invariant)

    def back(error: Exception) -> None:
        told.append(error)
        server.start()

    def take(position: int) -> None:
        if position == closing + 1:
            ended.set()  # what the guard wrote was judged as well

    with Ledger.open(url, create=False, lock_timeout_s=1.0) as ledger:
        guard = Guard(ledger, also=at_finding, stop=ended, on_problem=back)
        verdict = follow(url, stop=ended, poll_s=0.01, on_finding=guard.on_finding, on_event=take)
        events = [event for event in ledger.read() if event.position >= closing]
        assert ledger.state().job(JOB).safe_mode is not None
    assert outages == ["I18"]
    assert len(told) == 1
    assert [event.type for event in events] == ["DivergenceFlagged", "SafeModeEntered"]
    assert events[0].body["invariant"] == "I18"
    assert verdict.exit_code == 1


def test_who_stops_during_an_outage_is_told_of_it(faulty: Run, server: PostgresServer) -> None:
    url, stop = server.url(), threading.Event()
    append(url, faulty.entries[:20])

    def take(position: int) -> None:
        if position == 19:
            server.stop("fast")

    with pytest.raises(OutOfReach, match="check that the server runs"):
        follow(url, stop=stop, poll_s=0.01, on_event=take, on_problem=lambda error: stop.set())
    with pytest.raises(OutOfReach):  # and an outage at the beginning is no outage to wait for
        follow(url, stop=threading.Event())
    with pytest.raises(OutOfReach):
        verify(url)


def test_pauses_grow_and_an_outage_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self.pauses_s: list[float] = []

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            self.pauses_s.append(timeout)
            return self.is_set()

    monkeypatch.setattr(patient, "FIRST_PAUSE_S", 1.0)
    stop, told, left = Stop(), list[Exception](), [LedgerUnreachable(str(n)) for n in range(6)]

    def act() -> str:
        if left:
            raise left.pop(0)
        return "done"

    assert outlive(act, LedgerUnreachable, stop, told.append) == "done"
    assert stop.pauses_s == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert [str(error) for error in told] == ["0"]
    left.append(LedgerUnreachable("again"))
    stop.set()
    with pytest.raises(LedgerUnreachable, match="again"):
        outlive(act, LedgerUnreachable, stop)
    left.append(LedgerUnreachable("x"))
    with pytest.raises(LedgerUnreachable):
        outlive(act, OutOfReach, Stop())


def test_the_command_follows_and_freezes_as_a_process(faulty: Run, tmp_path: Path) -> None:
    path, closing = tmp_path / "live.db", faulty.at("JobClosed")
    at = faulty.at("UpdateApplied", 1)
    Run(faulty.entries[:at]).write(path)
    process = subprocess.Popen(
        [sys.executable, "-c", "from shiftbook.ledger.cli import main; main()", "verify",
         str(path), "--follow", "--freeze", "--format", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        append(f"sqlite:///{path}", faulty.entries[at:closing])
        with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
            deadline = time.monotonic() + DEADLINE_S
            while ledger.state().job(JOB).safe_mode is None:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                threading.Event().wait(0.05)
            assert ledger.head().size == closing + 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    lines = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert process.returncode == 1
    assert [(line["kind"], line["invariant"]) for line in lines if line["kind"] == "finding"] == [
        ("finding", "I18")
    ]
    assert (lines[-1]["kind"], lines[-1]["verdict"]) == ("verdict", "findings")
    with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
        types = [e.type for e in ledger.read()][closing:]
    assert types == ["DivergenceFlagged", "SafeModeEntered"]
