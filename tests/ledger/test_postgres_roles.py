"""Goal: a writer role can append and read and nothing else, and doctor says who can do more.

Method: roles on a real server, made by ``doctor --grant``; each tries what it must not; a second
server with careless settings is looked at.
"""

from __future__ import annotations

import json
import secrets
import shlex

import psycopg
import pytest
from click.testing import CliRunner, Result

from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.postgres_health import check_version
from tests.ledger.stores import run_sql
from tests.postgres_server import PostgresServer, running_server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def checks(result: Result) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in json.loads(result.stdout)}


def fork() -> ExperimentForked:
    return ExperimentForked(parent="p", reason="r")


@pytest.fixture
def role(postgres: PostgresServer, postgres_url: str) -> str:
    """A role that ``doctor --grant`` made, and the ledger with it."""
    name = f"writer_{secrets.token_hex(4)}"
    result = run("doctor", "--ledger", postgres_url, "--grant", name, "--format", "json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["status"] == "ok"
    others = ("meta", "heads", "nodes", "derived_revision")
    held = "; ".join(f"{table} SELECT" for table in others)
    assert f"{name}: events SELECT, INSERT; {held}" == row["found"]
    return name


def as_role(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}@")


FORBIDDEN = {
    "update": "UPDATE events SET key = 'x'",
    "delete": "DELETE FROM events",
    "truncate": "TRUNCATE events",
    "drop": "DROP TABLE events",
    "drop a trigger": "DROP TRIGGER events_change ON events",
    "disable triggers": "ALTER TABLE events DISABLE TRIGGER ALL",
    "add a trigger": "CREATE TRIGGER t BEFORE INSERT ON events FOR EACH ROW "
    "EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "replace the function": "CREATE OR REPLACE FUNCTION events_refuse() RETURNS trigger "
    "LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    "pose as a replica": "SET session_replication_role = replica",
    "change meta": "UPDATE meta SET value = '9'",
    "add to meta": "INSERT INTO meta VALUES ('a', 'b')",
    "change the revision": "DELETE FROM derived_revision",
    "a table beside": "CREATE TABLE more (a int)",
    "copy out to a file": "COPY events TO '/tmp/events'",
}


def test_the_writer_appends_decides_and_reads(postgres_url: str, role: str) -> None:
    with Ledger.open(as_role(postgres_url, role)) as ledger:
        assert ledger.append("a", [fork()] * 20, key="k").first == 0
        assert ledger.append("a", [fork()] * 20, key="k").repeated
        assert ledger.append("a", fork()).first == 20
        assert ledger.state().size == 21


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_writer_may_do_nothing_else(
    postgres: PostgresServer, postgres_url: str, role: str, name: str
) -> None:
    with Ledger.open(as_role(postgres_url, role)) as ledger:
        ledger.append("a", fork())
    with psycopg.connect(**{**postgres.parameters, "user": role}) as connection:
        connection.execute(f"SET search_path = {postgres_url.rpartition('schema=')[2]}")  # type: ignore[call-overload]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(FORBIDDEN[name])  # type: ignore[call-overload]


def test_the_writer_cannot_make_or_upgrade_a_ledger(
    postgres: PostgresServer, postgres_url: str, role: str
) -> None:
    with pytest.raises(LedgerUnreachable, match="--grant"):
        Ledger.open(postgres.url("not_for_writers", user=role))
    assert run_sql(postgres_url, "DROP TABLE derived_revision") is None
    with pytest.raises(LedgerUnreachable, match="--grant"):
        Ledger.open(as_role(postgres_url, role))
    with Ledger.open(as_role(postgres_url, role), read_only=True) as ledger:
        assert ledger.head().size == 0
    again = run("doctor", "--ledger", postgres_url, "--grant", role)
    assert again.exit_code == 0, "the owner brings it up on the way"
    with Ledger.open(as_role(postgres_url, role)) as ledger:
        assert ledger.append("a", fork()).first == 0


def test_doctor_says_what_a_role_may_do(postgres_url: str, role: str) -> None:
    found = checks(
        run("doctor", "--ledger", as_role(postgres_url, role), "--format", "json")
    )  # fmt: skip
    assert found["role"]["status"] == "ok"
    assert found["triggers"]["status"] == "ok"
    assert found["server"]["found"].startswith("PostgreSQL 1")
    assert found["ledger"]["status"] == "ok"
    assert role not in found["ledger"]["found"]

    owner = checks(run("doctor", "--ledger", postgres_url, "--format", "json"))["role"]
    assert owner["status"] == "warning"
    assert "superuser" in owner["found"]
    assert "--grant shiftbook_writer" in owner["fix"]


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("GRANT UPDATE, TRUNCATE ON events TO {role}", "TRUNCATE, UPDATE on events"),
        ("GRANT INSERT ON meta TO {role}", "INSERT on meta"),
        ("GRANT CREATE ON SCHEMA {schema} TO {role}", "CREATE in schema"),
        ("GRANT DELETE ON events TO PUBLIC", "DELETE on events"),
        ("GRANT UPDATE (data, leaf) ON events TO {role}", "UPDATE of columns on events"),
        ("GRANT INSERT (size) ON heads TO PUBLIC", "INSERT of columns on heads"),
        ("ALTER TABLE events OWNER TO {role}", "the owner"),
    ],
)
def test_doctor_finds_a_grant_too_many_and_mends_it(
    postgres_url: str, role: str, statement: str, told: str
) -> None:
    schema = postgres_url.rpartition("schema=")[2]
    assert run_sql(postgres_url, statement.format(role=role, schema=schema)) is None
    url = as_role(postgres_url, role)
    row = checks(run("doctor", "--ledger", url, "--format", "json"))["role"]
    assert row["status"] == "warning"
    assert told in row["found"]
    if "OWNER" in statement:
        return  # the table has to be given back by hand
    assert run("doctor", "--ledger", postgres_url, "--grant", role).exit_code == 0
    assert checks(run("doctor", "--ledger", url, "--format", "json"))["role"]["status"] == "ok"


