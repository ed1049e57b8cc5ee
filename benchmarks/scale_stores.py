"""Measures the memory of what reads a whole ledger where that is an archive or in PostgreSQL.

A ledger in SQLite is exported, and the archive imported into a server of its own, from the wheel
that the tests use. Each figure comes from a process of its own; memory is that of the process and
its children, not of the server, which has its own settings.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.instruments import MILLION, Bound, Measured, cpu_s, shown_bounds, timed, watched

LIMIT_MB = 500


def _judged(target: str, *, integrity_only: bool) -> Measured:
    from shiftbook.verify.verdict import verify

    found: Measured = {}
    cpu = cpu_s()
    with watched(found), timed(found, "seconds"):
        verdict = verify(target, evidence=_beside(target), integrity_only=integrity_only)
    if verdict.findings or verdict.last != verdict.judged_until:
        raise SystemExit(f"expected no findings, found {verdict.word} until {verdict.last}")
    return found | {"events": verdict.last + 1, "cpu_s": cpu_s() - cpu}


def _beside(target: str) -> str | None:
    """Where the segments of a ledger in a server lie; an archive holds its own."""
    return str(_Subjects.evidence) if "://" in target else None


def integrity(target: str) -> Measured:
    """`verify --integrity-only`."""
    return _judged(target, integrity_only=True)


def judgement(target: str) -> Measured:
    """`verify`, both passes and evidence."""
    return _judged(target, integrity_only=False)


def import_(target: str) -> Measured:
    """`import` of the archive into an empty ledger."""
    from shiftbook.ledger.archive import import_archive
    from shiftbook.ledger.archive_file import ArchiveFile
    from shiftbook.ledger.ledger import Ledger

    found: Measured = {}
    cpu = cpu_s()
    with (
        ArchiveFile.open(_Subjects.archive) as archive,
        Ledger.open(target, evidence=_Subjects.evidence) as ledger,
        watched(found),
        timed(found, "seconds"),
    ):
        done = import_archive(archive, ledger)
    return found | {"events": done.imported, "cpu_s": cpu_s() - cpu}


def export(target: str) -> Measured:
    """`export` of the whole ledger with its evidence."""
    from shiftbook.ledger.archive import export_archive
    from shiftbook.ledger.ledger import Ledger

    found: Measured = {}
    again = _Subjects.archive.with_suffix(".again.tar")
    cpu = cpu_s()
    try:
        with (
            Ledger.open(target, read_only=True, evidence=_Subjects.evidence) as ledger,
            watched(found),
            timed(found, "seconds"),
        ):
            done = export_archive(ledger, again)
    finally:
        again.unlink(missing_ok=True)
    if done.missing_segments:
        raise SystemExit(f"expected a whole archive, found {done.plain()}")
    return found | {"events": done.last + 1, "cpu_s": cpu_s() - cpu}


def mirror(target: str) -> Measured:
    """Every event and all evidence into a new mirror."""
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.ledger.mirror import Mirror

    found: Measured = {}
    with Ledger.open(target, read_only=True, evidence=_Subjects.evidence) as ledger:
        for suffix in (".mirror.duckdb", ".mirror.duckdb.wal"):
            ledger.beside(suffix).unlink(missing_ok=True)
        cpu = cpu_s()
        with watched(found), timed(found, "seconds"):
            Mirror.open(ledger).close()
        found |= {"events": ledger.head().size, "cpu_s": cpu_s() - cpu}
        for suffix in (".mirror.duckdb", ".mirror.duckdb.wal"):
            ledger.beside(suffix).unlink(missing_ok=True)
    return found


MEASURES: dict[str, tuple[Callable[[str], Measured], str]] = {
    "archive-integrity": (integrity, "verify ARCHIVE --integrity-only"),
    "archive-judgement": (judgement, "verify ARCHIVE"),
    "postgres-import": (import_, "import into PostgreSQL"),
    "postgres-integrity": (integrity, "verify --integrity-only on PostgreSQL"),
    "postgres-judgement": (judgement, "verify on PostgreSQL"),
    "postgres-export": (export, "export from PostgreSQL"),
    "postgres-mirror": (mirror, "mirror of a ledger in PostgreSQL"),
}

BESIDE = "{seconds:.0f} s for {events:.0f} events, {cpu_s:.0f} s of CPU"


class _Subjects:
    """Where the archive and the segments lie; the same in each process of one run."""

    folder = Path(tempfile.gettempdir())
    archive = folder / "book.tar"
    evidence = folder / "book.evidence"

    @classmethod
    def lie_in(cls, folder: Path) -> None:
        cls.folder = folder
        cls.archive, cls.evidence = folder / "book.tar", folder / "book.evidence"


def _measure(name: str, target: str, folder: Path) -> Measured:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale_stores", name, target, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Measured = json.loads(done.stdout)
    found["s_per_million"] = found["seconds"] * MILLION / found["events"]
    return found


def report(path: Path, only: Sequence[str]) -> int:
    """Print every figure; the number of bounds that were missed."""
    from shiftbook.ledger.archive import export_archive
    from shiftbook.ledger.ledger import Ledger
    from tests.postgres_server import running_server

    folder = Path(tempfile.mkdtemp(prefix="shiftbook-stores-"))
    _Subjects.lie_in(folder)
    missed = 0
    # What is asked of PostgreSQL needs the ledger there.
    served = any(name.startswith("postgres") for name in only)
    try:
        with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
            export_archive(ledger, _Subjects.archive)
        with running_server() as server:
            for name, (_, what) in MEASURES.items():
                if only and name not in only and (name != "postgres-import" or not served):
                    continue
                url = server.url("book")
                target = str(_Subjects.archive) if name.startswith("archive") else url
                bounds = [Bound("peak_mb", LIMIT_MB, False, "MB", f"memory: {what}")]
                missed += shown_bounds(_measure(name, target, folder), bounds, BESIDE)
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
    return missed


if __name__ == "__main__":
    _, name_, target_, folder_ = sys.argv
    _Subjects.lie_in(Path(folder_))
    print(json.dumps(MEASURES[name_][0](target_)))
