"""Looks at millions of stored events in seconds: blocks of them on all cores at once.

Each core has a process of its own, which runs scan_block.py on every so-manieth block and sends
what it knows of it. What a block says is for integrity.py to put together. For the judge processes
read ahead, in the same way: see read_ahead.py.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from shiftbook.verify.scan_block import (
    BLOCK_EVENTS,
    Block,
    Orders,
    Stretches,
    scan_blocks,
)

T = TypeVar("T")
P = TypeVar("P")

MOST_PROCESSES = 8
ALONE_EVENTS = 2 * BLOCK_EVENTS
"""Up to so many events one process is done before others have started."""

PIPE_BYTES = 1 << 20
"""What a process may be ahead in sending, where the system allows it: half a page of events."""

_WORK = (
    "import sys; from shiftbook.verify.scan_block import work; "
    "work(sys.stdin.buffer, sys.stdout.buffer)"
)
"""What a process of its own runs."""


def sound_blocks(
    path: Path,
    events: int,
    sizes: Collection[int] = (),
    evidence: Path | None = None,
    *,
    named: bool = True,
    processes: int | None = None,
) -> Generator[Block]:
    """Blocks of the first ``events`` events of an SQLite ledger, as long as they are sound.

    ``sizes`` are numbers of events whose edge in the tree is wanted; ``evidence`` is the folder of
    the segments, where they are to be looked at too; ``named`` whether they are wanted at all. At
    most ``processes`` blocks are in memory at once (default: one for each usable core), some 20 MB
    each, and 60 MB more with evidence.
    """
    usable = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    stretches = Stretches(range(0, events, BLOCK_EVENTS), BLOCK_EVENTS, events, sorted(sizes))
    orders = Orders(ledger_uri(path), stretches, evidence, named)
    alone = events <= ALONE_EVENTS or usable == 1
    for block in scan_blocks(orders) if alone else shared(orders, usable, Block):
        if not block.sound:
            return
        yield block


def ledger_uri(path: Path) -> str:
    """What sqlite3 opens a ledger by, for reading only."""
    return f"{path.absolute().as_uri()}?mode=ro"


class Shareable(Protocol):
    """A dataclass of orders that several processes can share."""

    @property
    def stretches(self) -> Sequence[Any]: ...

    def blocks(self) -> Iterator[Any]: ...


def shared(
    orders: Shareable, processes: int, kind: type[T], before: type[P] | None = None
) -> Generator[T | P]:
    """Blocks of a kind, in order, from processes that take them in turn; each is at most one ahead.

    Before a block its process may say things of the kind ``before``, which are given as they come.
    Ends early where a process dies or cannot start.
    """
    with ExitStack() as stack:
        answers = []
        for number in range(processes):
            worker = _start()
            stack.callback(_end, worker)
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                part = orders.stretches[number::processes]
                pickle.dump(replace(orders, stretches=part), worker.stdin)  # type: ignore[type-var]
                worker.stdin.close()
            except OSError:
                return  # it could not start; one process does it all, more slowly
            answers.append(worker.stdout)
        for index in range(len(orders.stretches)):
            block = _answer(answers[index % processes])
            while before is not None and isinstance(block, before):
                yield block
                block = _answer(answers[index % processes])
            if not isinstance(block, kind):
                return
            yield block


def _start() -> subprocess.Popen[bytes]:
    # Not forked, since a child of a process with threads may wait for a lock for ever; and not
    # by multiprocessing, which would run the program's main module again.
    worker = subprocess.Popen(
        [sys.executable, "-P", "-c", _WORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert worker.stdout is not None
    with suppress(OSError):  # more than the system allows: as it is, then
        fcntl.fcntl(worker.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return worker


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with suppress(OSError):  # what it was not given in time
                stream.close()
    worker.wait()


def _answer(answers: IO[bytes]) -> Any:
    """The next answer of a process, None where it died or what came is none."""
    try:
        return pickle.load(answers)
    except Exception:  # half an answer may raise anything, as the documentation of pickle says
        return None
