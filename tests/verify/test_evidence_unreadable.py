"""Goal: evidence that cannot be read is held against nobody; what is gone or altered is a finding.

Method: `verify` and `export` run in processes of their own that may not read the folder or a file
(without the right of root to read all), or whose reads of it are failed by strace as a network disk
fails them; beside that, files are removed and replaced by other things.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from shiftbook.verify.verdict import verify

GOLDEN = Path(__file__).parents[1] / "assets/schema-2/job.db"
CODE = "from shiftbook.ledger.cli import main; main()"
COMMAND = (sys.executable, "-c", CODE)
DEADLINE_S = 120.0


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A ledger with its evidence beside it."""
    shutil.copytree(f"{GOLDEN}.evidence", tmp_path / "job.db.evidence")
    return Path(shutil.copy(GOLDEN, tmp_path))


def segments(book: Path) -> list[Path]:
    return sorted(Path(f"{book}.evidence").iterdir())


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@cache
def without_rights() -> Sequence[str] | None:
    """What begins a command that has no more rights than its user's; None where that is refused."""
    if os.geteuid() != 0:
        return ()
    words = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    if shutil.which("setpriv") is None or ran(*words, "true").returncode:
        return None
    return words


def failing(paths: Sequence[Path], error: str) -> Sequence[str] | None:
    """What begins a command whose opening of these files is failed; None where that is refused."""
    words = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=openat"]
    for path in paths:
        words += ["-P", str(path)]
    words += ["-e", f"inject=openat:error={error}"]
    if shutil.which("strace") is None or ran(*words, "true").returncode:
        return None
    return words


def said_nothing_is_known(before: Sequence[str] | None, book: Path, why: str, name: str) -> None:
    if before is None:
        pytest.skip("this machine lets nobody take rights away, or trace")
    archive = book.with_name("run.tar")
    for words in (
        ("verify", str(book)),
        ("verify", str(book), "--integrity-only", "--format", "json"),
        ("export", "--ledger", str(book), "-o", str(archive)),
    ):
        done = ran(*before, *COMMAND, *words)
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        for part in ("expected to read evidence at", name, why, "make it readable"):
            assert part in done.stderr
    assert not archive.exists(), "half an archive is none"


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_may_not_be_read_is_not_judged(book: Path, what: str) -> None:
    path = Path(f"{book}.evidence") if what == "folder" else segments(book)[-1]
    path.chmod(0)
    try:
        said_nothing_is_known(without_rights(), book, "Permission denied", path.name)
    finally:
        path.chmod(0o700)


@pytest.mark.parametrize(
    ("error", "why"), [("ESTALE", "Stale file handle"), ("EIO", "Input/output error")]
)
def test_a_disk_that_does_not_answer_is_not_judged(book: Path, error: str, why: str) -> None:
    path = segments(book)[0]
    said_nothing_is_known(failing([path], error), book, why, path.name)


def test_the_processes_that_look_at_blocks_do_not_judge_it_either(book: Path) -> None:
    """One of them that cannot read the folder ends; the process that judges looks for itself."""
    before = without_rights()
    if before is None:
        pytest.skip("this machine lets nobody take rights away")
    code = f"from shiftbook.verify import scan; scan.ALONE_EVENTS = 0; {CODE}"
    words = (*before, sys.executable, "-c", code, "verify", str(book), "--integrity-only")
    assert ran(*words).returncode == 0
    folder = Path(f"{book}.evidence")
    folder.chmod(0)
    try:
        done = ran(*words)
    finally:
        folder.chmod(0o700)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Permission denied" in done.stderr


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def a_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket may only be short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def the_folder_a_file(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_bytes(b"")


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: shutil.rmtree(path.parent),
        a_folder,
        a_loop,
        a_socket,
        the_folder_a_file,
    ],
    ids=["gone", "cut", "folder gone", "a folder", "a loop", "a socket", "folder a file"],
)
def test_what_stands_in_the_place_of_a_segment_is_a_finding(
    book: Path, change: Callable[[Path], object]
) -> None:
    path = segments(book)[0]
    change(path)
    verdict = verify(f"sqlite:///{book}", integrity_only=True)
    assert verdict.exit_code == 1
    assert {finding.invariant for finding in verdict.findings} == {"evidence"}
    assert any(path.name in finding.found for finding in verdict.findings)
