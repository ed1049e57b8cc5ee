"""The controller: observes, proposes, acts through the gate, and later says what a move brought.

A detached actor. When its process dies the training loop goes on; Ray starts it again, and before
anything else it ends what the process before left open.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from typing import Any

from shiftbook.ledger.errors import (
    GateError,
    Rejected,
    ShiftbookError,
)
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.job_state import JobState, OperationState
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.recovery import recover
from shiftbook.scheduler.errors import MoveFailed, WorkerLost
from shiftbook.scheduler.mover import LoopClient, RayMover, job_fleet
from shiftbook.scheduler.moves import MoveRunner, Report
from shiftbook.scheduler.planned import PlannedMoves
from shiftbook.scheduler.policies import NoMoves, Policy, RandomMoves

POLL_S = 0.04
"""Pause between two looks where a move may become worth it soon."""
CALM_POLL_S = 0.2
"""Pause between two looks where nothing becomes worth it before the next iteration begins, in the
middle of a rollout and after its end; the beginning of that iteration ends it."""
RETRY_S = 0.5
MOVER = "ray"
"""Entry point under which recovery finds the mover of the moves that are granted here."""


class Controller:
    """The actor of one job's scheduler."""

    def __init__(
        self,
        job: str,
        ledger_url: str,
        lanes: int,
        *,
        random_moves: int | None = None,
        proposer: str = "planner",
    ) -> None:
        self._job, self._url = job, ledger_url
        self._lanes, self._random, self._proposer = lanes, random_moves, proposer
        self._stop = threading.Event()
        self._paused = threading.Event()
        self._error: str | None = None
        self._signal_at: dict[str, tuple[int, int]] = {}
        """Boundary of a move to (process, signal), for fault tests."""
        self._decisions = 0
        self._busy_s = 0.0
        self._finished = False
        threading.Thread(target=self._guarded, daemon=True).start()

    def status(self) -> dict[str, Any]:
        """Process id, decisions made, seconds spent deciding, and what went wrong last."""
        return {
            "pid": os.getpid(),
            "error": self._error,
            "finished": self._finished,
            "decisions": self._decisions,
            "busy_s": self._busy_s,
        }

    def pause(self) -> None:
        """Decide nothing until resume."""
        self._paused.set()

    def resume(self) -> None:
        """Decide again."""
        self._paused.clear()

    def die_at(self, boundary: str) -> None:
        """For fault tests: end this process with SIGKILL when a move passes a boundary."""
        self._signal_at[boundary] = (os.getpid(), signal.SIGKILL)

    def stop_at(self, boundary: str) -> None:
        """For fault tests: stop this process with SIGSTOP when a move passes a boundary."""
        self._signal_at[boundary] = (os.getpid(), signal.SIGSTOP)

    def kill_at(self, boundary: str, pid: int) -> None:
        """For fault tests: end another process with SIGKILL when a move passes a boundary."""
        self._signal_at[boundary] = (pid, signal.SIGKILL)

    def _guarded(self) -> None:
        while not self._stop.is_set():
            try:
                self._run()
                return
            except (ShiftbookError, OSError) as error:
                # The ledger or the loop cannot be reached: nothing moves, and it is tried again.
                self._error = f"{type(error).__name__}: {error}"
                self._stop.wait(RETRY_S)
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
                os.write(2, traceback.format_exc().encode())
                self._stop.wait(RETRY_S)

    def _run(self) -> None:
        with Ledger.open(self._url, create=False, actor="controller") as ledger:
            self._ledger = ledger
            self._gate = Gate(ledger, by="controller")
            self._loop = LoopClient(self._job)
            job = self._when_training()
            if job is None:
                return
            assert job.opened is not None
            fleet = job_fleet(job.opened)
            mover = RayMover(fleet, self._loop, self._job, job.opened.components)
            recover(ledger, self._job, mover, by="controller", gate=self._gate, leave_asked=True)
            runner = MoveRunner(self._gate, fleet, self._loop, mover)
            runner.at_boundary = self._boundary
            policy = self._policy(job)
            calm: int | None = None
            while not self._stop.wait(POLL_S if calm is None else 0.0):
                if self._paused.is_set():
                    calm = None
                    continue
                ended, calm = self._turn(runner, policy, calm)
                if ended:
                    return

    def _when_training(self) -> JobState | None:
        """The job once its loop trains; None when it is closed."""
        while not self._stop.wait(POLL_S):
            job = self._ledger.state().job(self._job)
            if job.status == "closed":
                return None
            if job.status == "open" and job.attempt is not None:
                try:
                    if self._loop.telemetry()["phase"] == "training":
                        return job
                except WorkerLost:
                    continue
        return None

    def _policy(self, job: JobState) -> Policy:
        assert job.opened is not None
        if self._random is not None:
            return RandomMoves(job.opened, self._random)
        if self._proposer == "operator":
            return NoMoves()
        return PlannedMoves(job.opened, self._gate, self._job, self._lanes)

    def _turn(
        self, runner: MoveRunner, policy: Policy, calm: int | None
    ) -> tuple[bool, int | None]:
        """Look once, and move if it is worth it.

        True when the job has ended; and the iteration in which nothing can become worth it soon.
        """
        telemetry = self._loop.telemetry(*(() if calm is None else (calm, CALM_POLL_S)))
        if telemetry["phase"] == "ended":
            policy.finish(telemetry)
            self._finished = True
            return True, None
        began_s = time.monotonic()
        job = self._ledger.state().job(self._job)
        asked = _asked_by_operator(job)
        if asked is not None:
            self._carry_out(runner, policy, asked.operation, None)
            return False, None
        proposal = policy.propose(telemetry, job)
        self._busy_s += time.monotonic() - began_s
        if proposal is None:
            return False, telemetry["iteration"] if policy.calm(telemetry) else None
        self._decisions += 1
        try:
            operation = self._gate.propose(self._job, proposal)
        except Rejected as error:
            policy.refused(error)
            return False, None
        self._carry_out(runner, policy, operation, telemetry)
        return False, None

    def _carry_out(
        self,
        runner: MoveRunner,
        policy: Policy,
        operation: str,
        telemetry: dict[str, Any] | None,
    ) -> None:
        try:
            grant = self._gate.grant(self._job, operation, mover=MOVER)
            known = self._ledger.state().job(self._job).operations[operation]
            report: Report = runner.run(grant, known.before, known.after, known.strategy)
        except Rejected as error:
            policy.refused(error)
        except (MoveFailed, GateError) as error:
            self._error = str(error)
            policy.failed(operation)
        else:
            policy.moved(report, telemetry)

    def _boundary(self, name: str) -> None:
        aimed = self._signal_at.pop(name, None)
        if aimed is None:
            return
        pid, number = aimed
        if pid == os.getpid():
            # To the process it would stop some thread first, and this one would go on for a while.
            signal.pthread_kill(threading.get_ident(), number)
        else:
            os.kill(pid, number)


def _asked_by_operator(job: JobState) -> OperationState | None:
    """A proposal that waits for a controller: one that an operator made through the gate."""
    if job.operation_running() is not None:
        return None
    for operation in job.operations.values():
        if operation.status == "proposed":
            return operation
    return None
