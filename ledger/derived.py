"""Brings the tables beside the events up to this build, by alembic, under the append lock.

Only a ledger that an older build made is changed, when it is opened for writing. The revisions are
in migrations/versions; a new one goes there, into ``KNOWN``, and into tables.py, which makes the
tables of a new ledger at once.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from shiftbook.ledger.dialect import Connection, Dialect
from shiftbook.ledger.errors import NewerLedger
from shiftbook.ledger.tables import KNOWN, REVISION, Statement, one

HEAD = KNOWN[-1]
SCRIPTS = Path(__file__).with_name("migrations")


def revision_of(dialect: Dialect, connection: Connection, statement: Statement) -> str | None:
    """Revision of a ledger's derived tables, None from before there were revisions.

    Raises NewerLedger for one that this build does not know.
    """
    if not dialect.columns(connection, REVISION.name):
        return None
    row = one(connection, statement)
    if row is None:
        return None
    found = row[0].decode("utf-8", "replace") if isinstance(row[0], bytes) else str(row[0])
    if found not in KNOWN:
        raise NewerLedger(
            f"expected tables of revision {HEAD} or older in {dialect.url}, found {found}; "
            "install a newer Shiftbook"
        )
    return found


def upgrade(dialect: Dialect, *, scripts: Path = SCRIPTS) -> None:
    """Run the revisions that a ledger lacks: all of them in one transaction, or none.

    The caller holds ``dialect.lock``. Raises what the dialect makes of the database's errors.
    """
    # Alembic takes a quarter of a second to import, which ledgers that need no change do not pay.
    from alembic import command
    from alembic.config import Config

    connection = dialect.writer()
    raw = getattr(connection, "wire", connection)
    engine = create_engine(
        f"{dialect.sql.name}+{dialect.sql.driver}://", creator=lambda: raw, poolclass=StaticPool
    )
    config = Config(attributes={"schema": dialect.schema})
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    try:
        with engine.connect() as bound, bound.begin():
            connection.execute(dialect.begin)
            config.attributes["connection"] = bound
            command.upgrade(config, "head")
    except DBAPIError as error:
        if isinstance(error.orig, dialect.errors):
            raise dialect.explain(error.orig) from error
        raise
    except dialect.errors as error:
        raise dialect.explain(error) from error
    finally:
        engine.dispose()
