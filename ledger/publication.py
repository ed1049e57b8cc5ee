"""Places outside the database where signed heads are published, and from which they are read.

A place is a file that is only appended to, a folder at any fsspec URL with one object for each
head, or a command that is given each head on its standard input. What stands there must be out of
reach of those who can write the database: that is all that a published head is good for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from shiftbook.ledger.durable import replace_file, sync_path
from shiftbook.ledger.errors import InvalidInput, InvalidNote, PublicationFailed
from shiftbook.ledger.object_folder import Objects, open_objects, shown_url, told
from shiftbook.ledger.signed_note import SignedHead, split_heads

COMMAND_PREFIX = "exec:"

COMMAND_LIMIT_S = 60.0
"""How long a witness command may take before it counts as failed."""

TAIL_BYTES = 1 << 16
"""What is read of a file's end to find its last head."""

NAME_DIGITS = 20
"""Digits of an object's name, so that the order of names is the order of sizes."""


class Outlet(ABC):
    """One place."""

    name: str
    """What it is called in messages, without credentials."""

    @abstractmethod
    def last(self) -> SignedHead | None:
        """The last head there, not verified; None where there is none or it cannot be asked.

        Raises PublicationFailed where the place cannot be reached or holds something else.
        """

    @abstractmethod
    def publish(self, head: SignedHead) -> None:
        """Add a head, durable on return. Raises PublicationFailed."""

    def _failed(self, why: object, do: str) -> PublicationFailed:
        return PublicationFailed(f"expected to publish heads to {self.name}, found: {why}; {do}")


