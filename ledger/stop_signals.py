"""Lets SIGTERM and SIGHUP end a command as Ctrl-C does, so that it stops what it has started.

A batch system, a service manager or a closed terminal sends them. By default they end a process on
the spot, and processes of its own, such as those of a cluster, would stay behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stopped:
    """Which signal asked this process to end, if one did."""

    number: int | None = None

    @property
    def exit_code(self) -> int:
        """What a shell gives for a process that this signal ended: Ctrl-C where none did."""
        return 128 + (signal.SIGINT if self.number is None else self.number)


@contextmanager
def stop_on_signals() -> Iterator[Stopped]:
    """Have the first of these signals raise KeyboardInterrupt in the main thread.

    One that is handled or ignored already, as SIGHUP is under ``nohup``, stays so. Which one it was
    is told by what this gives, since libraries raise an interrupt anew.
    """
    stopped = Stopped()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    free = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_DFL]

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.number = number
        for each in free:
            signal.signal(each, signal.SIG_IGN)  # what is being stopped is stopped to the end
        raise KeyboardInterrupt

    for number in free:
        signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_set(stop: threading.Event) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end what goes on until it is stopped, in order: they set ``stop``."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Give these signals the handlers back that they had before, where a library sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):  # neither the default nor ignored
                signal.signal(number, handler)
