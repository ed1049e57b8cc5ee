"""What commands share: which ledger, which output format, and how rows are printed."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from shiftbook.ledger.errors import InvalidInput, InvalidURL, UnknownJob

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger

Format = Literal["table", "json", "jsonl", "csv"]
FORMATS = ("table", "json", "jsonl", "csv")
_AGO = re.compile(r"[0-9]+\.?[0-9]*[smhd]|\.[0-9]+[smhd]")
UNBROKEN_WIDTH = 24
"""A column that is no wider than this is never folded on a terminal."""

DEFAULT_LEDGER = "sqlite:///shiftbook.db"
EVIDENCE_VARIABLE = "SHIFTBOOK_EVIDENCE"

Command = TypeVar("Command", bound=Callable[..., Any])


class LedgerURL(click.ParamType):  # type: ignore[type-arg]
    """A ledger's URL; a plain path stands for the SQLite file at that path."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a URL; a path becomes ``sqlite:///path``."""
        text = str(value)
        if "://" in text:
            return text
        if not text:
            raise InvalidURL(
                "expected a ledger URL or the path of an SQLite file, found nothing; "
                f"leave --ledger away for {DEFAULT_LEDGER}"
            )
        return f"sqlite:///{Path(text).expanduser()}"


def ledger_option(command: Command) -> Command:
    """Add ``--ledger``; the function receives ``ledger_url``."""
    return click.option(
        "--ledger",
        "ledger_url",
        type=LedgerURL(),
        envvar="SHIFTBOOK_LEDGER",
        default=DEFAULT_LEDGER,
        show_default=True,
        show_envvar=True,
        help="URL of the ledger, or the path of its SQLite file.",
    )(command)


def evidence_option(command: Command) -> Command:
    """Add ``--evidence``; the function receives ``evidence``, None for the folder beside."""
    return click.option(
        "--evidence",
        envvar=EVIDENCE_VARIABLE,
        show_envvar=True,
        help="Folder of the evidence segments, or its URL (s3://, gs://, ...); "
        "default: the folder beside the ledger's file.",
    )(command)


def format_option(default: Format = "table") -> Callable[[Command], Command]:
    """Add ``--format``; the function receives ``format_``."""
    return click.option(
        "--format",
        "format_",
        type=click.Choice(FORMATS),
        default=default,
        show_default=True,
        help="How rows are printed.",
    )


def open_book(
    url: str, *, write: bool = False, create: bool = False, evidence: str | None = None
) -> Ledger:
    """Open an existing ledger, for reading unless ``write``; with ``create`` also one that is new.

    Its evidence lies at ``evidence``, else where SHIFTBOOK_EVIDENCE says, else beside its file.
    """
    from shiftbook.ledger.ledger import Ledger

    return Ledger.open(
        url,
        create=create,
        read_only=not write,
        actor=actor() if write else None,
        evidence=evidence or os.environ.get(EVIDENCE_VARIABLE) or None,
    )


def actor() -> str:
    """Who types the command, as the ledger records it: self-claimed, as ``operator:name``."""
    import getpass

    try:
        return f"operator:{getpass.getuser()}"
    except (KeyError, OSError):
        return "operator"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on a terminal's stderr what takes so long, while it does."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def known_job(ledger: Ledger, job: str) -> str:
    """Return the job's name; raise UnknownJob where no event carries it."""
    if next(ledger.rows(job=job, limit=1), None) is None:
        raise UnknownJob(job, ledger.jobs())
    return job


def one_job(ledger: Ledger, job: str | None) -> str:
    """Return the named job, or the only one there is; raise InvalidInput where that is unclear."""
    if job is not None:
        return known_job(ledger, job)
    from shiftbook.ledger.envelope import SYSTEM_JOB

    known = [name for name in ledger.jobs() if name != SYSTEM_JOB]
    if len(known) == 1:
        return known[0]
    if not known:
        raise InvalidInput("this ledger has no job yet; run one, or give another --ledger")
    raise InvalidInput(f"this ledger has {len(known)} jobs; name one of: {', '.join(known)}")


