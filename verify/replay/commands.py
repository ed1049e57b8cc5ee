"""The command ``replay``: runs a small job again and names the first divergence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shiftbook.ledger.cli_options import (
    LedgerURL,
    emit,
    emit_document,
    evidence_option,
    format_option,
    working,
)
from shiftbook.ledger.cli_types import Finite, NamedPath, Whole

RUN = frozenset({"schedule", "workers", "moves", "seed", "steps", "limit_s"})
"""What says how a job is run."""

MEANINGLESS: dict[str, tuple[str, frozenset[str]]] = {
    "against": (
        "--against compares two recorded ledgers and runs nothing",
        RUN | {"golden", "update_golden", "code", "bisect"},
    ),
    "bisect": (
        "--bisect compares two runs of a job's Python path",
        frozenset({"golden", "update_golden", "job", "code", "evidence"}),
    ),
    "path": (
        "TARGET is a job's Python path and no ledger",
        frozenset({"job", "code", "evidence"}),
    ),
    "ledger": (
        "TARGET is a ledger, which is its own record",
        frozenset({"golden", "update_golden"}),
    ),
}
"""For each thing that can be asked for why some options say nothing about it, and which."""


@click.command(short_help="Run a small job again; name the first thing that came out otherwise.")
@click.argument("target")
@click.option("--schedule", help="Schedule of the run; the job's first one by default.")
@click.option(
    "--workers",
    metavar="NAME=N,...",
    help="Worker counts of the run, by component; the job's first ones by default.",
)
@click.option(
    "--moves", metavar="random:SEED", help="Inject moves that SEED draws; none by default."
)
@click.option("--seed", type=Whole(min=0), help="Seed; the job's own by default.")
@click.option("--steps", type=Whole(min=1), help="Steps; the job's own by default.")
@click.option(
    "--golden",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="Compare with this golden trace instead of with a run.",
)
@click.option("--update-golden", is_flag=True, help="Write the golden trace anew, for review.")
@click.option(
    "--against",
    type=LedgerURL(),
    help="Compare two recorded ledgers, TARGET being the other; nothing is run.",
)
@click.option("--job", help="The job of a ledger that has several.")
@click.option(
    "--code",
    metavar="PATH",
    help="Python path to run for a ledger whose job names none.",
)
@click.option(
    "--bisect",
    is_flag=True,
    help="Find the first operation whose output differs between two runs, and why.",
)
@click.option(
    "--timeout",
    "limit_s",
    type=Finite(min=1.0),
    default=900.0,
    show_default=True,
    help="Seconds that one run may take.",
)
@evidence_option
@format_option()
def replay(
    target: str,
    schedule: str | None,
    workers: str | None,
    moves: str | None,
    seed: int | None,
    steps: int | None,
    golden: Path | None,
    update_golden: bool,
    against: str | None,
    job: str | None,
    code: str | None,
    bisect: bool,
    limit_s: float,
    evidence: str | None,
    format_: Any,
) -> int:
    """Run a small job again and name the first thing that came out otherwise.

    TARGET is a job's Python path (package.module:attribute or file.py:attribute) or a recorded
    ledger, whose job is run by the code and configuration that it names. The run is compared with
    one under the job's reference conditions, with the golden trace, or with the ledger's record.
    A golden trace is always written under the reference conditions; where --update-golden comes
    with others, a run under these is then held against it.

    Exit code 0: the same. 1: a divergence. 2: it could not be told.
    """
    from shiftbook.verify.replay.outcome import compare_ledgers
    from shiftbook.verify.replay.outcome import replay as run_replay
    from shiftbook.verify.replay.running import Asked
    from shiftbook.verify.replay.target import is_python_target, parse_moves, parse_workers

    is_path = is_python_target(target)
    _refuse_meaningless("against" if against else "bisect" if bisect else "", is_path)
    asked = Asked(seed, steps, schedule, parse_workers(workers), parse_moves(moves))
    if not is_path:
        target = LedgerURL().convert(target, None, None)
    if against is not None:
        outcome = compare_ledgers(target, against, job, job, evidence=evidence)
    elif bisect:
        return _bisect(target, asked, limit_s, format_)
    else:
        with working(f"replaying {target}"):
            outcome = run_replay(
                target,
                asked,
                golden=golden,
                update_golden=update_golden,
                job=job,
                evidence=evidence,
                code=code,
                limit_s=limit_s,
            )
    _print(outcome, format_)
    return int(outcome.exit_code)


def _refuse_meaningless(kind: str, is_path: bool) -> None:
    """Raise UsageError for options that say nothing about what was asked for."""
    if kind == "against" and is_path:
        raise click.UsageError("--against compares two recorded ledgers; TARGET is a Python path")
    if kind == "bisect" and not is_path:
        raise click.UsageError("--bisect compares two runs of a job; give the job's Python path")
    why, without = MEANINGLESS[kind or ("path" if is_path else "ledger")]
    context = click.get_current_context()
    given = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name in without
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{why}; leave {', '.join(sorted(given))} away")


def _print(outcome: Any, format_: Any) -> None:
    from shiftbook.verify.replay.story import outcome_lines

    if format_ == "json":
        emit_document(outcome.plain())
    elif format_ == "table":
        for line in outcome_lines(outcome):
            click.echo(line)
    else:
        document = outcome.plain()
        divergence = document.pop("divergence") or {}
        for name in ("step", "component", "kind", "name", "what", "expected", "found",
                     "elements", "differing", "largest"):  # fmt: skip
            document[name] = divergence.get(name)
        emit([tuple(document.values())], list(document), format_)


def _bisect(target: str, asked: Any, limit_s: float, format_: Any) -> int:
    from shiftbook.verify.replay.bisect import bisect as find
    from shiftbook.verify.replay.bisect import report_lines

    with working(f"looking for where two runs of {target} part"):
        report = find(target, asked, limit_s=limit_s)
    if format_ == "json":
        emit_document(report.plain())
    elif format_ == "table":
        for line in report_lines(report):
            click.echo(line)
    else:
        document = report.plain()
        emit([tuple(document.values())], list(document), format_)
    return int(report.exit_code)
