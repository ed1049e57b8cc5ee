"""Goal: no flipped bytes of the file give a traceback, or a clean verdict that covers changed rows.

Method: bits are flipped at random, a few or a burst, over the whole SQLite file of a signed run, by
a seed that hypothesis draws the same way each time; the auditor has the key and the heads outside.
What a clean verdict covers is every row of the tables events, heads, nodes and meta, values and
their types: after a clean verdict a full read of them must give what was written. Flips in unused
space of a page, in counters of the header, in indexes and in the text of triggers change no row.
200 files by default; 2,000 under the slow marker.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from shiftbook.ledger.errors import ShiftbookError
from tests.verify.signed_run import Signed, write_signed

Dump = dict[str, list[tuple[object, ...]]]
OUTCOMES: dict[str, int] = {}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


@pytest.fixture(scope="module")
def target(original: Signed, tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return original.copy(tmp_path_factory.mktemp("target"))


def dump(path: Path) -> Dump:
    """Every value of every row with its type, in the order of the rows."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.text_factory = bytes
        found: Dump = {}
        for table in ("events", "heads", "nodes", "meta"):
            names = [row[1].decode() for row in connection.execute(f"pragma table_info({table})")]
            listed = ", ".join(f'typeof("{name}"), "{name}"' for name in names)
            found[table] = connection.execute(f"select {listed} from {table}").fetchall()
        return found


def damage(original: Signed, target: Signed, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(original.path.read_bytes())
    start = chance.randrange(len(data))
    burst = chance.random() < 0.2
    for number in range(chance.choice([1, 1, 1, 2, 8, 40])):
        at = (start + number) % len(data) if burst else chance.randrange(len(data))
        # The first page, with the header and the tables' texts, is hit more often than by chance.
        at = at % 4096 if chance.random() < 0.1 else at
        data[at] ^= 1 << chance.randrange(8)
    target.path.write_bytes(data)


def examine(original: Signed, target: Signed, seed: int) -> None:
    note(f"seed {seed}")
    damage(original, target, seed)
    outcome, told = outcome_of(target)
    assert "\n" not in told
    if outcome == "clean":
        assert dump(target.path) == dump(original.path)
    OUTCOMES[outcome] = OUTCOMES.get(outcome, 0) + 1


def outcome_of(target: Signed) -> tuple[str, str]:
    """The word of the verdict, or the name and line of an error that says it cannot be given."""
    try:
        return target.verify(require_signed=True).word, ""
    except ShiftbookError as error:
        return f"{type(error).__name__}, exit code {error.exit_code}", str(error)


COMMON = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(COMMON, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_flips(original: Signed, target: Signed, seed: int) -> None:
    examine(original, target, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(COMMON, max_examples=2000)
@given(seed=st.integers(2**32, 2**64))
def test_many_flips(original: Signed, target: Signed, seed: int) -> None:
    examine(original, target, seed)


def test_the_flips_did_all_that_they_can_do(original: Signed, target: Signed) -> None:
    """Both a clean verdict and findings came up, so neither half of the test was empty."""
    if not OUTCOMES:
        for seed in range(60):
            examine(original, target, seed)
    print(OUTCOMES)
    assert OUTCOMES.get("clean", 0) > 5
    assert OUTCOMES.get("findings", 0) > 20
    could_not = {"could not judge", "UnreadableStore, exit code 2", "NothingToJudge, exit code 2"}
    assert set(OUTCOMES) <= {"clean", "findings"} | could_not


def test_every_bit_of_heads_nodes_and_meta_counts(original: Signed, target: Signed) -> None:
    """Each stored value of the small tables is changed in the file by one bit, at each byte."""
    whole = original.path.read_bytes()
    with closing(sqlite3.connect(original.path)) as connection:
        values = [
            bytes(row[0])
            for row in connection.execute(
                "select note from heads union all select hash from nodes "
                "union all select cast(value as blob) from meta where length(value) > 3"
            )
        ]
    assert len(values) == 6
    for value in values:
        at = whole.find(value)
        assert at > 0
        for offset in range(0, len(value), 13):
            data = bytearray(whole)
            data[at + offset] ^= 1 << offset % 8
            target.path.write_bytes(data)
            assert target.verify().exit_code == 1, (value, offset)
    shutil.copy(original.path, target.path)
    assert target.verify().exit_code == 0