THROUGH = {
    "a role that may change": (
        "GRANT UPDATE, DELETE ON events TO {other}; GRANT {other} TO {role}",
        "UPDATE, DELETE on events",
    ),
    "one of another": (
        "GRANT TRUNCATE ON heads TO {other}; CREATE ROLE {other}2; "
        "GRANT {other} TO {other}2; GRANT {other}2 TO {role}",
        "TRUNCATE on heads",
    ),
    "the owner": ("ALTER TABLE events OWNER TO {other}; GRANT {other} TO {role}", "the owner"),
    "a superuser": ("ALTER ROLE {other} SUPERUSER; GRANT {other} TO {role}", "a superuser"),
    "one that makes roles": ("ALTER ROLE {other} CREATEROLE; GRANT {other} TO {role}", "roles"),
    "one that makes tables": (
        "GRANT CREATE ON SCHEMA {schema} TO {other}; GRANT {other} TO {role}",
        "CREATE in schema",
    ),
    "the server's own": ("GRANT pg_write_all_data TO {role}", "UPDATE, DELETE on events"),
    "by itself": ("ALTER ROLE {role} CREATEROLE", "may make roles"),
}


@pytest.mark.parametrize("inherits", ["INHERIT", "NOINHERIT"])
@pytest.mark.parametrize("name", THROUGH)
def test_doctor_finds_what_a_role_may_become_and_mends_it(
    postgres_url: str, role: str, name: str, inherits: str
) -> None:
    """A role that is a member of another can become it, whether it inherits its rights or not."""
    other, schema = f"other_{secrets.token_hex(4)}", postgres_url.rpartition("schema=")[2]
    statements, told = THROUGH[name]
    for statement in (
        f"CREATE ROLE {other}",
        f"ALTER ROLE {role} {inherits}",
        *statements.format(role=role, other=other, schema=schema).split("; "),
    ):
        assert run_sql(postgres_url, statement) is None
    url, mended = as_role(postgres_url, role), []
    for _ in range(3):
        row = checks(run("doctor", "--ledger", url, "--format", "json"))["role"]
        if row["status"] == "ok":
            break
        assert told in row["found"]
        mended = shlex.split(row["fix"])
        assert mended[:2] == ["psql", "-c"], row
        assert run_sql(postgres_url, mended[2]) is None, row
    assert row["status"] == "ok", row
    assert mended


