"""Starts runs of a job, each in a process of its own, and reads the traces that they leave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shiftbook.verify import errors
from shiftbook.verify.errors import ReplayError, ReplayFailed
from shiftbook.verify.replay.child import ERROR, REQUEST, TENSORS, TRACE
from shiftbook.verify.replay.protocol import Conditions, ReplayJob, Start, shows_all
from shiftbook.verify.replay.trace import Line, Trace, stack, step_lines

LIMIT_S = 900.0
"""How long one run may take; a small job takes seconds."""
END_LIMIT_S = 20.0
"""How long a run that is told to end may take for it."""
HASH_SEED = "PYTHONHASHSEED"


@dataclass(frozen=True)
class Asked:
    """What of a run's conditions was asked for; None leaves it to the job."""

    seed: int | None = None
    steps: int | None = None
    schedule: str | None = None
    workers: Mapping[str, int] | None = None
    moves: int | None = None
    start: Start | None = None

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "seed": self.seed,
            "steps": self.steps,
            "schedule": self.schedule,
            "workers": dict(self.workers or {}),
            "moves": self.moves,
            "start": None if self.start is None else asdict(self.start),
        }

    @property
    def reference(self) -> Asked:
        """The same seed and steps under the reference conditions."""
        return Asked(self.seed, self.steps, start=self.start)


def run_apart(
    target: str,
    asked: Asked,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    number: int = 1,
    keep: bool = True,
    limit_s: float = LIMIT_S,
    interventions: Sequence[str] = (),
    operations: Path | None = None,
    hash_seed: str | None = None,
) -> Trace:
    """Run a Python target in a fresh process and return its trace; files go to ``folder``.

    ``number`` counts runs: the hashes of text, and with them the order of sets, differ between
    numbers unless PYTHONHASHSEED is set. Raises what the job's loading raised, and ReplayFailed
    where the job stopped with an error or took longer than ``limit_s``.
    """
    folder.mkdir(parents=True)
    request = {
        "target": target,
        "config": None if config is None else dict(config),
        "conditions": asked.plain(),
        "keep": keep,
        "path": [str(Path.cwd()), *(path for path in sys.path if path)],
        "interventions": list(interventions),
        "operations": None if operations is None else str(operations),
    }
    (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
    seeded = hash_seed or os.environ.get(HASH_SEED) or str(number)
    environment = {**os.environ, HASH_SEED: seeded}
    output = folder / "output"
    with (
        output.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", "shiftbook.verify.replay.child", str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        ) as process,
    ):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise ReplayFailed(
                f"{target}: expected the run to end within {limit_s:g} s, it did not; ask for "
                "fewer --steps, or give a longer --timeout"
            ) from error
        finally:
            _end(process)
    if code or not (folder / TRACE).is_file():
        _raise(folder, target, code, output)
    return read_trace(folder / TRACE, target)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that goes on, first so that it can stop what it started itself."""
    for signal_ in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        signal_()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)


def _raise(folder: Path, target: str, code: int, output: Path) -> None:
    error = folder / ERROR
    if not error.is_file():
        said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = said[-1] if said else "it said nothing"
        raise ReplayFailed(f"{target}: the run ended with exit code {code}: {last}")
    told = json.loads(error.read_text(encoding="utf-8"))
    if told["kind"] == "job":
        if os.environ.get("SHIFTBOOK_DEBUG") == "1":
            sys.stderr.write(told["traceback"])
        raise ReplayFailed(
            f"{target}: the job stopped with {told['message']}; mend the job, or run again with "
            "SHIFTBOOK_DEBUG=1 for the traceback"
        )
    kind = getattr(errors, told["kind"], ReplayError)
    raise kind(told["message"])


def read_trace(path: Path, target: str) -> Trace:
    """The trace that a run left."""
    with path.open(encoding="utf-8") as stream:
        header = json.loads(stream.readline())
        lines = tuple(Line(**json.loads(text)) for text in stream)
    begun = header["conditions"].get("start")
    start = None if begun is None else Start(**begun)
    return Trace(
        target=target,
        config=header["config"],
        equality=header["equality"],
        whole=header["whole"],
        conditions=Conditions(**{**header["conditions"], "start": start}),
        stack=header["stack"],
        lines=lines,
    )


def run_here(
    job: ReplayJob, conditions: Conditions, folder: Path, *, target: str, keep: bool = True
) -> Trace:
    """Run a job in this process, for objects that no Python path names."""
    tensors = folder / TENSORS
    if keep:
        tensors.mkdir(parents=True)
    lines = tuple(step_lines(job.run(conditions), tensors if keep else None))
    return Trace(
        target,
        dict(job.config),
        job.equality,
        conditions,
        stack(),
        lines,
        whole=shows_all(job, conditions.schedule),
    )
