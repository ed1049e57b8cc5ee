"""Times a ledger of a thousand jobs and millions of events; prints each figure with its bound.

The ledger is made first (tests/ledger/big_ledger.py), or ``--ledger FILE`` names one. Each figure
comes from a process of its own, so that its memory is its own and nothing is warm but the disk.
Beside what reads the whole ledger stands a bare ``sqlite3`` in the same process, on the same rows:
``read`` fetches them, ``read + hash`` hashes them as well. Where we are slower than that, the line
says what is done beside.

Usage: python -m benchmarks.scale [--events N | --ledger FILE] [--only NAME ...]

``--stores`` measures the memory of the same work on other stores instead: the ledger exported into
an archive, and imported into PostgreSQL (benchmarks/scale_stores.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import scale_stores
from benchmarks.instruments import (
    MILLION,
    Bound,
    Measured,
    apart,
    bare,
    cpu_s,
    peak_mb,
    shown_bounds,
    timed,
    watched,
)

ROUNDS = 5

# -- questions -----------------------------------------------------------------------------


def questions(path: Path) -> Measured:
    """Each with a handle of its own, as a command opens it; milliseconds."""
    from shiftbook.ledger.cli_options import known_job
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.ledger.standing import read_standing

    url = f"sqlite:///{path}"
    found: Measured = {}
    with Ledger.open(url, read_only=True) as ledger:
        jobs = ledger.jobs()
        size = ledger.head().size
    times: dict[str, list[float]] = {}

    def ask(name: str, question: Callable[[Ledger], object]) -> None:
        start = time.perf_counter()
        with Ledger.open(url, read_only=True) as ledger:
            question(ledger)
        times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    def state(job: str) -> Callable[[Ledger], object]:
        return lambda ledger: read_standing(ledger.state(), known_job(ledger, job))

    for number in range(ROUNDS + 1):
        job = jobs[(number * 7919) % len(jobs)]
        snapshot = path.with_name(path.name + ".snapshots")
        if number == 0:
            shutil.rmtree(snapshot, ignore_errors=True)
            ask("state_first", state(job))  # nothing is folded yet
        ask("state_once", state(job))  # the first look at this job
        ask("state", state(job))
        ask("log", lambda ledger, job=job: list(ledger.read(job=known_job(ledger, job), limit=50)))  # type: ignore[misc]
        ask("newest", lambda ledger, job=job: list(ledger.read(job=job, limit=50, reverse=True)))  # type: ignore[misc]
        ask("rare", lambda ledger: list(ledger.read(types=["JobOpened"], limit=50, reverse=True)))
        ask("show", lambda ledger, n=number: ledger.event(size * n // (ROUNDS + 1)))  # type: ignore[misc]
        ask("since", lambda ledger: _since(ledger, size))
    for name, values in times.items():
        found[name] = median(values)
    found |= _bare_questions(path, jobs, size)
    found["peak_mb"] = peak_mb()
    return found


def _bare_questions(path: Path, jobs: Sequence[str], size: int) -> Measured:
    """`log` and `show` by sqlite3 alone, connecting each time; milliseconds."""
    asked = {
        "log_bare": "SELECT data FROM events WHERE job = ? ORDER BY position LIMIT 50",
        "show_bare": "SELECT data FROM events WHERE position = ?",
    }
    found: Measured = {}
    for name, text in asked.items():
        took = []
        for number in range(ROUNDS + 1):
            job, position = jobs[(number * 7919) % len(jobs)], size * number // (ROUNDS + 1)
            start = time.perf_counter()
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                connection.execute(text, (job if "job" in text else position,)).fetchall()
            took.append((time.perf_counter() - start) * 1e3)
        found[name] = median(took)
    return found


def _since(ledger: Any, size: int) -> list[Any]:
    middle = ledger.event(size // 2).recorded_ns
    after, _ = ledger.span(-1, middle, None)
    return list(ledger.read(after, limit=50))


def imports(path: Path) -> Measured:
    """Start of the command line beside a Python that does nothing; milliseconds."""

    def run(code: str) -> float:
        took = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            took.append((time.perf_counter() - start) * 1e3)
        return min(took)

    nothing = run("pass")
    book = "import shiftbook.ledger.cli, shiftbook.ledger.commands.book, shiftbook.ledger.ledger"
    return {"python_ms": nothing, "import_ms": run(book) - nothing}


# -- the whole ledger ----------------------------------------------------------------------


def integrity(path: Path) -> Measured:
    """`verify --integrity-only`, seconds per million, with the files of evidence and without."""
    from shiftbook.verify.evidence import EvidenceFolder
    from shiftbook.verify.integrity import Integrity, check_stored
    from shiftbook.verify.stored import RawEvents
    from shiftbook.verify.verdict import verify

    found: Measured = {}
    bare(path, found, hashed=True)
    events = int(found["events"])
    cpu = cpu_s()
    with watched(found), timed(found, "with_evidence_s", MILLION / events):
        verdict = verify(f"sqlite:///{path}", integrity_only=True)
    found["with_evidence_cpu_s"] = (cpu_s() - cpu) * MILLION / events
    if verdict.integrity_broken or verdict.findings or verdict.last != events - 1:
        raise SystemExit(f"expected a sound ledger of {events} events, found {verdict.word}")
    # The same pass over the events alone, as the judgement does it: it reads evidence itself.
    cpu = cpu_s()
    with RawEvents(f"sqlite:///{path}") as raw, timed(found, "seconds", MILLION / events):
        checked = Integrity(EvidenceFolder(raw))
        checked.evidence_apart = True
        check_stored(raw, checked, None)
    found["cpu_s"] = (cpu_s() - cpu) * MILLION / events
    found["ratio"] = found["bare_s"] / found["seconds"]
    return found


def judgement(path: Path) -> Measured:
    """`verify`, both passes and evidence, seconds per million."""
    from shiftbook.verify.verdict import verify

    found: Measured = {}
    bare(path, found, hashed=True)
    cpu = cpu_s()
    with watched(found), timed(found, "seconds", MILLION / found["events"]):
        verdict = verify(f"sqlite:///{path}")
    found["cpu_s"] = (cpu_s() - cpu) * MILLION / found["events"]
    if verdict.findings or verdict.last != found["events"] - 1:
        raise SystemExit(f"expected a clean verdict, found {verdict.word} until {verdict.last}")
    found["ratio"] = found["bare_s"] / found["seconds"]
    return found


def export(path: Path) -> Measured:
    """`export` of the whole ledger with its evidence, seconds per million."""
    from shiftbook.ledger.archive import export_archive
    from shiftbook.ledger.ledger import Ledger

    found: Measured = {}
    bare(path, found, hashed=True)
    archive = path.with_name(path.name + ".tar")
    cpu = cpu_s()
    try:
        with (
            Ledger.open(f"sqlite:///{path}", read_only=True) as ledger,
            watched(found),
            timed(found, "seconds", MILLION / found["events"]),
        ):
            done = export_archive(ledger, archive)
        found["cpu_s"] = (cpu_s() - cpu) * MILLION / found["events"]
        found["archive_mb"] = archive.stat().st_size / 1e6
    finally:
        archive.unlink(missing_ok=True)
    if done.missing_segments or done.last != found["events"] - 1:
        raise SystemExit(f"expected a whole archive, found {done.plain()}")
    found["ratio"] = found["bare_s"] / found["seconds"]
    return found


def mirror(path: Path) -> Measured:
    """Every event into the mirror; its tables out of them; all at once; then aggregates."""
    from shiftbook.ledger import mirror_build
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.ledger.mirror import Mirror

    found: Measured = {}
    bare(path, found, hashed=False)
    with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
        _forget_mirror(path)
        cpu_s = time.process_time()
        with timed(found, "events_s"):
            Mirror.open(ledger, ()).close()
        found["cpu_us"] = (time.process_time() - cpu_s) * MILLION / found["events"]
        found["rate"] = found["events"] / found["events_s"]
        found["ratio"] = found["bare_s"] / (found["events_s"] * MILLION / found["events"])
        with apart(mirror_build, "load_segments") as evidence, timed(found, "tables_s"):
            Mirror.open(ledger).close()
        found["evidence_s"] = sum(evidence)
        found["tables_s"] -= sum(evidence)
        _forget_mirror(path)
        with apart(mirror_build, "load_segments") as evidence, timed(found, "whole_s"):
            Mirror.open(ledger).close()
        found["whole_rate"] = found["events"] / (found["whole_s"] - sum(evidence))
        with timed(found, "again_ms", 1e3):
            mirror = Mirror.open(ledger)
        found["peak_mb"] = peak_mb()
        with mirror:
            _aggregate(path, mirror, found)
    return found


def _forget_mirror(path: Path) -> None:
    for suffix in (".mirror.duckdb", ".mirror.duckdb.wal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _aggregate(path: Path, mirror: Any, found: Measured) -> None:
    typed = "SELECT sum(wall_s), quantile_cont(wall_s, 0.99), avg(device_s) FROM iterations"
    stored = (
        "SELECT sum(json_extract(data, '$.body.wall_s')), avg(json_extract(data, "
        "'$.body.device_s')) FROM (SELECT CAST(data AS TEXT) AS data FROM events WHERE "
        "type || '' = 'IterationCompleted')"
    )
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        mirror.rows(typed)
        took.append(time.perf_counter() - start)
    found["mirror_ms"] = median(took) * 1e3
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    with closing(connection), timed(found, "store_ms", 1e3):
        connection.execute(stored).fetchall()
    found["times"] = found["store_ms"] / found["mirror_ms"]


MEASURES: dict[str, tuple[Callable[[Path], Measured], list[Bound], str]] = {
    "questions": (
        questions,
        [
            Bound("state", 100, False, "ms", "state JOB"),
            Bound("state_once", 100, False, "ms", "state JOB, first look at that job"),
            Bound("state_first", 100, False, "ms", "state JOB, no snapshot of anything"),
            Bound("log", 100, False, "ms", "log --job JOB --limit 50"),
            Bound("newest", 100, False, "ms", "log --job JOB --limit 50 --newest"),
            Bound("rare", 100, False, "ms", "log --type JobOpened --limit 50"),
            Bound("since", 100, False, "ms", "log --since TIME --limit 50"),
            Bound("show", 100, False, "ms", "show POSITION"),
            Bound("peak_mb", 500, False, "MB", "memory of these questions"),
        ],
        "opening included, start of Python and imports not; sqlite3 alone takes {log_bare:.1f} ms "
        "for log and {show_bare:.1f} ms for show; the rest is the check of the store when it is "
        "opened, and for state the fold of a job's events",
    ),
    "imports": (
        imports,
        [Bound("import_ms", 1_000, False, "ms", "imports of a command")],
        "python -c pass takes {python_ms:.0f} ms beside",
    ),
    "integrity": (
        integrity,
        [
            Bound("seconds", 3, False, "s/million", "integrity pass"),
            Bound("peak_mb", 500, False, "MB", "memory of the integrity pass"),
        ],
        "bare sqlite3, read + hash, one process: {bare_s:.2f} s/million, {ratio:.2f} x; slower by "
        "the parse of every event, the comparison of its columns, and the tree; {cpu_s:.1f} s of "
        "CPU. With the evidence of its segments, each file read, hashed and decoded: "
        "{with_evidence_s:.1f} s/million, {with_evidence_cpu_s:.1f} s of CPU",
    ),
    "judgement": (
        judgement,
        [
            Bound("seconds", 60, False, "s/million", "judgement, with integrity and evidence"),
            Bound("peak_mb", 500, False, "MB", "memory of the judgement"),
        ],
        "bare sqlite3, read + hash: {bare_s:.2f} s/million, {ratio:.2f} x; slower by the fold and "
        "every invariant, in Python, and by decoding the evidence; {cpu_s:.1f} s of CPU",
    ),
    "export": (
        export,
        [Bound("peak_mb", 500, False, "MB", "memory of an export")],
        "{seconds:.1f} s/million, an archive of {archive_mb:.0f} MB; bare sqlite3, read + hash: "
        "{bare_s:.2f} s/million, {ratio:.2f} x; slower by the compression and its second hash, and "
        "by the search of each event for a segment; {cpu_s:.1f} s of CPU",
    ),
    "mirror": (
        mirror,
        [
            Bound("rate", 200_000, True, "events/s", "mirror into DuckDB"),
            Bound("times", 50, True, "x", "aggregate, mirror / JSON in the store"),
            Bound("peak_mb", 500, False, "MB", "memory of the mirror"),
        ],
        "bare sqlite3, read alone: {bare_s:.2f} s/million, {ratio:.2f} x; slower by every field "
        "typed and compressed; {cpu_us:.1f} µs of CPU an event. The eleven other tables, made when "
        "first asked for: {tables_s:.1f} s more; all at once {whole_rate:.0f} events/s; evidence "
        "rows of the samples {evidence_s:.1f} s besides; nothing new {again_ms:.0f} ms; "
        "{mirror_ms:.1f} ms against {store_ms:.0f} ms",
    ),
}


def report(path: Path, only: Sequence[str]) -> int:
    """Print every figure; the number of bounds that were missed."""
    return sum(
        shown_bounds(measure(name, path), bounds, beside)
        for name, (_, bounds, beside) in MEASURES.items()
        if not only or name in only
    )


def measure(name: str, path: Path) -> Measured:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--measure", name, "--ledger", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Measured = json.loads(done.stdout)
    return found


def main() -> int:
    """Make the ledger and run everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=MILLION)
    parser.add_argument("--ledger", type=Path)
    every = [*MEASURES, *scale_stores.MEASURES]
    parser.add_argument("--only", choices=every, nargs="+", default=(), metavar="NAME")
    parser.add_argument("--stores", action="store_true", help="archive and PostgreSQL instead")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(MEASURES[given.measure][0](given.ledger)))
        return 0
    stores = given.stores or not scale_stores.MEASURES.keys().isdisjoint(given.only)
    run = scale_stores.report if stores else report
    if given.ledger is not None:
        return 1 if run(given.ledger, given.only) else 0
    from tests.ledger.big_ledger import write_big

    folder = Path(tempfile.mkdtemp(prefix="shiftbook-scale-"))
    try:
        path = folder / "book.db"
        start = time.perf_counter()
        write_big(path, given.events)
        rate = given.events / (time.perf_counter() - start)
        print(f"{given.events} events of 1,000 jobs written, {rate:.0f} a second", flush=True)
        return 1 if run(path, given.only) else 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
