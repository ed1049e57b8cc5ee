"""Slots are real: a process is pinned to its slot's core and holds the slot's locks while it works.

Two locks stand for each device. *Presence* is the device's lock as the ledger's fencing knows it,
shared by the processes of one job that hold state on the device: it keeps those of any other job
out, and while one of them lives nobody can say that the device is free. *Activity* is exclusive,
held by the one process that computes there now, so that components that share a device take turns.
Both are kernel locks: they end when their process lets go or dies, and in no other way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from shiftbook.ledger.dialect import side_path
from shiftbook.ledger.fencing import lock_path
from shiftbook.scheduler.errors import SlotBusy

ENTER_LIMIT_S = 2.0
ENTER_PAUSE_S = 0.001


def core_of(device: str) -> int:
    """The core that a slot stands for; slots beyond the cores share them (for tests)."""
    cores = sorted(os.sched_getaffinity(1) if _may_see_init() else os.sched_getaffinity(0))
    return cores[int(device.rsplit("/", 1)[1]) % len(cores)]


def _may_see_init() -> bool:
    try:
        os.sched_getaffinity(1)
    except OSError:
        return False
    return True


def pin(device: str | None) -> None:
    """Bind this process to its slot's core; a process without a slot may run anywhere."""
    if device is None:
        return
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core_of(device)})


def lock_directory(ledger_url: str) -> Path:
    """Where the locks of a ledger's devices live: a device belongs to one ledger."""
    return side_path(ledger_url, ".locks")


class Presence:
    """This process holds state on a device for a job."""

    def __init__(self, directory: Path, device: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = lock_path(directory, device)
        self._device = device
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """True while the lock is this process's."""
        return self._fd is not None

    def enter(self, job: str) -> None:
        """Take the shared lock; SlotBusy where a process of another job holds state there."""
        if self._fd is not None:
            return
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + ENTER_LIMIT_S
        owner = ""
        while time.monotonic() < deadline_s:
            owner = _share(fd, job)
            if owner == job:
                self._fd = fd
                return
            if owner:
                break
            # Another process is just entering: it holds the lock for itself for an instant.
            time.sleep(ENTER_PAUSE_S)
        os.close(fd)
        raise SlotBusy(
            f"{self._device}: expected no process of another job, found one of "
            f"{owner or 'a job that is entering'!r}; wait until it leaves or dies"
        )

    def leave(self) -> None:
        """Let go."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _share(fd: int, job: str) -> str:
    """Take the lock shared, naming the job when nobody held it; the job that has the device, or
    an empty text while that cannot be said."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, job.encode(), 0)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    # The change from exclusive to shared is not atomic, so the name is read again under it.
    return os.pread(fd, 4096, 0).decode()


class Activity:
    """The right to compute on a device now.

    A component that goes first (``urgent``) says so as long as it has work; the others then let
    the device go after the unit that they are in.
    """

    def __init__(self, directory: Path, device: str, *, urgent: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        base = lock_path(directory, device)
        self._urgent = urgent
        self._fd = _open(base.with_suffix(".activity"))
        self._first_fd = _open(base.with_suffix(".first"))
        self._claimed = False
        self.held = False

    def try_take(self) -> bool:
        """Take it if nobody else computes there; True when it is this process's."""
        if self._urgent:
            self._claim()
        elif self._wanted():
            self.give()
            return False
        if not self.held:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.held = True
        return True

    def give(self) -> None:
        """Let the next one compute."""
        if self._claimed:
            fcntl.flock(self._first_fd, fcntl.LOCK_UN)
            self._claimed = False
        if self.held:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.held = False

    def _claim(self) -> None:
        if not self._claimed:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._first_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._claimed = True

    def _wanted(self) -> bool:
        """True while a component that goes first has work for the device."""
        try:
            fcntl.flock(self._first_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._first_fd, fcntl.LOCK_UN)
        return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
