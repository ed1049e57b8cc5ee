"""Goal: no word that a person can type is called a fault of Shiftbook, or passed over in silence.

Method: every parameter of every command is found by asking the commands. Each number is given one
that no ledger can hold, NaN and infinity, each path an empty name; each text bytes that are no
UTF-8, on a real ledger. Numerals of other scripts, of which Python takes some for digits, stand
where a position or a time is expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from shiftbook.ledger.cli import COMMAND_GROUP, main
from shiftbook.ledger.cli_options import moment_ns
from shiftbook.ledger.commands.operate import read_topology
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.topology import Topology
from tests.ledger.sample_ledger import write_sample

HUGE = "9" * 30
NO_UTF8 = "\udcff"


def parameters(command: click.Command, name: str) -> Iterator[tuple[str, click.Parameter]]:
    if isinstance(command, click.Group):
        for part in command.commands.values():
            yield from parameters(part, f"{name} {part.name}")
    for parameter in command.params:
        yield f"{name} {parameter.name}", parameter


EVERY = [
    pytest.param(parameter, id=name)
    for point in sorted(entry_points(group=COMMAND_GROUP), key=lambda point: point.name)
    for name, parameter in parameters(point.load(), point.name)
]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "ledger.db"
    write_sample(path, schedules=("dynamic",), iterations=2).close()
    return path


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def assert_refused(result: Result, *said: str) -> None:
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "a fault of shiftbook" not in result.stderr, result.stderr
    for part in said:
        assert part in result.stderr, result.stderr


@pytest.mark.parametrize("parameter", EVERY)
def test_numbers_and_paths_that_mean_nothing_are_refused_as_words(
    parameter: click.Parameter,
) -> None:
    wrong: list[str] = []
    if isinstance(parameter.type, click.types.IntParamType) and parameter.name != "until":
        wrong = [HUGE, "1.5", "nan", ""]
    elif isinstance(parameter.type, click.types.FloatParamType):
        wrong = ["nan", "inf", "-inf", "1e999", ""]
    elif isinstance(parameter.type, click.Path):
        wrong = [""]
    for word in wrong:
        with pytest.raises(click.BadParameter):
            parameter.type.convert(word, parameter, None)


def test_there_are_such_parameters() -> None:
    kinds = [type(parameter.values[0].type).__name__ for parameter in EVERY]  # type: ignore[attr-defined]
    assert min(kinds.count(kind) for kind in ("Whole", "Finite", "NamedPath")) >= 5


@pytest.mark.parametrize(
    "words",
    [
        ("log", "--after", HUGE),
        ("log", "--limit", HUGE),
        ("log", "--since", HUGE + "d"),
        ("log", "--until", ""),
        ("follow", "--after", HUGE, "--limit", "1"),
        ("show", HUGE),
        ("show", "-" + HUGE),
        ("show", "²"),
        ("show", "٣"),
        ("prove", HUGE),
        ("prove", "--since", HUGE),
        ("verify", "--until", HUGE),
        ("export", "-o", "none.tar", "--until", HUGE),
        ("report", "-o", ""),
        ("export", "-o", ""),
        ("show", NO_UTF8),
        ("state", NO_UTF8),
        ("log", "--job", NO_UTF8),
        ("log", "--operation", NO_UTF8),
        ("log", "--type", NO_UTF8),
        ("recover", NO_UTF8),
        ("verify", "--job", NO_UTF8),
        ("report", "-o", "none.html", "--job", NO_UTF8),
        ("sql", f"select '{NO_UTF8}'"),
    ],
    ids=ascii,
)
def test_words_that_name_nothing(
    words: tuple[str, ...], book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(invoke(*words, "--ledger", str(book)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["²m", "٣m", ".m", "1..5s", "m", "", "1e3s", HUGE + "d", "-5m"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected a time"):
        moment_ns(text)


def test_a_file_whose_name_is_no_utf8_may_be_written(book: Path, tmp_path: Path) -> None:
    """A path is bytes, and no text of a ledger."""
    page = tmp_path / f"{NO_UTF8}.html"
    assert invoke("report", "-o", str(page), "--ledger", str(book)).exit_code == 0
    assert page.stat().st_size > 1000


def test_a_component_that_stands_twice() -> None:
    """One of the two places would have been forgotten."""
    with pytest.raises(InvalidInput, match="each component once"):
        read_topology("rollout=n/0 rollout=n/1", Topology())


def test_two_ledgers_for_one_verdict(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would not have been judged. The environment names a default and no second."""
    assert_refused(invoke("verify", str(book), "--ledger", "other.db"), "two ledgers")
    monkeypatch.setenv("SHIFTBOOK_LEDGER", "other.db")
    assert invoke("verify", str(book), "--integrity-only").exit_code == 0


@pytest.mark.parametrize("command", ["jobs", "verify", "follow"])
def test_a_folder_for_a_ledger_names_the_ledger_in_it(command: str, book: Path) -> None:
    assert_refused(invoke(command, "--ledger", str(book.parent)), "a folder", str(book))
