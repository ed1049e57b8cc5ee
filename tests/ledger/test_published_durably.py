"""Goal: a head counts as published once it is durable, and not because somebody can read it.

Method: the sync of the file or of its folder fails once, or the process dies before it; afterwards
the signer, in this process or the next one, must write and sync the head again before it is done.
A file that is only read from memory is told by the syncs that the operating system saw.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import PublicationFailed
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import FileOutlet, read_published
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.signing_keys import Ed25519Signer, write_signer

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))


class Disk:
    """Watches what is synced, and fails syncs of one path when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: dict[Path, int] = {}
        self.synced: dict[Path, bytes] = {}
        """By path, what the file held at its last sync that did not fail."""
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        if self.failing.get(path):
            self.failing[path] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(fd)
        self.synced[path] = path.read_bytes() if path.is_file() else b""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as opened:
        grow(opened)
        yield opened


def grow(ledger: Ledger) -> None:
    ledger.append("job", [ExperimentForked(parent="p", reason="r")])


def signer_of(ledger: Ledger, heads: Path) -> HeadSigner:
    return HeadSigner(ledger, KEY, [FileOutlet(heads)])


def sizes(heads: Path) -> list[int]:
    return [SignedHead.parse(note).size for _, note in read_published(str(heads))]


@pytest.mark.parametrize("again", ["the same process", "the next process"])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("first", [True, False])
def test_a_head_whose_sync_failed_is_written_again(
    ledger: Ledger, tmp_path: Path, disk: Disk, *, again: str, times: int, first: bool
) -> None:
    heads = tmp_path / "heads"
    signer = signer_of(ledger, heads)
    if not first:
        signer.sign()
        grow(ledger)
    disk.failing[heads] = times
    with pytest.raises(PublicationFailed, match="offered again"):
        signer.sign()
    disk.failing.clear()
    if again == "the next process":
        signer = signer_of(ledger, heads)
    disk.synced.clear()
    head = signer.sign()
    assert head is not None
    assert disk.synced[heads] == heads.read_bytes()
    assert sizes(heads) == ([1] if first else [1, 2])


def test_the_name_of_a_new_file_is_durable_too(ledger: Ledger, tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "outside"
    folder.mkdir()
    signer = signer_of(ledger, folder / "heads")
    disk.failing[folder] = 1
    with pytest.raises(PublicationFailed):
        signer.sign()
    signer.sign()
    assert folder in disk.synced
    assert sizes(folder / "heads") == [1]


def test_what_a_dead_process_left_is_synced_before_it_counts(
    ledger: Ledger, tmp_path: Path, disk: Disk
) -> None:
    """A process wrote a head and died before its sync: its bytes are there, perhaps in memory."""
    heads = tmp_path / "heads"
    signer_of(ledger, heads).sign()
    for failing in (0, 1):
        disk.synced.clear()
        disk.failing[heads] = failing
        signer_of(ledger, heads).sign()
        assert disk.synced[heads] == heads.read_bytes()
        assert sizes(heads) == [1]


def test_a_damaged_last_head_is_never_cut_off(ledger: Ledger, tmp_path: Path, disk: Disk) -> None:
    """Not even where a sync fails: it is evidence."""
    heads = tmp_path / "heads"
    signer_of(ledger, heads).sign()
    damaged = heads.read_bytes().replace(b"\n1\n", b"\nx\n", 1)
    heads.write_bytes(damaged)
    grow(ledger)
    for failing in (1, 0):
        disk.failing[heads] = failing
        with pytest.raises(PublicationFailed):
            signer_of(ledger, heads).sign()
        assert heads.read_bytes() == damaged


def test_a_witness_gets_all_that_it_missed_from_processes_that_sign_once(tmp_path: Path) -> None:
    """``shiftbook sign --publish exec:...``, time and again; the witness is away in between."""
    url, key = f"sqlite:///{tmp_path}/ledger.db", tmp_path / "runs.key"
    write_signer(KEY, key)
    seen, away = tmp_path / "seen", tmp_path / "away"
    command = f'exec:sh -c "test ! -e {away} && cat >> {seen}"'
    sign = ["sign", "--ledger", url, "--key", str(key), "--publish", command]
    for number in range(6):
        with Ledger.open(url) as ledger:
            grow(ledger)
        gone = number in (2, 3)
        if gone:
            away.touch()
        else:
            away.unlink(missing_ok=True)
        done = CliRunner().invoke(main, sign)
        assert (done.exit_code != 0) == gone, done.output
    assert sizes(seen) == [1, 2, 3, 4, 5, 6]
    (kept,) = tmp_path.glob("runs.key.accepted-*")
    assert SignedHead.parse(kept.read_bytes()).size == 6
    kept.write_bytes(b"text")
    with Ledger.open(url) as ledger:
        grow(ledger)
    done = CliRunner().invoke(main, sign)
    assert done.exit_code != 0
    assert "delete it to begin with the newest head" in done.output
