"""Goal: whatever is wrong with the file or its disk is said in words, and nothing is lost.

Method: real damaged, locked, unwritable and full files; commits that fail before or after they
took effect are made by a connection that raises SQLite's own error at COMMIT.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import (
    AppendInDoubt,
    LedgerError,
    LedgerUnreachable,
    NotALedger,
)
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Receipt
from tests.ledger.stores import attack

DEADLINE_S = 30.0


def fork(reason: object = "r") -> Event:
    return ExperimentForked(parent="p", reason=str(reason))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ledger.db"
    with Ledger.open(f"sqlite:///{file}") as ledger:
        ledger.append("job", [fork(n) for n in range(200)])
    return file


def says(kind: type[LedgerError], path: Path, *words: str, **options: Any) -> None:
    """Opening raises this error, in one line with these words."""
    with pytest.raises(kind) as caught:
        Ledger.open(f"sqlite:///{path}", **options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, (word, text)


def test_a_folder(tmp_path: Path) -> None:
    says(NotALedger, tmp_path, "folder")


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    says(LedgerUnreachable, tmp_path / "no" / "ledger.db", "folder", "found none")


def test_a_missing_file_is_only_made_when_allowed(tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        says(LedgerUnreachable, tmp_path / "ledger.db", "found nothing", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    says(LedgerUnreachable, tmp_path / "file" / "ledger.db")


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"hello, I am a text file\n" * 500, os.urandom(8192), b"SQLite format 3\x00"],
    ids=["empty", "one byte", "text", "random", "header alone"],
)
@pytest.mark.parametrize("options", [{}, {"read_only": True}, {"create": False}])
def test_a_file_that_is_no_ledger(tmp_path: Path, content: bytes, options: dict) -> None:
    file = tmp_path / "ledger.db"
    file.write_bytes(content)
    says(NotALedger, file, "ledger.db", **options)
    assert file.read_bytes() == content, "somebody else's file is left as it is"


def test_another_programs_database(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE events (position INTEGER)")
    connection.close()
    before = file.read_bytes()
    says(NotALedger, file, "another program's database")
    assert file.read_bytes() == before


def test_a_truncated_file(path: Path) -> None:
    whole = path.read_bytes()
    for size in (10, 100, 1000, 4096, 5000, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(NotALedger) as caught, Ledger.open(f"sqlite:///{path}") as ledger:
            list(ledger.read())
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    with Ledger.open(f"sqlite:///{path}") as ledger:
        assert sum(1 for _ in ledger.read()) == 200


def test_a_locked_ledger_names_the_holder(path: Path) -> None:
    code = (
        "import fcntl, os, sys\nfrom pathlib import Path\n"
        "from shiftbook.ledger.file_lock import FileLock\n"
        "lock = FileLock(Path(sys.argv[1]), 5); lock.acquire(); print('held', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    ledger = Ledger.open(f"sqlite:///{path}", lock_timeout_s=0.1)
    child = subprocess.Popen(
        [sys.executable, "-c", code, f"{path}.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(LedgerUnreachable, match=f"process {child.pid}"):
        ledger.append("job", fork())
    assert ledger.head().size == 200, "reading needs no lock"
    says(LedgerUnreachable, path, f"process {child.pid}", lock_timeout_s=0.1)
    child.kill()
    child.communicate(timeout=DEADLINE_S)
    assert ledger.append("job", fork()).first == 200, "the lock dies with its holder"
    ledger.close()


def test_a_database_locked_by_another_program(path: Path) -> None:
    code = (
        "import sqlite3, sys\nc = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.readline()\n"
    )
    ledger = Ledger.open(f"sqlite:///{path}", lock_timeout_s=0.1)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(LedgerUnreachable, match="locked by another program"):
        ledger.append("job", fork())
    child.communicate("\n", timeout=DEADLINE_S)
    assert ledger.append("job", fork()).first == 200
    ledger.close()


def test_a_lock_file_that_was_removed_is_made_again(path: Path) -> None:
    with Ledger.open(f"sqlite:///{path}") as one, Ledger.open(f"sqlite:///{path}") as two:
        one.append("job", fork())
        path.with_name("ledger.db.lock").unlink()
        assert [ledger.append("job", fork()).first for ledger in (one, two, one)] == [201, 202, 203]


def test_a_ledger_that_was_moved_away_takes_nothing(path: Path) -> None:
    with Ledger.open(f"sqlite:///{path}") as ledger:
        ledger.append("job", fork())
        moved = path.with_name("moved.db")
        path.rename(moved)
        for _ in range(2):
            with pytest.raises(LedgerUnreachable, match="moved or replaced"):
                ledger.append("job", fork(), key="k")
        moved.rename(path)
        assert not ledger.append("job", fork(), key="k").repeated
        assert ledger.head().size == 202


def _open_without_rights(url: str, results: Any) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for options in ({}, {"read_only": True}):
        try:
            with Ledger.open(url, **options) as ledger:
                results.put(f"opened {sum(1 for _ in ledger.read())}")
        except LedgerError as error:
            results.put(f"{type(error).__name__} {error}")


def open_without_rights(path: Path) -> tuple[str, str]:
    """Open for writing and for reading, without root's rights; what came of each."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_open_without_rights, args=(f"sqlite:///{path}", results))
    with reachable_for_nobody(path):
        child.start()
        found = results.get(timeout=DEADLINE_S), results.get(timeout=DEADLINE_S)
        child.join(DEADLINE_S)
    return found


