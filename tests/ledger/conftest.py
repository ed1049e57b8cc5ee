"""Both stores for each test of the ledger that asks for ``store_url``, with a real server."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ledger.gate_cases import WORLD_FOLDER
from tests.ledger.stores import SQLITE, STORES, postgres_of_the_session
from tests.postgres_server import PostgresServer


@pytest.fixture
def postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    """The server of this session. URLs of ledgers carry no user, so the environment names one, and
    the folders of what lies on this machine beside a ledger in a server."""
    monkeypatch.setenv("PGUSER", "postgres")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return postgres_of_the_session()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """A ledger of one test in the server: a schema of its own."""
    return postgres.url(f"t_{secrets.token_hex(6)}")


@pytest.fixture(params=STORES)
def store_urls(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """URLs by name of ledgers that are not there yet, on each store in turn."""
    monkeypatch.setenv(WORLD_FOLDER, str(tmp_path))
    if request.param == "sqlite":
        return lambda name: f"{SQLITE}{tmp_path}/{name}.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    test = secrets.token_hex(6)
    return lambda name: server.url(f"t_{test}_{name}")


@pytest.fixture
def store_url(store_urls: Callable[[str], str]) -> str:
    """URL of a ledger that is not there yet, on each store in turn."""
    return store_urls("ledger")
