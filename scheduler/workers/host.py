"""A worker process: hosts one replica of one component and obeys only grants of the ledger."""

from __future__ import annotations

import importlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shiftbook.ledger.errors import ShiftbookError
from shiftbook.ledger.fencing import GrantChecker
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.scheduler.channels import Work
from shiftbook.scheduler.errors import WorkerError
from shiftbook.scheduler.slots import Activity, Presence, lock_directory, pin
from shiftbook.scheduler.workers.component import (
    Answer,
    Component,
    Drained,
    Layout,
    Loaded,
    Parcel,
)
from shiftbook.scheduler.workers.feed import Feed
from shiftbook.scheduler.workers.line import Line, line_of

IDLE_WAIT_S = 0.25
TURN_WAIT_S = (0.002, 0.02)
"""Shortest and longest pause before a worker asks again for a device that another component
uses; it doubles, since asking takes time from the one that computes."""
FLUSH_LIMIT_S = 5.0
WATCH_S = 5.0
LEDGER_LIMIT_S = 2.0
"""How long a check of a grant waits for a ledger that is out of reach."""
NO_WORK_S = 0.05
"""A replica that was given nothing for so long has nothing to work on."""

MUTATING = ("place", "restore", "resume", "quiesce", "snapshot", "drop", "undo", "call")
"""Methods that change what the worker holds or does; each checks its grant first."""


@dataclass(frozen=True)
class HostSpec:
    """What a worker process is for; ``device`` is None for a component that takes no slot."""

    component: str
    replica: str
    device: str | None
    node: str
    factory: str
    """Python path ``module:callable`` that makes the component from the job's config."""


@dataclass(frozen=True)
class Assignment:
    """The job that a worker serves; a worker without state may be given another."""

    job: str
    ledger_url: str
    loop_name: str
    config: dict[str, Any]


