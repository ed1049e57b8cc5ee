"""The command that says what is wrong with this machine and this ledger, and what mends it."""

from __future__ import annotations

import click

from shiftbook.ledger.cli_options import DEFAULT_LEDGER, Format, emit, format_option, ledger_option

EXIT_BAD = 1
COLUMNS = ("check", "status", "found", "fix")


@click.command()
@ledger_option
@format_option()
@click.pass_context
def doctor(context: click.Context, ledger_url: str, format_: Format) -> int:
    """Look at machine, installation and ledger; say what is wrong and the command that mends it.

    Exits with 1 where something is wrong; a warning alone exits with 0.
    """
    from shiftbook.ledger.health import examine

    # The default ledger need not be there; one that was asked for must be.
    asked_for = ledger_url != DEFAULT_LEDGER or context.get_parameter_source("ledger_url") not in (
        click.core.ParameterSource.DEFAULT,
        None,
    )
    checks = examine(ledger_url, must_exist=asked_for)
    emit([(c.name, c.status, c.found, c.fix) for c in checks], COLUMNS, format_)
    return EXIT_BAD if any(check.status == "wrong" for check in checks) else 0
