"""A ledger's server and role: what doctor looks at, and how the owner makes roles for others."""

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
from shiftbook.ledger.tables import APPEND_ONLY, EVENTS, HEADS, METADATA, NODES

CONNECT_S = 5.0

OLDEST_VERSION, BOUNDED_VERSION = 140000, 170000
"""The oldest server that is supported, and the first that can bound a whole transaction."""

WRITER, SIGNER = "writer", "signer"

WRITTEN = {WRITER: (EVENTS.name,), SIGNER: (HEADS.name, NODES.name)}
"""Tables that a role of either kind inserts into; it reads the others."""

PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")

OF_COLUMNS = ("SELECT", "INSERT", "UPDATE", "REFERENCES")
"""Privileges that may be held on some columns of a table and not on the table."""

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
            found = _triggers(dialect, session)
            yield from check_triggers(dialect, found, tables_of(dialect, session))
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
    places = [f'"{dialect.schema}"."{name}"' for name in tables_of(dialect, session)]
    rows = session.execute(
        "SELECT tgname::text, tgenabled::text FROM pg_trigger WHERE tgrelid = ANY(%s::regclass[])",
        (places,),
    )
    return dict(rows.fetchall())


def tables_of(dialect: PostgresDialect, session: Session) -> list[str]:
    """The tables of the ledger that are there, in the order in which they are made."""
    return [name for name in METADATA.tables if dialect.columns(session, name)]


def check_triggers(
    dialect: PostgresDialect, found: dict[str, str], tables: list[str]
) -> Iterator[Check]:
    """The triggers stand and fire in every session, also in one that poses as a replica."""
    guarded = [table.name for table in APPEND_ONLY if table.name in tables]
    sound = True
    for name in guarded:
        table = f"{dialect.schema}.{name}"
        wanted = (f"{name}_insert", f"{name}_change")
        lacking = [trigger for trigger in wanted if trigger not in found]
        off = [trigger for trigger in wanted if found.get(trigger, "A") != "A"]
        if lacking:
            sound = False
            yield Check(
                "triggers",
                "wrong",
                f"{table} lacks {', '.join(lacking)}: {name} could be changed or cut out",
                f"shiftbook doctor --ledger {dialect.url} --grant {EXAMPLE_ROLE} (as the owner), "
                f"then: shiftbook verify --ledger {dialect.url}",
            )
        if off:
            sound = False
            enable = ", ".join(f"ENABLE ALWAYS TRIGGER {trigger}" for trigger in off)
            yield Check(
                "triggers",
                "wrong",
                f"{', '.join(off)} of {table} do not always fire",
                f'psql -c "ALTER TABLE {table} {enable}"; shiftbook verify --ledger {dialect.url}',
            )
    if sound:
        listed = ", ".join(f"{dialect.schema}.{name}" for name in guarded)
        yield Check("triggers", "ok", f"{listed}: take what follows, and no change")


def grants_of(dialect: PostgresDialect, session: Session, role: str) -> dict[str, list[str]]:
    """Privileges of a role by table of the ledger, in the order of PRIVILEGES.

    What it has on some columns alone follows, as in ``UPDATE of columns``.
    """
    asked = [f"has_table_privilege(%s, %s, '{name}')" for name in PRIVILEGES]
    asked += [f"has_any_column_privilege(%s, %s, '{name}')" for name in OF_COLUMNS]
    held: dict[str, list[str]] = {}
    for table in tables_of(dialect, session):
        place = f'"{dialect.schema}"."{table}"'
        row = session.execute(f"SELECT {', '.join(asked)}", [role, place] * len(asked)).fetchone()
        assert row is not None
        whole = [name for name, has in zip(PRIVILEGES, row, strict=False) if has]
        parts = zip(OF_COLUMNS, row[len(PRIVILEGES) :], strict=True)
        held[table] = whole + [f"{n} of columns" for n, has in parts if has and n not in whole]
    return held


def powers_through_others(
    dialect: PostgresDialect, session: Session, role: str
) -> Iterator[tuple[str, str]]:
    """(other role, what it may do to the ledger) for each one that a role was made a member of.

    What that one may become in turn counts too, and nothing depends on what is inherited: a member
    can become the role.
    """
    rows = session.execute(
        "SELECT d.rolname::text, m.rolname::text, m.rolsuper, m.rolcreaterole, "
        "m.oid = c.relowner, has_schema_privilege(m.oid, c.relnamespace, 'CREATE') "
        "FROM pg_roles r, pg_auth_members a, pg_roles d, pg_roles m, pg_class c "
        "WHERE c.oid = to_regclass(%s) AND r.rolname = %s AND a.member = r.oid "
        "AND a.roleid = d.oid AND pg_has_role(d.oid, m.oid, 'MEMBER') "
        "AND (m.oid = d.oid OR NOT d.rolsuper) ORDER BY d.rolname, m.oid <> d.oid, m.rolname",
        (f'"{dialect.schema}".{EVENTS.name}', role),
    ).fetchall()
    for direct, other, superuser, makes_roles, owner, creates in rows:
        told = ["all that a superuser may"] if superuser else []
        told += ["all that the owner may"] if owner else []
        told += ["give itself roles"] if makes_roles and not superuser else []
        told += [f"CREATE in schema {dialect.schema}"] if creates and not superuser else []
        if not superuser and not owner:
            for table, rights in grants_of(dialect, session, other).items():
                more = [right for right in rights if not right.startswith(("SELECT", "INSERT"))]
                told += [f"{', '.join(more)} on {table}"] if more else []
        if told:
            yield direct, "; ".join(told) + (f" (as {other})" if other != direct else "")


