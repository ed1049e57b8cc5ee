"""The commands that sign heads, hand out proofs and check them: key, sign, prove, check."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shiftbook.ledger.cli_options import (
    Format,
    emit,
    emit_document,
    format_option,
    ledger_option,
    open_book,
    working,
)
from shiftbook.ledger.cli_types import Finite, NamedPath, Whole
from shiftbook.ledger.stop_signals import signals_set

if TYPE_CHECKING:
    from shiftbook.ledger.head_signer import HeadSigner
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.ledger.signed_note import SignedHead

DEFAULT_KEY = "shiftbook.key"
HEAD_COLUMNS = ("size", "root", "origin", "key")

key_file_option = click.option(
    "--key",
    "key_file",
    type=NamedPath(dir_okay=False, path_type=Path),
    envvar="SHIFTBOOK_KEY",
    default=DEFAULT_KEY,
    show_default=True,
    show_envvar=True,
    help="File of the private key.",
)


@click.group()
def key() -> None:
    """Make and show the keys that sign heads."""


@key.command("new")
@click.option("--name", help="Name of the ledger that it signs for, such as example.com/runs.")
@click.option(
    "-o",
    "out",
    type=NamedPath(dir_okay=False, path_type=Path),
    default=DEFAULT_KEY,
    show_default=True,
    help="File to write the private key to, for its owner's eyes only.",
)
def new(name: str | None, out: Path) -> int:
    """Make a key; print the verifier key, which everybody may have."""
    from shiftbook.ledger.signing_keys import new_signer, write_signer

    signer = new_signer(name)
    write_signer(signer, out)
    click.echo(f"private key written to {out}; keep it where no writer can read it", err=True)
    click.echo(signer.verifier.text())
    return 0


@key.command("show")
@click.argument("file", type=NamedPath(dir_okay=False, path_type=Path), default=DEFAULT_KEY)
def show(file: Path) -> int:
    """Print the verifier key that belongs to a private key."""
    from shiftbook.ledger.signing_keys import read_signer

    click.echo(read_signer(file).verifier.text())
    return 0


@click.command()
@ledger_option
@key_file_option
@click.option(
    "--publish",
    "places",
    multiple=True,
    metavar="PLACE",
    help="Where heads go outside the database: a file, an fsspec URL of a folder, or "
    "exec:COMMAND, which gets each head on stdin. May be repeated. Default: KEY.heads beside the "
    "key.",
)
@click.option(
    "--follow",
    "follow_",
    is_flag=True,
    help="Keep signing until Ctrl-C or SIGTERM, then once more.",
)
@click.option(
    "--every",
    type=Whole(1),
    default=1000,
    show_default=True,
    help="Events, with --follow.",
)
@click.option(
    "--each",
    "each_s",
    type=Finite(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds after which anything new is signed, with --follow.",
)
@click.option(
    "--predecessor",
    "predecessors",
    multiple=True,
    metavar="PUB",
    help="Verifier key that signed this ledger before; may be repeated.",
)
@format_option()
def sign(
    ledger_url: str,
    key_file: Path,
    places: tuple[str, ...],
    follow_: bool,
    every: int,
    each_s: float,
    predecessors: tuple[str, ...],
    format_: Format,
) -> int:
    """Sign the head of the ledger and publish it outside the database.

    Refuses, with exit code 1, a ledger that is no continuation of what this key signed last.
    """
    from shiftbook.ledger.head_signer import HeadSigner
    from shiftbook.ledger.publication import open_outlet
    from shiftbook.ledger.signing_keys import read_signer, read_verifier

    signer = read_signer(key_file)
    beside = key_file.with_name(key_file.name + ".heads")
    with open_book(ledger_url, write=True) as ledger:
        heads = HeadSigner(
            ledger,
            signer,
            [open_outlet(place, key_file=key_file) for place in places or (str(beside),)],
            memory=key_file.with_name(key_file.name + ".last"),
            predecessors=[read_verifier(text) for text in predecessors],
        )
        if follow_:
            _follow(heads, every, each_s, "jsonl" if format_ == "table" else format_)
            return 0
        with working("signing"):
            head = heads.sign()
    rows = [] if head is None else [_row(head, signer.verifier.text())]
    emit(rows, HEAD_COLUMNS, format_)
    return 0


def _row(head: SignedHead, verifier: str) -> tuple[object, ...]:
    return head.size, head.root.hex(), head.origin, verifier


def _follow(heads: HeadSigner, every: int, each_s: float, format_: Format) -> None:
    text = heads.signer.verifier.text()
    stop = threading.Event()

    def show_head(head: SignedHead) -> None:
        emit([_row(head, text)], HEAD_COLUMNS, format_)
        sys.stdout.flush()

    with signals_set(stop):
        heads.run(
            every=every,
            each_s=each_s,
            stop=stop,
            on_head=show_head,
            on_problem=lambda error: click.echo(f"shiftbook: {error}", err=True),
        )


@click.command()
@click.argument("position", type=Whole(0), required=False)
@ledger_option
@click.option(
    "--since", metavar="HEAD", help="Prove that this head, a file or a size, still holds."
)
@click.option("--at", "size", type=Whole(1), help="Prove under the head of this size.")
@click.option(
    "-o",
    "out",
    type=NamedPath(dir_okay=False, path_type=Path, allow_dash=True),
    default="-",
    help="File to write the proof to; stdout by default.",
)
def prove(
    position: int | None, ledger_url: str, since: str | None, size: int | None, out: Path
) -> int:
    """Prove that an event stands in the ledger, or that the ledger continues an earlier head.

    The proof is one file; `shiftbook check` needs it and the verifier key, and no ledger.
    """
    from shiftbook.ledger import proof as proofs
    from shiftbook.ledger.asked_file import write_asked_file

    if (position is None) == (since is None):
        raise click.UsageError("give the POSITION of an event, or --since HEAD")
    if since is not None and size is not None:
        raise click.UsageError("--at goes with a POSITION")
    with open_book(ledger_url) as ledger:
        if since is not None:
            document = proofs.prove_since(ledger, _earlier_head(ledger, since))
        else:
            assert position is not None
            document = proofs.prove_event(ledger, position, size=size)
    data = proofs.encode_proof(document)
    if str(out) == "-":
        sys.stdout.write(data.decode())
    else:
        write_asked_file(out, data, kind="a proof", is_kind=proofs.is_proof)
        click.echo(f"proof written to {out}", err=True)
    return 0


def _earlier_head(ledger: Ledger, since: str) -> SignedHead:
    from shiftbook.ledger.errors import InvalidInput, InvalidNote
    from shiftbook.ledger.proof import no_head_of
    from shiftbook.ledger.signed_note import SignedHead, split_heads

    path = Path(since)
    if since.isdecimal() and not path.exists():
        size = int(since)
        head = ledger.tree().head(size) if size <= ledger.head().size else None
        if head is None:
            raise no_head_of(size, ledger.tree().sizes_near(size))
        return head
    if not path.is_file():
        raise InvalidInput(
            f"expected the file of a signed head, or the size of one, found {since!r}"
        )
    chunks = [chunk for _, chunk in split_heads(path.read_bytes())]
    try:
        return SignedHead.parse(chunks[-1] if chunks else b"")
    except InvalidNote as error:
        raise InvalidInput(f"expected a signed head in {since}, found none: {error}") from error


@click.command()
@click.argument("file", type=NamedPath(dir_okay=False, path_type=Path, allow_dash=True))
@click.option(
    "--key",
    "keys",
    required=True,
    multiple=True,
    metavar="PUB",
    help="Verifier key of the ledger's signer, or a file with it; may be repeated.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(("table", "json")),
    default="table",
    show_default=True,
    help="A sentence, or one JSON object.",
)
def check(file: Path, keys: tuple[str, ...], format_: str) -> int:
    """Check a proof or signed heads offline, with the verifier key alone.

    Of a file of heads, as `sign` publishes them, each must hold and continue the one before it in
    size.

    Exit code 0: it holds. 1: it does not. 2: the file is none, or the key is.
    """
    from dataclasses import asdict

    from shiftbook.ledger.proof import MAX_HEADS_BYTES, check_proof
    from shiftbook.ledger.signing_keys import read_verifier

    verifiers = [read_verifier(text) for text in keys]
    if str(file) == "-":
        data = sys.stdin.buffer.read(MAX_HEADS_BYTES + 1)
    else:
        with file.open("rb") as opened:
            data = opened.read(MAX_HEADS_BYTES + 1)
    checked = check_proof(data, verifiers)
    if format_ == "json":
        emit_document(asdict(checked))
    else:
        click.echo(checked.sentence)
    return 0