@contextmanager
def reachable_for_nobody(folder: Path) -> Iterator[None]:
    """Let others pass through the folders above, for the time of the test."""
    above = [p for p in folder.parents if p.stat().st_uid == os.getuid() and p != Path("/")]
    modes = [(p, p.stat().st_mode) for p in above]
    for p, mode in modes:
        p.chmod(mode | 0o011)
    try:
        yield
    finally:
        for p, mode in modes:
            p.chmod(mode)


@pytest.mark.parametrize("with_log", [False, True])
def test_a_read_only_file_in_an_unwritable_folder(
    path: Path, tmp_path: Path, with_log: bool
) -> None:
    if with_log:
        # As a killed writer leaves it: the events stand in the log alone.
        live = Ledger.open(f"sqlite:///{path}")
        live.append("job", fork())
        folder = tmp_path / "copy"
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("copy", "*.lock"))
        live.close()
        path = folder / "ledger.db"
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        writing, reading = open_without_rights(path)
    finally:
        path.parent.chmod(0o755)
    assert writing.startswith("LedgerUnreachable")
    assert "writ" in writing
    assert reading == f"opened {201 if with_log else 200}"


def test_a_new_ledger_in_an_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    writing, reading = open_without_rights(tmp_path / "ledger.db")
    tmp_path.chmod(0o755)
    assert writing.startswith("LedgerUnreachable")
    assert "folder writable" in writing
    assert reading.startswith("LedgerUnreachable")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """No file of this process grows beyond ``limit`` bytes: a disk that is full for it alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_index_that_cannot_be_made(path: Path) -> None:
    """A reader without the log's index would not see what is appended from then on."""
    with file_size_limit(10_000):
        for options in ({}, {"read_only": True}):
            says(LedgerUnreachable, path, "ledger.db", **options)
    with Ledger.open(f"sqlite:///{path}") as ledger:
        ledger.append("job", fork())
        assert ledger.head().size == 201


def test_a_log_that_cannot_grow(path: Path) -> None:
    """The write fails in the middle of a commit: told, nothing acknowledged is lost, goes on."""
    ledger = Ledger.open(f"sqlite:///{path}")
    ledger.append("job", fork("before"))
    limit = path.with_name("ledger.db-wal").stat().st_size + 6_000
    with file_size_limit(limit):
        for _ in range(3):
            with pytest.raises((LedgerUnreachable, AppendInDoubt)) as caught:
                ledger.append("job", [fork("x" * 1000)] * 50, key="big")
            assert "\n" not in str(caught.value)
        assert ledger.head().size == 201
    receipt = ledger.append("job", [fork("x" * 1000)] * 50, key="big")
    assert (receipt.first, receipt.last, receipt.repeated) == (201, 250, False)
    ledger.close()
    with Ledger.open(f"sqlite:///{path}") as again:
        assert [e.position for e in again.read()] == list(range(251))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"needs the right to mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    with Ledger.open(f"sqlite:///{small_disk}/ledger.db") as ledger:

        def append(number: int) -> Receipt:
            return ledger.append("job", [fork("x" * 5000)] * 4, key=str(number))

        def fill() -> None:
            for number in itertools.count():
                append(number)

        with pytest.raises(LedgerUnreachable, match="full"):
            fill()
        written = ledger.head().size // 4
        assert written
        for _ in range(2):
            with pytest.raises(LedgerUnreachable, match="full"):
                append(written)
        assert ledger.head().size == 4 * written
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
        assert not append(written).repeated
        assert [e.position for e in ledger.read()] == list(range(4 * written + 4))


def test_a_disk_too_full_for_a_new_ledger(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (1 << 20))
    with pytest.raises(LedgerUnreachable):
        Ledger.open(f"sqlite:///{small_disk}/ledger.db")
    (small_disk / "filler").unlink()
    with Ledger.open(f"sqlite:///{small_disk}/ledger.db") as ledger:
        assert ledger.append("job", fork()).first == 0
    assert sorted(p.name for p in small_disk.iterdir()) == ["ledger.db", "ledger.db.lock"]


