"""An index by type, so that the events of one type are found among millions of others."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """A ledger that may only be read goes without, and is read more slowly by type."""
    op.create_index("events_type_position", "events", ["type", "position"], if_not_exists=True)
