"""Changes of a process under which one cause of chance cannot act, to find the cause of a
divergence by experiment."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

EARLY = ("python-random", "numpy-random", "clock", "entropy", "one-thread")
LATE = ("python-random", "numpy-random", "torch-random", "deterministic-kernels", "one-thread")
TICK_S = 0.001
FROZEN_S = 1_700_000_000.0


def intervene_early(names: Iterable[str]) -> None:
    """Make the changes that must be there before the job's module is imported."""
    for name in names:
        if name in EARLY:
            _EARLY[name]()


def intervene_late(names: Iterable[str]) -> None:
    """Make the changes right before the job runs, after its modules were imported."""
    for name in names:
        if name in LATE:
            _LATE[name]()


def _seeded_random() -> None:
    """Generators of Python without a seed get 0."""
    made: Any = random.Random
    seed = random.seed

    class Seeded(made):  # type: ignore[misc]
        def __init__(self, x: Any = None) -> None:
            super().__init__(0 if x is None else x)

    def seeded(a: Any = None, version: int = 2) -> None:
        seed(0 if a is None else a, version)

    Seeded.__name__ = "Random"
    setattr(random, "Random", Seeded)  # noqa: B010
    setattr(random, "seed", seeded)  # noqa: B010


def _seed_random() -> None:
    random.seed(0)


def _seeded_numpy() -> None:
    """numpy's generators without a seed get 0."""
    try:
        import numpy as np
    except ModuleNotFoundError:
        return
    make: Any = np.random.default_rng
    seed: Any = np.random.seed

    def seeded_rng(value: Any = None) -> Any:
        return make(0 if value is None else value)

    def seeded(value: Any = None) -> None:
        seed(0 if value is None else value)

    setattr(np.random, "default_rng", seeded_rng)  # noqa: B010
    setattr(np.random, "seed", seeded)  # noqa: B010


def _seed_numpy() -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def _seed_torch() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.seed = lambda: int(torch.manual_seed(0).initial_seed())


def _deterministic() -> None:
    """Kernels that have no deterministic form stay as they are and torch warns."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.use_deterministic_algorithms = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a function whose effect the intervention keeps."""


def _one_thread_of_torch() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.set_num_threads = _nothing


def _one_thread_of_python() -> None:
    """Pools run what is submitted at once, and results are given in the order of submission."""
    from concurrent import futures
    from concurrent.futures import thread

    class Serial(thread.ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            done: futures.Future[Any] = futures.Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)
            return done

    def in_order(fs: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
        yield from list(fs)

    setattr(futures, "ThreadPoolExecutor", Serial)  # noqa: B010
    setattr(thread, "ThreadPoolExecutor", Serial)  # noqa: B010
    setattr(futures, "as_completed", in_order)  # noqa: B010


def _frozen_clock() -> None:
    """Clocks that the program reads go on by TICK_S at each look; others see the real time."""
    from shiftbook.checkpoint.operation_trace import CLOCKS, is_programs

    looks = 0

    def freeze(name: str) -> None:
        real = getattr(time, name)

        def frozen() -> float:
            nonlocal looks
            if not is_programs(sys._getframe(1).f_code.co_filename):
                return float(real()) if not name.endswith("_ns") else real()
            looks += 1
            now = FROZEN_S + looks * TICK_S
            return int(now * 1e9) if name.endswith("_ns") else now

        setattr(time, name, frozen)

    for name in CLOCKS:
        freeze(name)


def _seeded_entropy() -> None:
    """The system's entropy, as the program draws it, comes from a generator with the seed 0."""
    import os

    from shiftbook.checkpoint.operation_trace import is_programs

    source = random.Random(0)
    real = os.urandom

    def urandom(size: int, /) -> bytes:
        caller = sys._getframe(1).f_code.co_filename
        if is_programs(caller) or caller.endswith(("uuid.py", "secrets.py", "random.py")):
            return source.randbytes(size)
        return real(size)

    setattr(os, "urandom", urandom)  # noqa: B010
    setattr(random, "_urandom", urandom)  # noqa: B010


_EARLY: dict[str, Callable[[], None]] = {
    "python-random": _seeded_random,
    "numpy-random": _seeded_numpy,
    "clock": _frozen_clock,
    "entropy": _seeded_entropy,
    "one-thread": _one_thread_of_python,
}
_LATE: dict[str, Callable[[], None]] = {
    "python-random": _seed_random,
    "numpy-random": _seed_numpy,
    "torch-random": _seed_torch,
    "deterministic-kernels": _deterministic,
    "one-thread": _one_thread_of_torch,
}
