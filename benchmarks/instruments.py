"""What the measurements of large ledgers share: bounds, clocks, memory, and a bare ``sqlite3``."""

from __future__ import annotations

import hashlib
import os
import resource
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MILLION = 1_000_000

Measured = dict[str, float]


@dataclass(frozen=True)
class Bound:
    """A figure that is bounded: its name in the measurement, the bound, and which way."""

    key: str
    bound: float
    at_least: bool
    unit: str
    what: str

    def line(self, found: Measured) -> tuple[bool, str]:
        """Whether it holds, and the line that says so."""
        value = found[self.key]
        met = value >= self.bound if self.at_least else value <= self.bound
        sign = "≥" if self.at_least else "≤"
        return met, (
            f"{self.what:<44} {value:10.1f} {self.unit:<9} (bound {sign} {self.bound:g}) "
            f"{'ok' if met else 'MISSED'}"
        )


@contextmanager
def timed(found: Measured, key: str, scale: float = 1.0) -> Iterator[None]:
    """Keep the seconds that a block takes, times ``scale``."""
    start = time.perf_counter()
    yield
    found[key] = (time.perf_counter() - start) * scale


@contextmanager
def apart(module: Any, name: str) -> Iterator[list[float]]:
    """Seconds of each call of one function of a module, meanwhile."""
    took: list[float] = []
    real = getattr(module, name)

    def clocked(*given: Any) -> Any:
        start = time.perf_counter()
        result = real(*given)
        took.append(time.perf_counter() - start)
        return result

    setattr(module, name, clocked)
    try:
        yield took
    finally:
        setattr(module, name, real)


@contextmanager
def watched(found: Measured) -> Iterator[None]:
    """Keep, as ``peak_mb``, the most memory that this process and its children have at once, in MB.

    Looked at four times a second. What they share, such as libraries, counts once (PSS).
    """
    done = threading.Event()
    peak_kb = 0

    def look() -> None:
        nonlocal peak_kb
        while not done.wait(0.25):
            peak_kb = max(peak_kb, sum(map(_pss_kb, ["self", *_children()])))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    found["peak_mb"] = peak_kb / 1024


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _pss_kb(pid: str) -> int:
    try:
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (OSError, ProcessLookupError):  # it has ended meanwhile
        return 0
    return next((int(line.split()[1]) for line in told.splitlines() if line.startswith("Pss:")), 0)


def peak_mb() -> float:
    """Most memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bare(path: Path, found: Measured, *, hashed: bool) -> None:
    """Seconds per million that sqlite3 alone takes for the bytes of the same rows."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        count = connection.execute("SELECT max(position) + 1 FROM events").fetchone()[0]
        with timed(found, "bare_s", MILLION / count):
            after, sha256 = -1, hashlib.sha256
            while True:
                page = connection.execute(
                    "SELECT position, data FROM events WHERE position > ? ORDER BY position "
                    "LIMIT 2048",
                    (after,),
                ).fetchall()
                if not page:
                    break
                after = page[-1][0]
                if hashed:
                    for _, data in page:
                        sha256(b"\x00" + data).digest()
    found["events"] = count


def cpu_s() -> float:
    """Seconds of CPU of this process and of its children that have ended."""
    every = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in every)


def shown_bounds(found: Measured, bounds: Sequence[Bound], beside: str) -> int:
    """Print each figure with its bound and what stands beside; the number that were missed."""
    missed = 0
    for bound in bounds:
        met, line = bound.line(found)
        missed += not met
        print(line, flush=True)
    print(f"    {beside.format(**found)}", flush=True)
    return missed
