"""An exclusive lock on a file beside the ledger, with a time limit and the holder's pid."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from shiftbook.ledger.errors import LedgerUnreachable

FIRST_WAIT_S = 0.0002
"""First pause between two tries; flock has no time limit of its own, so it is polled."""

LONGEST_WAIT_S = 0.004
"""Longest pause between two tries: a few commits' time."""


class FileLock:
    """One holder at a time among all processes of a machine; dies with its holder.

    Not re-entrant and not shared between threads: whoever uses it serialises its own threads.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._fd = -1
        self.held = False

    def acquire(self) -> None:
        """Take the lock; raise LedgerUnreachable, naming the holder, after ``timeout_s``."""
        deadline = None
        wait_s = FIRST_WAIT_S
        while True:
            if self._fd < 0:
                self._open()
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR):
                    raise LedgerUnreachable(
                        f"expected to lock {self.path}, found: {error.strerror}; "
                        "keep the ledger on a file system that has locks"
                    ) from error
            else:
                if self._still_there():
                    break
                self._drop()
                continue
            now = time.monotonic()
            if deadline is None:
                deadline = now + self.timeout_s
            if now >= deadline:
                raise LedgerUnreachable(
                    f"expected the lock {self.path} within {self.timeout_s:g} s, found it held by "
                    f"{self._holder()}; wait for that process, or end it, and try again"
                )
            time.sleep(min(wait_s, deadline - now))
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)
        self.held = True
        # The pid is a hint for the person who finds the ledger locked; a full disk must not
        # keep anybody from locking.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, b"%-20d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Give the lock back; nothing happens where it is not held."""
        if self.held:
            self.held = False
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the lock back and close its file."""
        self.release()
        self._drop()

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LedgerUnreachable(
                f"expected a lock file {self.path} that can be written, found: {error.strerror}; "
                "make its folder writable, or open the ledger for reading only"
            ) from error

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _still_there(self) -> bool:
        # Somebody may have removed the file between our open and our lock; a lock on a file
        # that has no name keeps nobody out.
        try:
            named = self.path.stat()
        except FileNotFoundError:
            return False
        mine = os.fstat(self._fd)
        return named.st_ino == mine.st_ino and named.st_dev == mine.st_dev

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            text = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            if text.isdigit():
                return f"process {text}"
        return "another process"
