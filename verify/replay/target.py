"""Finds the job that a target names, and checks the conditions that it is asked to run under."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from shiftbook.verify.errors import ReplayError, TargetNotFound
from shiftbook.verify.replay.protocol import Conditions, ReplayJob

MEMBERS = ("run", "seed", "steps", "schedules", "workers", "movable", "equality", "config")
HOW = "give package.module:attribute or file.py:attribute"


def is_python_target(target: str) -> bool:
    """True where a target has the form of a Python path rather than of a ledger's URL or file."""
    place, colon, attribute = target.rpartition(":")
    if not colon or "://" in target or not attribute.replace(".", "_").isidentifier():
        return False
    return place.endswith(".py") or all(part.isidentifier() for part in place.split("."))


def load_target(target: str, config: Mapping[str, Any] | None = None) -> ReplayJob:
    """The job at a Python path; ``config`` is given to a function that makes it.

    Raises TargetNotFound where it is not there or no job.
    """
    if not is_python_target(target):
        raise TargetNotFound(f"expected a Python path, found {target!r}; {HOW}")
    place, _, attribute = target.rpartition(":")
    found: Any = _module(place, target)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TargetNotFound(f"expected {part!r} in {place}, found no such name; {HOW}")
        found = getattr(found, part)
    return as_job(found, target, config)


def as_job(found: Any, target: str, config: Mapping[str, Any] | None = None) -> ReplayJob:
    """An object as a job; a function or class is called with ``config`` first."""
    if callable(found) and (isinstance(found, type) or not _is_job(found)):
        found = found(config)
    elif config is not None and dict(config) != dict(getattr(found, "config", {})):
        raise TargetNotFound(
            f"{target}: expected a function that takes the configuration, found a finished job "
            "with another one; offer a function of config"
        )
    if not _is_job(found):
        missing = [name for name in MEMBERS if not hasattr(found, name)]
        raise TargetNotFound(
            f"{target}: expected a job, found {type(found).__name__} without "
            f"{', '.join(missing)}; make it a shiftbook.verify.replay.protocol.Job"
        )
    return cast("ReplayJob", found)


def _is_job(value: Any) -> bool:
    return all(hasattr(value, name) for name in MEMBERS)


def _module(place: str, target: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise TargetNotFound(f"expected a file at {place}, found none; {HOW}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise TargetNotFound(
                f"{target}: expected a module {place}, found none named {error.name}; {HOW}"
            ) from error
        raise


def parse_workers(text: str | None) -> dict[str, int]:
    """``rollout=2,trainer=4`` as numbers by component; raises ReplayError."""
    counts: dict[str, int] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, count = part.partition("=")
        if not equals or not count.strip().isdecimal() or int(count) < 1:
            raise ReplayError(
                f"expected workers such as rollout=2,trainer=4, found {part.strip()!r}"
            )
        counts[name.strip()] = int(count)
    return counts


def parse_moves(text: str | None) -> int | None:
    """``random:SEED`` as the seed, ``none`` as None; raises ReplayError."""
    if text is None or text == "none":
        return None
    word, colon, seed = text.partition(":")
    if word != "random" or not colon or not seed.isdecimal():
        raise ReplayError(f"expected moves such as random:7, or none, found {text!r}")
    return int(seed)


def reference(job: ReplayJob, seed: int | None = None, steps: int | None = None) -> Conditions:
    """The conditions that others are held against: first schedule, first counts, no moves."""
    return Conditions(
        seed=job.seed if seed is None else seed,
        steps=job.steps if steps is None else steps,
        schedule=job.schedules[0],
        workers={name: counts[0] for name, counts in job.workers.items()},
    )


def varied(
    job: ReplayJob,
    base: Conditions,
    schedule: str | None,
    workers: Mapping[str, int],
    moves: int | None,
) -> Conditions:
    """The reference with what was asked for changed; ReplayError for what the job cannot do."""
    if schedule is not None and schedule not in job.schedules:
        raise ReplayError(
            f"expected a schedule among {', '.join(job.schedules)}, found {schedule!r}"
        )
    for name, count in workers.items():
        if name not in job.workers:
            known = ", ".join(job.workers) or "none"
            raise ReplayError(f"expected workers of a component among {known}, found {name!r}")
        if count not in job.workers[name]:
            counts = ", ".join(str(one) for one in job.workers[name])
            raise ReplayError(f"expected {counts} workers of {name}, found {count}")
    if moves is not None and not job.movable:
        raise ReplayError("expected a job that can move, found one that cannot; leave --moves away")
    return Conditions(
        base.seed, base.steps, schedule or base.schedule, {**base.workers, **workers}, moves
    )
