"""Goal: a plain SQLite connection, past all of our code, can neither change nor reorder the book.

Method: a raw sqlite3 connection in a process of its own tries UPDATE, DELETE, every form of
INSERT OR ..., gaps and wrong versions and sequences; each must fail and change nothing.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger

COLUMNS = "position, job, version, type, schema, operation, key, writer, sequence, recorded_ns"

CHILD = """
import json, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
try:
    connection.execute(sys.argv[2])
    connection.commit()
    print(json.dumps("done"))
except sqlite3.Error as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def attempt(path: Path, sql: str) -> str:
    """Run one statement in a fresh process, as another program would; what came of it."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), sql], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def insert(verb: str, position: object, job: str, version: int, writer: str, sequence: int) -> str:
    return (
        f"{verb} INTO events VALUES ({position}, '{job}', {version}, 'T', 1, NULL, NULL, "
        f"'{writer}', {sequence}, 1, x'7b7d', zeroblob(32))"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ledger.db"
    with Ledger.open(f"sqlite:///{file}", writer="w") as ledger:
        for number in range(4):
            ledger.append("a", ExperimentForked(parent="p", reason=str(number)), key=f"k{number}")
        ledger.append("b", ExperimentForked(parent="p", reason="other"))
    return file


def rows(path: Path) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    found = connection.execute(f"SELECT {COLUMNS}, data, leaf FROM events").fetchall()
    connection.close()
    return found


REFUSED = {
    "update": "UPDATE events SET data = x'00' WHERE position = 1",
    "update or replace": "UPDATE OR REPLACE events SET position = 1 WHERE position = 2",
    "update of a key": "UPDATE events SET key = NULL",
    "delete": "DELETE FROM events WHERE position = 4",
    "delete all": "DELETE FROM events",
    "gap": insert("INSERT", 6, "a", 4, "w", 5),
    "far gap": insert("INSERT", 2**62, "a", 4, "w", 5),
    "negative": insert("INSERT", -1, "a", 4, "w", 5),
    "no position": insert("INSERT", "NULL", "a", 4, "w", 5),
    "taken position": insert("INSERT", 2, "a", 4, "w", 5),
    "replace a position": insert("INSERT OR REPLACE", 2, "a", 2, "w", 2),
    "replace the last": insert("INSERT OR REPLACE", 4, "b", 0, "w", 4),
    "replace a version": insert("INSERT OR REPLACE", 5, "a", 2, "x", 0),
    "replace a sequence": insert("INSERT OR REPLACE", 5, "a", 4, "w", 2),
    "REPLACE": insert("REPLACE", 3, "a", 3, "w", 3),
    "ignore": insert("INSERT OR IGNORE", 7, "a", 4, "w", 5),
    "fail": insert("INSERT OR FAIL", 7, "a", 4, "w", 5),
    "rollback": insert("INSERT OR ROLLBACK", 7, "a", 4, "w", 5),
    "upsert": insert("INSERT", 2, "a", 2, "w", 2)
    + " ON CONFLICT (position) DO UPDATE SET data = x'00'",
    "version gap": insert("INSERT", 5, "a", 5, "w", 5),
    "version again": insert("INSERT", 5, "a", 3, "w", 5),
    "new job not from 0": insert("INSERT", 5, "c", 1, "w", 5),
    "sequence gap": insert("INSERT", 5, "a", 4, "w", 6),
    "new writer not from 0": insert("INSERT", 5, "a", 4, "x", 1),
    "second row of two": insert("INSERT", 5, "a", 4, "w", 5)
    + ", (7, 'a', 5, 'T', 1, NULL, NULL, 'w', 6, 1, x'7b7d', zeroblob(32))",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_changed(name: str, path: Path) -> None:
    before = rows(path)
    answer = attempt(path, REFUSED[name])
    assert answer != "done", name
    assert rows(path) == before


def test_what_follows_in_everything_is_allowed(path: Path) -> None:
    """The control: the triggers refuse what is wrong, not everything."""
    assert attempt(path, insert("INSERT", 5, "a", 4, "w", 5)) == "done"
    assert attempt(path, insert("INSERT OR REPLACE", 6, "new", 0, "new", 0)) == "done"
    assert [row[0] for row in rows(path)] == list(range(7))


def test_the_first_event_must_be_at_0(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    Ledger.open(f"sqlite:///{file}").close()
    assert attempt(file, insert("INSERT", 1, "a", 0, "w", 0)) != "done"
    assert attempt(file, insert("INSERT", 0, "a", 0, "w", 0)) == "done"


def test_a_trigger_that_refuses_our_own_append_is_said_in_words(path: Path) -> None:
    """A row that another program slipped in does not confuse a handle that was open before."""
    with Ledger.open(f"sqlite:///{path}", writer="w") as ledger:
        ledger.append("a", ExperimentForked(parent="p", reason="mine"))
        assert attempt(path, insert("INSERT", 6, "a", 5, "w", 6)) == "done"
        receipt = ledger.append("a", ExperimentForked(parent="p", reason="next"))
        assert (receipt.first, receipt.first_version) == (7, 6)
        assert ledger.event(7).sequence == 7