def moment_ns(text: str, *, now: datetime | None = None) -> int:
    """Read a point in time: ISO 8601 (UTC where it has no zone), or ``90s``, ``10m``, ``2h``,
    ``3d`` ago. Returns UTC nanoseconds; raises InvalidInput."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        if _AGO.fullmatch(text):
            at = (now or datetime.now(UTC)) - timedelta(seconds=float(text[:-1]) * units[text[-1]])
        else:
            at = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(
            "expected a time such as 2026-01-31T12:00:00 or 10m (ten minutes ago), "
            f"found {text[:60]!r}"
        ) from error
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    delta = at - datetime(1970, 1, 1, tzinfo=UTC)
    return ((delta.days * 86400 + delta.seconds) * 1_000_000 + delta.microseconds) * 1000


def clock_text(ns: int | None) -> str:
    """UTC nanoseconds as ``2026-01-31 12:00:00.123``; empty for none."""
    if ns is None:
        return ""
    seconds, rest = divmod(ns, 1_000_000_000)
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return str(ns)
    return f"{at:%Y-%m-%d %H:%M:%S}.{rest // 1_000_000:03d}"


def plain(value: Any) -> Any:
    """A value as JSON can hold it: non-finite numbers by name, times as ISO, bytes as hex."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def emit(
    rows: Iterable[Sequence[Any]],
    columns: Sequence[str],
    format_: Format,
    *,
    title: str | None = None,
) -> None:
    """Print rows to stdout: a table for people, or JSON, JSON lines or CSV for programs.

    The field names of JSON are the columns. A table is drawn with rules on a terminal and as
    plain aligned text, never cut, where it is piped.
    """
    out = sys.stdout
    if format_ == "jsonl":
        for row in rows:
            out.write(_json(dict(zip(columns, row, strict=True))) + "\n")
    elif format_ == "json":
        out.write("[")
        for number, row in enumerate(rows):
            record = _json(dict(zip(columns, row, strict=True)))
            out.write(("\n " if number == 0 else ",\n ") + record)
        out.write("\n]\n")
    elif format_ == "csv":
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell_csv(value) for value in row] for row in rows)
    elif out.isatty():
        _rich_table(rows, columns, title)
    else:
        _plain_table(rows, columns)


def emit_document(document: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout, indented."""
    sys.stdout.write(json.dumps(plain(document), indent=2, ensure_ascii=False) + "\n")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(plain(value), ensure_ascii=False, separators=(", ", ": "))


def _cell_csv(value: Any) -> Any:
    value = plain(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def cell_text(value: Any) -> str:
    """A value as a person reads it in a table."""
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, dict):
        return " ".join(f"{key}={cell_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(cell_text(item) for item in value)
    return printable(str(value).replace("\n", " "))


def printable(text: str) -> str:
    """Text with its control characters escaped: what stands in a ledger cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def _rich_table(rows: Iterable[Sequence[Any]], columns: Sequence[str], title: str | None) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=SIMPLE, title_justify="left", pad_edge=False)
    numeric, body = _table_body(rows, columns)
    widths = [max(len(line[i]) for line in [columns, *body]) for i in range(len(columns))]
    for name, right, width in zip(columns, numeric, widths, strict=True):
        table.add_column(
            name,
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=width <= UNBROKEN_WIDTH,
        )
    for row in body:
        # As Text: names and reasons are data, and square brackets in them are no markup.
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout)
    if sum(min(width, UNBROKEN_WIDTH) + 3 for width in widths) > console.width:
        # Too many columns to fold: whole lines, which the terminal wraps, instead of cut ones.
        _write_plain(columns, numeric, body)
    else:
        console.print(table)


def _plain_table(rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> None:
    numeric, body = _table_body(rows, columns)
    _write_plain(columns, numeric, body)


def _write_plain(columns: Sequence[str], numeric: list[bool], body: list[list[str]]) -> None:
    lines = [list(columns), *body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _table_body(
    rows: Iterable[Sequence[Any]], columns: Sequence[str]
) -> tuple[list[bool], list[list[str]]]:
    """Say which columns are all numbers, and give every cell as text."""
    values = [list(row) for row in rows]
    numeric = [
        any(row[i] is not None for row in values)
        and all(
            row[i] is None
            or (isinstance(row[i], int | float | Decimal) and not isinstance(row[i], bool))
            for row in values
        )
        for i in range(len(columns))
    ]
    return numeric, [[cell_text(value) for value in row] for row in values]
