"""Looks at millions of stored events in seconds: blocks of them on all cores at once.

Each core has a process of its own, which runs scan_block.py on every so-manieth block and sends
what it knows of it. What a block says is for integrity.py to put together.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from shiftbook.verify.scan_block import BLOCK_EVENTS, Block, scan_block

MOST_PROCESSES = 8
ALONE_EVENTS = 2 * BLOCK_EVENTS
"""Up to so many events one process is done before others have started."""

_WORK = (
    "import sys; from shiftbook.verify.scan_block import work; "
    "work(sys.stdin.buffer, sys.stdout.buffer)"
)
"""What a process of its own runs."""

Order = tuple[str, int, int, list[int]]
"""Arguments of ``scan_block``."""


def sound_blocks(
    path: Path, events: int, sizes: Collection[int] = (), *, processes: int | None = None
) -> Generator[Block]:
    """Blocks of the first ``events`` events of an SQLite ledger, as long as they are sound.

    ``sizes`` are numbers of events whose edge in the tree is wanted. At most ``processes`` blocks
    are in memory at once (default: one for each usable core), some 20 MB each.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    usable = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    alone = events <= ALONE_EVENTS or usable == 1
    for block in _alone(uri, events, sizes) if alone else _shared(uri, events, sizes, usable):
        if not block.sound:
            return
        yield block


def _orders(
    uri: str, events: int, sizes: Collection[int], start: int = 0, step: int = 1
) -> Iterator[Order]:
    """Every ``step``-th block from block ``start`` on."""
    for first in range(start * BLOCK_EVENTS, events, step * BLOCK_EVENTS):
        end = min(first + BLOCK_EVENTS, events)
        yield uri, first, end - 1, [size for size in sizes if first < size <= end]


def _alone(uri: str, events: int, sizes: Collection[int]) -> Generator[Block]:
    for order in _orders(uri, events, sizes):
        yield scan_block(*order)


def _shared(uri: str, events: int, sizes: Collection[int], processes: int) -> Generator[Block]:
    """Blocks in order from processes that take them in turn; each is at most one ahead."""
    with ExitStack() as stack:
        answers = []
        for number in range(processes):
            worker = _start()
            stack.callback(_end, worker)
            listed = list(_orders(uri, events, sizes, number, processes))
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                pickle.dump(listed, worker.stdin)
                worker.stdin.close()
            except OSError:
                return  # it could not start; one process does it all, more slowly
            answers.append(worker.stdout)
        for index in range(-(-events // BLOCK_EVENTS)):
            block = _answer(answers[index % processes])
            if block is None:
                return
            yield block


def _start() -> subprocess.Popen[bytes]:
    # Not forked, since a child of a process with threads may wait for a lock for ever; and not
    # by multiprocessing, which would run the program's main module again.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _WORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with suppress(OSError):  # what it was not given in time
                stream.close()
    worker.wait()


def _answer(answers: IO[bytes]) -> Block | None:
    """The next block of a process, None where it died."""
    try:
        block: Any = pickle.load(answers)
    except (EOFError, pickle.UnpicklingError):
        return None
    return block if isinstance(block, Block) else None
