"""Folded states on disk, so that a job is known without reading all that it ever did.

A snapshot is derived and disposable. It lies beside the ledger (``<ledger>.snapshots/``; that of a
server's ledger in the user's cache folder), a file for each job and one for what the jobs share,
and names the event up to which it was folded. It is
used only where the file is whole, was made by the same code, and that event still stands in the
ledger with the same bytes; otherwise the events are folded again. The verifier never looks here.

Plain files, since each is replaced in one step without a lock: who reads meets the old one or the
new one, and two who write the same do no harm. Nothing is synced: a torn file is not whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.dialect import Dialect
from shiftbook.ledger.job_state import JobState, LeaseState
from shiftbook.ledger.tables import StoredRow

FORMAT = 1
"""Version of the file's layout; another one is not read."""

# fmt: off
FOLDING_MODULES = (
    "__init__", "amendment", "canonical", "dialect", "durable", "engines", "envelope", "errors",
    "file_lock", "fold_jobs", "fold_moves", "fold_rules", "fold_syncs", "folding", "job_state",
    "plan", "postgres", "postgres_session", "postgres_url", "postgres_wake", "snapshots", "sqlite",
    "state", "tables", "topology",
)
# fmt: on
"""Modules that, with the events, decide what a fold gives: all that ``state`` and ``folding``
import, and what these import in turn. A test walks the imports, so that none is forgotten; one too
many costs no more than a fold."""

SHARED = ""
"""Stands for the name of a job in the snapshot of what jobs share; no job has an empty name."""

MAX_BYTES = 256 << 20
"""A state larger than this, unpacked, is folded again instead of loaded."""


@dataclass
class Shared:
    """What belongs to no single job: who owns which device, and which are in quarantine."""

    leases: dict[str, LeaseState]
    quarantine: dict[str, str]
    newer: str | None = None


S = TypeVar("S", JobState, Shared)


@dataclass(frozen=True)
class Snapshot(Generic[S]):
    """A state, and the event up to which it is folded."""

    position: int
    leaf: bytes
    state: S

    def stands(self, row: StoredRow | None) -> bool:
        """Say whether the ledger has that very event at that position.

        Its bytes name writer, sequence and time, so a copy of the ledger that took another way
        before this position has other bytes here.
        """
        return (
            row is not None
            and row.position == self.position
            and row.leaf == self.leaf == leaf_hash(row.data)
        )


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Made when it is first needed, which takes some milliseconds."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


@cache
def fold_code() -> str:
    """SHA-256 over the source that decides what a fold gives: other code, other snapshots.

    Taken from the source itself, so that nobody has to remember a number. Where an installation
    has no source, the version of the distribution stands for it.
    """
    digest = hashlib.sha256()
    try:
        for source in _sources():
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    except OSError:
        return version("shiftbook")
    return digest.hexdigest()


def _sources() -> list[Traversable]:
    ledger, events = files("shiftbook.ledger"), files("shiftbook.ledger.events")
    named = [ledger.joinpath(f"{name}.py") for name in FOLDING_MODULES]
    families = [file for file in events.iterdir() if file.name.endswith(".py")]
    return named + sorted(families, key=lambda file: file.name)


class Snapshots:
    """The snapshots of one ledger; without a folder there are none, and nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, dialect: Dialect) -> Snapshots:
        """Snapshots on this machine of a ledger, in a file or in a server (``Dialect.beside``)."""
        try:
            return cls(dialect.beside(".snapshots"))
        except RuntimeError:  # a user without a home
            return cls(None)

    def job(self, name: str) -> Snapshot[JobState] | None:
        """The snapshot of a job, if there is a usable one; its event is still to be checked."""
        found = self._read(name, JobState)
        return found if found is not None and found.state.name == name else None

    def shared(self) -> Snapshot[Shared] | None:
        """The snapshot of what jobs share; its event is still to be checked."""
        return self._read(SHARED, Shared)

    def keep(self, name: str, snapshot: Snapshot[S]) -> None:
        """Write a snapshot in one step. Where that cannot be done, none is kept from now on."""
        if self._folder is None:
            return
        head = {
            "format": FORMAT,
            "code": fold_code(),
            "of": name,
            "position": snapshot.position,
            "leaf": snapshot.leaf.hex(),
        }
        # In two steps, since each model has a rule of its own for NaN, and some write null.
        plain = _adapter(type(snapshot.state)).dump_python(snapshot.state)
        state = to_json(plain, inf_nan_mode="strings")
        content = orjson.dumps(head) + b"\n" + zlib.compress(state, 1)
        path = self._path(name)
        draft = path.with_name(f"{path.name}.new-{os.getpid()}-{id(snapshot)}")
        try:
            if not self._folder.is_dir():
                # That of a server's ledger is, like the ledger, nobody else's to read.
                self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._folder.mkdir(exist_ok=True)
            draft.write_bytes(hashlib.sha256(content).digest() + content)
            draft.replace(path)
        except OSError:
            # It is only a copy: the ledger stays right without, and slower.
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            self._folder = None

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        stem = hashlib.sha256(name.encode()).hexdigest()[:32] if name else "shared"
        return self._folder / f"{stem}.snapshot"

    def _read(self, name: str, kind: type[S]) -> Snapshot[S] | None:
        if self._folder is None:
            return None
        try:
            whole = self._path(name).read_bytes()
        except OSError:
            return None
        digest, content = whole[:32], whole[32:]
        if hashlib.sha256(content).digest() != digest:
            return None
        head_bytes, _, packed = content.partition(b"\n")
        try:
            head = orjson.loads(head_bytes)
            if (head["format"], head["code"], head["of"]) != (FORMAT, fold_code(), name):
                return None
            unpacker = zlib.decompressobj()
            state = unpacker.decompress(packed, MAX_BYTES)
            if not unpacker.eof:
                return None
            return Snapshot(
                int(head["position"]),
                bytes.fromhex(head["leaf"]),
                _adapter(kind).validate_json(state),
            )
        except (ValueError, KeyError, TypeError, zlib.error, ValidationError):
            # Somebody else's file, whole by its digest and yet none of ours.
            return None
