"""The worker's side of a grant: check it against the ledger before obeying, and lock the device."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import DeviceHeld, LedgerUnreachable, StaleGrant, UnknownPosition
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.job_state import AttemptState, OperationState, OperationStatus
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.state import LedgerState

ALLOWED: dict[OperationStatus, frozenset[str]] = {
    "granted": frozenset({"quiesce", "undo"}),
    "quiesced": frozenset({"snapshot", "place", "restore", "undo"}),
    "transferred": frozenset({"restore", "probe", "undo"}),
    "verified": frozenset({"resume", "drop"}),
}
"""Worker methods that the grant of a move allows, by the status of the move."""

FINISHING = frozenset({"place", "restore", "probe"})
"""Methods that recovery may use beyond these on a verified move: a new place that died after the
point of no return has to be filled again before the move can finish."""

RESTORING = frozenset({"place", "restore", "resume", "drop", "undo"})
"""Methods that recovery may use on a move that is not verified: a source that died meanwhile has
to be brought up again at its old place before the move can be rolled back."""

STANDING = frozenset({"place", "restore", "resume", "load_weights", "call", "undo", "drop"})
"""Worker methods that the standing grant of the current attempt allows."""

LAYOUT = frozenset({"place", "restore", "drop", "undo"})
"""Those that change what stands on a device: while a move that has quiesced covers the device,
they belong to the move's own grant alone."""

OPERATION_EVENTS = frozenset({"ReallocationGranted", "OperationTakenOver"})

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05
"""Pauses between two tries at a device lock; flock has no time limit of its own."""


class GrantChecker:
    """Checks grants for one worker, which uses ``devices`` of ``job``.

    The floor is taken from the ledger at the start and rises with every grant that is obeyed, so
    a worker that was started again knows what is stale before anybody calls it. While the ledger
    cannot be reached, the standing grant that was checked last stays good and every grant of a
    move is refused.
    """

    def __init__(
        self, open_ledger: Callable[[], Ledger], job: str, devices: str | Collection[str]
    ) -> None:
        self._open_ledger = open_ledger
        self._ledger: Ledger | None = None
        self.job = job
        self.devices: tuple[str, ...] = (
            (devices,) if isinstance(devices, str) else tuple(sorted(devices))
        )
        self.floor = -1
        """Lowest epoch of a move's grant that is obeyed."""
        self._standing: tuple[Grant, AttemptState] | None = None
        with contextlib.suppress(LedgerUnreachable):  # the first check tries again
            self._raise_floor(self._reachable().state())

    def check(self, grant: Grant | None, method: str) -> OperationState | AttemptState:
        """Say what stands behind a grant that allows ``method`` now.

        Raise StaleGrant where the grant is missing, forged (the ledger holds no such event),
        foreign (of another job, or not for this worker's devices), stale (a newer epoch replaced
        it), expired (its move is closed), or does not allow the method at this step.
        """
        if grant is None:
            raise StaleGrant(f"{method}: expected a grant, found none; ask the gate for one")
        if grant.job != self.job:
            raise StaleGrant(f"{method}: a grant of job {grant.job}, this worker runs {self.job}")
        missing = sorted(set(self.devices) - set(grant.devices))
        if missing:
            raise StaleGrant(
                f"{method}: the grant is for {', '.join(grant.devices) or 'no device'}, "
                f"this worker uses {', '.join(missing)}"
            )
        try:
            ledger = self._reachable()
            state = ledger.state()
            stored = ledger.event(grant.epoch)
        except UnknownPosition as error:
            raise StaleGrant(f"{method}: forged grant, {error}") from error
        except LedgerUnreachable as error:
            self.close()
            return self._in_outage(grant, method, error)
        self._raise_floor(state)
        if stored.type == "LeaseGranted":
            return self._check_standing(state, grant, stored, method)
        return self._check_operation(state, grant, stored, method)

    def close(self) -> None:
        """Close the ledger handle; the next check opens a new one."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()

    def _reachable(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self._open_ledger()
        return self._ledger

    def _raise_floor(self, state: LedgerState) -> None:
        """No epoch below the newest of any move that covered this worker's devices is obeyed."""
        epochs = state.job(self.job).epochs
        self.floor = max(
            self.floor, *(epochs.get(device, -1) for device in self.devices or epochs), -1
        )

    def _check_operation(
        self, state: LedgerState, grant: Grant, stored: StoredEvent, method: str
    ) -> OperationState:
        if (
            stored.type not in OPERATION_EVENTS
            or stored.job != grant.job
            or stored.operation != grant.operation
            or tuple(stored.body["devices"]) != grant.devices
        ):
            raise StaleGrant(
                f"{method}: forged grant of {grant.operation}; at {grant.epoch} stands "
                f"{stored.type} of {stored.job}, operation {stored.operation}"
            )
        known = state.job(grant.job).operations.get(grant.operation)
        if known is None or known.epoch != grant.epoch or grant.epoch < self.floor:
            newest = max(self.floor, known.epoch if known else -1)
            raise StaleGrant(
                f"{method}: stale grant of {grant.operation}, epoch {grant.epoch}; "
                f"in force is epoch {newest}"
            )
        allowed = ALLOWED.get(known.status, frozenset())
        if known.open and known.taken_over:
            allowed |= FINISHING if known.status == "verified" else RESTORING
        if method not in allowed:
            now = ", ".join(sorted(allowed)) or "nothing: the grant has expired"
            raise StaleGrant(f"{method}: {grant.operation} is {known.status}, which allows {now}")
        return known

    def _check_standing(
        self, state: LedgerState, grant: Grant, stored: StoredEvent, method: str
    ) -> AttemptState:
        if (
            stored.job != grant.job
            or stored.body["holder"] != grant.operation
            or tuple(stored.body["devices"]) != grant.devices
        ):
            raise StaleGrant(
                f"{method}: forged standing grant of {grant.operation}; at {grant.epoch} stands a "
                f"lease of {stored.job} for {stored.body['holder']}"
            )
        job = state.job(grant.job)
        attempt = job.current_attempt()
        if attempt is None or (attempt.attempt, attempt.epoch) != (grant.operation, grant.epoch):
            now = f"{attempt.attempt} at epoch {attempt.epoch}" if attempt else "no attempt"
            raise StaleGrant(
                f"{method}: stale standing grant of {grant.operation}, epoch {grant.epoch}; "
                f"current is {now}"
            )
        for device in self.devices:
            held = state.leases.get(device)
            if held is None or (held.job, held.epoch) != (grant.job, grant.epoch):
                now = f"leased by {held.job} at {held.epoch}" if held else "leased by nobody"
                raise StaleGrant(f"{method}: expired standing grant, {device} is {now}")
            if device in state.quarantine:
                by = state.quarantine[device]
                raise StaleGrant(f"{method}: {device} is in quarantine since {by}")
        _require_standing(method)
        self._standing = (grant, attempt)
        running = job.operation_running()
        if (
            method in LAYOUT
            and running is not None
            and running.status != "granted"
            and set(self.devices) & set(running.devices)
        ):
            raise StaleGrant(
                f"{method}: {running.operation} is {running.status} on these devices, "
                "which leaves the method to its own grant"
            )
        return attempt

    def _in_outage(self, grant: Grant, method: str, error: LedgerUnreachable) -> AttemptState:
        if self._standing is not None and self._standing[0] == grant:
            _require_standing(method)
            # A move that had begun may have left this device between two layouts.
            if method in LAYOUT:
                raise StaleGrant(f"{method}: no layout changes while the ledger is unreachable")
            return self._standing[1]
        raise StaleGrant(
            f"{method}: the grant of {grant.operation} cannot be checked now ({error}); "
            "no move is made while the ledger is unreachable"
        ) from error


