"""The calculator tool: many calls wait at once, one limited child process evaluates them.

A call takes no slot. It is evaluated at once and its result is held back for the call's latency.
An expression that uses up the child's CPU time gets an error, and a new child takes the others. A
child that was killed from outside, or that fell silent on a crowded machine, says nothing about
the expression: calls are pure, so the call is repeated (three times at most), and a sample does not
depend on such accidents.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shiftbook.jobs.errors import ToolboxError
from shiftbook.jobs.questions import result_tokens
from shiftbook.jobs.tool_latency import LATENCY_SCALE, tool_latency_s

__all__ = ["LATENCY_SCALE", "ToolResult", "Toolbox", "tool_latency_s"]

_CHILD = Path(__file__).with_name("calculator_child.py")
_MAX_IN_PIPE = 64  # expressions sent and not answered; far below the pipe's 64 KiB
_MAX_EXPRESSION = 256
_MAX_ATTEMPTS = 3

CallKey = tuple[str, int]


@dataclass(frozen=True)
class ToolResult:
    """The outcome of one call: decimal ``value``, or None and the ``error``; ``latency_s`` is
    the scaled wait that the call was held for."""

    key: CallKey
    expression: str
    value: str | None
    error: str
    latency_s: float

    @property
    def tokens(self) -> list[int]:
        """The tokens that enter the episode's context."""
        return result_tokens(self.value)


@dataclass
class _Call:
    key: CallKey
    expression: str
    due: float
    latency_s: float
    attempts: int = 0
    result: ToolResult | None = None


class Toolbox:
    """Runs calculator calls for episodes of the job with ``seed``.

    ``clock`` is in seconds and only ever compared with itself. ``evaluation_timeout_s`` is the wall
    time (of the system's monotonic clock) after which a silent child is killed. Use as a context
    manager, or ``close`` it.
    """

    repeatable = True

    def __init__(
        self,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        evaluation_timeout_s: float = 10.0,
    ) -> None:
        self.seed = seed
        self.child_restarts = 0
        self._clock = clock
        self._evaluation_timeout_s = evaluation_timeout_s
        self._calls: dict[CallKey, _Call] = {}
        self._unsent: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()
        self._head_since = 0.0
        self._buffer = b""
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def child_pid(self) -> int | None:
        """Process id of the calculator's child, or None before the first call."""
        return None if self._child is None else self._child.pid

    @property
    def waiting(self) -> list[CallKey]:
        """Keys of the calls that have not been returned by ``ready``."""
        return list(self._calls)

    def start_call(self, key: CallKey, expression: str) -> float:
        """Begin a call; returns the seconds it will wait at least. Never blocks.

        Starting a waiting key again with the same expression changes nothing. Raises
        ``ToolboxError`` for another expression under that key, or one that cannot be sent.
        """
        held = self._calls.get(key)
        if held is not None:
            if held.expression != expression:
                raise ToolboxError(
                    f"call {key}: expected the expression {held.expression!r} that it began with, "
                    f"found {expression!r}; one key stands for one call"
                )
            return held.latency_s
        if not expression or len(expression) > _MAX_EXPRESSION or not expression.isprintable():
            raise ToolboxError(
                f"call {key}: expected one printable line of 1 to {_MAX_EXPRESSION} characters, "
                f"found {len(expression)}: {expression[:40]!r}"
            )
        latency_s = tool_latency_s(self.seed, *key)
        call = _Call(key, expression, self._clock() + latency_s, latency_s)
        self._calls[key] = call
        self._unsent.append(call)
        self._pump()
        return latency_s

    def ready(self, now: float | None = None) -> list[ToolResult]:
        """Results whose wait is over at ``now`` (the clock's time where None); each once, in the
        order in which they fell due. Never blocks."""
        self._pump()
        now = self._clock() if now is None else now
        over = [c for c in self._calls.values() if c.result is not None and c.due <= now]
        over.sort(key=lambda call: (call.due, call.key))
        for call in over:
            del self._calls[call.key]
        return [call.result for call in over if call.result is not None]

    def next_due(self) -> float | None:
        """The clock's time at which the next result can be ready, or None without calls."""
        return min((call.due for call in self._calls.values()), default=None)

    def drain(self) -> list[tuple[CallKey, str]]:
        """Give up all waiting calls and return them, to be started again elsewhere."""
        owed = [(call.key, call.expression) for call in self._calls.values()]
        self._calls.clear()
        self._unsent.clear()
        if self._sent:  # replies to forgotten calls must not be read as later ones' replies
            self._stop_child()
            self._sent.clear()
        return owed

    def close(self) -> None:
        """End the child process; calls that still wait are given up."""
        self._calls.clear()
        self._unsent.clear()
        self._sent.clear()
        self._stop_child()

    def _pump(self) -> None:
        """Send what fits, read what has come, and replace a child that died or fell silent."""
        self._send()
        while self._sent:
            if not self._read():
                if time.monotonic() - self._head_since > self._evaluation_timeout_s:
                    self._lose_child("evaluation timed out", at_fault=False)
                else:
                    return
            self._send()

    def _send(self) -> None:
        if not self._unsent:
            return
        child = self._running_child()
        assert child.stdin is not None
        while self._unsent and len(self._sent) < _MAX_IN_PIPE:
            call = self._unsent[0]
            try:
                os.write(child.stdin.fileno(), call.expression.encode() + b"\n")
            except BrokenPipeError:
                if self._sent:
                    return  # reading will notice the death and name its cause
                self._stop_child()
                self.child_restarts += 1
                child = self._running_child()
                assert child.stdin is not None
                continue
            if not self._sent:
                self._head_since = time.monotonic()
            self._sent.append(self._unsent.popleft())

    def _read(self) -> bool:
        """Take in replies; False when there is none yet."""
        child = self._running_child()
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(timeout=0):
                return False
        data = os.read(child.stdout.fileno(), 65536)
        if not data:
            out_of_time = child.wait() == -signal.SIGXCPU
            reason = "out of CPU time" if out_of_time else "calculator died"
            self._lose_child(reason, at_fault=out_of_time)
            return True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._settle(self._sent.popleft(), line.decode())
            self._head_since = time.monotonic()
        return True

    def _settle(self, call: _Call, reply: str) -> None:
        value = reply[1:] if reply.startswith("=") else None
        error = "" if value is not None else reply[1:]
        call.result = ToolResult(call.key, call.expression, value, error, call.latency_s)

    def _lose_child(self, reason: str, at_fault: bool) -> None:
        """The child ended with the call at the head of the pipe: that one fails if it was at fault
        or has had its attempts; all others are sent anew."""
        head = self._sent[0]
        head.attempts += 1
        if at_fault or head.attempts >= _MAX_ATTEMPTS:
            self._settle(self._sent.popleft(), "!" + reason)
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        self._stop_child()
        self.child_restarts += 1

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_CHILD)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                )
            except OSError as cause:
                raise ToolboxError(
                    f"expected to start the calculator with {sys.executable}, found: {cause}; "
                    "check process and memory limits of this machine"
                ) from cause
            self._buffer = b""
            self._head_since = time.monotonic()
        return self._child

    def _stop_child(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        child.wait()
