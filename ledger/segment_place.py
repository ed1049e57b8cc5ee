"""Where evidence segments lie: a local folder, or a folder that fsspec reaches by a URL."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable
from urllib.parse import unquote, urlsplit

from shiftbook.ledger.durable import sync_path
from shiftbook.ledger.errors import EvidenceError, EvidenceOutOfReach
from shiftbook.ledger.object_folder import LOCAL_SCHEMES, RemoteObjects, shown_url, told

DRAFT = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}")
"""Name of a segment that is being written; nothing refers to it."""

DRAFT_AGE_S = 60.0
"""A younger draft is left alone: its writer may have made it and not locked it yet."""

SAID_OF_FILE = frozenset((errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO))
"""Errors that say what stands in the place of a segment; of others nothing is known of it."""

T = TypeVar("T")


def segment_name(sha256: str) -> str:
    """File name of a segment."""
    return f"{sha256}.parquet"


def segment_sha256(data: bytes) -> str:
    """Name of a segment by the bytes of its file."""
    return hashlib.sha256(data).hexdigest()


@runtime_checkable
class SegmentPlace(Protocol):
    """What holds the files of segments, by their SHA-256."""

    def where(self, sha256: str) -> str:
        """Name of a segment's file for people, without credentials."""

    def get(self, sha256: str) -> bytes | None:
        """Bytes of a segment's file, None where there is none; raise EvidenceError."""


@runtime_checkable
class WritablePlace(SegmentPlace, Protocol):
    """A place that takes new segments."""

    def put(self, sha256: str, data: bytes) -> None:
        """Write a file that is there whole or not at all; durable after ``settle``."""

    def settle(self) -> None:
        """Make what was put durable; raise EvidenceError."""


class LocalFolder:
    """A folder of this machine; files appear under their names complete and synced."""

    _tidied: set[Path] = set()
    """Folders that this process looked through for drafts of writers that died."""
    _doubtful: set[Path] = set()
    """Files whose folder could not be synced; their names may be gone after a power cut."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fresh: set[Path] = set()

    def where(self, sha256: str) -> str:
        """Path of a segment's file."""
        return str(self.folder / segment_name(sha256))

    def get(self, sha256: str) -> bytes | None:
        """Bytes of a segment's file, None where there is none; raise EvidenceError.

        EvidenceOutOfReach where this process may not read it, or its disk does not answer.
        """
        try:
            return (self.folder / segment_name(sha256)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            kind = EvidenceError if error.errno in SAID_OF_FILE else EvidenceOutOfReach
            raise kind(
                f"expected to read evidence at {self.where(sha256)}, found: {error.strerror}; "
                "make it readable, or restore it from a copy"
            ) from error

    def put(self, sha256: str, data: bytes) -> None:
        """Write and sync a draft and give it its name; what stands there with these bytes stays."""
        target = self.folder / segment_name(sha256)
        with self._explained():
            self._begin()
            if target not in self._doubtful and _holds(target, data):
                return
            self._fresh.add(target)
            draft = self.folder / f".{sha256}.{secrets.token_hex(4)}"
            try:
                with draft.open("xb") as file:
                    # Held until the draft has its name, so that nobody takes it for abandoned.
                    fcntl.flock(file, fcntl.LOCK_EX)
                    file.write(data)
                    file.flush()
                    os.fdatasync(file.fileno())
                    draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)

    def settle(self) -> None:
        """Sync the folder's list of names; after a failure its new files are written again."""
        fresh, self._fresh = self._fresh, set()
        with self._explained():
            try:
                sync_path(self.folder)
            except OSError:
                # A second sync of the folder could succeed without having written these names.
                self._doubtful |= fresh
                raise
        self._doubtful -= fresh

    def tidy(self) -> int:
        """Remove the drafts of writers that died; how many there were."""
        removed = 0
        with os.scandir(self.folder) as found:
            drafts = [self.folder / e.name for e in found if DRAFT.fullmatch(e.name)]
        oldest_s = time.time() - DRAFT_AGE_S
        for draft in drafts:
            # A living writer holds a lock on its draft, and the lock dies with its process.
            with contextlib.suppress(FileNotFoundError, BlockingIOError), draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_mtime < oldest_s:
                    draft.unlink()
                    removed += 1
        return removed

    def _begin(self) -> None:
        if not self.folder.is_dir():
            # That of a server's ledger lies in a folder of the user's that need not be there, and
            # is, like the ledger, nobody else's to read.
            missing = [folder for folder in self.folder.parents if not folder.is_dir()]
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            for folder in (self.folder, *missing):
                sync_path(folder.parent)
        if self.folder not in self._tidied:
            self.tidy()
            self._tidied.add(self.folder)

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except OSError as error:
            raise EvidenceError(
                f"expected to write evidence to {self.folder}, found: {error.strerror or error}; "
                "make the folder writable and give it space"
            ) from error


