"""The command ``verify``: judges a ledger and says what it found, what it checked and what not."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from shiftbook.ledger.cli_options import (
    LedgerURL,
    emit,
    emit_document,
    evidence_option,
    ledger_option,
    open_book,
    plain,
)
from shiftbook.ledger.stop_signals import signals_set


def _line(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(plain(record), ensure_ascii=False) + "\n")
    sys.stdout.flush()


@contextmanager
def _progress() -> Any:
    """Show the position reached, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return

    shown = 0

    def show(position: int) -> None:
        nonlocal shown
        if position >= shown + 1000:
            shown = position
            click.echo(f"\rverified to position {position}", err=True, nl=False)

    try:
        yield show
    finally:
        click.echo("\r" + " " * 40 + "\r", err=True, nl=False)


@click.command(short_help="Judge a ledger: is the policy the one that the program meant?")
@click.argument("ledger_argument", metavar="[LEDGER|FILE]", required=False, type=LedgerURL())
@ledger_option
@evidence_option
@click.option("--job", help="Judge this job only; leases of other jobs still count.")
@click.option("--until", type=int, help="Judge up to this position.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(("table", "json", "jsonl")),
    default="table",
    show_default=True,
    help="How the verdict is printed.",
)
@click.option(
    "--heads",
    "places",
    multiple=True,
    metavar="FILE|URL",
    help="Heads published outside the database, to hold against it; may be repeated.",
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="PUB",
    help="Verifier key of the signer, or a file with it; may be repeated.",
)
@click.option(
    "--require-signed",
    is_flag=True,
    help="Exit with 2 where events stand after the last head outside the database.",
)
@click.option(
    "--integrity-only", is_flag=True, help="Check stored bytes and evidence, no invariant."
)
@click.option(
    "--so-far",
    is_flag=True,
    help="Judge jobs that are not closed as far as they are recorded, instead of exit code 2.",
)
@click.option(
    "--allow-unknown",
    is_flag=True,
    help="Pass over events of types that this build does not know, instead of exit code 2.",
)
@click.option("--record", "record_", is_flag=True, help="Write the verdict into the ledger.")
@click.option(
    "--follow",
    "follow_",
    is_flag=True,
    help="Judge a live ledger until its jobs close, or until Ctrl-C or SIGTERM.",
)
@click.option(
    "--freeze",
    is_flag=True,
    help="With --follow: enter safe mode at a job's first finding that should stop it.",
)
def verify(
    ledger_argument: str | None,
    ledger_url: str,
    evidence: str | None,
    job: str | None,
    until: int | None,
    format_: str,
    places: tuple[str, ...],
    keys: tuple[str, ...],
    require_signed: bool,
    integrity_only: bool,
    so_far: bool,
    allow_unknown: bool,
    record_: bool,
    follow_: bool,
    freeze: bool,
) -> int:
    """Judge a ledger, or the archive or tiles in FILE, from its first event to its head.

    First the stored bytes (order, hashes, evidence, signed heads), then the invariants. Findings
    say where, what was expected, what was found and what to do; the table at the end says what was
    checked and what was not. Only reads, unless --record is given.

    With --follow --freeze a finding of severity stop is written into the ledger at once and the job
    enters safe mode: it trains on, and nothing moves until an operator thaws it.

    Exit code 0: clean. 1: findings. 2: could not judge, which includes that a required invariant
    was not checked, that a newer version or one with other types of event wrote a part, and that a
    job is not closed where neither --until nor --so-far asks for less.
    """
    from shiftbook.verify import verdict as verdicts
    from shiftbook.verify.heads import Outside
    from shiftbook.verify.sources import exported_path

    if follow_ and until is not None:
        raise click.UsageError("--follow goes on to the end; leave --until away")
    if freeze and not follow_:
        raise click.UsageError("--freeze goes with --follow; use `shiftbook freeze JOB` otherwise")
    if integrity_only and (follow_ or job or record_):
        raise click.UsageError("--integrity-only goes with no --follow, --job or --record")
    if ledger_argument is not None and _given("ledger_url") and ledger_argument != ledger_url:
        raise click.UsageError("LEDGER and --ledger name two ledgers; give one of them")
    url = ledger_argument or ledger_url
    if record_ and exported_path(url) is not None:
        raise click.UsageError("a verdict on an export cannot be recorded in it")
    streaming = format_ == "jsonl" or (follow_ and format_ == "table")
    on_finding = _finding_printer(format_) if streaming else None
    with _progress() as on_event, ExitStack() as stack:
        if follow_:
            stop = threading.Event()
            if freeze:
                from shiftbook.verify.guard import Guard

                guard = Guard(
                    stack.enter_context(open_book(url, write=True)),
                    also=on_finding,
                    stop=stop,
                    on_problem=_tell_outage,
                )
                on_finding = guard.on_finding
            with signals_set(stop):
                verdict = verdicts.follow(
                    url,
                    job,
                    stop=stop,
                    outside=lambda: Outside.read(places, keys),
                    require_signed=require_signed,
                    on_finding=on_finding,
                    on_event=on_event,
                    evidence=evidence,
                    allow_unknown=allow_unknown,
                    on_problem=_tell_outage,
                )
        else:
            verdict = verdicts.verify(
                url,
                job,
                until,
                outside=Outside.read(places, keys),
                require_signed=require_signed,
                on_finding=on_finding,
                on_event=on_event,
                evidence=evidence,
                integrity_only=integrity_only,
                require_closed=until is None and not so_far,
                allow_unknown=allow_unknown,
            )
    _print(verdict, format_)
    if record_:
        from shiftbook.verify.recorded import record

        with open_book(url, write=True) as ledger:
            count = record(ledger, verdict)
        click.echo(f"recorded as {count} events", err=True)
    return verdict.exit_code


def _given(parameter: str) -> bool:
    """Whether a parameter stands on the command line, and not in the environment or nowhere."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is click.core.ParameterSource.COMMANDLINE


def _tell_outage(error: Exception) -> None:
    click.echo(f"going on when the ledger answers again: {error}", err=True)


def _finding_printer(format_: str) -> Callable[[Any], None]:
    from shiftbook.verify.story import finding_lines

    def show(finding: Any) -> None:
        if format_ == "jsonl":
            _line({"kind": "finding", **finding.plain()})
        else:
            click.echo("\n".join(finding_lines(finding)), err=True)

    return show


def _print(verdict: Any, format_: str) -> None:
    from shiftbook.verify import story

    if format_ == "json":
        emit_document(verdict.plain())
        return
    if format_ == "jsonl":
        document = verdict.plain()
        for finding in verdict.findings:
            if finding.invariant in ("integrity", "evidence", "heads", "outside"):
                _line({"kind": "finding", **finding.plain()})  # the others went out as they came
        for row in document.pop("coverage"):
            _line({"kind": "coverage", **row})
        document.pop("findings")
        _line({"kind": "verdict", **document})
        return
    for line in story.verdict_lines(verdict):
        click.echo(line)
    columns, rows = story.coverage_table(verdict)
    click.echo("")
    emit(rows, columns, "table")
    click.echo("")
    click.echo(story.closing_line(verdict))
