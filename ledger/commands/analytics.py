"""Commands that understand the moves: sql and report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shiftbook.ledger.cli_options import (
    Format,
    emit,
    format_option,
    ledger_option,
    open_book,
    working,
)
from shiftbook.ledger.cli_types import NamedPath
from shiftbook.ledger.errors import InvalidInput

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.ledger.mirror import Mirror


@click.command()
@ledger_option
@format_option()
@click.argument("query")
def sql(ledger_url: str, format_: Format, query: str) -> None:
    """Run a DuckDB SELECT over the ledger's tables (QUERY, @FILE, or - for stdin).

    Tables: events, reallocations, candidates, weight_syncs, weight_deliveries, iterations,
    windows, leases, checkpoints, samples, findings, shadows. A query reads no file and changes
    nothing.
    """
    from shiftbook.ledger.query import run_query, tables_of

    text = _query_text(query)
    with open_book(ledger_url) as ledger, _mirrored(ledger, tables_of(text)) as mirror:
        if mirror.missing_segments:
            click.echo(
                f"shiftbook: {mirror.missing_segments} evidence segments are missing or altered; "
                "their samples are not in the table samples; `shiftbook verify` names them",
                err=True,
            )
        answer = run_query(mirror, text)
        emit(answer.rows, answer.columns, format_)


def _mirrored(ledger: Ledger, tables: Sequence[str]) -> Mirror:
    from shiftbook.ledger.mirror import Mirror

    with working("bringing the ledger's copy up to date"):
        return Mirror.open(ledger, tables)


def _query_text(query: str) -> str:
    if query == "-":
        try:
            text = sys.stdin.read()
            text.encode()  # in the C locale Python reads any bytes
        except UnicodeError as error:
            raise InvalidInput(
                f"expected a query in UTF-8 on stdin, found other bytes ({error})"
            ) from error
    elif query.startswith("@"):
        path = Path(query[1:])
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"expected a file with a query at {path}, found none that can be read ({error}); "
                "check the path"
            ) from error
    else:
        text = query
        text.encode()  # what is not UTF-8 is refused before DuckDB sees it
    if not text.strip():
        raise InvalidInput("expected a query, found nothing; try: shiftbook sql 'from iterations'")
    return text


@click.command()
@ledger_option
@click.option(
    "-o",
    "--output",
    type=NamedPath(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page to write.",
)
@click.option(
    "--verdict",
    "verdict_path",
    type=NamedPath(exists=True, dir_okay=False, path_type=Path),
    help="JSON of `shiftbook verify --format json`; default: the verdict in the ledger.",
)
@click.option("--job", help="Only this job.")
def report(ledger_url: str, output: Path, verdict_path: Path | None, job: str | None) -> None:
    """Write one self-contained HTML page with pictures of the moves and what they brought."""
    from shiftbook.ledger.cli_options import known_job
    from shiftbook.ledger.report import read_verdict, write_report

    verdict = read_verdict(verdict_path) if verdict_path else None
    with open_book(ledger_url) as ledger, working("drawing"):
        jobs = [known_job(ledger, job)] if job else None
        write_report(ledger, output, verdict=verdict, jobs=jobs)
    click.echo(f"wrote {output}", err=True)
