"""Everything that writes a ledger or beside one, each act in a forked child whose calls fail.

Run under strace, which fails or kills at the WHEN-th call of a kind in every process. A child makes
so many idle calls first that this is the n-th call of its act; so one run of strace sweeps over all
calls of an act, and the imports are paid once. An act tells what was acknowledged and what failed
through ``writev``, which strace leaves alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shiftbook.ledger.archive import export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.errors import (
    EvidenceOutOfReach,
    LedgerUnreachable,
    ShiftbookError,
    SpoolError,
)
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.events.probes import DataBuilt
from shiftbook.ledger.evidence import write_segment
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import FileOutlet
from shiftbook.ledger.receipt import Receipt
from shiftbook.ledger.segment_place import LocalFolder
from shiftbook.ledger.signing_keys import Ed25519Signer, write_signer
from shiftbook.ledger.spool import SpoolingWriter
from shiftbook.ledger.tiles import write_tiles

WHEN = 400
"""The call that strace fails, counted from a process's first one; an act makes fewer."""

APPENDS = 3
TRIES = 2
KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
ROWS = [{"index": [*range(n, n + 50)], "digest": [f"{n:032x}"] * 50} for n in range(3)]
"""Of the segments of a data set, see DataBuilt."""

Tell = Callable[[str], None]


def batch(number: int) -> list[ExperimentForked]:
    """The events of an append."""
    return [ExperimentForked(parent="p", reason=f"{number}.{n}") for n in range(1 + 2 * number)]


def tried(tell: Tell, name: str, act: Callable[[], Any]) -> Any:
    """Do an act, again where it fails, and tell what came of it each time."""
    for _ in range(TRIES):
        try:
            result = act()
        except ShiftbookError as error:
            tell(f"{name} {type(error).__name__} {error}")
        else:
            tell(f"{name} ok")
            return result
    return None


def append(folder: Path, tell: Tell, name: str = "ledger.db") -> None:
    """Open a ledger, append three times, close it."""
    ledger = tried(tell, "open", lambda: Ledger.open(f"sqlite:///{folder / name}"))
    if ledger is not None:
        for number in range(APPENDS):
            tried(
                tell,
                f"append {number}",
                lambda number=number: ledger.append("job", batch(number), key=f"crash {number}"),
            )
        ledger.close()
        tell("close ok")


def signer_of(ledger: Ledger, folder: Path) -> HeadSigner:
    """The signer of a ledger, with its memory and its place outside the database."""
    return HeadSigner(ledger, KEY, [FileOutlet(folder / "heads")], memory=folder / "key.last")


def sign(folder: Path, tell: Tell) -> None:
    """Sign and publish, append, and sign again."""
    ledger = tried(tell, "open", lambda: Ledger.open(f"sqlite:///{folder}/ledger.db"))
    if ledger is None:
        return
    signer = signer_of(ledger, folder)
    for number in range(2):
        head = tried(tell, f"sign {number}", signer.sign)
        if head is not None:
            tell(f"head {head.size} {head.root.hex()} ok")
        if not number:
            tried(tell, "append 0", lambda: ledger.append("job", batch(0), key="crash 0"))
    ledger.close()


def tiles(folder: Path, tell: Tell) -> None:
    """Bring a folder of tiles up to a later head."""

    def act() -> None:
        with Ledger.open(f"sqlite:///{folder}/ledger.db", read_only=True) as ledger:
            write_tiles(ledger, folder / "tiles")

    tried(tell, "tiles", act)


def create(folder: Path, tell: Tell) -> None:
    """The same with a ledger that is not there yet."""
    append(folder, tell, "new.db")


def export(folder: Path, tell: Tell) -> None:
    """Write an archive over an older one."""

    def act() -> None:
        with Ledger.open(f"sqlite:///{folder}/ledger.db", read_only=True) as ledger:
            export_archive(ledger, folder / "old.tar")

    tried(tell, "export", act)


def import_(folder: Path, tell: Tell) -> None:
    """Bring an archive into a new ledger."""

    def act() -> None:
        with (
            ArchiveFile.open(folder / "whole.tar") as archive,
            Ledger.open(f"sqlite:///{folder}/new.db") as ledger,
        ):
            import_archive(archive, ledger)

    tried(tell, "import", act)


def evidence(folder: Path, tell: Tell) -> None:
    """Write segments."""
    for number, rows in enumerate(ROWS):
        tried(tell, f"segment {number}", lambda rows=rows: write_segment(folder / "segments", rows))