def _holds(target: Path, data: bytes) -> bool:
    """True where the file stands with these bytes."""
    try:
        return target.stat().st_size == len(data) and target.read_bytes() == data
    except FileNotFoundError:
        return False


class RemoteFolder:
    """A folder of whatever fsspec knows (s3, gcs, ...); credentials are fsspec's own matter.

    Object stores show an object whole or not at all. Where a file system shows a torn one, reading
    names it and writing the rows again repairs it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.shown = shown_url(url).rstrip("/")
        self._objects = self._reach(lambda: RemoteObjects(url), "use")

    def where(self, sha256: str) -> str:
        """URL of a segment's file, without credentials."""
        return f"{self.shown}/{segment_name(sha256)}"

    def get(self, sha256: str) -> bytes | None:
        """Bytes of a segment's file, None where there is none; raise EvidenceOutOfReach."""
        return self._reach(
            lambda: self._objects.read(segment_name(sha256)), "read", segment_name(sha256)
        )

    def put(self, sha256: str, data: bytes) -> None:
        """Write a file and read it back; what stands there with these bytes stays.

        Raises EvidenceOutOfReach, also where the store did not keep what it was given.
        """
        name = segment_name(sha256)
        if self.get(sha256) == data:
            return
        self._reach(lambda: self._objects.write(name, data), "write", name)
        if self.get(sha256) != data:
            # No finding: nothing refers to it yet, and it is written again.
            raise EvidenceOutOfReach(
                f"expected the bytes that were written at {self.where(sha256)}, found others; "
                "write the rows again"
            )

    def settle(self) -> None:
        """Nothing is left to do: an object is durable when its store has answered."""

    def _reach(self, act: Callable[[], T], what: str, name: str = "") -> T:
        try:
            return act()
        except Exception as error:
            # Every store behind fsspec has errors of its own.
            raise EvidenceOutOfReach(
                f"expected to {what} evidence at {self.shown}{name and '/'}{name}, found "
                f"{told(error, self._url)}; see that "
                "fsspec reaches it from here, its package and credentials included"
            ) from error


def open_place(place: Path | str) -> LocalFolder | RemoteFolder:
    """The folder at a path or URL; raise EvidenceOutOfReach where fsspec does not know
    the URL."""
    if isinstance(place, Path):
        return LocalFolder(place)
    parts = urlsplit(place)
    if "://" not in place:
        return LocalFolder(Path(place))
    if parts.scheme in LOCAL_SCHEMES:
        # Not through fsspec, which neither syncs nor renames into place.
        return LocalFolder(Path(unquote(parts.path)))
    return RemoteFolder(place)


class Beside(Protocol):
    """Whatever has a ledger file, such as a Ledger; ``evidence`` may name another place."""

    @property
    def path(self) -> Path | None: ...


Place: TypeAlias = "Beside | Path | str | SegmentPlace"
"""A ledger, the folder of its segments, the folder's URL, or what holds segments itself."""


def evidence_folder(place: Beside | Path) -> Path:
    """Folder of the segments beside a ledger; a path is that folder itself."""
    if isinstance(place, Path):
        return place
    if place.path is None:
        raise EvidenceError(
            "expected a ledger in a file, whose segments lie beside it, found one in a server; "
            "name the folder or its URL instead (SHIFTBOOK_EVIDENCE, or --evidence)"
        )
    return place.path.with_name(place.path.name + ".evidence")


def segment_place(place: Place) -> SegmentPlace:
    """What holds the segments of a ledger: the place that it names, else the folder beside it."""
    # By class first: to ask whether an object fits a protocol takes longer than to read a file.
    if isinstance(place, LocalFolder | RemoteFolder):
        return place
    if isinstance(place, Path | str):
        return open_place(place)
    if isinstance(place, SegmentPlace):
        return place
    named: Path | str | None = getattr(place, "evidence", None)
    return LocalFolder(evidence_folder(place)) if named is None else open_place(named)
