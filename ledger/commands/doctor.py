"""The command that says what is wrong with this machine and this ledger, and what mends it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from shiftbook.ledger.checks import Check
from shiftbook.ledger.cli_options import DEFAULT_LEDGER, Format, emit, format_option, ledger_option
from shiftbook.ledger.errors import InvalidInput, MissingExtra

EXIT_BAD = 1
COLUMNS = ("check", "status", "found", "fix")


@click.command()
@ledger_option
@format_option()
@click.option(
    "--grant",
    "role",
    metavar="ROLE",
    help="On PostgreSQL, as the owner: make the ledger and a role that may only append and read.",
)
@click.option(
    "--signer", is_flag=True, help="With --grant: a role that may only sign heads and read."
)
@click.pass_context
def doctor(
    context: click.Context, ledger_url: str, format_: Format, role: str | None, signer: bool
) -> int:
    """Look at machine, installation and ledger; say what is wrong and the command that mends it.

    Exits with 1 where something is wrong; a warning alone exits with 0. With --grant it looks at
    nothing else: it makes the ledger's tables where there are none, puts their triggers back as
    they belong, makes ROLE where there is none (without a password), leaves ROLE with SELECT and
    INSERT alone (of events; with --signer, of heads and nodes instead), and shows its grants.
    """
    if role is not None:
        return _grant(ledger_url, role, format_, signer=signer)
    if signer:
        raise click.UsageError("--signer says what --grant ROLE is for; give both")
    from shiftbook.ledger.health import examine

    # The default ledger need not be there; one that was asked for must be.
    asked_for = ledger_url != DEFAULT_LEDGER or context.get_parameter_source("ledger_url") not in (
        click.core.ParameterSource.DEFAULT,
        None,
    )
    checks = examine(ledger_url, must_exist=asked_for)
    return _print(checks, format_)


def _grant(ledger_url: str, role: str, format_: Format, *, signer: bool) -> int:
    if not ledger_url.startswith("postgresql+psycopg:"):
        raise InvalidInput(
            "expected a ledger on PostgreSQL for --grant, found one without roles; who may write "
            "a file is set by its permissions: chmod, chown"
        )
    try:
        from shiftbook.ledger.postgres_health import SIGNER, WRITER, grant_role
    except ImportError as error:
        raise MissingExtra("postgres", "psycopg") from error
    return _print(grant_role(ledger_url, role, SIGNER if signer else WRITER), format_)


def _print(checks: Sequence[Check], format_: Format) -> int:
    emit([(c.name, c.status, c.found, c.fix) for c in checks], COLUMNS, format_)
    return EXIT_BAD if any(check.status == "wrong" for check in checks) else 0
