"""Replays a target and says how it came out: the same, otherwise, or not to be told."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shiftbook.verify.errors import GoldenInvalid, ReplayError, TargetNotFound
from shiftbook.verify.replay.compare import (
    CALIBRATION_RUNS,
    MARGIN,
    Divergence,
    Tolerance,
    calibrated,
    first_divergence,
)
from shiftbook.verify.replay.golden import read_golden, write_golden
from shiftbook.verify.replay.recorded_trace import recorded_trace
from shiftbook.verify.replay.running import LIMIT_S, Asked, run_apart, run_here
from shiftbook.verify.replay.target import as_job, is_python_target, reference, varied
from shiftbook.verify.replay.trace import Line, Trace

EXIT_SAME, EXIT_DIVERGED, EXIT_COULD_NOT = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """What a replay showed. ``against`` says what was expected to come out, in words."""

    target: str
    against: str
    conditions: str
    divergence: Divergence | None
    observations: int
    """Observations that were compared."""
    steps: int
    equality: str
    tolerances: Mapping[str, float]
    could_not: str = ""
    """Why there is no answer; empty where there is one."""
    notes: tuple[str, ...] = ()
    written: str = ""
    """Golden trace that was written."""
    other_stack: bool = False
    """True where a golden trace was made on another stack and the bits here are others."""

    @property
    def exit_code(self) -> int:
        """0 the same; 1 a divergence; 2 it could not be told."""
        if self.could_not:
            return EXIT_COULD_NOT
        return EXIT_SAME if self.divergence is None else EXIT_DIVERGED

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        return {EXIT_SAME: "same", EXIT_DIVERGED: "diverged"}.get(self.exit_code, "could not tell")

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        return {
            "outcome": self.word,
            "exit_code": self.exit_code,
            "target": self.target,
            "against": self.against,
            "conditions": self.conditions,
            "steps": self.steps,
            "observations": self.observations,
            "equality": self.equality,
            "tolerances": dict(self.tolerances),
            "divergence": None if self.divergence is None else self.divergence.plain(),
            "could_not": self.could_not,
            "notes": list(self.notes),
            "written": self.written,
        }


class Runner:
    """Runs one target as often as it takes; a Python path in processes of their own, an object
    here. Use as a context manager: the folder with kept tensors goes at its end."""

    def __init__(self, target: str | Any, *, limit_s: float = LIMIT_S) -> None:
        self._target = target
        self._limit_s = limit_s
        self._config: Mapping[str, Any] | None = None
        self._runs = 0
        self._place = tempfile.TemporaryDirectory(prefix="shiftbook-replay-")

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._place.cleanup()

    @property
    def name(self) -> str:
        """The target as it is called in golden traces."""
        if isinstance(self._target, str):
            return self._target
        kind = self._target if hasattr(self._target, "__qualname__") else type(self._target)
        return f"{kind.__module__}:{kind.__qualname__}"

    def with_config(self, target: str, config: Mapping[str, Any]) -> None:
        """Run ``target`` with a configuration, as a ledger names both."""
        self._target, self._config = target, config

    def run(self, asked: Asked, *, keep: bool = True) -> Trace:
        """One more run."""
        self._runs += 1
        folder = Path(self._place.name) / f"run-{self._runs}"
        if isinstance(self._target, str):
            return run_apart(
                self._target,
                asked,
                folder,
                config=self._config,
                number=self._runs,
                keep=keep,
                limit_s=self._limit_s,
            )
        job = as_job(self._target, self.name, self._config)
        conditions = varied(
            job,
            reference(job, asked.seed, asked.steps),
            asked.schedule,
            asked.workers or {},
            asked.moves,
        )
        return run_here(job, conditions, folder, target=self.name, keep=keep)


def replay(
    target: str | Any,
    asked: Asked | None = None,
    *,
    golden: Path | None = None,
    update_golden: bool = False,
    job: str | None = None,
    evidence: str | None = None,
    code: str | None = None,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Run a target again and compare: with its golden trace where one is given, with the record
    where the target is a ledger, else with a run under the reference conditions.

    ``target`` is a Python path, a ledger's URL or file, or a job object. ``job`` names one of a
    ledger's jobs; ``code`` is the Python path to run for it where its JobOpened names none. Raises
    ReplayError and its kinds, and what reading a ledger raises.
    """
    asked = asked or Asked()
    if update_golden and golden is None:
        raise GoldenInvalid("expected the file to write with --update-golden; give --golden FILE")
    if isinstance(target, str) and not is_python_target(target):
        if golden is not None:
            raise GoldenInvalid(
                "expected a ledger to be its own record, found --golden as well; leave it away, "
                "or give the job's Python path"
            )
        return _against_ledger(target, asked, job, evidence, code, limit_s)
    with Runner(target, limit_s=limit_s) as runner:
        if golden is None:
            return _against_reference(runner, asked)
        if update_golden:
            return _update(runner, asked, golden)
        return _against_golden(runner, asked, golden)


