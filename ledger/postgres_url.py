"""URLs of PostgreSQL ledgers: what may stand in them; how they are shown, without credentials."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.engine import URL

from shiftbook.ledger.errors import InvalidURL

FORM = "postgresql+psycopg://[USER@]HOST[:PORT]/DATABASE[?schema=NAME]"

DEFAULT_SCHEMA = "public"

SHOWN = ("host", "schema")
"""Options that say where the ledger is; they stay in the URL that is stored and shown."""

PASSED_ON = (
    "channel_binding",
    "gssencmode",
    "krbsrvname",
    "passfile",
    "service",
    "sslcert",
    "sslcrl",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "target_session_attrs",
)
"""Options that go to libpq as they are."""

_SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")


def options(url: URL) -> dict[str, str]:
    """Options of a URL, each once; raise InvalidURL for those that are not known."""
    found: dict[str, str] = {}
    for name, value in url.query.items():
        if name not in (*SHOWN, *PASSED_ON):
            raise InvalidURL(
                f"expected {FORM} with options among {', '.join((*SHOWN, *PASSED_ON))}, found the "
                f"option {name!r}; leave it out"
            )
        found[name] = value if isinstance(value, str) else ",".join(value)
    return found


def schema_of(url: URL) -> str:
    """Schema of the ledger's tables; raise InvalidURL where it is no plain name."""
    schema = options(url).get("schema", DEFAULT_SCHEMA)
    if not _SCHEMA.fullmatch(schema):
        raise InvalidURL(
            "expected a schema of small letters, digits and _ that does not begin with pg_ or a "
            f"digit, found {schema!r}; choose another"
        )
    return schema


def public(url: URL) -> str:
    """The URL without user, password and whatever else is nobody's business."""
    kept = {name: value for name, value in sorted(options(url).items()) if name in SHOWN}
    if kept.get("schema") == DEFAULT_SCHEMA:
        del kept["schema"]
    shown = URL.create(
        url.drivername, host=url.host, port=url.port, database=url.database, query=kept
    )
    return shown.render_as_string()


def parameters(url: URL) -> dict[str, Any]:
    """What libpq needs to connect; raise InvalidURL where the database has no name."""
    if not url.database:
        raise InvalidURL(f"expected {FORM}, found {public(url)} without a database; name one")
    given: dict[str, Any] = {k: v for k, v in options(url).items() if k in (*PASSED_ON, "host")}
    named = {
        "host": url.host,
        "port": url.port,
        "user": url.username,
        "password": url.password,
        "dbname": url.database,
    }
    return given | {name: value for name, value in named.items() if value}
