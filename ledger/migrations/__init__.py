"""Revisions of the tables beside the events, for alembic; the table of events itself only grows."""
