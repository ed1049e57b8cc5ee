"""Writes the golden ledgers of a version: good and broken ones, each with the verdict on it.

``python -m tests.assets.make_golden tests/assets/NAME`` makes a new folder. A folder that is there
is never written again: what a version wrote must stay readable as that version wrote it.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from shiftbook.ledger.archive import export_archive
from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.errors import ShiftbookError
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import verify
from tests.ledger.sample_ledger import write_every_status
from tests.verify.honest_run import JOB, honest_run

PLAIN = "job"
"""The ledger that is kept as plain files; the others are packed, each with its evidence."""

NEXT_NS = 1_700_000_100_000_000_000


def write_job(path: Path) -> None:
    """A whole small job, clean."""
    honest_run().write(path)


def write_unknown(path: Path) -> None:
    """The same, and then an event of a type and one of a schema that no build knows."""

    class FanStopped(Event):
        schema_ = 1
        node: str

    class Newer(Event):
        schema_ = 99
        outcome: dict[str, int]

        @classmethod
        def type_(cls) -> str:
            return "JobClosed"

    write_job(path)
    with Ledger.open(
        f"sqlite:///{path}", writer="writer-2", actor="tester", now_ns=lambda: NEXT_NS
    ) as ledger:
        ledger.append(JOB, [FanStopped(node="n"), Newer(outcome={"finished": 1})])


def write_statuses(path: Path) -> None:
    """A reallocation in every status, one of them poisoned."""
    write_every_status(path).close()


def _edit(path: Path, *statements: tuple[str, tuple[object, ...]]) -> None:
    """Run statements on the file, past the triggers."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
            connection.execute(f'DROP TRIGGER "{name}"')
        for text, values in statements:
            connection.execute(text, values)


def _event(path: Path, type_: str) -> tuple[int, bytes]:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute(
            "SELECT position, data FROM events WHERE type = ? ORDER BY position LIMIT 1", (type_,)
        ).fetchone()
    return int(found[0]), bytes(found[1])


def alter_body(path: Path) -> None:
    """The bytes of an event changed, its leaf left as it was."""
    at, data = _event(path, "SamplesRewarded")
    changed = data.replace(b'"reward_mean"', b'"reward_meam"')
    _edit(path, ("UPDATE events SET data = ? WHERE position = ?", (changed, at)))


def forge_rate(path: Path) -> None:
    """A learning rate changed with its leaf, so that only an invariant can tell."""
    at, data = _event(path, "UpdateApplied")
    changed = data.replace(b'"learning_rate":0.001', b'"learning_rate":0.002')
    assert changed != data
    _edit(
        path,
        (
            "UPDATE events SET data = ?, leaf = ? WHERE position = ?",
            (changed, leaf_hash(changed), at),
        ),
    )


def cut_out(path: Path) -> None:
    """An event deleted from the middle."""
    _edit(path, ("DELETE FROM events WHERE position = 30", ()))


def swap(path: Path) -> None:
    """The bytes and leaves of two events exchanged."""
    with closing(sqlite3.connect(path)) as connection:
        pair = [
            connection.execute("SELECT data, leaf FROM events WHERE position = ?", (at,)).fetchone()
            for at in (40, 41)
        ]
    text = "UPDATE events SET data = ?, leaf = ? WHERE position = ?"
    _edit(path, (text, (*pair[1], 40)), (text, (*pair[0], 41)))


def cut_file(path: Path) -> None:
    """The file cut short."""
    path.write_bytes(path.read_bytes()[:-8192])


def _segment(path: Path) -> Path:
    _, data = _event(path, "BatchConsumed")
    return Path(f"{path}.evidence") / f"{json.loads(data)['body']['segment']['sha256']}.parquet"


def lose_segment(path: Path) -> None:
    """An evidence file removed."""
    _segment(path).unlink()


def alter_segment(path: Path) -> None:
    """A bit of an evidence file flipped."""
    file = _segment(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


GOOD: dict[str, Callable[[Path], None]] = {
    PLAIN: write_job,
    "unknown": write_unknown,
    "statuses": write_statuses,
}
BROKEN: dict[str, Callable[[Path], None]] = {
    "altered-body": alter_body,
    "forged-rate": forge_rate,
    "cut-out": cut_out,
    "swapped": swap,
    "cut-file": cut_file,
    "lost-segment": lose_segment,
    "altered-segment": alter_segment,
}
"""Changes of the ledger of the job."""


def archive(path: Path, first: int = 0) -> bytes:
    """The archive of a ledger, from a position on."""
    target = path.with_name("archive.tar")
    with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
        export_archive(ledger, target, first=first)
    return target.read_bytes()


def flipped(data: bytes) -> bytes:
    """One bit changed in the compressed events."""
    at = data.index(b"events/0") + 512 + 1000
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def newer(data: bytes) -> bytes:
    """The first member says another version."""
    return data.replace(b'{"archive":1,', b'{"archive":2,', 1)


ARCHIVES: dict[str, Callable[[Path], bytes]] = {
    "archive": archive,
    "archive-range": lambda path: archive(path, 30),
    "archive-torn": lambda path: archive(path)[:-2000],
    "archive-flipped": lambda path: flipped(archive(path)),
    "archive-newer": lambda path: newer(archive(path)),
}
"""What archives of the ledger of the job hold."""


def settle(path: Path) -> None:
    """Copy the log into the file, so that the file alone is the ledger."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    for suffix in ("-wal", "-shm", ".lock"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def stated(path: Path) -> dict[str, Any]:
    """The verdict on a ledger or an archive, as far as it must hold for ever."""
    try:
        verdict = verify(f"sqlite:///{path}")
    except ShiftbookError as error:
        return {"exit_code": error.exit_code, "error": type(error).__name__}
    return {
        "exit_code": verdict.exit_code,
        "findings": [[f.invariant, f.job, f.position] for f in verdict.findings],
        "judged_until": verdict.judged_until,
        "head": verdict.head,
    }


def _pack(folder: Path, target: Path) -> None:
    with tarfile.open(target, "w:xz", format=tarfile.USTAR_FORMAT) as packed:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            info = tarfile.TarInfo(file.relative_to(folder).as_posix())
            info.size = file.stat().st_size
            with file.open("rb") as content:
                packed.addfile(info, content)


def unpack(packed: Path, folder: Path) -> Path:
    """Unpack a golden ledger into a folder; the path of its file."""
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / "ledger.db"


def make(out: Path) -> None:
    """Write every golden ledger into a new folder."""
    out.mkdir()
    verdicts = {}
    for name in (*GOOD, *BROKEN):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "ledger.db"
            GOOD.get(name, write_job)(path)
            settle(path)
            if name in BROKEN:
                BROKEN[name](path)
                if name != "cut-file":
                    settle(path)
            if name == PLAIN:
                shutil.copy(path, out / f"{name}.db")
                shutil.copytree(f"{path}.evidence", out / f"{name}.db.evidence")
            else:
                _pack(Path(scratch), out / f"{name}.tar.xz")
            verdicts[name] = stated(path)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "ledger.db"
        write_job(path)
        for name, made in ARCHIVES.items():
            (out / f"{name}.tar").write_bytes(made(path))
            verdicts[name] = stated(out / f"{name}.tar")
    text = json.dumps(verdicts, indent=2, ensure_ascii=False) + "\n"
    (out / "verdicts.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
