"""Goal: no file that a person names is lost to a command that writes another kind of file there.

Method: every option of every command that names a file to write is found by asking the commands;
each is pointed at a ledger, a private key, a text and a page that is none of ours, which must stay
byte for byte; then at what the command itself wrote, at an empty file and at a device.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from shiftbook.ledger.cli import COMMAND_GROUP, main
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.publication import open_outlet
from shiftbook.ledger.signing_keys import new_signer
from tests.ledger.sample_ledger import write_sample

WRITERS = {
    "report -o": ("report",),
    "prove -o": ("prove", "3"),
    "export -o": ("export",),
    "key new -o": ("key", "new"),
    "checkpoint transfer secret --out": ("checkpoint", "transfer", "secret"),
}
"""Each option that names a file to write, with the words before it."""

REPLACES = ("report -o", "prove -o", "export -o")
"""Those that write again over what they wrote; a key and a secret are never replaced."""

ELSEWHERE = {"replay --golden": "tests/verify/test_golden.py", "sign --publish": "test_head_signer"}
"""Those that other tests hold to the same."""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed ledger."""
    folder = tmp_path_factory.mktemp("book")
    with write_sample(folder / "ledger.db", schedules=("dynamic",), iterations=2) as ledger:
        place = open_outlet(str(folder / "heads"))
        HeadSigner(ledger, new_signer(), [place], memory=folder / "last").sign()
    return folder / "ledger.db"


def invoke(option: str, book: Path, target: Path | str) -> Result:
    words = [*WRITERS[option], option.split()[-1], str(target)]
    if "checkpoint" not in words and "key" not in words:
        words += ["--ledger", str(book)]
    return CliRunner().invoke(main, words)


def options(command: click.Command, name: str) -> Iterator[str]:
    """Every option of a command and those under it that names a file which need not be there."""
    if isinstance(command, click.Group):
        for part in command.commands.values():
            yield from options(part, f"{name} {part.name}")
    for parameter in command.params:
        kind = parameter.type
        if not isinstance(parameter, click.Option) or not isinstance(kind, click.Path):
            continue
        if kind.file_okay and not kind.exists:
            yield f"{name} {parameter.opts[0]}"


def test_every_option_that_writes_a_file_is_tried_here() -> None:
    found = {
        option
        for point in entry_points(group=COMMAND_GROUP)
        for option in options(point.load(), point.name)
    }
    reads = {"sign --key", "checkpoint transfer token --secret"}
    assert found - reads - set(ELSEWHERE) == set(WRITERS)


@pytest.mark.parametrize("option", WRITERS)
def test_a_file_of_another_kind_stays(option: str, book: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["key", "new", "-o", str(tmp_path / "k.key")]).exit_code == 0
    (tmp_path / "text").write_text("a text\n", encoding="utf-8")
    (tmp_path / "page.html").write_text("<!doctype html>\n<title>Mine</title>", encoding="utf-8")
    (tmp_path / "one.json").write_text('{"format": "mine"}\n', encoding="utf-8")
    (tmp_path / "ledger.db").write_bytes(book.read_bytes())
    for path in sorted(tmp_path.iterdir()):
        before = path.read_bytes()
        result = invoke(option, book, path)
        assert result.exit_code == 2, (path, result.output)
        assert str(path) in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 5, "and no draft is left"


@pytest.mark.parametrize("option", REPLACES)
def test_what_the_command_wrote_is_written_again(option: str, book: Path, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if option != "export -o":  # which makes its own file, and takes no other
        path.touch()
    for _ in range(2):
        result = invoke(option, book, path)
        assert result.exit_code == 0, result.stderr
        assert path.stat().st_size > 100
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("option", ["report -o", "prove -o"])
def test_a_pipe_is_written_to_and_stays_one(option: str, book: Path, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.set_blocking(reader, False)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
        result = invoke(option, book, path)
        assert result.exit_code == 0, result.stderr
        assert len(os.read(reader, 1 << 20)) > 100
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("option", REPLACES)
def test_what_is_written_is_synced_before_it_has_its_name_and_its_folder_after(
    option: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename may reach the disk before the content does: a power cut left an empty file."""
    path, calls = tmp_path / "out", list[tuple[str, str]]()
    sync, rename = os.fsync, Path.replace

    def synced(fd: int) -> None:
        calls.append(("sync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        sync(fd)

    def renamed(draft: Path, target: Path) -> Path:
        if target == path:
            calls.append(("rename", str(draft)))
        return rename(draft, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    assert invoke(option, book, path).exit_code == 0
    (at,) = (number for number, (what, _) in enumerate(calls) if what == "rename")
    assert ("sync", calls[at][1]) in calls[:at]
    assert ("sync", str(tmp_path)) in calls[at:]


@pytest.mark.parametrize("option", REPLACES)
def test_what_could_not_be_synced_does_not_replace_what_is_there(
    option: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    assert invoke(option, book, path).exit_code == 0
    before = path.read_bytes()

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    monkeypatch.setattr(os, "fdatasync", fails)
    result = invoke(option, book, path)
    assert result.exit_code == 2
    assert "Input/output error" in result.stderr
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"], "and no draft is left"
