"""The command ``shadow``: runs windows of a live job again beside it, and compares."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from shiftbook.ledger.cli_options import (
    emit,
    emit_document,
    evidence_option,
    format_option,
    ledger_option,
    one_job,
    open_book,
    plain,
    working,
)
from shiftbook.ledger.cli_types import Finite


@click.command(short_help="Run a live job's windows again under a static schedule, and compare.")
@click.argument("job", required=False)
@ledger_option
@evidence_option
@click.option(
    "--follow",
    "follow_",
    is_flag=True,
    help="Go on until the job closes: each shadow starts once its bundle is there.",
)
@click.option("--once", is_flag=True, help="End after the first window that is newly compared.")
@click.option(
    "--code",
    metavar="PATH",
    help="Python path to run for a job that names none.",
)
@click.option(
    "--timeout",
    "limit_s",
    type=Finite(min=1.0),
    default=900.0,
    show_default=True,
    help="Seconds that the shadow of one window may take.",
)
@format_option()
def shadow(
    job: str | None,
    ledger_url: str,
    evidence: str | None,
    follow_: bool,
    once: bool,
    code: str | None,
    limit_s: float,
    format_: Any,
) -> int:
    """Run a live job's windows again under a static schedule, and compare.

    The plan says which windows (its field shadow). Each begins at the bundle that the live run
    saved there and is run in one process, by the code and configuration that JobOpened names; what
    the ledger holds of its iterations is compared with it. The outcome is recorded in the ledger,
    and where both sides disagree the job enters safe mode with the first difference as its reason.

    JOB may be left out where the ledger has only one. The job may still run, or be over.

    Exit code 0: every window that is due agreed. 1: one disagreed. 2: one could not be compared.
    """
    from shiftbook.verify.shadowing import Outcome, Shadow, exit_code

    shown: list[Outcome] = []

    def show(outcome: Outcome) -> None:
        shown.append(outcome)
        if format_ == "jsonl":
            sys.stdout.write(json.dumps(plain(outcome.plain()), ensure_ascii=False) + "\n")
            sys.stdout.flush()
        elif format_ == "table":
            for line in outcome_lines(outcome):
                click.echo(line)

    with open_book(ledger_url, write=True, evidence=evidence) as ledger:
        name = one_job(ledger, job)
        with (
            Shadow(ledger, name, code=code, limit_s=limit_s) as runner,
            working(f"running the shadow of {name}"),
        ):
            outcomes = runner.run(follow=follow_, once=once, on_outcome=show)
    result = exit_code(outcomes)
    if format_ == "json":
        windows = [outcome.plain() for outcome in outcomes]
        emit_document({"job": name, "exit_code": result, "windows": windows})
    elif format_ == "csv":
        rows = [outcome.plain() for outcome in outcomes]
        columns = list(Outcome(name, range(1)).plain())
        emit([tuple(row[column] for column in columns) for row in rows], columns, "csv")
    elif format_ == "table":
        click.echo(closing_line(name, outcomes))
    return result


def outcome_lines(outcome: Any) -> list[str]:
    """One window, in lines for a person."""
    first, last = outcome.window[0], outcome.window[-1]
    span = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    if outcome.compared is None:
        return [f"could not tell: {span}: {outcome.could_not}"]
    found = outcome.compared
    how = {"bits": "bit for bit", "test": "by the sequential test"}[found.method]
    when = f"at position {outcome.position}" + (", compared before" if outcome.before else "")
    bundle = found.bundle[:12]
    lines = [
        f"{outcome.word}: {span} from bundle {bundle}, {how}, {found.observations} observations, "
        f"{found.wall_s:.1f} s ({when})"
    ]
    if found.difference is not None:
        what = found.difference
        event = "" if what.position is None else f"  (event at position {what.position})"
        lines += [
            f"  first difference: iteration {what.iteration}, component {what.component}: "
            f"{what.kind} {what.name}: {what.what}",
            f"  live:   {what.live}{event}",
            f"  shadow: {what.shadow}",
        ]
    return lines


def closing_line(job: str, outcomes: Any) -> str:
    """The last line: how many windows, and how they came out."""
    if not outcomes:
        return f"nothing to compare: no window of {job} has come to its end"
    words = [outcome.word for outcome in outcomes]
    counts = [
        f"{words.count(word)} {told}"
        for word, told in (
            ("agreed", "agreed"),
            ("disagreed", "disagreed"),
            ("could not tell", "could not be compared"),
        )
        if word in words
    ]
    return f"{job}: {len(words)} windows: {', '.join(counts)}"