def check_role(dialect: PostgresDialect, session: Session, role: str | None = None) -> Check:
    """The grants of a role (default: the one that connects), and whether they are too many."""
    row = session.execute(
        "SELECT r.rolname::text, r.rolsuper, r.oid = c.relowner, "
        "has_schema_privilege(r.oid, c.relnamespace, 'CREATE'), r.rolcreaterole "
        "FROM pg_roles r, pg_class c WHERE c.oid = to_regclass(%s) "
        "AND r.rolname = coalesce(%s, current_user)",
        (f'"{dialect.schema}".{EVENTS.name}', role),
    ).fetchone()
    if row is None:
        return Check("role", "wrong", f"no role {role}", f'psql -c "CREATE ROLE {role} LOGIN"')
    name, superuser, owner, creates, makes_roles = row
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
    for other, what in powers_through_others(dialect, session, name):
        revoke = f'psql -c "REVOKE \\"{other}\\" FROM \\"{name}\\""'
        return Check("role", "warning", f"{found}; as a member of {other} it may: {what}", revoke)
    if makes_roles:
        alter = f'psql -c "ALTER ROLE \\"{name}\\" NOCREATEROLE"'
        return Check("role", "warning", f"{found}; {name} may make roles and become them", alter)
    inserts = {table for table, rights in held.items() if "INSERT" in rights}
    signs = not inserts.isdisjoint(WRITTEN[SIGNER]) and inserts.isdisjoint(WRITTEN[WRITER])
    kind = SIGNER if signs else WRITER
    wanted = {table: {"SELECT", *(("INSERT",) if table in WRITTEN[kind] else ())} for table in held}
    mend = _mend(dialect, name, kind)
    if any("SELECT" not in rights for rights in held.values()):
        return Check("role", "wrong", f"{found}; {name} may not read", mend)
    lacking = [table for table in WRITTEN[kind] if table not in inserts]
    if signs and lacking:
        what = f"{name} may not sign, it lacks INSERT on {', '.join(lacking)}"
        return Check("role", "wrong", f"{found}; {what}", mend)
    excess = {t: sorted(set(rights) - wanted[t]) for t, rights in held.items()}
    if creates or any(excess.values()):
        more = [f"{', '.join(rights)} on {t}" for t, rights in excess.items() if rights]
        more += [f"CREATE in schema {dialect.schema}"] if creates else []
        return Check(
            "role", "warning", f"{found}; more than a {kind} needs: {'; '.join(more)}", mend
        )  # fmt: skip
    does = " (signs)" if signs else " (reads only)" if lacking else ""
    return Check("role", "ok", found + does)


def _mend(dialect: PostgresDialect, role: str, kind: str) -> str:
    more = " --signer" if kind == SIGNER else ""
    return f"shiftbook doctor --ledger {dialect.url} --grant {role}{more} (as the owner)"


def grant_statements(schema: str, tables: list[str], role: str, kind: str) -> list[str]:
    """SQL that leaves a role with what its kind needs on these tables, and nothing else."""
    statements = [
        f'REVOKE CREATE ON SCHEMA "{schema}" FROM {role}',
        f'GRANT USAGE ON SCHEMA "{schema}" TO {role}',
    ]
    for table in tables:
        rights = "SELECT, INSERT" if table in WRITTEN[kind] else "SELECT"
        statements.append(f'REVOKE ALL ON "{schema}"."{table}" FROM PUBLIC, {role}')
        statements.append(f'GRANT {rights} ON "{schema}"."{table}" TO {role}')
    return statements


def grant_role(url: str, role: str, kind: str = WRITER) -> list[Check]:
    """As the owner: make the ledger where there is none, its triggers as they belong, and a role
    that may do its part alone.

    A WRITER appends and reads, a SIGNER adds heads and nodes and reads; what the role had before
    is taken from it.
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
        for statement in dialect.triggers():
            session.execute(statement.replace("CREATE ", "CREATE OR REPLACE ", 1))
        tables = tables_of(dialect, session)
        for statement in grant_statements(dialect.schema, tables, role, kind):
            session.execute(statement)
        session.execute("COMMIT")
        return [check_role(dialect, session, role)]
    except psycopg.Error as error:
        raise dialect.explain(error) from error
    finally:
        session.close()
