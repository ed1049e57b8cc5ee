"""One run of a job in a process of its own: ``python -m shiftbook.verify.replay.child FOLDER``.

Reads FOLDER/request.json and writes FOLDER/trace.jsonl (a header, then a line for each
observation), or FOLDER/error.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from shiftbook.ledger.errors import ShiftbookError
from shiftbook.verify.replay.protocol import Conditions, ReplayJob, current_component
from shiftbook.verify.replay.target import load_target, reference, varied
from shiftbook.verify.replay.trace import stack, step_lines

REQUEST, TRACE, ERROR, TENSORS = "request.json", "trace.jsonl", "error.json", "tensors"
_AGAIN = "SHIFTBOOK_REPLAY_ENVIRONMENT"
"""Set once the process has been started anew with the environment that the job asks for."""


def conditions_of(job: ReplayJob, asked: dict[str, Any]) -> Conditions:
    """The conditions that a request names, held against what the job can do."""
    base = reference(job, asked.get("seed"), asked.get("steps"))
    return varied(job, base, asked.get("schedule"), asked.get("workers") or {}, asked.get("moves"))


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
            [sys.executable, "-m", __spec__.name, str(folder)],
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
            "conditions": {
                "seed": conditions.seed,
                "steps": conditions.steps,
                "schedule": conditions.schedule,
                "workers": dict(conditions.workers),
                "moves": conditions.moves,
            },
            "stack": stack(),  # at the end: the job may import torch while it runs
        }
        out.write("\n".join([json.dumps(header), *body]) + "\n")


def main(arguments: list[str]) -> int:
    """Run, and leave an error where the parent looks for it."""
    folder = Path(arguments[0])
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


def _tell(folder: Path, error: dict[str, str]) -> None:
    (folder / ERROR).write_text(json.dumps(error), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
