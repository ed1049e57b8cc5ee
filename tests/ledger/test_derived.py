"""Goal: tables beside the events change from build to build; events, and older ledgers, stay.

Method: on both stores, ledgers as older builds left them are opened; a revision that does not exist
yet is run on them from a copy of the migrations; what a new ledger has is compared with what the
revisions make.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from shiftbook.ledger import derived
from shiftbook.ledger.dialect import Dialect, open_dialect
from shiftbook.ledger.errors import LedgerError, LedgerUnreachable, NewerLedger
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.tables import KNOWN, METADATA
from tests.ledger.stores import run_sql

NEXT = '''
"""A revision of tomorrow."""
import sqlalchemy as sa
from alembic import op
revision = "9999"
down_revision = "{head}"

def upgrade():
    job, n = sa.Column("job", sa.Text, primary_key=True), sa.Column("n", sa.Integer)
    op.create_table("tallies", job, n)
    op.execute("INSERT INTO tallies SELECT job, count(*) FROM events GROUP BY job")
    {then}
'''


def fork() -> ExperimentForked:
    return ExperimentForked(parent="p", reason="r")


@pytest.fixture
def old_url(store_url: str) -> str:
    """A ledger as 0.1.0 made it: events and ``meta``, no revision."""
    with Ledger.open(store_url, writer="w") as ledger:
        ledger.append("a", [fork(), fork()])
        ledger.append("b", fork())
    assert run_sql(store_url, "DROP TABLE derived_revision") is None
    return store_url


def tables(url: str) -> dict[str, set[str]]:
    dialect = open_dialect(url, lock_timeout_s=5.0)
    connection = dialect.reader()
    try:
        names = (*METADATA.tables, "tallies", "alembic_version")
        return {n: found for n in names if (found := dialect.columns(connection, n))}
    finally:
        connection.close()


def tomorrow(folder: Path, then: str = "pass") -> Path:
    scripts = folder / "migrations"
    shutil.copytree(derived.SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    text = NEXT.format(then=then, head=derived.HEAD)
    (scripts / "versions" / "r9999_tallies.py").write_text(text, encoding="utf-8")
    return scripts


def upgrade_to_tomorrow(url: str, scripts: Path) -> None:
    dialect: Dialect = open_dialect(url, lock_timeout_s=20.0)
    dialect.lock()
    try:
        derived.upgrade(dialect, scripts=scripts)
    finally:
        dialect.unlock()
        dialect.close()


def test_the_newest_script_is_the_revision_that_new_ledgers_get() -> None:
    config = Config()
    config.set_main_option("script_location", str(derived.SCRIPTS))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_current_head() == derived.HEAD
    assert tuple(s.revision for s in scripts.walk_revisions())[::-1] == KNOWN


def test_a_new_ledger_needs_no_upgrade_and_does_not_load_alembic(store_url: str) -> None:
    code = (
        "import sys\nfrom shiftbook.ledger.ledger import Ledger\n"
        "Ledger.open(sys.argv[1]).close()\nLedger.open(sys.argv[1]).close()\n"
        "print('alembic' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, store_url], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_an_older_ledger_is_brought_up_when_it_is_opened_for_writing(old_url: str) -> None:
    with Ledger.open(old_url, read_only=True) as reader:
        before = [(row.position, row.data, row.leaf) for row in reader.rows()]
    assert "derived_revision" not in tables(old_url), "reading changes nothing"
    with Ledger.open(old_url, writer="w") as ledger:
        assert ledger.append("a", fork()).first == 3
        assert [(r.position, r.data, r.leaf) for r in ledger.rows(until=2)] == before
    assert tables(old_url).keys() == METADATA.tables.keys()
    Ledger.open(old_url).close()


def test_revisions_make_what_a_new_ledger_has(old_url: str) -> None:
    """Also where ``meta`` has to be made: the same columns either way."""
    Ledger.open(old_url).close()
    upgraded = tables(old_url)
    assert run_sql(old_url, "DROP TABLE derived_revision", "DROP TABLE meta") is None
    upgrade_to_tomorrow(old_url, derived.SCRIPTS)
    assert tables(old_url) == upgraded


def has_index(url: str) -> bool:
    made = run_sql(url, "CREATE INDEX events_type_position ON events (type, position)")
    if made is None:
        assert run_sql(url, "DROP INDEX events_type_position") is None
    return made is not None


def test_a_ledger_of_before_there_was_an_index_by_type_gets_it(store_url: str) -> None:
    with Ledger.open(store_url, writer="w") as ledger:
        ledger.append("a", [fork(), fork()])
    before = "UPDATE derived_revision SET version_num = '0001'"
    assert run_sql(store_url, "DROP INDEX events_type_position", before) is None
    with Ledger.open(store_url, read_only=True) as reader:
        assert [e.position for e in reader.read(types=["ExperimentForked", "x"])] == [0, 1]
    assert not has_index(store_url), "reading changes nothing"
    with Ledger.open(store_url, writer="w") as ledger:
        assert ledger.append("a", fork()).first == 2
    assert has_index(store_url)


def test_many_openers_of_an_older_ledger_upgrade_it_once(old_url: str) -> None:
    opened: list[int] = []

    def open_it() -> None:
        with Ledger.open(old_url, lock_timeout_s=30.0) as ledger:
            opened.append(ledger.append("c", fork()).first)

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(opened) == list(range(3, 9))


def test_a_revision_of_tomorrow_is_carried_and_refused_by_todays_code(
    store_url: str, tmp_path: Path
) -> None:
    with Ledger.open(store_url, writer="w") as ledger:
        ledger.append("a", [fork(), fork()])
        ledger.append("b", fork())
        upgrade_to_tomorrow(store_url, tomorrow(tmp_path))
        assert tables(store_url)["tallies"] == {"job", "n"}
        assert run_sql(store_url, "INSERT INTO tallies VALUES ('a', 9)") is not None, "filled"
        assert ledger.head().size == 3, "a handle that was open goes on"
    for read_only in (False, True):
        with pytest.raises(
            NewerLedger, match=rf"revision {derived.HEAD} or older.*found 9999.*newer"
        ):
            Ledger.open(store_url, read_only=read_only)


def test_a_revision_that_fails_leaves_nothing_behind(old_url: str, tmp_path: Path) -> None:
    before = tables(old_url).keys()
    assert "derived_revision" not in before
    with pytest.raises(LedgerError):
        upgrade_to_tomorrow(old_url, tomorrow(tmp_path, "op.execute('SELECT * FROM nowhere')"))
    assert tables(old_url).keys() == before, "not even the first revision"
    with Ledger.open(old_url) as ledger:
        assert ledger.append("a", fork()).first == 3


def test_a_revision_waits_for_the_append_lock(store_url: str, tmp_path: Path) -> None:
    with Ledger.open(store_url) as ledger:
        ledger.append("a", fork())
        scripts = tomorrow(tmp_path)
        dialect = open_dialect(store_url, lock_timeout_s=0.2)
        held: list[str] = []

        def fn(state: object) -> None:
            try:
                dialect.lock()
                derived.upgrade(dialect, scripts=scripts)
            except LedgerUnreachable as error:
                held.append(str(error))

        ledger.decide(fn)
        assert len(held) == 1
        assert "tallies" not in tables(store_url)
