"""Goal: any sequence of appends, decisions, repeats, reopenings and crashes equals a plain list.

Method: a hypothesis state machine drives two handles on one real file beside a list of what should
stand. A crash copies the files as they are at that moment, log included, and goes on with the copy.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import IdempotencyConflict, UnknownPosition, VersionConflict
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Decision, Ledger
from shiftbook.ledger.state import fold
from tests.ledger.stores import new_url, postgres_of_the_session

JOBS = st.sampled_from(["a", "b", "ж"])
BATCHES = st.lists(st.sampled_from(["x", "y", "é", ""]), min_size=1, max_size=4)
HANDLES = st.integers(0, 1)


@dataclass(frozen=True)
class Row:
    job: str
    reason: str
    key: str | None
    writer: str


def events(reasons: list[str]) -> list[Event]:
    return [ExperimentForked(parent="p", reason=reason) for reason in reasons]


class LedgerMachine(RuleBasedStateMachine):
    store = "sqlite"
    keyed = Bundle("keyed")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-machine-"))
        self.copies = 0
        self.rows: list[Row] = []
        self.keys: dict[tuple[str, str], tuple[list[str], int]] = {}
        self.url = new_url(self.store, self.folder)
        self.handles = [self.open(0), self.open(1)]

    def open(self, number: int) -> Ledger:
        return Ledger.open(self.url, writer=f"w{number}")

    def teardown(self) -> None:
        for handle in getattr(self, "handles", []):
            handle.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder.parent / self.folder.name, ignore_errors=True)

    def version(self, job: str) -> int:
        return sum(row.job == job for row in self.rows) - 1

    def expect(self, number: int, job: str, reasons: list[str], key: str | None) -> None:
        if key is not None:
            self.keys[job, key] = reasons, len(self.rows)
        self.rows += [Row(job, reason, key, f"w{number}") for reason in reasons]

    @rule(number=HANDLES, job=JOBS, reasons=BATCHES)
    def append(self, number: int, job: str, reasons: list[str]) -> None:
        first, version = len(self.rows), self.version(job)
        receipt = self.handles[number].append(job, events(reasons))
        self.expect(number, job, reasons, None)
        assert list(receipt.positions) == list(range(first, len(self.rows)))
        assert (receipt.first_version, receipt.last_version) == (version + 1, self.version(job))
        assert not receipt.repeated

    @rule(target=keyed, number=HANDLES, job=JOBS, reasons=BATCHES, key=st.sampled_from("klm"))
    def append_with_key(self, number: int, job: str, reasons: list[str], key: str):
        handle, known = self.handles[number], self.keys.get((job, key))
        if known is None:
            receipt = handle.append(job, events(reasons), key=key)
            assert (receipt.first, receipt.repeated) == (len(self.rows), False)
            self.expect(number, job, reasons, key)
        elif known[0] == reasons:
            receipt = handle.append(job, events(reasons), key=key)
            assert (receipt.first, receipt.repeated) == (known[1], True)
        else:
            with pytest.raises(IdempotencyConflict):
                handle.append(job, events(reasons), key=key)
        return job, key

    @rule(number=HANDLES, which=keyed, version=st.integers(-1, 5), decided=st.booleans())
    def repeat(self, number: int, which: tuple[str, str], version: int, decided: bool) -> None:
        reasons, first = self.keys[which]
        job, key = which
        if decided:
            drafts = [Draft(event) for event in events(reasons)]
            receipt = self.handles[number].decide(lambda state: Decision(job, drafts, key))
        else:
            receipt = self.handles[number].append(
                job, events(reasons), key=key, expected_version=version
            )
        assert receipt is not None
        assert (receipt.first, receipt.last) == (first, first + len(reasons) - 1)
        assert receipt.repeated

    @rule(number=HANDLES, job=JOBS, reasons=BATCHES, off=st.integers(-2, 2))
    def append_at_version(self, number: int, job: str, reasons: list[str], off: int) -> None:
        expected = self.version(job) + off
        if off:
            with pytest.raises(VersionConflict) as caught:
                self.handles[number].append(job, events(reasons), expected_version=expected)
            assert caught.value.found == self.version(job)
        else:
            self.handles[number].append(job, events(reasons), expected_version=expected)
            self.expect(number, job, reasons, None)

    @rule(number=HANDLES, job=JOBS, nothing=st.booleans())
    def decide(self, number: int, job: str, nothing: bool) -> None:
        def choose(state):
            assert state.size == len(self.rows)
            assert state.job(job).version == self.version(job)
            reason = str(state.size)
            return None if nothing else Decision(job, [Draft(events([reason])[0])])

        receipt = self.handles[number].decide(choose)
        if nothing:
            assert receipt is None
        else:
            assert receipt is not None
            assert receipt.first == len(self.rows)
            self.expect(number, job, [str(len(self.rows))], None)

    @rule(number=HANDLES)
    def reopen(self, number: int) -> None:
        self.handles[number].close()
        self.handles[number] = self.open(number)

    @precondition(lambda self: self.copies < 3 and self.store == "sqlite")
    @rule()
    def crash(self) -> None:
        """Go on with the files as a kill at this moment leaves them.

        The copy is made by another process: closing the file here would drop SQLite's locks.
        """
        self.copies += 1
        target = self.folder.with_name(f"{self.folder.name}-{self.copies}")
        subprocess.run(["cp", "-r", str(self.folder), str(target)], check=True)
        for handle in self.handles:
            handle.close()
        shutil.rmtree(self.folder)
        self.folder = target
        self.url = new_url(self.store, self.folder)
        self.handles = [self.open(0), self.open(1)]

    @precondition(lambda self: self.copies < 3 and self.store == "postgresql")
    @rule(number=HANDLES)
    def cut(self, number: int) -> None:
        """The server ends every connection; the handles go on by themselves."""
        self.copies += 1
        with psycopg.connect(**postgres_of_the_session().parameters) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'shiftbook'"
            )

    @invariant()
    def the_book_is_the_list(self) -> None:
        if not hasattr(self, "rows"):
            return
        for handle in self.handles:
            stored = list(handle.read())
            assert [Row(e.job, e.body["reason"], e.key, e.writer) for e in stored] == self.rows
            assert [e.position for e in stored] == list(range(len(self.rows)))
            for name in "abж":
                versions = [e.version for e in stored if e.job == name]
                assert versions == list(range(len(versions)))
            for writer in ("w0", "w1"):
                sequences = [e.sequence for e in stored if e.writer == writer]
                assert sequences == list(range(len(sequences)))
            head = handle.head()
            assert head.size == len(self.rows)
            assert head.leaf == (leaf_hash(stored[-1].data) if stored else None)
            assert handle.state() == fold(stored)
            with pytest.raises(UnknownPosition):
                handle.event(len(self.rows))


class PostgresLedgerMachine(LedgerMachine):
    store = "postgresql"


for machine in (LedgerMachine, PostgresLedgerMachine):
    machine.TestCase.settings = settings(
        max_examples=25,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
TestLedgerMachine = LedgerMachine.TestCase
TestPostgresLedgerMachine = PostgresLedgerMachine.TestCase
