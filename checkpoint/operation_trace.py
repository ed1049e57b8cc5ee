"""Watches a running job: the output of each torch operation, draws of chance, and looks at clocks.

``Watch`` writes them to a file, a JSON object a line, in the order in which they happen, and makes
the changes (interventions) under which a cause of chance cannot act. What is hidden from it:
operations outside torch, generators of classes other than those named here, and clocks read by
compiled code.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from shiftbook.checkpoint.interventions import intervene_early, intervene_late

MOST_EVENTS = 400_000
"""Events that are written; a run that makes more is cut there, and the last line says so."""

UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose output is whatever lay in memory; it is set to zero while watched."""
OVERWRITTEN = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")
"""Operations that do not read the tensor they write."""

PYTHON_DRAWS = (
    "random", "uniform", "triangular", "randint", "choice", "randrange", "sample", "shuffle",
    "choices", "normalvariate", "gauss", "expovariate", "betavariate", "getrandbits", "randbytes",
)  # fmt: skip
NUMPY_DRAWS = (
    "rand", "randn", "randint", "random", "random_sample", "uniform", "normal", "standard_normal",
    "choice", "shuffle", "permutation", "exponential", "poisson", "binomial", "bytes",
)  # fmt: skip
CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")

_STDLIB = sysconfig.get_paths()["stdlib"]
_LIBRARIES = tuple(
    f"site-packages/{name}/" for name in ("torch", "numpy", "numba", "ray", "pyarrow", "_pytest")
)
_OWN = ("operation_trace.py", "interventions.py", "/verify/replay/")

Item = TypeVar("Item")


def is_programs(filename: str) -> bool:
    """True for a file of the program under watch: not Python's, not torch's or numpy's, not
    this watcher's."""
    if filename.startswith("<") or any(part in filename for part in _OWN):
        return False
    if any(part in filename for part in _LIBRARIES):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename


def source_of(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame of the program; empty where there is none."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_programs(filename):
            path = Path(filename)
            here = Path.cwd()
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Watch:
    """Watches one run of a job in this process, which is given up to it."""

    def __init__(
        self,
        interventions: Iterable[str],
        path: str | None,
        component: Callable[[], str] = str,
    ) -> None:
        """``path`` is the file to write, None to intervene alone; ``component`` says which
        component computes."""
        self._interventions = tuple(interventions)
        self._path = path
        self._component = component
        self._out: Any = None
        self._events = 0
        self._step = 0
        self._mode: Any = None

    def before_import(self) -> None:
        """Set up what the job's module must not import past: draws, clocks, interventions."""
        intervene_early(self._interventions)
        if self._path is not None:
            self._out = Path(self._path).open("w", encoding="utf-8")  # noqa: SIM115
            _watch_python(self._note)
            if "clock" not in self._interventions:
                _watch_clocks(self._note)
            _watch_numpy(self._note)

    def watched(self, steps: Iterator[Item]) -> Iterator[Item]:
        """The job's steps, each made under watch."""
        intervene_late(self._interventions)
        if self._out is not None and "torch" in sys.modules:
            from shiftbook.checkpoint.torch_operations import Operations

            self._mode = Operations(self._write, self._component)
        try:
            while True:
                with self._mode or nullcontext():
                    try:
                        step = next(steps)
                    except StopIteration:
                        return
                yield step
                self._step += 1
        finally:
            if self._out is not None:
                self._out.close()

    def _note(self, kind: str, name: str, value: Any) -> None:
        """One draw of chance or look at a clock."""
        data = repr(value).encode()
        self._write(
            {
                "kind": kind,
                "name": name,
                "value": hashlib.sha256(data).hexdigest()[:16],
                "source": source_of(sys._getframe(2)),
                "component": self._component(),
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        if self._out is None or self._out.closed or self._events > MOST_EVENTS:
            return
        self._events += 1
        if self._events > MOST_EVENTS:
            event = {"kind": "cut", "name": f"after {MOST_EVENTS} events"}
        self._out.write(json.dumps({**event, "step": self._step}) + "\n")


Note = Callable[[str, str, Any], None]


def _watch_python(note: Note) -> None:
    for name in PYTHON_DRAWS:
        _watch(random, name, "python-random", f"random.{name}", note)


def _watch_numpy(note: Note) -> None:
    """numpy's own generator; numpy is imported for that where it is installed."""
    try:
        import numpy as np
    except ModuleNotFoundError:
        return
    for name in NUMPY_DRAWS:
        _watch(np.random, name, "numpy-random", f"numpy.random.{name}", note)
    make = np.random.default_rng

    def watched(seed: Any = None) -> Any:
        made = make(seed)
        if seed is None:
            state = made.bit_generator.state
            note("numpy-random", "numpy.random.default_rng() without a seed", state)
        return made

    np.random.default_rng = watched


def _watch_clocks(note: Note) -> None:
    import time

    for name in CLOCKS:
        _watch(time, name, "clock", f"time.{name}", note, programs_alone=True)
    import os

    _watch(os, "urandom", "entropy", "os.urandom", note, programs_alone=True)
    import uuid

    _watch(uuid, "uuid4", "entropy", "uuid.uuid4", note, programs_alone=True)


def _watch(
    module: Any, name: str, kind: str, shown: str, note: Note, *, programs_alone: bool = False
) -> None:
    original = getattr(module, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        if not programs_alone or is_programs(sys._getframe(1).f_code.co_filename):
            note(kind, shown, args[0] if value is None and args else value)
        return value

    watched.__name__ = name
    setattr(module, name, watched)
