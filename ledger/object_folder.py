"""A folder of small objects that are written once: at an fsspec URL, or on this machine.

An object store has neither append nor rename. It shows an object whole or not at all, and has it
durable when it answers; so everything here is one object for one thing, and where none may be
replaced it is made on the condition that there is none (``If-None-Match`` on S3, generation 0 on
Google's), which two writers cannot both meet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from shiftbook.ledger.durable import sync_path

LOCAL_SCHEMES = ("file", "local")

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss"))
"""Protocols of fsspec whose paths begin with a bucket, and whose folders need not be made."""

READ_AT_ONCE = 64
"""Objects that are asked for together, where many are read."""


class NoBucket(Exception):
    """The bucket of a URL is not there: not the same as a bucket without the object."""


class Objects(Protocol):
    """What both kinds do. Each call raises whatever its file system raises."""

    shown: str
    """URL without user, password and query."""

    def read(self, name: str) -> bytes | None:
        """Bytes of an object, None where there is none."""

    def create(self, name: str, data: bytes) -> bytes:
        """Make an object where there is none, durable; the bytes that stand there, whoever's."""

    def names(self) -> list[str]:
        """Names of the objects, sorted; empty where there is no folder."""

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """Bytes of the objects of these names, in their order."""

    def whole(self) -> bytes | None:
        """Bytes of the object that the URL itself names; None where it is a folder or nothing."""


class RemoteObjects:
    """A folder that fsspec reaches; credentials and the number of tries are its own matter."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # only where a URL is used

        self.shown = shown_url(url)
        self._fs: Any
        self._fs, root = url_to_fs(url)
        self._root = str(root).rstrip("/")
        kinds = self._fs.protocol
        in_store = not OBJECT_STORES.isdisjoint((kinds,) if isinstance(kinds, str) else kinds)
        self._bucket = self._root.partition("/")[0] if in_store else None
        self._bucket_seen = False

    def read(self, name: str) -> bytes | None:
        """Bytes of an object, None where there is none; raise NoBucket."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            self._need_bucket()
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write an object, in the place of one that is there."""
        self._make_folder()
        self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bytes:
        """Make an object where there is none, durable; the bytes that stand there, whoever's.

        A store without conditional writes (501) leaves a gap between look and write.
        """
        there = self.read(name)
        if there is not None:
            return there
        self._make_folder()
        failed: Exception | None = None
        try:
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                self._fs.pipe_file(self._path(name), data)
        except Exception as error:  # another writer's object, or an answer that was lost
            failed = error
        there = self.read(name)
        if there is None:
            raise failed or FileNotFoundError(f"{name} is not there after it was written")
        return there

    def names(self) -> list[str]:
        """Names of the objects, sorted; empty where there is no folder; raise NoBucket."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            self._need_bucket()
            return []
        return sorted(str(entry).rsplit("/", 1)[-1] for entry in found)

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """Bytes of the objects of these names, in their order."""
        for first in range(0, len(names), READ_AT_ONCE):
            paths = [self._path(name) for name in names[first : first + READ_AT_ONCE]]
            yield from self._fs.cat_ranges(paths, None, None, on_error="raise")

    def whole(self) -> bytes | None:
        """Bytes of the object that the URL itself names; None where it is a folder or nothing."""
        self._fs.invalidate_cache()
        return bytes(self._fs.cat_file(self._root)) if self._fs.isfile(self._root) else None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self) -> None:
        # In an object store that would be the bucket alone, which a slip of the hand must not make.
        if self._bucket is None:
            self._fs.makedirs(self._root, exist_ok=True)

    def _need_bucket(self) -> None:
        """Stores say the same of a missing object and of a missing bucket; tell them apart."""
        if self._bucket is None or self._bucket_seen:
            return
        self._fs.invalidate_cache()
        if not self._fs.exists(self._bucket):
            raise NoBucket(f"no bucket {self._bucket}, or no right to see it")
        self._bucket_seen = True


class LocalObjects:
    """A folder of this machine; an object appears under its name complete and synced."""

    def __init__(self, url: str) -> None:
        self.shown = shown_url(url)
        self.folder = Path(unquote(urlsplit(url).path))
        self._settled = False

    def read(self, name: str) -> bytes | None:
        """Bytes of an object, None where there is none."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bytes:
        """Make an object where there is none, durable; the bytes that stand there, whoever's."""
        self._make_folder()
        target = self.folder / name
        draft = self.folder / f".{name}.{secrets.token_hex(4)}"
        try:
            with draft.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # A rename would replace what is there; a link does not.
            with contextlib.suppress(FileExistsError):
                target.hardlink_to(draft)
        finally:
            draft.unlink(missing_ok=True)
        sync_path(self.folder)
        return target.read_bytes()

    def names(self) -> list[str]:
        """Names of the objects, sorted; empty where there is no folder."""
        try:
            if not self._settled:  # what a writer that died made may be in memory alone
                sync_path(self.folder)
                self._settled = True
            return sorted(path.name for path in self.folder.iterdir())
        except FileNotFoundError:
            return []

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """Bytes of the objects of these names, in their order."""
        return ((self.folder / name).read_bytes() for name in names)

    def whole(self) -> bytes | None:
        """Bytes of the object that the URL itself names; None where it is a folder or nothing."""
        return self.folder.read_bytes() if self.folder.is_file() else None

    def _make_folder(self) -> None:
        missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.is_dir()]
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync_path(folder.parent)


def open_objects(url: str) -> RemoteObjects | LocalObjects:
    """The folder at a URL; raise ImportError or ValueError where fsspec does not know it."""
    # Not through fsspec, which neither syncs nor puts a file into place at once.
    return LocalObjects(url) if urlsplit(url).scheme in LOCAL_SCHEMES else RemoteObjects(url)


def shown_url(url: str) -> str:
    """A URL without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def told(error: Exception, url: str) -> str:
    """An error of a file system in a line of at most 200 characters, without credentials."""
    said = " ".join(str(error).replace(url, shown_url(url)).split())[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
