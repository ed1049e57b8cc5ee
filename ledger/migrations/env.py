"""What alembic runs for a command: on the connection that derived.py gives, in its transaction."""

from __future__ import annotations

from alembic import context

from shiftbook.ledger.tables import METADATA, REVISION


def run() -> None:
    """Run the revisions that are asked for; whoever gave the connection commits."""
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=METADATA,
        version_table=REVISION.name,
        version_table_schema=context.config.attributes["schema"],
    )
    with context.begin_transaction():
        context.run_migrations()


if __name__ == "env_py":  # alembic loads this file under that name; an import runs nothing
    run()