def load_path(path: str) -> Callable[..., Any]:
    """Import ``module:name``."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise WorkerError(
            f"expected a Python path module:name, found {path!r} ({error})"
        ) from error


class WorkerHost:
    """The Ray actor around a component."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.incarnation = f"{spec.replica}-{uuid.uuid4().hex[:8]}"
        self.assignment: Assignment | None = None
        self._component: Component | None = None
        self._state = "idle"
        self._prepared: str | None = None
        self._layout: Layout | None = None
        self._prior: Layout | None = None
        """Layout before the one that is being prepared; undo goes back to it."""
        self._operation: str | None = None
        self._mutex = threading.RLock()
        self._starting = False
        """True while the component is made, which may take minutes."""
        self._running = threading.Event()
        self._paused = threading.Event()
        self._paused.set()
        self._wake = threading.Event()
        self._feed: Feed | None = None
        self._presence: Presence | None = None
        self._activity: Activity | None = None
        self._turn_wait_s = TURN_WAIT_S[0]
        self._busy_s = 0.0
        self._units = 0
        self._last_unit_s = 0.0
        self._first_unit_s: float | None = None
        self._worked = threading.Event()
        """Set by the first unit of work since this replica began to serve."""
        self._failure: str | None = None
        pin(spec.device)
        threading.Thread(target=self._work, daemon=True).start()

    # ---- what anyone may ask -------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What this process is, holds and does."""
        component = self._component
        return {
            **asdict(self.spec),
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "job": self.assignment.job if self.assignment else None,
            "ledger_url": self.assignment.ledger_url if self.assignment else None,
            "ready": component is not None and not self._starting,
            "state": self._state,
            "prepared": self._prepared,
            "operation": self._operation,
            "layout": self._layout,
            "resident_bytes": component.resident_bytes() if component else 0,
            "busy_s": self._busy_s,
            "units": self._units,
            "last_unit_s": self._last_unit_s,
            "first_unit_s": self._first_unit_s,
            "failure": self._failure,
            "affinity": sorted(os.sched_getaffinity(0)),
        }

    def figures(self) -> dict[str, Any]:
        """Telemetry of this replica, cheap."""
        component = self._component
        return {
            "busy_s": self._busy_s,
            "units": self._units,
            "active": self._state == "active",
            **(component.load() if component else {}),
        }

    def first_unit(self, limit_s: float) -> float | None:
        """Seconds since the first unit of work after resume began, waited for within the limit;
        None where there is nothing to work on."""
        if not self._worked.wait(min(NO_WORK_S, limit_s)) and self._has_nothing():
            return None
        self._worked.wait(limit_s)
        first_s = self._first_unit_s
        return None if first_s is None else time.monotonic() - first_s

    def _has_nothing(self) -> bool:
        feed, component = self._feed, self._component
        return feed is None or (
            feed.inbox.empty() and component is not None and not component.has_work()
        )

    def watch(self) -> None:
        """Takes long: whoever waits for this call learns at once when the process dies, and calls
        again when it ends. A caller that died holds one of this process's threads until then."""
        threading.Event().wait(WATCH_S)

    def attach(self, assignment: Assignment) -> dict[str, Any]:
        """Serve a job. Changes nothing that a job owns: refused while another's state is here."""
        with self._mutex:
            current = self.assignment
            if current == assignment and self._component is not None:
                return self.status()
            if self._state != "idle" or self._prepared:
                raise WorkerError(
                    f"{self.spec.replica}: expected an idle worker, found one that is "
                    f"{self._state} for {current.job if current else 'nobody'}; "
                    "drop its state first"
                )
            self._starting = True
            try:
                self._serve(assignment)
            finally:
                self._starting = False
            return self.status()

    # ---- what needs a grant --------------------------------------------------------------

    def place(self, grant: Grant | None, layout: Layout) -> dict[str, Any]:
        """Come to stand on the device, for a layout; holds nothing yet."""
        with self._mutex:
            self._check(grant, "place")
            if self._presence is not None:
                self._presence.enter(self._job())
            pin(self.spec.device)
            if self._layout != layout:
                self._prior, self._layout = self._layout, layout
            return self.status()

    def restore(self, grant: Grant | None, payload: dict[str, Any]) -> Loaded:
        """Build the state for the placed layout beside the present one."""
        with self._mutex:
            operation = self._check(grant, "restore")
            if self._layout is None:
                raise WorkerError(f"{self.spec.replica}: expected place before restore")
            loaded = self._held().prepare(self._layout, payload)
            self._prepared = operation
            self._operation = operation
            return loaded

    def resume(self, grant: Grant | None) -> dict[str, Any]:
        """Make what was prepared the present state, and work."""
        with self._mutex:
            operation = self._check(grant, "resume")
            if self._prepared:
                self._held().activate()
                self._prepared = self._prior = None
            elif self._state == "idle":
                raise WorkerError(f"{self.spec.replica}: expected restore before resume")
            self._operation = operation
            self._start()
            return self.status()

    def quiesce(self, grant: Grant | None) -> dict[str, Any]:
        """Stop, hand over all work in hand, keep the state; idempotent."""
        with self._mutex:
            operation = self._check(grant, "quiesce")
            drained, keys = self._stop()
            self._operation = operation
            return {
                "keys": keys,
                "partial_tokens": drained.partial_tokens,
                "replay_tokens": drained.replay_tokens,
                "moved_bytes": drained.moved_bytes,
                "idle_s": time.monotonic() - self._last_unit_s,
                "incarnation": self.incarnation,
            }

    def snapshot(self, grant: Grant | None) -> dict[str, Any]:
        """State for another replica; this one keeps its own until it drops it."""
        with self._mutex:
            self._check(grant, "snapshot")
            return self._held().snapshot()

    def drop(self, grant: Grant | None) -> dict[str, Any]:
        """Leave the device: no weights, no KV, no optimizer state, no lock."""
        with self._mutex:
            self._check(grant, "drop")
            if self._state == "active":
                self._stop()
            self._clear()
            return self.status()

    def undo(self, grant: Grant | None) -> dict[str, Any]:
        """Forget what was prepared; go on as before, or hold nothing when there was nothing."""
        with self._mutex:
            self._check(grant, "undo")
            self._held().discard()
            if self._prior is not None:
                self._layout, self._prior = self._prior, None
            self._prepared = None
            if self._state == "idle":
                self._clear()
            else:
                self._start()
            return self.status()

    def call(self, grant: Grant | None, method: str, arguments: dict[str, Any]) -> Any:
        """A method of the component's own (a trainer's update, an engine's sync)."""
        if self._starting:
            # Whoever calls has others to look after, and a start may take minutes.
            raise WorkerError(
                f"{self.spec.replica}: expected an active replica for {method}, found one that "
                "starts; bring it up first"
            )
        with self._mutex:
            self._check(grant, "load_weights" if method == "sync" else "call")
            if self._state != "active":
                raise WorkerError(
                    f"{self.spec.replica}: expected an active replica for {method}, "
                    f"found one that is {self._state}"
                )
            return self._between_units(lambda: self._held().call(method, arguments))

    # ---- inside --------------------------------------------------------------------------

    def _serve(self, assignment: Assignment) -> None:
        """Make the component of a job, and its lines."""
        if self._feed is not None:
            self._feed.end()
        if self._component is not None:
            self._component.close()
        self.assignment = assignment
        self._checker = GrantChecker(
            lambda: Ledger.open(
                assignment.ledger_url,
                create=False,
                read_only=True,
                lock_timeout_s=LEDGER_LIMIT_S,
            ),
            assignment.job,
            () if self.spec.device is None else (self.spec.device,),
        )
        locks = lock_directory(assignment.ledger_url)
        device = self.spec.device
        self._presence = None if device is None else Presence(locks, device)
        find = line_of(assignment.loop_name)
        # One caller each: a take is held open while there is no work.
        self._loop, self._taking, self._delivering = Line(find), Line(find), Line(find)
        self._component = load_path(self.spec.factory)(self.spec, assignment.config)
        urgent = self._component.urgent
        self._activity = None if device is None else Activity(locks, device, urgent=urgent)
        self._feed = Feed(
            self._take,
            self._deliver,
            self._room,
            self._hungry,
            self._component.linger_s,
            self._wake,
        )

    def _check(self, grant: Grant | None, method: str) -> str:
        if self.assignment is None:
            raise WorkerError(f"{self.spec.replica}: expected attach first")
        self._checker.check(grant, method)
        assert grant is not None
        return grant.operation

    def _job(self) -> str:
        assert self.assignment is not None
        return self.assignment.job

    def _held(self) -> Component:
        if self._component is None:
            raise WorkerError(f"{self.spec.replica}: expected attach first")
        return self._component

    def _start(self) -> None:
        self._state = "active"
        self._first_unit_s = None
        self._worked.clear()
        self._failure = None
        self._loop.call("feed", self.spec.replica)
        self._running.set()
        self._wake.set()
        assert self._feed is not None
        self._feed.open()

    def _stop(self) -> tuple[Drained, list[Any]]:
        """Stop working and give all work in hand back to the channels."""
        if self._state != "active":
            return Drained([]), []
        assert self._feed is not None
        self._loop.call("hold", self.spec.replica)
        self._running.clear()
        self._wake.set()
        self._paused.wait()
        taken = self._feed.close()
        if not self._feed.flush(FLUSH_LIMIT_S):
            raise WorkerError(
                f"{self.spec.replica}: expected the job to take its answers within "
                f"{FLUSH_LIMIT_S:.0f} s, it did not; undo, and try again when it answers"
            )
        drained = self._held().drain()
        items = [*drained.items, *((work.key, work.item) for work in taken)]
        # The job has everything before this process forgets anything.
        keys = self._loop.call(
            "give_back", self.spec.component, (self.spec.replica, self.incarnation), items
        )
        self._state = "quiesced"
        return drained, keys

    def _clear(self) -> None:
        self._held().drop()
        self._prepared = self._layout = self._prior = None
        self._state = "idle"
        self._let_go()
        if self._presence is not None:
            self._presence.leave()

    def _between_units(self, action: Callable[[], Any]) -> Any:
        """Run something while the work thread stands still, on this replica's turn."""
        self._running.clear()
        self._wake.set()
        self._paused.wait()
        try:
            while self._activity is not None and not self._activity.try_take():
                self._wake.wait(TURN_WAIT_S[0])
                self._wake.clear()
            begin_s = time.monotonic()
            result = action()
            self._busy_s += time.monotonic() - begin_s
            return result
        finally:
            self._let_go()
            if self._state == "active":
                self._running.set()

    def _room(self) -> int:
        return self._held().room()

    def _hungry(self) -> bool:
        assert self._feed is not None
        return self._feed.inbox.empty() and self._held().hungry()

    def _take(self, limit: int, wait_s: float) -> list[Work]:
        worker = (self.spec.replica, self.incarnation)
        lanes = self._held().lanes
        works: list[Work] = self._taking.call(
            "take",
            self.spec.component,
            worker,
            limit,
            None if lanes is None else list(lanes),
            wait_s,
        )
        return works

    def _deliver(self, answers: list[Answer], limit: int) -> list[Work]:
        component = self._held()
        lanes = component.lanes
        parcel = Parcel(
            self.spec.component,
            (self.spec.replica, self.incarnation),
            answers,
            self.figures(),
            component.first_use(),
            limit,
            None if lanes is None else list(lanes),
        )
        works: list[Work] = self._delivering.call("deliver", parcel)
        return works

    def _work(self) -> None:
        while True:
            if not self._running.is_set():
                self._let_go()
                self._paused.set()
                self._running.wait()
                self._paused.clear()
                continue
            try:
                self._unit()
            except ShiftbookError as error:
                self._fail(str(error))
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")

    def _let_go(self) -> None:
        """Let another component of the device compute."""
        if self._activity is not None:
            self._activity.give()

    def _fail(self, reason: str) -> None:
        """A failed unit ends the process: its state is in doubt, and the job owes nobody to it."""
        self._failure = reason
        os.write(2, f"{self.spec.replica}: {reason}\n".encode())
        os._exit(70)

    def _unit(self) -> None:
        component, feed = self._component, self._feed
        assert component is not None
        assert feed is not None
        while not feed.inbox.empty():
            work = feed.inbox.get()
            component.submit(work.key, work.item)
        if component.hungry():
            feed.ask()
        if not component.has_work():
            self._let_go()
            due_s = component.wake_after_s()
            self._wake.wait(IDLE_WAIT_S if due_s is None else min(due_s, IDLE_WAIT_S))
            self._wake.clear()
            return
        if self._activity is not None and not self._activity.try_take():
            # One that goes first asks again soon: it waits for one unit of another at most.
            first = component.urgent
            self._wake.wait(TURN_WAIT_S[0] if first else self._turn_wait_s)
            self._wake.clear()
            self._turn_wait_s = min(2 * self._turn_wait_s, TURN_WAIT_S[1])
            return
        self._turn_wait_s = TURN_WAIT_S[0]
        begin_s = time.monotonic()
        answers = component.step()
        end_s = time.monotonic()
        self._busy_s += end_s - begin_s
        if answers:
            self._units += len(answers)
            self._last_unit_s = end_s
            if self._first_unit_s is None:
                self._first_unit_s = begin_s
                self._worked.set()
            feed.answer(answers)