def _against_reference(runner: Runner, asked: Asked) -> Outcome:
    second = runner.run(asked)  # first, so that what cannot be run is refused at once
    first = runner.run(asked.reference)
    tolerance, notes = _calibration(runner, asked, first)
    expected, left_out = _comparable(first, second)
    against = f"a run with {first.conditions.text()}"
    return _outcome(expected, second, tolerance, against, notes=(*notes, *left_out))


def _calibration(
    runner: Runner, asked: Asked, first: Trace
) -> tuple[Tolerance | None, tuple[str, ...]]:
    """The noise between runs of one seed, where the job asks for that."""
    if first.equality == "bits":
        return None, ()
    more = [runner.run(asked.reference) for _ in range(CALIBRATION_RUNS - 1)]
    tolerance = calibrated([first, *more])
    note = (
        f"tolerances: {MARGIN:g} times the greatest relative difference between "
        f"{CALIBRATION_RUNS} runs of one seed; what was the same in all must be the same"
    )
    return tolerance, (note,)


def _update(runner: Runner, asked: Asked, golden: Path) -> Outcome:
    first = runner.run(asked.reference)
    tolerance, notes = _calibration(runner, asked, first)
    if tolerance is None:
        outcome = _outcome(first, runner.run(asked.reference), None, "a second run")
        if outcome.divergence is not None:
            note = (
                "no golden trace was written: two runs of one seed differ; --bisect says where "
                "that begins"
            )
            return replace(outcome, notes=(*outcome.notes, note))
    write_golden(golden, first, tolerance)
    if asked.schedule is None and not asked.workers and asked.moves is None:
        outcome = _outcome(first, first, tolerance, str(golden), notes=notes)
    else:
        outcome = _against_golden(runner, asked, golden)
    return replace(outcome, written=str(golden))


def _against_golden(runner: Runner, asked: Asked, golden: Path) -> Outcome:
    expected, tolerance = read_golden(golden, runner.name)
    run = expected.conditions
    if asked.seed not in (None, run.seed):
        raise GoldenInvalid(
            f"{golden}: expected the seed {run.seed} that it was made with, found --seed "
            f"{asked.seed}; leave --seed away"
        )
    if asked.steps is not None and asked.steps > run.steps:
        raise GoldenInvalid(
            f"{golden}: expected at most its {run.steps} steps, found --steps {asked.steps}; ask "
            "for fewer, or write it anew with --update-golden"
        )
    steps = asked.steps or run.steps
    found = runner.run(replace(asked, seed=run.seed, steps=steps))
    if found.config_digest != expected.config_digest:
        raise GoldenInvalid(
            f"{golden}: expected the configuration {expected.config_digest[:12]} that it was made "
            f"with, found {found.config_digest[:12]} ({_changed(expected.config, found.config)}); "
            "write it again with --update-golden and review the difference"
        )
    cut, left_out = _comparable(_first_steps(expected, steps), found)
    used = tolerance if expected.equality == "tolerance" else None
    outcome = _outcome(cut, found, used, f"the golden trace {golden}", notes=left_out)
    if outcome.divergence is not None and expected.stack != found.stack and used is None:
        return replace(
            outcome,
            other_stack=True,
            could_not=(
                f"{golden} was made on another stack ({expected.stack}; here {found.stack}), where "
                "the same program may give other bits; write it again here with --update-golden"
            ),
        )
    return outcome


