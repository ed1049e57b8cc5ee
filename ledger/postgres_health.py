"""A ledger's server and role: what doctor looks at, and how the owner makes a role that writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg

from shiftbook.ledger.checks import Check
from shiftbook.ledger.dialect import open_dialect
from shiftbook.ledger.errors import InvalidInput, LedgerError
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.postgres import HOLD_S, PostgresDialect
from shiftbook.ledger.postgres_session import Session
from shiftbook.ledger.tables import EVENTS, METADATA

CONNECT_S = 5.0

OLDEST_VERSION, BOUNDED_VERSION = 140000, 170000
"""The oldest server that is supported, and the first that can bound a whole transaction."""

WRITTEN = (EVENTS.name,)
"""Tables that a writer inserts into; it reads the others."""

PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")

TRIGGERS = ("events_insert", "events_change")

EXAMPLE_ROLE = "shiftbook_writer"

_ROLE = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")


def _dialect(url: str) -> PostgresDialect:
    dialect = open_dialect(url, lock_timeout_s=CONNECT_S)
    assert isinstance(dialect, PostgresDialect)
    return dialect


def examine_server(url: str) -> Iterator[Check]:
    """Version, durability, triggers and grants; yields what is wrong instead of raising."""
    try:
        dialect = _dialect(url)
        session = dialect.connect(read_only=True)
    except LedgerError as error:
        yield Check("server", "wrong", " ".join(str(error).split()), "pg_isready -h HOST -p PORT")
        return
    try:
        yield check_version(session.wire.info.server_version)
        yield from check_durability(_defaults(session))
        if dialect.columns(session, EVENTS.name):
            yield check_triggers(dialect, _triggers(dialect, session))
            yield check_role(dialect, session)
    except psycopg.Error as error:
        said = " ".join(str(dialect.explain(error)).split())
        yield Check("server", "wrong", said, "pg_isready -h HOST -p PORT")
    finally:
        session.close()


def check_version(found: int) -> Check:
    """Old servers lack what keeps a stopped writer from holding the lock."""
    name = f"PostgreSQL {found // 10000}.{found % 10000}"
    if found >= BOUNDED_VERSION:
        return Check("server", "ok", name)
    if found >= OLDEST_VERSION:
        return Check(
            "server",
            "warning",
            f"{name}: a writer that stops in the middle of sending holds the lock for ever; one "
            f"that stops anywhere else, {HOLD_S:g} s",
            "pg_upgrade to PostgreSQL 17 or newer, which ends both",
        )
    return Check("server", "wrong", f"{name} is not supported", "pg_upgrade to 17 or newer")


def _defaults(session: Session) -> dict[str, str]:
    rows = session.execute(
        "SELECT name, reset_val FROM pg_settings "
        "WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')"
    )
    return dict(rows.fetchall())


def check_durability(defaults: dict[str, str]) -> Iterator[Check]:
    """Settings under which a crash of the machine takes acknowledged events with it."""
    bad = False
    for name in ("fsync", "full_page_writes"):
        if defaults.get(name) == "off":
            bad = True
            yield Check(
                "durability",
                "wrong",
                f"{name} is off: a crash of the machine loses acknowledged events, or the database",
                f'psql -c "ALTER SYSTEM SET {name} = on" -c "SELECT pg_reload_conf()"',
            )
    if defaults.get("synchronous_commit") == "off":
        bad = True
        yield Check(
            "durability",
            "warning",
            "synchronous_commit is off for this role: the ledger's own handles set it on, other "
            "programs of the role do not wait for the disk",
            'psql -c "ALTER ROLE CURRENT_USER RESET synchronous_commit"',
        )
    if not bad:
        commit = defaults.get("synchronous_commit", "unknown")
        yield Check("durability", "ok", f"fsync on, synchronous_commit {commit}")


def _triggers(dialect: PostgresDialect, session: Session) -> dict[str, str]:
    rows = session.execute(
        "SELECT tgname::text, tgenabled::text FROM pg_trigger WHERE tgrelid = to_regclass(%s)",
        (f'"{dialect.schema}".{EVENTS.name}',),
    )
    return dict(rows.fetchall())


def check_triggers(dialect: PostgresDialect, found: dict[str, str]) -> Check:
    """The triggers stand and fire in every session, also in one that poses as a replica."""
    table = f"{dialect.schema}.{EVENTS.name}"
    lacking = [name for name in TRIGGERS if name not in found]
    if lacking:
        return Check(
            "triggers",
            "wrong",
            f"{table} lacks {', '.join(lacking)}: events could be changed or cut out",
            f"shiftbook verify --ledger {dialect.url}; restore the table with its triggers",
        )
    off = [name for name in TRIGGERS if found[name] != "A"]
    if off:
        enable = ", ".join(f"ENABLE ALWAYS TRIGGER {name}" for name in off)
        return Check(
            "triggers",
            "wrong",
            f"{', '.join(off)} of {table} do not always fire",
            f'psql -c "ALTER TABLE {table} {enable}"; shiftbook verify --ledger {dialect.url}',
        )
    return Check("triggers", "ok", f"{table} takes what follows, and no change")


def grants_of(dialect: PostgresDialect, session: Session, role: str) -> dict[str, list[str]]:
    """Privileges of a role by table of the ledger, in the order of PRIVILEGES."""
    tables = [name for name in METADATA.tables if dialect.columns(session, name)]
    held: dict[str, list[str]] = {}
    for table in tables:
        place = f'"{dialect.schema}"."{table}"'
        row = session.execute(
            f"SELECT {', '.join(['has_table_privilege(%s, %s, %s)'] * len(PRIVILEGES))}",
            [value for name in PRIVILEGES for value in (role, place, name)],
        ).fetchone()
        held[table] = [name for name, has in zip(PRIVILEGES, row or (), strict=False) if has]
    return held


def check_role(dialect: PostgresDialect, session: Session, role: str | None = None) -> Check:
    """The grants of a role (default: the one that connects), and whether they are too many."""
    row = session.execute(
        "SELECT r.rolname::text, r.rolsuper, pg_has_role(r.oid, c.relowner, 'MEMBER'), "
        "has_schema_privilege(r.oid, c.relnamespace, 'CREATE') "
        "FROM pg_roles r, pg_class c WHERE c.oid = to_regclass(%s) "
        "AND r.rolname = coalesce(%s, current_user)",
        (f'"{dialect.schema}".{EVENTS.name}', role),
    ).fetchone()
    if row is None:
        return Check("role", "wrong", f"no role {role}", f'psql -c "CREATE ROLE {role} LOGIN"')
    name, superuser, owner, creates = row
    held = grants_of(dialect, session, name)
    found = f"{name}: " + "; ".join(
        f"{table} {', '.join(rights) or 'nothing'}" for table, rights in held.items()
    )
    mend = f"shiftbook doctor --ledger {dialect.url} --grant {EXAMPLE_ROLE}"
    if superuser or owner:
        what = "a superuser" if superuser else "the owner"
        return Check(
            "role",
            "warning",
            f"{found}; {what} can take the triggers away: let jobs write as another role",
            f"{mend}, then give jobs a URL with {EXAMPLE_ROLE}@",
        )
    wanted = {table: {"SELECT", *(("INSERT",) if table in WRITTEN else ())} for table in held}
    lacking = [table for table, rights in held.items() if "SELECT" not in rights]
    if lacking:
        return Check("role", "wrong", f"{found}; {name} may not read", _mend(dialect, name))
    excess = {t: sorted(set(rights) - wanted[t]) for t, rights in held.items()}
    if creates or any(excess.values()):
        more = [f"{', '.join(rights)} on {t}" for t, rights in excess.items() if rights]
        more += [f"CREATE in schema {dialect.schema}"] if creates else []
        return Check(
            "role", "warning", f"{found}; more than a writer needs: {'; '.join(more)}",
            _mend(dialect, name),
        )  # fmt: skip
    writes = all("INSERT" in held[table] for table in WRITTEN)
    return Check("role", "ok", found if writes else f"{found} (reads only)")


def _mend(dialect: PostgresDialect, role: str) -> str:
    return f"shiftbook doctor --ledger {dialect.url} --grant {role} (as the owner)"


def grant_statements(schema: str, tables: list[str], role: str) -> list[str]:
    """SQL that leaves a role with what a writer needs on these tables, and nothing else."""
    statements = [
        f'REVOKE CREATE ON SCHEMA "{schema}" FROM {role}',
        f'GRANT USAGE ON SCHEMA "{schema}" TO {role}',
    ]
    for table in tables:
        rights = "SELECT, INSERT" if table in WRITTEN else "SELECT"
        statements.append(f'REVOKE ALL ON "{schema}"."{table}" FROM PUBLIC, {role}')
        statements.append(f'GRANT {rights} ON "{schema}"."{table}" TO {role}')
    return statements


def grant_writer(url: str, role: str) -> list[Check]:
    """As the owner: make the ledger where there is none, and a role that may only append and read.

    The role is made where there is none, without a password. Raises InvalidInput,
    LedgerUnreachable or what opening a ledger raises.
    """
    if not _ROLE.fullmatch(role):
        raise InvalidInput(
            "expected a role of small letters, digits and _ that does not begin with pg_ or a "
            f"digit, found {role!r}; choose another"
        )
    Ledger.open(url).close()
    dialect = _dialect(url)
    session = dialect.connect(read_only=False)
    try:
        session.execute("BEGIN")
        known = session.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
        if known is None:
            session.execute(f"CREATE ROLE {role} LOGIN")
        tables = [name for name in METADATA.tables if dialect.columns(session, name)]
        for statement in grant_statements(dialect.schema, tables, role):
            session.execute(statement)
        session.execute("COMMIT")
        return [check_role(dialect, session, role)]
    except psycopg.Error as error:
        raise dialect.explain(error) from error
    finally:
        session.close()
