"""Commands that look at the book: jobs, log, show, state, follow."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from shiftbook.ledger.cli_options import (
    Format,
    clock_text,
    emit,
    emit_document,
    format_option,
    known_job,
    ledger_option,
    moment_ns,
    one_job,
    open_book,
    printable,
)
from shiftbook.ledger.cli_types import Whole
from shiftbook.ledger.errors import InvalidInput, UnknownOperation

if TYPE_CHECKING:
    from shiftbook.ledger.envelope import StoredEvent
    from shiftbook.ledger.ledger import Ledger

JOB_COLUMNS = (
    "job",
    "status",
    "mode",
    "iteration",
    "policy_version",
    "topology",
    "attempt",
    "attempts",
    "committed",
    "rejected",
    "open_operation",
    "safe_mode",
    "events",
    "last_event_ns",
)
_POSITION = re.compile(r"-?[0-9]+")
EVENT_COLUMNS = (
    "position",
    "job",
    "version",
    "type",
    "schema",
    "occurred_ns",
    "recorded_ns",
    "writer",
    "sequence",
    "actor",
    "operation",
    "cause",
    "key",
    "body",
)


@click.command()
@ledger_option
@format_option()
def jobs(ledger_url: str, format_: Format) -> None:
    """List the jobs of a ledger and how far each has come."""
    from shiftbook.ledger.envelope import SYSTEM_JOB

    with open_book(ledger_url) as ledger:
        state = ledger.state()
        rows = []
        for name in ledger.jobs():
            if name == SYSTEM_JOB:
                continue
            job = state.job(name)
            statuses = [operation.status for operation in job.operations.values()]
            rows.append(
                (
                    name,
                    job.status,
                    job.plan.moves.mode if job.plan else None,
                    job.iteration,
                    job.policy_version,
                    job.topology.text(),
                    job.attempt,
                    len(job.attempts),
                    statuses.count("committed"),
                    statuses.count("rejected"),
                    job.open_operation,
                    job.safe_mode,
                    job.version + 1,
                    clock_text(job.last_event_ns) if format_ == "table" else job.last_event_ns,
                )
            )
    if format_ == "table":
        # What fits a terminal; `shiftbook state JOB` has the rest.
        shown = [name for name in JOB_COLUMNS if name not in ("topology", "attempt", "mode")]
        at = [JOB_COLUMNS.index(name) for name in shown]
        rows_ = [[row[i] for i in at] for row in rows]
        emit(rows_, [*shown[:-1], "last_event"], "table")
    else:
        emit(rows, JOB_COLUMNS, format_)


@click.command()
@ledger_option
@format_option()
@click.option("--job", help="Only events of this job.")
@click.option("--type", "types", multiple=True, help="Only events of this type; may be repeated.")
@click.option("--operation", help="Only events of this reallocation or weight sync.")
@click.option("--component", help="Only events that concern this component.")
@click.option("--since", help="Recorded at or after: 2026-01-31T12:00:00 (UTC), or 10m ago.")
@click.option("--until", help="Recorded before: a time as for --since.")
@click.option(
    "--after",
    type=Whole(min=-1),
    default=-1,
    show_default=True,
    help="Only events after this position.",
)
@click.option("--limit", type=Whole(min=1), help="At most so many events.")
@click.option("--newest", is_flag=True, help="Newest first.")
def log(
    ledger_url: str,
    format_: Format,
    job: str | None,
    types: tuple[str, ...],
    operation: str | None,
    component: str | None,
    since: str | None,
    until: str | None,
    after: int,
    limit: int | None,
    newest: bool,
) -> None:
    """Print events, oldest first; filters may be combined."""
    since_ns = None if since is None else moment_ns(since)
    until_ns = None if until is None else moment_ns(until)
    with open_book(ledger_url) as ledger:
        if job is not None:
            known_job(ledger, job)
        _known_types(ledger, types)
        if job is None and operation is None:
            # Of a job or an operation there are few events; of a ledger, millions.
            after, last = ledger.span(after, since_ns, until_ns)
        else:
            last = None
        if operation is not None:
            _known_operation(ledger, operation)
        sifted = since_ns is not None or until_ns is not None or component is not None
        found: Iterator[StoredEvent] = ledger.read(
            after,
            until=last,
            job=job,
            types=types or None,
            operation=operation,
            limit=None if sifted else limit,
            reverse=newest,
        )
        if since_ns is not None:
            found = (event for event in found if event.recorded_ns >= since_ns)
        if until_ns is not None:
            found = (event for event in found if event.recorded_ns < until_ns)
        if component is not None:
            from shiftbook.ledger.concerns import Concerns

            concerns = Concerns.of(ledger.state(), component, job)
            if not concerns.known:
                raise InvalidInput(
                    f"no component {component!r} in any topology of this ledger; `shiftbook state "
                    "JOB` shows those of a job"
                )
            found = (event for event in found if concerns.event(event))
        _print_events(islice(found, limit), format_)


def _known_types(ledger: Ledger, types: Iterable[str]) -> None:
    """Refuse a type that this build does not know, unless a newer one has written it."""
    from difflib import get_close_matches

    from shiftbook.ledger.events import REGISTRY

    for name in types:
        if name in REGISTRY or next(ledger.rows(types={name}, limit=1), None) is not None:
            continue
        near = get_close_matches(name, REGISTRY, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "docs/sql.md lists them"
        raise InvalidInput(f"no event type {name!r} in this build or this ledger; {hint}")


def _known_operation(ledger: Ledger, operation: str) -> None:
    if next(ledger.rows(operation=operation, limit=1), None) is None:
        raise InvalidInput(
            f"no event of an operation {operation!r} in this ledger; `shiftbook log --type "
            "ReallocationProposed` and `--type WeightSyncStarted` list their names"
        )


def _print_events(events: Iterable[StoredEvent], format_: Format) -> None:
    if format_ == "jsonl":
        # The stored bytes themselves: what is printed is what was hashed.
        for event in events:
            sys.stdout.write(event.data.decode() + "\n")
    elif format_ == "table":
        from shiftbook.ledger.summary import summary

        rows = (
            (
                event.position,
                clock_text(event.recorded_ns),
                event.job,
                event.type,
                event.operation,
                summary(event),
            )
            for event in events
        )
        emit(rows, ("position", "recorded", "job", "type", "operation", "summary"), "table")
    else:
        rows_ = (tuple(getattr(event, name) for name in EVENT_COLUMNS) for event in events)
        emit(rows_, EVENT_COLUMNS, format_)


@click.command(context_settings={"ignore_unknown_options": True})
@ledger_option
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Text for people, or one JSON object.",
)
@click.argument("target")
def show(ledger_url: str, format_: str, target: str) -> None:
    """Show one event (TARGET is a position) or the whole story of an operation (its id)."""
    with open_book(ledger_url) as ledger:
        if _POSITION.fullmatch(target):
            stored = ledger.event(int(target))
            document = stored.plain()
            if format_ == "table":
                document |= {
                    "recorded": clock_text(stored.recorded_ns),
                    "leaf": stored.leaf.hex(),
                }
            emit_document(document)
            return
        if target.startswith("-"):
            raise click.NoSuchOption(target)
        from shiftbook.ledger.story import read_story, story_text

        events = list(ledger.read(operation=target))
        if not events:
            raise UnknownOperation(target)
        story = read_story(events)
    if format_ == "json":
        emit_document(story)
    else:
        sys.stdout.write(printable(story_text(story)))


@click.command()
@ledger_option
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Text for people, or one JSON object.",
)
@click.argument("job", required=False)
def state(ledger_url: str, format_: str, job: str | None) -> None:
    """Show where a job stands now: topology, leases, replicas, open operation, policy, bundle.

    Without JOB, the only job of the ledger.
    """
    from shiftbook.ledger.standing import read_standing, standing_text

    with open_book(ledger_url) as ledger:
        standing = read_standing(ledger.state(), one_job(ledger, job))
    if format_ == "json":
        emit_document(standing)
    else:
        sys.stdout.write(printable(standing_text(standing)))


@click.command()
@ledger_option
@format_option("jsonl")
@click.option(
    "--after",
    type=Whole(min=-1),
    help="Start after this position (-1: from the first event). Default: only new events.",
)
@click.option("--job", help="Only events of this job, which need not be there yet.")
@click.option("--type", "types", multiple=True, help="Only events of this type; may be repeated.")
@click.option("--limit", type=Whole(min=1), help="Stop after so many events.")
def follow(
    ledger_url: str,
    format_: Format,
    after: int | None,
    job: str | None,
    types: tuple[str, ...],
    limit: int | None,
) -> None:
    """Print events as they are appended, until Ctrl-C."""
    if format_ == "json":
        raise InvalidInput("a stream has no end, so it is no JSON array; use --format jsonl")
    with open_book(ledger_url) as ledger:
        _known_types(ledger, types)
        start = ledger.head().size - 1 if after is None else after
        found = (
            event
            for event in ledger.follow(start)
            if (job is None or event.job == job) and (not types or event.type in types)
        )
        for number, event in enumerate(islice(found, limit)):
            _print_followed(event, format_, first=number == 0)
            sys.stdout.flush()


def _print_followed(event: StoredEvent, format_: Format, *, first: bool) -> None:
    if format_ == "jsonl":
        sys.stdout.write(event.data.decode() + "\n")
    elif format_ == "csv":
        import csv
        import json

        writer = csv.writer(sys.stdout, lineterminator="\n")
        if first:
            writer.writerow(EVENT_COLUMNS)
        values: list[Any] = [getattr(event, name) for name in EVENT_COLUMNS[:-1]]
        writer.writerow([*values, json.dumps(event.body, ensure_ascii=False)])
    else:
        from shiftbook.ledger.summary import summary

        line = (
            f"{event.position:>7}  {clock_text(event.recorded_ns)}  {event.job}  {event.type}  "
            f"{summary(event)}"
        )
        sys.stdout.write(printable(line) + "\n")
