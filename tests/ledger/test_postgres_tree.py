"""Goal: on a server, heads and nodes only grow, and a role that signs needs no owner and no events.

Method: on a real server a ledger with two heads and a node is attacked by a superuser, past all of
our code and also posing as a replica: UPDATE, DELETE, TRUNCATE, and inserts that do not follow. A
role that ``doctor --grant ROLE --signer`` made signs, by the library and by the command, and tries
what it must not; roles with a grant too few or too many are told what mends them.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import FileOutlet
from shiftbook.ledger.signing_keys import Ed25519Signer
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import verify
from tests.ledger.stores import run_sql
from tests.postgres_server import PostgresServer

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def checks(result: Result) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in json.loads(result.stdout)}


def grow(url: str, count: int) -> None:
    with Ledger.open(url, writer="w") as ledger:
        ledger.append("job", [ExperimentForked(parent="p", reason="r") for _ in range(count)])


def sign(url: str, folder: Path) -> int:
    with Ledger.open(url) as ledger:
        outlets = [FileOutlet(folder / "heads")]
        head = HeadSigner(ledger, KEY, outlets, memory=folder / "key.last").sign()
        return head.size if head is not None else 0


def as_role(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}@")


@pytest.fixture
def signed(postgres_url: str, tmp_path: Path) -> str:
    """300 events; heads of 5 and 300 and the node of the first 256."""
    grow(postgres_url, 5)
    assert sign(postgres_url, tmp_path) == 5
    grow(postgres_url, 295)
    assert sign(postgres_url, tmp_path) == 300
    return postgres_url


ATTACKS = {
    "update a head": "UPDATE heads SET note = '\\x00' WHERE size = 5",
    "update no head": "UPDATE heads SET note = '\\x00' WHERE false",
    "delete a head": "DELETE FROM heads WHERE size = 300",
    "truncate heads": "TRUNCATE heads",
    "truncate all": "TRUNCATE events, heads, nodes",
    "replace a head": "INSERT INTO heads VALUES (300, '\\x00') "
    "ON CONFLICT (size) DO UPDATE SET note = '\\x00'",
    "a smaller head": "INSERT INTO heads VALUES (4, '\\x00')",
    "a head of nothing": "INSERT INTO heads VALUES (0, '\\x00')",
    "a head beyond the events": "INSERT INTO heads VALUES (301, '\\x00')",
    "update a node": "UPDATE nodes SET hash = '\\x00'",
    "delete a node": "DELETE FROM nodes",
    "truncate nodes": "TRUNCATE nodes",
    "replace a node": "INSERT INTO nodes VALUES (1, 0, '\\x00') "
    "ON CONFLICT (level, number) DO UPDATE SET hash = '\\x00'",
    "a gap in a level": "INSERT INTO nodes VALUES (1, 2, '\\x00')",
    "a level of leaves": "INSERT INTO nodes VALUES (0, 0, '\\x00')",
    "a level above without its first": "INSERT INTO nodes VALUES (2, 1, '\\x00')",
    "a head by MERGE": "MERGE INTO heads USING (SELECT 5 AS size) AS s ON heads.size = s.size "
    "WHEN MATCHED THEN DELETE",
    "a head by a query that changes": "WITH gone AS (DELETE FROM heads RETURNING 1) "
    "SELECT count(*) FROM gone",
}


def stored(url: str) -> list[object]:
    with Ledger.open(url, read_only=True) as ledger:
        nodes = ledger.tree().hashes(1, 0, 1)
        return [ledger.head(), [head.data() for head in ledger.tree().heads()], nodes]


@pytest.mark.parametrize("replica", [False, True], ids=["plain", "as a replica"])
@pytest.mark.parametrize("name", ATTACKS)
def test_heads_and_nodes_only_grow(signed: str, name: str, replica: bool) -> None:
    before = stored(signed)
    pose = ["SET session_replication_role = replica"] if replica else []
    said = run_sql(signed, *pose, ATTACKS[name])
    assert said is not None, name
    assert "append only" in said or "not the next" in said
    assert stored(signed) == before
    grow(signed, 1)  # and the ledger goes on


def test_what_follows_is_taken(signed: str) -> None:
    """The control: the triggers refuse what is wrong, not everything."""
    grow(signed, 212)
    more = ("INSERT INTO heads VALUES (301, '\\x00')", "INSERT INTO nodes VALUES (1, 1, '\\x00')")
    assert run_sql(signed, *more) is None


@pytest.fixture
def signer(postgres_url: str) -> str:
    """A role that may sign, and the ledger with it."""
    name = f"signer_{secrets.token_hex(4)}"
    grant = ("doctor", "--ledger", postgres_url, "--grant", name, "--signer", "--format", "json")
    result = run(*grant)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["status"] == "ok"
    assert row["found"] == (
        f"{name}: events SELECT; meta SELECT; heads SELECT, INSERT; nodes SELECT, INSERT; "
        "derived_revision SELECT (signs)"
    )
    return name


def test_another_role_signs(postgres_url: str, signer: str, tmp_path: Path) -> None:
    url = as_role(postgres_url, signer)
    grow(postgres_url, 300)
    assert sign(url, tmp_path) == 300
    grow(postgres_url, 300)
    assert sign(url, tmp_path) == 600
    with Ledger.open(url, read_only=True) as ledger:
        assert [head.size for head in ledger.tree().heads()] == [300, 600]
        assert len(ledger.tree().hashes(1, 0, 2)) == 2
    outside = Outside.read([str(tmp_path / "heads")], [KEY.verifier.text()])
    verdict = verify(url, outside=outside, integrity_only=True)
    assert not verdict.findings
    assert verdict.protected_until == 599


def test_the_command_signs_as_that_role(postgres_url: str, signer: str, tmp_path: Path) -> None:
    grow(postgres_url, 3)
    key = str(tmp_path / "signer.key")
    assert run("key", "new", "--name", "example.com/runs", "-o", key).exit_code == 0
    done = run("sign", "--ledger", as_role(postgres_url, signer), "--key", key)
    assert done.exit_code == 0, done.output
    doctor = run("doctor", "--ledger", as_role(postgres_url, signer), "--format", "json")
    assert checks(doctor)["role"]["status"] == "ok"
    assert checks(doctor)["unsigned tail"]["status"] == "ok"


FORBIDDEN = {
    "append": "INSERT INTO events SELECT * FROM events LIMIT 0",
    "update a head": "UPDATE heads SET note = '\\x00'",
    "truncate nodes": "TRUNCATE nodes",
    "drop a trigger": "DROP TRIGGER heads_change ON heads",
    "disable triggers": "ALTER TABLE nodes DISABLE TRIGGER ALL",
    "replace the function": "CREATE OR REPLACE FUNCTION heads_refuse() RETURNS trigger "
    "LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_signer_may_do_nothing_else(
    postgres: PostgresServer, postgres_url: str, signer: str, name: str
) -> None:
    with psycopg.connect(**{**postgres.parameters, "user": signer}) as connection:
        connection.execute(f"SET search_path = {postgres_url.rpartition('schema=')[2]}")  # type: ignore[call-overload]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(FORBIDDEN[name])  # type: ignore[call-overload]


def test_a_signer_that_appends_is_told_of_its_role(postgres_url: str, signer: str) -> None:
    with (
        Ledger.open(as_role(postgres_url, signer)) as ledger,
        pytest.raises(LedgerUnreachable, match="--grant"),
    ):
        ledger.append("job", ExperimentForked(parent="p", reason="r"))


@pytest.mark.parametrize(
    ("statement", "status", "told"),
    [
        ("REVOKE INSERT ON nodes FROM {role}", "wrong", "may not sign, it lacks INSERT on nodes"),
        ("GRANT DELETE ON heads TO {role}", "warning", "more than a signer needs: DELETE on heads"),
        ("GRANT INSERT ON events TO {role}", "warning", "needs: INSERT on heads; INSERT on nodes"),
    ],
)
def test_doctor_names_and_mends_the_grants_of_a_signer(
    postgres_url: str, signer: str, statement: str, status: str, told: str
) -> None:
    assert run_sql(postgres_url, statement.format(role=signer)) is None
    url = as_role(postgres_url, signer)
    row = checks(run("doctor", "--ledger", url, "--format", "json"))["role"]
    assert row["status"] == status
    assert told in row["found"]
    assert f"--grant {signer}" in row["fix"]
    grant = ("doctor", "--ledger", postgres_url, "--grant", signer, "--signer")
    assert run(*grant).exit_code == 0
    assert checks(run("doctor", "--ledger", url, "--format", "json"))["role"]["status"] == "ok"


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("DROP TRIGGER heads_change ON heads", "lacks heads_change"),
        ("ALTER TABLE nodes ENABLE TRIGGER nodes_insert", "do not always fire"),
    ],
)
def test_doctor_finds_triggers_of_the_tree_that_are_gone(
    postgres_url: str, statement: str, told: str
) -> None:
    Ledger.open(postgres_url).close()
    assert run_sql(postgres_url, statement) is None
    result = run("doctor", "--ledger", postgres_url, "--format", "json")
    assert result.exit_code == 1
    assert checks(result)["triggers"]["status"] == "wrong"
    assert told in checks(result)["triggers"]["found"]


def test_signer_goes_with_grant(postgres_url: str) -> None:
    result = run("doctor", "--ledger", postgres_url, "--signer")
    assert result.exit_code == 2
    assert "--grant" in result.stderr