def _changed(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    names = sorted({*expected, *found})
    other = [name for name in names if expected.get(name) != found.get(name)]
    return "other: " + ", ".join(other[:5])


def _against_ledger(
    url: str,
    asked: Asked,
    job: str | None,
    evidence: str | None,
    code: str | None,
    limit_s: float,
) -> Outcome:
    recorded, expected = recorded_trace(url, job, evidence=evidence)
    target = code or recorded.opened.replay
    if target is None:
        raise TargetNotFound(
            f"{expected.source}: expected job {recorded.name} to name a target for replay, found "
            f"none (its program is {recorded.opened.job_path or 'not named'}); give one with "
            "--code package.module:attribute"
        )
    run = expected.conditions
    if asked.seed not in (None, run.seed):
        raise ReplayError(
            f"expected the recorded seed {run.seed}, found --seed {asked.seed}; leave it away"
        )
    if asked.steps is not None and asked.steps > run.steps:
        raise ReplayError(
            f"expected at most the {run.steps} iterations that {expected.source} holds, found "
            f"--steps {asked.steps}"
        )
    steps = asked.steps or run.steps
    with Runner(target, limit_s=limit_s) as runner:
        runner.with_config(target, recorded.opened.config)
        found = runner.run(replace(asked, seed=run.seed, steps=steps))
    shared, notes = _comparable(_first_steps(expected, steps), replace(found, whole=False))
    against = f"the record of {recorded.name} in {expected.source}"
    return _outcome(shared, found, None, against, notes=notes)


def _comparable(expected: Trace, found: Trace) -> tuple[Trace, tuple[str, ...]]:
    """What of the expected trace a run of a job shows that may show a part alone, and a note on the
    rest."""
    if found.whole:
        return expected, ()
    shared, left_out = shown_by(found, expected)
    note = f"not compared, since the job does not show it: {', '.join(left_out)}"
    return replace(shared, whole=False), (note,) if left_out else ()


def shown_by(found: Trace, record: Trace) -> tuple[Trace, list[str]]:
    """The part of a record that a run shows at all, and what it does not show."""

    def sort(line: Line) -> str:
        if line.kind == "sample":
            return f"{line.component} samples"
        return f"{line.component} {line.kind} {line.name.split('/')[0]}"

    shown = {sort(line) for line in found.lines}
    left_out = dict.fromkeys(sort(line) for line in record.lines if sort(line) not in shown)
    kept = tuple(line for line in record.lines if sort(line) in shown)
    return replace(record, lines=kept), list(left_out)


def compare_ledgers(
    one: str,
    two: str,
    job: str | None = None,
    other_job: str | None = None,
    *,
    evidence: str | None = None,
) -> Outcome:
    """Compare what two ledgers recorded of a job each, without running anything.

    ``evidence`` is where the segments of both lie; without it each has its own.
    """
    expected_job, expected = recorded_trace(one, job, evidence=evidence)
    found_job, found = recorded_trace(two, other_job, evidence=evidence)
    steps = min(expected.conditions.steps, found.conditions.steps)
    notes: tuple[str, ...] = ()
    if expected.conditions.steps != found.conditions.steps:
        notes = (f"compared the first {steps} iterations, which both hold",)
    return _outcome(
        _first_steps(expected, steps),
        _first_steps(found, steps),
        None,
        f"the record of {expected_job.name} in {expected.source}",
        notes=notes,
        target=f"{found_job.name} in {found.source}",
    )


def _first_steps(trace: Trace, steps: int) -> Trace:
    """A trace up to so many of its steps."""
    kept = set(list(dict.fromkeys(line.step for line in trace.lines))[:steps])
    return replace(trace, lines=tuple(line for line in trace.lines if line.step in kept))


def _outcome(
    expected: Trace,
    found: Trace,
    tolerance: Tolerance | None,
    against: str,
    *,
    notes: tuple[str, ...] = (),
    target: str | None = None,
) -> Outcome:
    divergence = first_divergence(expected, found, tolerance)
    could_not = ""
    if not expected.lines or not found.lines:
        could_not = "nothing was observed: a job of 0 steps, or one that observes nothing"
    return Outcome(
        target=target or found.target,
        against=against,
        conditions=found.conditions.text(),
        divergence=None if could_not else divergence,
        observations=len(expected.lines),
        steps=len({line.step for line in expected.lines}),
        equality=expected.equality,
        tolerances={} if tolerance is None else tolerance.plain(),
        could_not=could_not,
        notes=notes,
    )
