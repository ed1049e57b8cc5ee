"""Both stores for each test of the ledger that asks for ``store_url``, with a real server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledger.gate_cases import WORLD_FOLDER
from tests.ledger.stores import STORES, postgres_of_the_session
from tests.postgres_server import PostgresServer


@pytest.fixture
def postgres(monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    """The server of this session. URLs of ledgers carry no user, so the environment names one."""
    monkeypatch.setenv("PGUSER", "postgres")
    return postgres_of_the_session()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """A ledger of one test in the server: a schema of its own."""
    return postgres.url(f"t_{secrets.token_hex(6)}")


@pytest.fixture(params=STORES)
def store_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """URL of a ledger that is not there yet, on each store in turn."""
    monkeypatch.setenv(WORLD_FOLDER, str(tmp_path))
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ledger.db"
    else:
        yield request.getfixturevalue("postgres_url")
