"""Commands that carry a ledger from one place to another: export and import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from shiftbook.ledger.cli_options import (
    EVIDENCE_VARIABLE,
    actor,
    emit_document,
    evidence_option,
    ledger_option,
    open_book,
    working,
)
from shiftbook.ledger.cli_types import NamedPath, Whole

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger

EXIT_BAD = 1

_format = click.option(
    "--format",
    "format_",
    type=click.Choice(("table", "json")),
    default="table",
    show_default=True,
    help="How the summary is printed.",
)


@click.command()
@ledger_option
@evidence_option
@click.option(
    "-o",
    "--output",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="The file to write; only an archive is ever replaced.",
)
@click.option(
    "--tiles",
    type=NamedPath(file_okay=False, path_type=Path),
    help="A folder to bring up to the last signed head, in the layout of C2SP tlog-tiles.",
)
@click.option("--since", type=Whole(min=0), default=0, show_default=True, help="First position.")
@click.option("--until", type=Whole(min=0), help="Last position; the head without it.")
@_format
def export(
    ledger_url: str,
    evidence: str | None,
    output: Path | None,
    tiles: Path | None,
    since: int,
    until: int | None,
    format_: Literal["table", "json"],
) -> int:
    """Write the ledger, or a range of it, into one file that verifies offline.

    The file holds the stored bytes of every event, the evidence segments that they bind, and the
    signed heads over them where it begins at 0. It appears whole and synced, or not at all. Exits
    with 1 where a segment is missing or altered: the file is written without it, and its verdict
    says so.

    With --tiles, instead or as well, events and tree up to the last signed head become static
    files that any reader of a tlog-tiles log understands; what a folder holds already is kept.
    """
    if output is None and tiles is None:
        raise click.UsageError("give -o FILE, --tiles FOLDER, or both")
    if output is None and (since or until is not None):
        raise click.UsageError("--since and --until go with -o; tiles begin at 0 and end at a head")
    with open_book(ledger_url, evidence=evidence) as ledger:
        if tiles is not None:
            _write_tiles(ledger, tiles, format_ if output is None else None)
        return 0 if output is None else _write_archive(ledger, output, since, until, format_)


def _write_tiles(ledger: Ledger, folder: Path, format_: Literal["table", "json"] | None) -> None:
    from shiftbook.ledger.tiles import write_tiles

    with working(f"exporting to {folder}"):
        head = write_tiles(ledger, folder)
    if format_ == "json":
        emit_document(
            {
                "tiles": str(folder),
                "origin": head.origin,
                "events": head.size,
                "root": head.root.hex(),
            }
        )
    else:
        click.echo(f"{folder}: tiles of {head.origin}, {head.size} events", err=format_ is None)


def _write_archive(
    ledger: Ledger,
    output: Path,
    since: int,
    until: int | None,
    format_: Literal["table", "json"],
) -> int:
    from shiftbook.ledger.archive import export_archive
    from shiftbook.ledger.archive_heads import heads_section

    with working(f"exporting to {output}"):
        # An end that is fixed now: no head in the archive covers more than its events.
        last = ledger.head().size - 1 if until is None else until
        sections = heads_section(ledger, since, last)
        done = export_archive(ledger, output, first=since, last=last, sections=sections)
    for what in done.missing:
        click.echo(f"evidence left out: {what}", err=True)
    if done.missing_segments > len(done.missing):
        click.echo(f"… and {done.missing_segments - len(done.missing)} more", err=True)
    if format_ == "json":
        emit_document(done.plain())
    else:
        click.echo(
            f"{done.path}: positions {done.first} to {done.last}, {done.segments} segments, "
            f"{done.bytes} bytes; last leaf {done.head}"
        )
    return EXIT_BAD if done.missing_segments else 0


@click.command("import")
@ledger_option
@evidence_option
@click.argument("file", type=NamedPath(path_type=Path))
@_format
def import_(
    ledger_url: str, evidence: str | None, file: Path, format_: Literal["table", "json"]
) -> None:
    """Bring an archive's events and evidence into a ledger, bit for bit.

    The ledger is made where there is none. What it holds already must be the same events; an
    import that was interrupted goes on where it ended. A range is taken only by a ledger that
    holds the event before it.
    """
    import os

    from shiftbook.ledger.archive import import_archive
    from shiftbook.ledger.archive_file import ArchiveFile
    from shiftbook.ledger.archive_heads import HEADS_SECTION, restore_heads
    from shiftbook.ledger.archive_history import require_history
    from shiftbook.ledger.errors import ArchiveMismatch, LedgerUnreachable
    from shiftbook.ledger.ledger import Ledger

    with working(f"importing {file}"), ArchiveFile.open(file) as archive:
        # Before the ledger is made where there is none.
        archive.require_sound()
        require_history(archive)
        begins = archive.range.first
        try:
            ledger = Ledger.open(
                ledger_url,
                create=begins == 0,
                actor=actor(),
                evidence=evidence or os.environ.get(EVIDENCE_VARIABLE) or None,
            )
        except LedgerUnreachable as error:
            if begins == 0 or "found nothing" not in str(error):
                raise
            raise ArchiveMismatch(
                f"expected a ledger that holds the event at position {begins - 1}, found none at "
                f"{ledger_url}; import the archive that begins at 0 first"
            ) from error

        def restore_section(name: str, data: bytes) -> bool:
            if name == HEADS_SECTION:
                restore_heads(ledger, data)
            return name == HEADS_SECTION

        with ledger:
            done = import_archive(archive, ledger, restore_section=restore_section)
    if done.sections:
        click.echo(f"not taken over: sections {', '.join(done.sections)}", err=True)
    if format_ == "json":
        emit_document(done.plain())
    else:
        before = f", {done.already} stood there already" if done.already else ""
        click.echo(
            f"positions {done.first} to {done.last}: {done.imported} events imported{before}; "
            f"{done.segments} segments"
        )
