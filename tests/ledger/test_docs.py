"""What people read agrees with what runs: commands, tables, columns and every example.

Method: the registered commands and the tables of a real mirror are compared with the headings,
tables and code blocks of `docs/cli.md` and `docs/sql.md`; example queries are run, example command
lines are parsed by the commands themselves.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest

from shiftbook.ledger.cli import COMMAND_GROUP, ORDER, main, short_help
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.mirror_build import TABLES
from shiftbook.ledger.query import run_query
from tests.ledger.sample_ledger import write_sample

DOCS = Path(__file__).parents[2] / "docs"
CLI = (DOCS / "cli.md").read_text(encoding="utf-8")
SQL = (DOCS / "sql.md").read_text(encoding="utf-8")
POINTS = {point.name: point for point in entry_points(group=COMMAND_GROUP)}
OURS = {name: p for name, p in POINTS.items() if p.module.startswith("shiftbook.ledger.")}


def section(text: str, heading: str) -> str:
    """The part of a document under one heading."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading!r}"
    return found.group(1)


def examples(text: str, language: str = "") -> list[str]:
    """Code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_every_registered_command_is_documented_with_an_example() -> None:
    assert set(POINTS) >= {"jobs", "log", "show", "state", "follow", "sql", "report", "doctor"}
    for name in POINTS:
        text = section(CLI, name)
        assert any(f"shiftbook {name}" in block for block in examples(text)), name


def test_nothing_is_documented_that_is_not_registered() -> None:
    documented = re.findall(r"^### (\w+)$", CLI, re.MULTILINE)
    assert sorted(documented) == sorted(POINTS)
    assert set(POINTS) <= set(ORDER)


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_command_and_every_option_has_help(name: str) -> None:
    command = OURS[name].load()
    assert isinstance(command, click.Command)
    assert command.help
    assert short_help(OURS[name]) == command.help.split("\n\n")[0].replace("\n", " ")
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            known = parameter.help or parameter.name in ("reason", "format_")
            assert known, f"{name} {parameter.opts}"


def options_of(command: click.Command) -> list[list[str]]:
    """The names of every option of a command and of those under it."""
    parts = command.commands.values() if isinstance(command, click.Group) else ()
    own = [part.opts for part in command.params if isinstance(part, click.Option)]
    return own + [names for part in parts for names in options_of(part)]


@pytest.mark.parametrize("name", sorted(POINTS))
def test_every_option_is_documented(name: str) -> None:
    """And none that is not there: an option that a text names must be one of some command."""
    text = section(CLI, name)
    shared = {"--ledger", "--format", "--help", "--reason", "--cost", "--restoring"}
    if f"`shiftbook {name} --help`" not in text:  # else the text leaves the rest to the help
        for names in options_of(POINTS[name].load()):
            assert any(option in text for option in names) or shared.intersection(names), (
                f"{name} {names}"
            )


def test_every_option_in_a_text_is_one() -> None:
    known = {"--help", "--version"}
    for point in POINTS.values():
        known.update(name for names in options_of(point.load()) for name in names)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", CLI))
    assert named - known <= {"--log"}  # of the witness in an example


def command_lines() -> list[list[str]]:
    """Every example command line of this package's commands."""
    lines = []
    for block in examples(CLI):
        joined = block.strip()
        for line in re.split(r"\n(?=shiftbook )", joined):
            words = shlex.split(line.split(">")[0] if '"' not in line else line)
            if words[0] == "shiftbook" and words[1] in OURS:
                lines.append(words[1:])
    return lines


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_example_command_lines_parse(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example must not be refused for its options; its paths need not be there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verdict.json").write_text("{}", encoding="utf-8")
    command = OURS[words[0]].load()
    if isinstance(command, click.Group):
        words = words[1:]
        command = command.commands[words[0]]
    context = command.make_context(words[0], words[1:])
    assert context.params


def test_help_lists_every_command_with_a_line_and_imports_none() -> None:
    code = (
        "import sys\n"
        "from shiftbook.ledger.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    heavy = ('torch', 'ray', 'numba', 'sqlalchemy', 'pydantic', 'duckdb', 'altair')\n"
        "    found = [name for name in heavy if name in sys.modules]\n"
        "    print(end.code, found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    for name in POINTS:
        assert re.search(rf"^  {name} +\S", done.stdout, re.MULTILINE), name


def test_every_table_is_documented_with_its_columns_and_types(tmp_path: Path) -> None:
    with (
        write_sample(tmp_path / "ledger.db", iterations=2) as ledger,
        Mirror.open(ledger) as mirror,
    ):
        for name in TABLES:
            text = section(SQL, name)
            documented = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
            described = mirror.rows(f"DESCRIBE {name}")
            assert [(column, kind) for column, kind, _ in documented] == [
                (row["column_name"], row["column_type"]) for row in described
            ], name
            assert len(examples(text, "sql")) == 1, name


@pytest.mark.parametrize("name", TABLES)
def test_the_example_query_of_a_table_runs(name: str, tmp_path: Path) -> None:
    query = examples(section(SQL, name), "sql")[0]
    assert name in query
    with (
        write_sample(tmp_path / "ledger.db", schedules=("dynamic",), iterations=2) as ledger,
        Mirror.open(ledger) as mirror,
    ):
        answer = run_query(mirror, query)
        rows = list(answer.rows)
    empty = ("leases", "samples", "findings", "shadows")
    assert rows or name in empty


def test_the_query_of_the_command_line_page_runs(tmp_path: Path) -> None:
    block = next(block for block in examples(section(CLI, "sql")) if "select" in block)
    words = shlex.split(block.split("\nshiftbook")[0])
    with (
        write_sample(tmp_path / "ledger.db", iterations=2) as ledger,
        Mirror.open(ledger) as mirror,
    ):
        assert len(list(run_query(mirror, words[2]).rows)) == 2


def test_the_root_says_where_the_ledger_is() -> None:
    assert "SHIFTBOOK_LEDGER" in (main.epilog or "")
    assert "SHIFTBOOK_LEDGER" in CLI


def test_every_test_that_a_promise_names_is_there() -> None:
    root = DOCS.parent
    known = {path.name for path in root.glob("tests/**/test_*.py")}
    for document in ("ledger.md", "proofs.md", "archive.md"):
        text = (DOCS / document).read_text(encoding="utf-8")
        for name in re.findall(r"\btests/[\w/]+\.py\b", text):
            assert (root / name).is_file(), (document, name)
        for name in re.findall(r"\btest_\w+\.py\b", text):
            assert name in known, (document, name)
    promised = section((DOCS / "ledger.md").read_text(), "What is promised, and how it is tested")
    assert len(re.findall(r"test_\w+\.py", promised)) > 20