def test_a_group_that_reads_is_no_power(postgres_url: str, role: str) -> None:
    group = f"readers_{secrets.token_hex(4)}"
    for statement in (
        f"CREATE ROLE {group}",
        f"GRANT SELECT ON events TO {group}",
        f"GRANT {group} TO {role}",
    ):
        assert run_sql(postgres_url, statement) is None
    row = checks(run("doctor", "--ledger", as_role(postgres_url, role), "--format", "json"))["role"]
    assert row["status"] == "ok"


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("DROP TRIGGER events_insert ON events", "lacks events_insert"),
        ("ALTER TABLE events DISABLE TRIGGER events_change", "do not always fire"),
        ("ALTER TABLE events ENABLE TRIGGER events_change", "do not always fire"),
    ],
)
def test_doctor_finds_triggers_that_are_gone(postgres_url: str, statement: str, told: str) -> None:
    Ledger.open(postgres_url).close()
    assert run_sql(postgres_url, statement) is None
    result = run("doctor", "--ledger", postgres_url, "--format", "json")
    assert result.exit_code == 1
    assert checks(result)["triggers"]["status"] == "wrong"
    assert told in checks(result)["triggers"]["found"]


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TRIGGER events_insert ON events",
        "DROP FUNCTION heads_refuse() CASCADE",
        "ALTER TABLE nodes DISABLE TRIGGER nodes_change",
        "CREATE OR REPLACE FUNCTION events_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN RETURN NULL; END'",
    ],
)
def test_the_owner_puts_triggers_back(postgres_url: str, statement: str) -> None:
    """With the command that doctor names, and they refuse again."""
    with Ledger.open(postgres_url) as ledger:
        ledger.append("job", ExperimentForked(parent="p", reason="r"))
    assert run_sql(postgres_url, statement) is None
    role = f"w_{secrets.token_hex(4)}"
    assert run("doctor", "--ledger", postgres_url, "--grant", role).exit_code == 0
    result = run("doctor", "--ledger", postgres_url, "--format", "json")
    assert checks(result)["triggers"]["status"] == "ok"
    for refused in ("DELETE FROM events", "TRUNCATE heads", "UPDATE nodes SET level = 1"):
        assert "append only" in (run_sql(postgres_url, refused) or ""), refused
    with Ledger.open(postgres_url) as ledger:
        ledger.append("job", ExperimentForked(parent="p", reason="r"))


def test_doctor_finds_a_server_that_forgets(postgres: PostgresServer, postgres_url: str) -> None:
    """The server of the tests runs without fsync; a role's default is careless as well."""
    Ledger.open(postgres_url).close()
    result = run("doctor", "--ledger", postgres_url, "--format", "json")
    assert result.exit_code == 1
    durability = checks(result)["durability"]
    assert durability["status"] == "wrong"
    assert "fsync is off" in durability["found"]
    assert "ALTER SYSTEM SET fsync = on" in durability["fix"]


@pytest.mark.parametrize("setting", ["on", "off"])
def test_doctor_on_a_server_with_syncs(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGUSER", "postgres")
    with running_server(synchronous_commit=setting) as server:
        Ledger.open(server.url()).close()
        found = checks(run("doctor", "--ledger", server.url(), "--format", "json"))["durability"]
        if setting == "on":
            assert (found["status"], found["found"]) == ("ok", "fsync on, synchronous_commit on")
        else:
            assert found["status"] == "warning"
            assert "synchronous_commit is off" in found["found"]
            assert "RESET synchronous_commit" in found["fix"]


def test_doctor_without_a_server_says_so(postgres: PostgresServer) -> None:
    url = postgres.url(database="nowhere")
    result = run("doctor", "--ledger", url, "--format", "json")
    assert result.exit_code == 1
    assert checks(result)["server"]["status"] == "wrong"
    assert checks(result)["ledger"]["status"] == "wrong"


@pytest.mark.parametrize(
    ("version", "status"), [(180004, "ok"), (170000, "ok"), (160004, "warning"), (130009, "wrong")]
)
def test_versions(version: int, status: str) -> None:
    assert check_version(version).status == status


@pytest.mark.parametrize("role", ["pg_mine", "Some One", "x; DROP TABLE events", "1st", ""])
def test_a_wrong_role_is_refused_in_a_line(postgres_url: str, role: str) -> None:
    result = run("doctor", "--ledger", postgres_url, "--grant", role)
    assert result.exit_code == 2
    assert "expected a role" in result.stderr


def test_grant_is_for_servers(tmp_path) -> None:
    result = run("doctor", "--ledger", f"sqlite:///{tmp_path}/l.db", "--grant", "w")
    assert result.exit_code == 2
    assert "chmod" in result.stderr
