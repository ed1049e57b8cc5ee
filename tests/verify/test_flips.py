"""Goal: no flipped bytes of a file give a traceback, or a clean verdict that covers changed rows.

Method: bits are flipped at random, a few or a burst, over the whole SQLite file of a signed run,
and over file and write-ahead log of one whose second half stands in the log; the auditor has the
key and the heads outside. Other files each time: hypothesis draws the seeds from the clock, and
prints the one that fails. ``--hypothesis-seed`` repeats a whole run, ``examine`` one file.

What a clean verdict covers is every row of the tables events, heads, nodes, meta and
derived_revision, values and their types: after a clean verdict a full read of them must give what
was written. One exception is documented: a revision that is older, or gone, is no finding. Flips
in unused space of a page, in counters of the header, in indexes and in the text of triggers change
no row. FLIPS files of each kind by default; 2,000 under the slow marker.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from shiftbook.ledger.errors import ShiftbookError
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import FileOutlet
from shiftbook.ledger.tables import KNOWN, METADATA, REVISION
from tests.verify.honest_run import Run
from tests.verify.signed_run import KEY, SIZES, Signed, long_run, write_signed

Dump = dict[str, list[tuple[object, ...]]]
OUTCOMES: dict[str, int] = {}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    """The same run as it stands while it is written: all after the second head is in the log."""
    folder = tmp_path_factory.mktemp("logged")
    entries = long_run().entries
    live = write_signed(folder, SIZES[:2], Run(entries[: SIZES[1]]))
    with closing(sqlite3.connect(live.path, isolation_level=None)) as reader:
        reader.execute("pragma journal_mode=wal")
        reader.execute("begin")
        reader.execute("select * from events").fetchone()  # keeps the log from being taken in
        for start, stop in pairwise(SIZES[1:]):
            Run(entries[start:stop]).write(live.path)
            with Ledger.open(f"sqlite:///{live.path}") as ledger:
                HeadSigner(ledger, KEY, [FileOutlet(live.heads)]).sign()
        copy = live.copy(tmp_path_factory.mktemp("as_it_stood"))
        shutil.copy(log_of(live.path), log_of(copy.path))
    return copy


@pytest.fixture(scope="module")
def target(original: Signed, tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return original.copy(tmp_path_factory.mktemp("target"))


def dump(path: Path) -> Dump:
    """Every value of every row with its type, in the order of the rows."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.text_factory = bytes
        found: Dump = {}
        for table in METADATA.tables:
            names = [row[1].decode() for row in connection.execute(f"pragma table_info({table})")]
            if not names and table == REVISION.name:
                found[table] = []
                continue
            listed = ", ".join(f'typeof("{name}"), "{name}"' for name in names)
            found[table] = connection.execute(f"select {listed} from {table}").fetchall()
        return found


def same(found: Dump, written: Dump) -> bool:
    """Whether all rows are as written; an older revision or none is brought up by a writer."""
    found, written = dict(found), dict(written)
    revision, last = found.pop(REVISION.name), written.pop(REVISION.name)
    older = [[(b"text", known.encode())] for known in KNOWN[:-1]]
    return found == written and revision in (last, [], *older)


def damage(original: Signed, target: Signed, seed: int) -> None:
    """Copy the ledger's files, bits of them flipped as the seed has it."""
    chance = random.Random(seed)
    path, log = original.path, log_of(original.path)
    data = bytearray(path.read_bytes())
    size = len(data)
    data += log.read_bytes() if log.exists() else b""
    start = chance.randrange(len(data))
    burst = chance.random() < 0.2
    for number in range(chance.choice([1, 1, 1, 2, 8, 40])):
        at = (start + number) % len(data) if burst else chance.randrange(len(data))
        # The first page, with the header and the tables' texts, is hit more often than by chance.
        at = at % 4096 if chance.random() < 0.1 else at
        data[at] ^= 1 << chance.randrange(8)
    target.path.with_name(target.path.name + "-shm").unlink(missing_ok=True)
    target.path.write_bytes(data[:size])
    log_of(target.path).unlink(missing_ok=True)
    if log.exists():
        log_of(target.path).write_bytes(data[size:])


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def examine(original: Signed, target: Signed, seed: int) -> None:
    note(f"seed {seed}")
    damage(original, target, seed)
    # Every fourth file is judged too; the stored bytes alone take a third of the time.
    outcome, told = outcome_of(target, integrity_only=bool(seed % 4))
    assert "\n" not in told
    if outcome == "clean":
        assert same(dump(target.path), dump(original.path))
    OUTCOMES[outcome] = OUTCOMES.get(outcome, 0) + 1


def outcome_of(target: Signed, *, integrity_only: bool = False) -> tuple[str, str]:
    """The word of the verdict, or the name and line of an error that says it cannot be given."""
    try:
        return target.verify(require_signed=True, integrity_only=integrity_only).word, ""
    except ShiftbookError as error:
        return f"{type(error).__name__}, exit code {error.exit_code}", str(error)


COMMON = settings(
    derandomize=False,
    database=None,
    # A seed has no simpler one.
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SEEDS = st.integers(0, 2**64)
FLIPS = 300
"""Files by default: some 10 s for each kind on a core of its own."""


@settings(COMMON, max_examples=FLIPS)
@given(seed=SEEDS)
def test_flips(original: Signed, target: Signed, seed: int) -> None:
    examine(original, target, seed)


@settings(COMMON, max_examples=FLIPS)
@given(seed=SEEDS)
def test_flips_with_a_log(logged: Signed, target: Signed, seed: int) -> None:
    examine(logged, target, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(COMMON, max_examples=2000)
@given(seed=SEEDS)
def test_many_flips(original: Signed, target: Signed, seed: int) -> None:
    examine(original, target, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(COMMON, max_examples=2000)
@given(seed=SEEDS)
def test_many_flips_with_a_log(logged: Signed, target: Signed, seed: int) -> None:
    examine(logged, target, seed)


def test_the_log_holds_what_the_file_does_not(logged: Signed, target: Signed) -> None:
    """So flips in it are flips of events; without it the ledger is an old copy."""
    shutil.copy(logged.path, target.path)
    log_of(target.path).unlink(missing_ok=True)
    target.path.with_name(target.path.name + "-shm").unlink(missing_ok=True)
    assert [f.invariant for f in target.verify().findings][:1] == ["outside"]
    shutil.copy(log_of(logged.path), log_of(target.path))
    assert target.verify(require_signed=True).exit_code == 0
    log_of(target.path).unlink()
    target.path.with_name(target.path.name + "-shm").unlink(missing_ok=True)


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
