"""What a call from a worker to its job's loop costs the cores: through Ray, and on the line.

``python -m benchmarks.line [--calls 2000] [--bytes 2000]`` lets one process call another with a
small answer, all calls by a Ray actor's method first and all on the line after it, and prints
processor time a call (of both processes and of Ray's own), seconds a call, and the ratios.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Result

TICKS = os.sysconf("SC_CLK_TCK")
BOUND = 0.5


def spent_s() -> float:
    """Processor seconds of all processes of this machine so far."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def echo(payload: bytes) -> bytes:
    """The call: as many bytes come back."""
    return payload


def measured(call: Any, calls: int) -> tuple[float, float]:
    """(processor seconds, seconds) a call."""
    for _ in range(20):
        call()
    began_cpu_s, began_s = spent_s(), time.perf_counter()
    for _ in range(calls):
        call()
    return (spent_s() - began_cpu_s) / calls, (time.perf_counter() - began_s) / calls


def main() -> int:
    """Measure both ways, and say with the exit code whether the line costs what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=2000)
    options = parser.parse_args()
    payload = os.urandom(options.bytes)

    from shiftbook.jobs.runner import Cluster, Place
    from shiftbook.scheduler.workers.line import Line, LineServer

    with tempfile.TemporaryDirectory() as folder, Cluster(Place(Path(folder)), 2):
        import ray

        @ray.remote(num_cpus=0)
        class Loop:
            def __init__(self) -> None:
                self.server = LineServer({"echo": echo}, socket.gethostbyname("localhost"))

            def line(self) -> Any:
                return self.server.address

            def echo(self, payload: bytes) -> bytes:
                return echo(payload)

        loop = Loop.remote()
        address = ray.get(loop.line.remote())
        line = Line(lambda: address)
        by_ray = measured(lambda: ray.get(loop.echo.remote(payload)), options.calls)
        by_line = measured(lambda: line.call("echo", payload), options.calls)
        line.close()
    for name, (cpu_s, wall_s) in (("Ray", by_ray), ("line", by_line)):
        print(f"{name:<5} {cpu_s * 1e3:6.3f} ms of a core, {wall_s * 1e3:6.3f} ms a call")
    ratio = by_line[0] / by_ray[0]
    result = Result("processor time, line / Ray", ratio, BOUND, False, "x", "")
    print(result.line())
    return int(not result.met)


if __name__ == "__main__":
    sys.exit(main())