class FailingCommit:
    """A connection whose next COMMIT raises an I/O error, having taken effect or not."""

    def __init__(self, real: Any, *, takes_effect: bool) -> None:
        self._real = real
        self._takes_effect = takes_effect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, text: str, *values: Any) -> Any:
        if text == "COMMIT":
            if self._takes_effect:
                self._real.execute(text)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
            raise error
        return self._real.execute(text, *values)


@pytest.mark.parametrize("takes_effect", [False, True])
def test_a_commit_in_doubt_is_settled_by_its_key(path: Path, takes_effect: bool) -> None:
    with Ledger.open(f"sqlite:///{path}") as ledger:
        first = ledger.append("job", fork("before"))
        real = ledger._store._open.writer
        ledger._store._open.writer = FailingCommit(real, takes_effect=takes_effect)
        with pytest.raises(AppendInDoubt, match="same key"):
            ledger.append("job", [fork("a"), fork("b")], key="k")
        receipt = ledger.append("job", [fork("a"), fork("b")], key="k")
        assert receipt.repeated is takes_effect
        assert (receipt.first, receipt.last) == (first.last + 1, first.last + 2)
        assert [e.body["reason"] for e in ledger.read(first.last)] == ["a", "b"]
        assert [e.sequence for e in ledger.read(first.first - 1)] == [0, 1, 2]


def test_after_doubt_the_head_is_verified_before_the_next_append(path: Path) -> None:
    """An acknowledged event is gone from the file while another commit is in doubt."""
    ledger = Ledger.open(f"sqlite:///{path}")
    ledger.append("job", fork("acknowledged"))
    ledger._store._open.writer = FailingCommit(ledger._store._open.writer, takes_effect=False)
    with pytest.raises(AppendInDoubt):
        ledger.append("job", fork("in doubt"), key="k")
    code = (
        "import sys, sqlite3\nc = sqlite3.connect(sys.argv[1])\n"
        "c.execute('DROP TRIGGER events_delete')\n"
        "c.execute('DELETE FROM events WHERE position = 200')\nc.commit()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    with pytest.raises(NotALedger, match="acknowledged"):
        ledger.append("job", fork("next"))
    ledger.close()


def test_a_handle_notices_that_acknowledged_events_are_gone(store_url: str) -> None:
    with Ledger.open(store_url) as ledger:
        ledger.append("job", [fork(n) for n in range(5)])
        attack(store_url, "DELETE FROM events WHERE position = 4")
        with pytest.raises(NotALedger, match="acknowledged"):
            ledger.append("job", fork("next"))


STRACED = """
import sys
from shiftbook.ledger.errors import LedgerError
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
ledger = Ledger.open(sys.argv[1])
for number in range(4):
    event = ExperimentForked(parent="p", reason=str(number))
    for attempt in range(2):
        try:
            print(number, "ok", ledger.append("job", event, key=str(number)).first)
            break
        except LedgerError as error:
            print(number, type(error).__name__)
ledger.close()
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to fail a sync")
def test_a_sync_that_fails(path: Path) -> None:
    """The third fdatasync of the process reports EIO, as a dying disk does."""
    trace = ["strace", "-f", "-qq", "-e", "trace=fdatasync", "-o", str(path.parent / "trace")]
    done = subprocess.run(
        [*trace, "-e", "inject=fdatasync:error=EIO:when=3",
         sys.executable, "-c", STRACED, f"sqlite:///{path}"],
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    if "ptrace" in done.stderr.lower():
        pytest.skip("tracing is not permitted here")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[-1].startswith("3 ok"), lines
    assert any("AppendInDoubt" in line for line in lines)
    with Ledger.open(f"sqlite:///{path}") as ledger:
        assert [e.body["reason"] for e in ledger.read(199)] == ["0", "1", "2", "3"]


def test_threads_that_meet_a_full_disk_lose_nothing(path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{path}")
    ledger.append("job", fork("before"))
    acknowledged: list[str] = []
    failed: list[str] = []

    def work(thread: int) -> None:
        for number in range(6):
            key = f"{thread}:{number}"
            try:
                ledger.append("job", [fork("x" * 2000)] * 5, key=key)
                acknowledged.append(key)
            except (LedgerUnreachable, AppendInDoubt):
                failed.append(key)

    with file_size_limit(path.with_name("ledger.db-wal").stat().st_size + 150_000):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert acknowledged
    assert failed
    for key in failed:
        ledger.append("job", [fork("x" * 2000)] * 5, key=key)
    keys = [event.key for event in ledger.read(200)]
    assert sorted(keys) == sorted([*acknowledged, *failed] * 5)
    ledger.close()
