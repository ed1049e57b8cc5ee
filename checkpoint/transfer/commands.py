"""The commands `shiftbook checkpoint transfer certificates | secret | token`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shiftbook.ledger.cli_types import Finite, NamedPath

DAYS = 30.0
TOKEN_S = 3600.0


@click.group()
def transfer() -> None:
    """Files that transfers across clusters need: certificates, a secret, tokens."""


@transfer.command()
@click.option(
    "--out",
    type=NamedPath(file_okay=False, path_type=Path),
    required=True,
    help="Folder for authority.pem, server.pem and server.key.",
)
@click.option(
    "--host", "hosts", multiple=True, required=True, help="Name or address of the trainer; repeat."
)
@click.option(
    "--days", type=Finite(), default=DAYS, show_default=True, help="How long they are good."
)
def certificates(out: Path, hosts: tuple[str, ...], days: float) -> None:
    """Make an authority and a server's certificate under it, for these hosts.

    Give receivers authority.pem and nothing else.
    """
    from shiftbook.checkpoint.transfer.certificates import make_certificates

    made = make_certificates(out, hosts, days=days)
    for path in (made.authority, made.certificate, made.key):
        sys.stdout.write(f"{path}\n")


@transfer.command()
@click.option(
    "--out",
    type=NamedPath(dir_okay=False, path_type=Path),
    required=True,
    help="File that only its owner reads; sources are started with it.",
)
def secret(out: Path) -> None:
    """Make the secret that tokens are issued under."""
    from shiftbook.checkpoint.transfer.tokens import write_secret

    write_secret(out)
    sys.stdout.write(f"{out}\n")


@transfer.command()
@click.option(
    "--secret",
    "secret_file",
    type=NamedPath(dir_okay=False, path_type=Path),
    required=True,
    help="File that `secret` made.",
)
@click.option("--target", required=True, help="Name of the engine that may pull with it.")
@click.option(
    "--ttl-s", type=Finite(), default=TOKEN_S, show_default=True, help="Seconds that it is good."
)
def token(secret_file: Path, target: str, ttl_s: float) -> None:
    """Issue a token for one engine; it goes to stdout and nowhere else."""
    from shiftbook.checkpoint.transfer.tokens import issue_token, read_secret

    sys.stdout.write(issue_token(read_secret(secret_file), target, ttl_s) + "\n")