def _require_standing(method: str) -> None:
    if method not in STANDING:
        allowed = ", ".join(sorted(STANDING))
        raise StaleGrant(f"{method}: a standing grant allows {allowed}; a move needs its own")


class DeviceLock:
    """The lock of a device on its node, held by the process that uses the device.

    It is an ``flock`` on a file in ``directory``, which must be local to the node: the kernel
    drops it when the holder dies, however it dies. Children do not inherit it, neither forked nor
    executed. A lock is no lease: it says that a process lives, the ledger says who may.
    """

    def __init__(self, directory: Path, device: str) -> None:
        self.device = device
        self.path = lock_path(directory, device)
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """True while this object holds the lock."""
        return self._fd is not None

    def acquire(self, timeout_s: float = 5.0) -> None:
        """Take the lock; raise DeviceHeld, naming the holder, after ``timeout_s``.

        Taking a lock that is held already does nothing.
        """
        if self._fd is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline_s = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        while not _try_lock(fd):
            if time.monotonic() >= deadline_s:
                holder = _holder(self.path)
                os.close(fd)
                raise DeviceHeld(
                    f"expected {self.device} free within {timeout_s:g} s, found it held by "
                    f"{holder}; end that process and confirm its death before you use the device"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        _HELD.add(self)

    def release(self) -> None:
        """Give the lock up; does nothing where it is not held."""
        fd, self._fd = self._fd, None
        _HELD.discard(self)
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


_HELD: weakref.WeakSet[DeviceLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked child shares the open file, and with it the lock, which would then outlive its
    # holder. Closing the child's descriptor leaves the parent's lock as it is.
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


def device_is_free(directory: Path, device: str) -> bool:
    """True when no process of this node holds the lock of a device."""
    try:
        fd = os.open(lock_path(directory, device), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _try_lock(fd)
    finally:
        os.close(fd)


def evidence_of_death(directory: Path, devices: Collection[str]) -> str:
    """Say, for ``Gate.expire``, that no process holds the lock of any of these devices.

    Raise DeviceHeld where one is held. It speaks for the node whose ``directory`` this is.
    """
    for device in sorted(devices):
        if not device_is_free(directory, device):
            holder = _holder(lock_path(directory, device))
            raise DeviceHeld(
                f"expected the lock of {device} free, found it held by {holder}; the holder lives"
            )
    return f"device locks free in {directory}: {', '.join(sorted(devices))}"


def lock_path(directory: Path, device: str) -> Path:
    """File of a device's lock."""
    return Path(directory) / f"{device.replace('/', '.')}.lock"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    pid = path.read_text(encoding="ascii", errors="replace").strip()
    return f"pid {pid}" if pid else "another process"
