"""The root of the command line: loads commands when they are called, turns errors into exit codes.

Exit codes: 0 done and clean; 1 the thing asked about is bad; 2 it could not be done; 130, 143 and
129 stopped by Ctrl-C, SIGTERM and SIGHUP. Data goes to stdout, everything else to stderr, an error
as one line.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from shiftbook.ledger.errors import InvalidInput, MissingExtra, ShiftbookError
from shiftbook.ledger.stop_signals import stop_on_signals

COMMAND_GROUP = "shiftbook.commands"
"""Entry-point group under which every package registers its commands."""

EXIT_COULD_NOT = 2
EXIT_INTERRUPTED = 130

ORDER = [
    *("demo", "jobs", "log", "show", "state", "follow"),
    *("verify", "sign", "prove", "check", "export", "import", "checkpoint"),
    *("analyze", "sql", "report", "replay", "shadow", "simulate"),
    *("propose", "freeze", "thaw", "recover", "serve", "key", "doctor"),
]
"""Order in the help, by what a command is for; commands of other packages come after these."""

EXTRA_OF = {
    "torch": "job",
    "ray": "job",
    "numba": "job",
    "numpy": "job",
    "safetensors": "job",
    "vllm": "vllm",
    "psycopg": "postgres",
    "adbc_driver_postgresql": "postgres",
    "fastapi": "service",
    "uvicorn": "service",
    "prometheus_client": "service",
    "pytest": "test",
    "hypothesis": "test",
}
"""Importable module to the extra of this distribution that installs it."""


_SURROGATES = re.compile("[\udc80-\udcff]")


class LazyCommands(click.Group):
    """The root group. A command's module is imported when that command is called, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all registered commands, ordered by what they are for."""
        names = {point.name for point in entry_points(group=COMMAND_GROUP)}
        known = [name for name in ORDER if name in names]
        return known + sorted(names.difference(known))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, or None where nobody registered that name."""
        for point in entry_points(group=COMMAND_GROUP, name=cmd_name):
            command = point.load()
            if not isinstance(command, click.Command):
                raise InvalidInput(
                    f"expected a click command at {point.value}, found {type(command).__name__}; "
                    f"correct the entry point {cmd_name!r} of group {COMMAND_GROUP}"
                )
            return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is called; a usage error names the ones there are."""
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            listed = ", ".join(self.list_commands(ctx))
            ctx.fail(f"no command {args[0]!r}; commands: {listed}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List every command with one line of help, read from its source without importing it."""
        points = {point.name: point for point in entry_points(group=COMMAND_GROUP)}
        rows = [(name, short_help(points[name])) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a reader that went away has what it wanted, so that is no error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Click would exit with 1, which means that the thing asked about is bad.
            _discard_stdout()
            return 0

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "shiftbook",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and exit with the code that the outcome stands for; click's own without that."""

        def run() -> Any:
            return super(LazyCommands, self).main(
                args, prog_name, complete_var, standalone_mode=False, **extra
            )

        if not standalone_mode:
            return run()
        _hold_descriptors()
        with stop_on_signals() as stopped:
            code = self._exit_code(run)
        sys.exit(stopped.exit_code if code == EXIT_INTERRUPTED else code)

    def _exit_code(self, run: Callable[[], Any]) -> int:
        try:
            if sys.stdout is None:
                raise InvalidInput(
                    "expected a standard output to print to, found it closed; nothing was done; "
                    "direct it to a file, or to /dev/null"
                )
            result = run()
            # A closed pipe must be noticed here, where it can still be passed over in silence.
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            return 0
        except (KeyboardInterrupt, click.exceptions.Abort):
            return EXIT_INTERRUPTED
        except Exception as error:
            code, line = explain(error)
            if os.environ.get("SHIFTBOOK_DEBUG") == "1":
                traceback.print_exc()
            click.echo(f"shiftbook: {line}", err=True)
            return code
        return result if isinstance(result, int) else 0


def _hold_descriptors() -> None:
    """Put /dev/null where standard input, output or error is closed.

    The next file that is opened would get its number, and what is printed could end in a ledger.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and one line for an error: what was wrong and what to do."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "shiftbook"
        return EXIT_COULD_NOT, _one_line(f"{error.format_message()} (see `{path} --help`)")
    if isinstance(error, click.ClickException):
        return EXIT_COULD_NOT, _one_line(error.format_message())
    if isinstance(error, ShiftbookError):
        return error.exit_code, _one_line(str(error))
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRA_OF.get((error.name or "").split(".")[0])
        if extra is not None:
            return EXIT_COULD_NOT, str(MissingExtra(extra, str(error.name)))
        return EXIT_COULD_NOT, (
            f"module {error.name} is missing, so this installation is incomplete; "
            "install it again with: pip install --force-reinstall shiftbook"
        )
    if isinstance(error, UnicodeEncodeError) and _SURROGATES.search(error.object):
        # How Python holds the bytes of an argument or a file's name that are no UTF-8.
        return EXIT_COULD_NOT, _one_line(
            f"expected text in UTF-8, found {os.fsencode(error.object)[:60]!r}; "
            "what a ledger holds is UTF-8, so check the argument and the terminal's encoding"
        )
    if isinstance(error, OSError) and error.strerror:
        where = f" {error.filename}" if error.filename else ""
        return EXIT_COULD_NOT, _one_line(
            f"the system refused{where}: {error.strerror}; "
            "check that the path exists, may be read and written, and has room"
        )
    return EXIT_COULD_NOT, _one_line(
        f"unexpected {type(error).__name__}: {error}; this is a fault of shiftbook: run again with "
        "SHIFTBOOK_DEBUG=1 and report the command, this line and the traceback"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _discard_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's flush at exit has no pipe to fail on."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        # No descriptor behind stdout, as under a test runner: nothing is flushed at exit.
        return


def short_help(point: EntryPoint) -> str:
    """First line of a command's docstring, read from the source of its module.

    Reading the source keeps `--help` from importing torch, Ray and whatever else a command needs.
    """
    try:
        spec = find_spec(point.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return "(not installed)"
    tree = ast.parse(Path(spec.origin).read_bytes())
    found = next(_docstrings(tree, point.attr), None) or ast.get_docstring(tree) or ""
    return found.strip().split("\n\n")[0].replace("\n", " ").strip()


def _docstrings(tree: ast.Module, name: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            text = ast.get_docstring(node)
            if text:
                yield text


@click.group(
    name="shiftbook",
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done and clean, 1 the thing asked about is bad, 2 could not be done. "
    "The ledger is --ledger, else SHIFTBOOK_LEDGER, else sqlite:///shiftbook.db.",
)
@click.version_option(package_name="shiftbook", prog_name="shiftbook")
def main() -> None:
    """The ledger and safety gate of reinforcement-learning jobs that move their devices."""
