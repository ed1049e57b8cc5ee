"""The second copy of a receiver's tensors, in memory or in a file, that a version is gathered in.

What the receiver serves from is not touched until the whole version was checked. In a file the
copy outlives its process: a journal beside it names the parcels that stand in it already.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shiftbook.checkpoint.errors import SourceLost, StagingFailed, TokenRefused
from shiftbook.checkpoint.positions import ITEM_BYTES
from shiftbook.checkpoint.transfer.boxes import whole
from shiftbook.checkpoint.transfer.parcel import Place
from shiftbook.checkpoint.transfer.plan import Order, Stored, Target

RESUMABLE = (SourceLost, TokenRefused)
"""Errors after which the same version may be asked for again: what was gathered stays."""
_ALIGN = 64
_BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Staging:
    """Arrays of bits for each stored tensor, and the keys of the orders that are done.

    As a context it lets its file go at the end, unless the next try can go on (``RESUMABLE``).
    """

    def __init__(
        self,
        layouts: Mapping[str, Stored],
        base: Mapping[str, Any] | None,
        *,
        file: Path | None = None,
        identity: str = "",
    ) -> None:
        self._layouts, self._base = layouts, base
        self._file, self._identity = file, identity
        self._journal: Any = None
        self.done: set[str] = set()
        self.nbytes = sum(_nbytes(stored) for stored in layouts.values())
        room = self._room()
        self.arrays = self._arrays(room)
        if not self.done:
            self._copy_base()
        if file is not None:
            self._begin_journal()

    @property
    def resumed(self) -> bool:
        """True when a try before this one left parcels in the file."""
        return bool(self.done)

    def places(self, order: Order) -> list[Place]:
        """Where the boxes of an order go."""
        return [self._place(target) for target in order.targets]

    def finished(self, order: Order) -> None:
        """The boxes of an order stand in it. Raises StagingFailed where that cannot be noted."""
        if self._journal is not None:
            self._note(order.key)
        self.done.add(order.key)

    def again(self) -> None:
        """What stands in it is of no use: pull everything anew."""
        self.done.clear()
        self._copy_base()
        if self._journal is not None:
            self._end_journal()
            self._begin_journal()

    def close(self, *, keep: bool = False) -> None:
        """Let the file go, unless it is kept; arrays that were handed out stay readable."""
        if self._journal is not None:
            self._end_journal()
        if self._file is not None and not keep:
            self._file.unlink(missing_ok=True)
            _journal_of(self._file).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(keep=isinstance(error, RESUMABLE))

    def _copy_base(self) -> None:
        if self._base is not None:
            for name, array in self.arrays.items():
                array[...] = self._base[name]

    def _place(self, target: Target) -> Place:
        array = self.arrays[target.stored]
        window = target.at.window(whole(array.shape))
        return Place(self._layouts[target.stored].dtype, array[window])

    def _room(self) -> Any:
        total = sum(-(-_nbytes(stored) // _ALIGN) * _ALIGN for stored in self._layouts.values())
        if self._file is None:
            return np.zeros(max(1, total), dtype=np.uint8)
        return self._mapped(self._file, max(1, total))

    def _mapped(self, file: Path, total: int) -> Any:
        journal = _journal_of(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            known = _read_journal(journal, self._identity) if file.exists() else None
            if known is not None and file.stat().st_size == total:
                self.done = known
            else:
                file.unlink(missing_ok=True)
                journal.unlink(missing_ok=True)
            with file.open("r+b" if file.exists() else "w+b") as opened:
                if not self.done:
                    _reserve(opened.fileno(), total, file)
                return np.frombuffer(mmap.mmap(opened.fileno(), total), dtype=np.uint8)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.unlink()
            raise StagingFailed(
                f"expected room for {total} bytes at {file}, found {error.strerror}; free some, or "
                "gather the version in memory or elsewhere",
                where=str(file),
            ) from error

    def _arrays(self, room: Any) -> dict[str, Any]:
        found, at = {}, 0
        for name in sorted(self._layouts):
            stored = self._layouts[name]
            nbytes = _nbytes(stored)
            bits = _BITS[ITEM_BYTES[stored.dtype]]
            found[name] = room[at : at + nbytes].view(bits).reshape(stored.layout.stored)
            at += -(-nbytes // _ALIGN) * _ALIGN
        return found

    def _begin_journal(self) -> None:
        assert self._file is not None
        try:
            # Anew, since the one before may end within a line; unbuffered, since a close must not
            # write what a full disk refused before.
            self._journal = _journal_of(self._file).open("wb", buffering=0)
            for text in (self._identity, *sorted(self.done)):
                self._note(text)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except StagingFailed:
            self.close()
            raise

    def _note(self, text: str) -> None:
        """Write a line of the journal; one that is cut off is none."""
        line = json.dumps(text).encode() + b"\n"
        try:
            if self._journal.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error

    def _end_journal(self) -> None:
        self._journal.close()
        self._journal = None

    def _failed(self, error: OSError) -> StagingFailed:
        return StagingFailed(
            f"expected room for the journal of {self._file}, found {error.strerror}; free some, or "
            "gather the version in memory or elsewhere",
            where=str(self._file),
        )


def _nbytes(stored: Stored) -> int:
    return int(np.prod(stored.layout.stored, dtype=np.int64)) * ITEM_BYTES[stored.dtype]


def _journal_of(file: Path) -> Path:
    return file.with_name(file.name + ".journal")


def _read_journal(journal: Path, identity: str) -> set[str] | None:
    """Keys of a journal of this very version and layout; None where there is no such."""
    if not journal.exists():
        return None
    # A process that died in mid-write leaves a line without its end: that parcel is pulled again.
    lines = journal.read_bytes().split(b"\n")[:-1]
    try:
        noted = [json.loads(line) for line in lines]
    except ValueError:
        return None  # a machine that went down leaves anything
    if not noted or noted[0] != identity or not all(isinstance(key, str) for key in noted):
        return None
    return set(noted[1:])


def _reserve(descriptor: int, total: int, file: Path) -> None:
    """Take the room now, so that a full disk shows before the first parcel and not within one."""
    disk = os.statvfs(file.parent)
    free = disk.f_bavail * disk.f_frsize
    if total > free:
        raise OSError(errno.ENOSPC, f"{free} bytes free on the disk")
    os.posix_fallocate(descriptor, 0, total)