class Away:
    """A ledger and a store of evidence that are both out of reach until they are back."""

    def __init__(self, ledger: Ledger, store: Path) -> None:
        self.over = False
        self._ledger = ledger
        self._store = LocalFolder(store)

    def append(self, job: str, events: Any, *, key: str | None = None) -> Receipt:
        """``Ledger.append``."""
        if not self.over:
            raise LedgerUnreachable("the ledger is away")
        return self._ledger.append(job, events, key=key)

    def where(self, sha256: str) -> str:
        """Path of a segment in the store."""
        return self._store.where(sha256)

    def get(self, sha256: str) -> bytes | None:
        """A segment that is in the store."""
        self._reach()
        return self._store.get(sha256)

    def put(self, sha256: str, data: bytes) -> None:
        """Give a segment to the store."""
        self._reach()
        self._store.put(sha256, data)

    def settle(self) -> None:
        """Make durable what the store was given: nothing while it is away."""
        if self.over:
            self._store.settle()

    def _reach(self) -> None:
        if not self.over:
            raise EvidenceOutOfReach("the store is away")


def spooled_batch(number: int, segments: Any) -> list[Event]:
    """The events of a record, the first with a segment where there is a place for it."""
    if segments is None:
        return [*batch(number)]
    segment = write_segment(segments, ROWS[number])
    named = DataBuilt(
        attempt="a", dataset_digest="d", tokenizer_digest="t", size=number, segment=segment
    )
    return [named, *batch(number)]


def spool(folder: Path, tell: Tell, *, evidence: bool = False) -> None:
    """Record through an outage, and empty the spool when it is over."""
    ledger = tried(tell, "open", lambda: Ledger.open(f"sqlite:///{folder}/ledger.db"))
    if ledger is None:
        return
    away = Away(ledger, folder / "ledger.db.evidence")

    def record(number: int) -> None:
        events = spooled_batch(number, writer.segments if evidence else None)
        writer.record("job", events, key=f"crash {number}")

    def drain() -> None:
        left = writer.drain()
        if left.waiting or left.rejected:
            raise SpoolError(f"expected an empty spool, found {left}")

    place = away if evidence else None
    writer = SpoolingWriter(away.append, folder / "spool", writer="w", evidence=place)
    for number in range(APPENDS):
        tried(tell, f"append {number}", lambda number=number: record(number))
    away.over = True
    tried(tell, "drain", drain)
    writer.close()
    ledger.close()


def segments(folder: Path, tell: Tell) -> None:
    """The same with segments, whose store is away too: they are kept and brought to it."""
    spool(folder, tell, evidence=True)


def key(folder: Path, tell: Tell) -> None:
    """Make a key."""
    tried(tell, "key", lambda: write_signer(KEY, folder / "new.key"))


ACTS: dict[str, Callable[[Path, Tell], None]] = {
    "append": append,
    "create": create,
    "evidence": evidence,
    "export": export,
    "import": import_,
    "key": key,
    "segments": segments,
    "sign": sign,
    "spool": spool,
    "tiles": tiles,
}
"""Whatever else comes to write durably gets its act here and its check in test_crashes.py."""


def _quietly(act: Callable[[], Any]) -> Callable[[], None]:
    def idle() -> None:
        with contextlib.suppress(OSError):
            act()

    return idle


@contextlib.contextmanager
def idle_calls() -> Iterator[dict[str, Callable[[], None]]]:
    """By name of the system call, one that has no effect."""
    null = os.open(os.devnull, os.O_RDWR)
    yield {
        "write": _quietly(lambda: os.write(null, b"x")),
        "pwrite64": _quietly(lambda: os.pwrite(null, b"x", 0)),
        "fsync": _quietly(lambda: os.fsync(null)),
        "fdatasync": _quietly(lambda: os.fdatasync(null)),
        "rename": _quietly(lambda: os.rename("/nonexistent/a", "/b")),  # noqa: PTH104
        "ftruncate": _quietly(lambda: os.ftruncate(null, 0)),
        "unlink": _quietly(lambda: os.unlink("/nonexistent/a")),  # noqa: PTH108
    }
    os.close(null)


def run(act: str, call: str, number: int, template: Path, folder: Path) -> None:
    """Do an act in a child, in a copy of the template, and have its n-th call fail.

    ``number`` 0 has none fail. The folder tells the child's number and its wait status.
    """
    shutil.copytree(template, folder)
    pid = os.fork()
    if pid:
        (folder / "pid").write_text(str(pid))
        (folder / "status").write_text(str(os.waitpid(pid, 0)[1]))
        return
    told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with idle_calls() as idle:
            for _ in range(WHEN - number if number else 0):
                idle[call]()
        ACTS[act](folder, lambda line: os.writev(told, [line.encode() + b"\n"]) and None)
    except BaseException as error:
        os.writev(told, [f"raised {type(error).__name__}: {error}\n".encode()])
        os._exit(1)
    os._exit(0)


def main(act: str, call: str, template: str, out: str, *numbers: str) -> None:
    """Sweep over calls of an act: a folder for each under ``out``."""
    for number in numbers:
        run(act, call, int(number), Path(template), Path(out) / number)


if __name__ == "__main__":
    main(*sys.argv[1:])
