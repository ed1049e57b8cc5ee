"""One run of a job in a process of its own: ``python -m shiftbook.verify.replay.child FOLDER PID``.

PID is the process that asked for it, whose end ends the run.
Reads FOLDER/request.json and writes FOLDER/trace.jsonl (a header, then a line for each
observation), or FOLDER/error.json.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shiftbook.ledger.errors import ShiftbookError
from shiftbook.verify.errors import NotRestorable
from shiftbook.verify.replay.protocol import (
    Conditions,
    ReplayJob,
    Start,
    current_component,
    shows_all,
)
from shiftbook.verify.replay.target import load_target, reference, varied
from shiftbook.verify.replay.trace import stack, step_lines

REQUEST, TRACE, ERROR, TENSORS = "request.json", "trace.jsonl", "error.json", "tensors"
_PR_SET_PDEATHSIG = 1
_STOPPED = 143
"""Exit code of a process that SIGTERM ends."""
_AGAIN = "SHIFTBOOK_REPLAY_ENVIRONMENT"
"""Set once the process has been started anew with the environment that the job asks for."""


def conditions_of(job: ReplayJob, asked: dict[str, Any]) -> Conditions:
    """The conditions that a request names, held against what the job can do."""
    base = reference(job, asked.get("seed"), asked.get("steps"))
    run = varied(job, base, asked.get("schedule"), asked.get("workers") or {}, asked.get("moves"))
    if asked.get("start") is None:
        return run
    if not getattr(job, "restorable", False):
        raise NotRestorable(
            "expected a job that can begin at a bundle, found one that cannot; let its run() "
            "restore conditions.start and give it the member restorable=True"
        )
    return replace(run, start=Start(**asked["start"]))


def run(folder: Path) -> None:
    """Run as the request in ``folder`` says and write the trace there."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    sys.path[:0] = [path for path in request["path"] if path not in sys.path]
    watch = None
    if request.get("interventions") or request.get("operations"):
        from shiftbook.checkpoint.operation_trace import Watch

        watch = Watch(
            request.get("interventions") or (), request.get("operations"), current_component
        )
        watch.before_import()
    job = load_target(request["target"], request.get("config"))
    wanted = {n: v for n, v in job.environment.items() if os.environ.get(n) != v}
    if wanted and _AGAIN not in os.environ:
        os.execve(  # libraries read these when they are loaded
            sys.executable,
            [sys.executable, "-m", __spec__.name, str(folder), *sys.argv[2:]],
            {**os.environ, **wanted, _AGAIN: "1"},
        )
    conditions = conditions_of(job, request["conditions"])
    keep = folder / TENSORS if request.get("keep") else None
    if keep is not None:
        keep.mkdir()
    with (folder / TRACE).open("w", encoding="utf-8") as out:
        steps = job.run(conditions) if watch is None else watch.watched(job.run(conditions))
        lines = step_lines(steps, keep)
        body = [json.dumps(line.plain()) for line in lines]
        header = {
            "config": dict(job.config),
            "equality": job.equality,
            "whole": shows_all(job, conditions.schedule),
            "conditions": {
                "seed": conditions.seed,
                "steps": conditions.steps,
                "schedule": conditions.schedule,
                "workers": dict(conditions.workers),
                "moves": conditions.moves,
                "start": None if conditions.start is None else asdict(conditions.start),
            },
            "stack": stack(),  # at the end: the job may import torch while it runs
        }
        out.write("\n".join([json.dumps(header), *body]) + "\n")


def main(arguments: list[str]) -> int:
    """Run, and leave an error where the parent looks for it."""
    folder = Path(arguments[0])
    _end_with(int(arguments[1]))
    try:
        run(folder)
    except ShiftbookError as error:
        _tell(folder, {"kind": type(error).__name__, "message": str(error)})
        return 2
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1] if frames else None
        where = f" at {last.filename}:{last.lineno}" if last is not None else ""
        text = f"{type(error).__name__}: {error}{where}"
        _tell(folder, {"kind": "job", "message": text, "traceback": traceback.format_exc()})
        return 1
    return 0


def _end_with(parent: int) -> None:
    """End, in order, when asked to and when the parent dies, however that happens."""
    signal.signal(signal.SIGTERM, _stop)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        raise SystemExit(_STOPPED)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(_STOPPED)


def _tell(folder: Path, error: dict[str, str]) -> None:
    (folder / ERROR).write_text(json.dumps(error), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
