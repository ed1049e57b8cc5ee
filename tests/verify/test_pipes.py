"""Goal: a pipe where a file is read in any order is refused, and no file of tensors is read whole.

Method: a FIFO that nobody writes to stands where a ledger, an archive or a bundle is asked for: to
open it would wait for ever, so a timer ends the test. A file of tensors under a bundle's path is
looked at and not read, by counting the bytes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner

from shiftbook.checkpoint.errors import ManifestInvalid
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.ledger.cli import main

LIMIT_S = 30


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still waiting for the pipe after {LIMIT_S} s")

    path = tmp_path / "pipe"
    os.mkfifo(path)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    yield path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "command",
    [
        "verify PIPE",
        "verify --ledger PIPE",
        "log --ledger PIPE",
        "import PIPE --ledger NEW",
        "checkpoint show PIPE",
        "checkpoint diff PIPE PIPE",
    ],
)
def test_a_pipe_is_refused_at_once(command: str, pipe: Path) -> None:
    places = {"PIPE": str(pipe), "NEW": str(pipe.parent / "new.db")}
    result = CliRunner().invoke(main, [places.get(word, word) for word in command.split()])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert "expected" in result.stderr


def test_a_file_of_tensors_is_not_read_as_a_manifest(tmp_path: Path) -> None:
    """The judge asks each recorded bundle for its manifest; a loop's own file may have 100 GB."""
    file = tmp_path / "weights.pt"
    with file.open("wb") as out:
        out.write(b"PK\3\4")
        out.truncate(1 << 40)  # sparse: to read it would take all memory
    with pytest.raises(ManifestInvalid):
        load_manifest(file)