class FileOutlet(Outlet):
    """A file with one head after the other, only ever appended to.

    What can be read there may have come no further than this machine's memory: the process that
    wrote it died before its sync, or the sync failed. So the file is synced before its last head
    counts as published. A second sync does not tell that the first one failed: what it was about is
    written again before.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._settled = False
        """True once all that the file holds is known to be durable."""
        self._again = False
        """True where a sync failed."""
        self._failed_at: int | None = None
        """Offset of a head of this process whose sync failed."""
        self._lock = threading.RLock()  # a head that is being written is not doubtful

    def last(self) -> SignedHead | None:
        """The last whole head; what a crash left of another after it is passed over."""
        with self._lock:
            try:
                self._settle()
            except OSError as error:
                raise self._failed(error.strerror or error, _MEND) from error
            chunks = self._tail()
            if not chunks:
                return None
            try:
                return SignedHead.parse(chunks[-1][1])
            except InvalidNote as error:
                if len(chunks) == 1:
                    if chunks[0][0] == 0 and not chunks[0][1].endswith(b"\n"):
                        return None
                    raise self._failed(f"its last head is damaged ({error})", _RESTORE) from error
            try:
                return SignedHead.parse(chunks[-2][1])
            except InvalidNote as error:
                raise self._failed(f"its last heads are damaged ({error})", _RESTORE) from error

    def publish(self, head: SignedHead) -> None:
        """Append a head; a torn one that a crash left is replaced by its whole."""
        with self._lock:
            self._append(head.data())

    def _append(self, data: bytes) -> None:
        try:
            self._settle()
            chunks = self._tail()
            new = not self.path.exists()
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                if chunks and not _is_head(chunks[-1][1]):
                    offset, torn = chunks[-1]
                    if not data.startswith(torn):
                        raise self._failed("its last head is damaged", _RESTORE)
                    os.ftruncate(fd, offset)
                self._settled, self._again, self._failed_at = False, True, os.fstat(fd).st_size
                _write_all(fd, data + b"\n")
                os.fsync(fd)
            finally:
                os.close(fd)
            if new:
                sync_path(self.path.parent)
        except OSError as error:
            # At once, since the next call may be another process's; else it is done before that.
            with contextlib.suppress(OSError):
                self._settle()
            raise self._failed(error.strerror or error, _MEND) from error
        self._settled, self._again, self._failed_at = True, False, None

    def _settle(self) -> None:
        """Make durable what the file holds, without the head whose sync failed."""
        if self._settled or not self.path.exists():
            return
        fd = os.open(self.path, os.O_RDWR if self._again else os.O_RDONLY)
        try:
            if self._failed_at is not None:
                os.ftruncate(fd, self._failed_at)
            elif self._again:  # another process's heads are kept, whatever they are
                for offset, chunk in self._tail():
                    os.pwrite(fd, chunk, offset)
            self._again = True
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_path(self.path.parent)
        self._settled, self._again, self._failed_at = True, False, None

    def _tail(self) -> list[tuple[int, bytes]]:
        """(offset, bytes) of the notes at the end; the first may have lost its beginning."""
        try:
            with self.path.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
                file.seek(start)
                found = [(start + at, chunk) for at, chunk in split_heads(file.read())]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed(error.strerror or error, _MEND) from error
        return found


class UrlOutlet(Outlet):
    """A folder at a URL, with an object for each head, named by its size.

    No head is ever added to an object or put in the place of one, so no earlier one can be lost by
    a write that failed, nor by a second writer.
    """

    def __init__(self, url: str) -> None:
        self._url, self.name = url, shown_url(url)
        self._objects = _open(url)

    def last(self) -> SignedHead | None:
        """The head with the largest size."""
        try:
            names = _head_names(self._objects)
            (data,) = self._objects.read_many(names[-1:]) if names else (None,)
        except Exception as error:  # each file system raises errors of its own
            raise self._failed(told(error, self._url), _MEND) from error
        try:
            return None if data is None else SignedHead.parse(data)
        except InvalidNote as error:
            raise self._failed(f"its last head is damaged ({error})", _RESTORE) from error

    def publish(self, head: SignedHead) -> None:
        """Make the object; one that is there with other content is never overwritten."""
        try:
            there = self._objects.create(_head_name(head.size), head.data())
        except Exception as error:  # each file system raises errors of its own
            raise self._failed(told(error, self._url), _MEND) from error
        if there != head.data():
            raise self._failed(
                f"another head of size {head.size}",
                "find out who wrote it: somebody signs a second history, or uses this place too",
            )


class CommandOutlet(Outlet):
    """A command that gets each head on its standard input and accepts it by exit code 0.

    ``memory`` is a file that keeps the last head that it accepted, for later processes: a command
    cannot be asked. Without it each process offers the newest head first.
    """

    def __init__(
        self, command: str, limit_s: float = COMMAND_LIMIT_S, memory: Path | None = None
    ) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InvalidInput(
                f"expected a command after {COMMAND_PREFIX}, found {error}"
            ) from error
        if not self._words:
            raise InvalidInput(f"expected a command after {COMMAND_PREFIX}, found none")
        self._limit_s = limit_s
        self.name = COMMAND_PREFIX + self._words[0]
        self._accepted: SignedHead | None = None
        self._memory = memory

    def last(self) -> SignedHead | None:
        """The last head that it accepted, as far as that was kept."""
        if self._accepted is None and self._memory is not None:
            do = f"restore {self._memory}, or delete it to begin with the newest head"
            try:
                self._accepted = SignedHead.parse(self._memory.read_bytes())
            except FileNotFoundError:
                return None
            except OSError as error:
                raise self._failed(error.strerror or error, do) from error
            except InvalidNote as error:
                raise self._failed(f"no head in its memory ({error})", do) from error
        return self._accepted

    def publish(self, head: SignedHead) -> None:
        """Run the command; it may refuse, as a witness does with a head that forks."""
        do = "run it by hand with the head on stdin to see why"
        try:
            done = subprocess.run(
                self._words,
                input=head.data(),
                capture_output=True,
                timeout=self._limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"no answer within {self._limit_s:g} s", do) from error
        except OSError as error:
            raise self._failed(error.strerror or error, "check the command") from error
        if done.returncode != 0:
            told = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise self._failed(
                f"exit code {done.returncode} {told[-1] if told else ''}".strip(), do
            )
        self._accepted = head
        if self._memory is not None:
            try:
                replace_file(self._memory, head.data())
                sync_path(self._memory.parent)
            except OSError as error:
                raise self._failed(
                    f"{error.strerror or error}, although the head was accepted",
                    f"make {self._memory} writable; the head is offered again next time",
                ) from error


_MEND = "check the place and the permissions; the head is offered again next time"
_RESTORE = "restore it from a copy; nothing is added behind a damaged head"


def _is_head(data: bytes) -> bool:
    try:
        SignedHead.parse(data)
    except InvalidNote:
        return False
    return True


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open(url: str) -> Objects:
    try:
        return open_objects(url)
    except (ImportError, ValueError) as error:
        raise InvalidInput(
            f"expected a URL that fsspec can open, found {shown_url(url)} ({told(error, url)}); "
            "install what it names, or check the scheme"
        ) from error


def _head_name(size: int) -> str:
    return f"{size:0{NAME_DIGITS}d}"


def _head_names(objects: Objects) -> list[str]:
    """Objects that are heads by their name, in the order of their sizes."""
    return [name for name in objects.names() if named_size(name) is not None]


def open_outlet(target: str, *, key_file: Path | None = None) -> Outlet:
    """``exec:COMMAND``, an fsspec URL of a folder, or the path of a file. Raises InvalidInput.

    Beside ``key_file`` is kept what a command accepted last, in a file for each command.
    """
    if target.startswith(COMMAND_PREFIX):
        command = target.removeprefix(COMMAND_PREFIX)
        if key_file is None:
            return CommandOutlet(command)
        of = hashlib.sha256(command.encode()).hexdigest()[:8]
        return CommandOutlet(command, memory=key_file.with_name(f"{key_file.name}.accepted-{of}"))
    if "://" in target:
        return UrlOutlet(target)
    if not target or Path(target).is_dir():
        raise InvalidInput(
            f"expected the path of a file for heads, found {target or 'nothing'!r}, which is none; "
            "name a file, a URL such as s3://bucket/heads, or exec:COMMAND"
        )
    return FileOutlet(Path(target).expanduser())


def read_published(target: str) -> Iterator[tuple[str, bytes]]:
    """(where, bytes) of every head at a place, in its order, unparsed.

    ``target`` is a file of heads, or an fsspec URL of a folder or of such a file. Raises
    PublicationFailed where it cannot be read.
    """
    if "://" not in target:
        try:
            data = Path(target).expanduser().read_bytes()
        except OSError as error:
            raise PublicationFailed(
                f"expected published heads in {target}, found: {error.strerror}; check the path"
            ) from error
        if not data.strip():
            raise PublicationFailed(
                f"expected published heads in {target}, found an empty file; check the path, or "
                "restore the file from a copy"
            )
        yield from _numbered(target, data)
        return
    shown = shown_url(target)
    objects = _open(target)
    try:
        whole = objects.whole()
        if whole is not None:
            yield from _numbered(shown, whole)
            return
        names = _head_names(objects)
        if not names:
            raise PublicationFailed(
                f"expected published heads at {shown}, found none; check the URL"
            )
        for name, data in zip(names, objects.read_many(names), strict=True):
            yield f"{shown}/{name}", data
    except PublicationFailed:
        raise
    except Exception as error:  # each file system raises errors of its own
        raise PublicationFailed(
            f"expected published heads at {shown}, found {told(error, target)}; "
            "check the URL and its credentials"
        ) from error


def named_size(where: str) -> int | None:
    """Number of events that the name of an object says; None where it is no object's name."""
    name = where.rsplit("/", 1)[-1]
    return int(name) if len(name) == NAME_DIGITS and name.isdecimal() else None


def _numbered(where: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    for number, (_, chunk) in enumerate(split_heads(data), 1):
        yield f"{where}, head {number}", chunk
