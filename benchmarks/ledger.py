"""Times the ledger against bare sqlite3 and psycopg: prints each ratio with its bound.

Exits with 1 when one misses its bound.

Both sides of a ratio run in turn, in small blocks of the same run, so that a busy disk meets both.
The bare side has the same durability (write-ahead log, synchronous FULL, one commit for each
append). For the single append it writes the bytes that the ledger stored to ``(position, data)``;
for the batch it is ``executemany`` of the finished rows into the same table and indexes, without
triggers, lock, validation, serialisation or hash. The batch against ``(position, data)`` alone is
printed beside it, without a bound. What runs on PostgreSQL is told in ledger_postgres.py.

Usage: python benchmarks/ledger.py [--rounds N] [--only NAME]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import ledger_postgres
from benchmarks.result import DIGEST, Result, iteration
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events import training
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.evidence import write_segments
from shiftbook.ledger.ledger import Ledger

BLOCK = 20
"""Appends in a row of one side before the other side has its turn."""

SAMPLES = 512
SHA = DIGEST * 2


class Bare:
    """The least that a program could do with sqlite3 for the same durability."""

    def __init__(self, path: Path, schema: Sequence[str]) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=wal").fetchone()
        self.connection.execute("PRAGMA synchronous=FULL")
        for statement in schema:
            self.connection.execute(statement)

    def insert(self, rows: Sequence[Sequence[object]]) -> float:
        """Insert and commit; seconds."""
        text = f"INSERT INTO events VALUES ({', '.join('?' * len(rows[0]))})"
        start = time.perf_counter()
        self.connection.execute("BEGIN")
        if len(rows) == 1:
            self.connection.execute(text, rows[0])
        else:
            self.connection.executemany(text, rows)
        self.connection.execute("COMMIT")
        return time.perf_counter() - start


BYTES_ALONE = ("CREATE TABLE events (position INTEGER PRIMARY KEY, data BLOB)",)


@dataclass(frozen=True)
class Medians:
    """Median seconds of one append, and bytes of an event."""

    ledger_s: float
    bytes_alone_s: float
    rows_s: float
    event_bytes: int


def against_bare(folder: Path, *, rounds: int, batch: int) -> Medians:
    """Append the same events by the ledger, as bytes alone, and as finished rows."""
    times: dict[str, list[float]] = {"ledger": [], "alone": [], "rows": []}
    with Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger:
        reader = sqlite3.connect(f"file:{folder}/ledger.db?mode=ro", uri=True)
        schema = reader.execute(
            "SELECT sql FROM sqlite_master WHERE type IN ('table', 'index') AND sql IS NOT NULL "
            "AND tbl_name = 'events' ORDER BY rowid"
        ).fetchall()
        alone = Bare(folder / "alone.db", BYTES_ALONE)
        same = Bare(folder / "rows.db", [row[0] for row in schema])
        number = 0
        for round_ in range(rounds):
            receipts = []
            elapsed: dict[str, list[float]] = {"ledger": [], "alone": [], "rows": []}
            for _ in range(BLOCK):
                events = [iteration(number + index) for index in range(batch)]
                number += batch
                start = time.perf_counter()
                receipts.append(ledger.append("job", events))
                elapsed["ledger"].append(time.perf_counter() - start)
            stored = [
                reader.execute(
                    "SELECT * FROM events WHERE position BETWEEN ? AND ?", (r.first, r.last)
                ).fetchall()
                for r in receipts
            ]
            elapsed["alone"] += [alone.insert([(r[0], r[10]) for r in rows]) for rows in stored]
            elapsed["rows"] += [same.insert(rows) for rows in stored]
            if round_:  # the first round warms up
                for side, values in elapsed.items():
                    times[side] += values
        for connection in (reader, alone.connection, same.connection):
            connection.close()
    ledger_s, alone_s, rows_s = (median(times[side]) for side in ("ledger", "alone", "rows"))
    return Medians(ledger_s, alone_s, rows_s, len(stored[0][0][10]))


def single(folder: Path, rounds: int) -> Result:
    """One event, one durable commit."""
    found = against_bare(folder, rounds=rounds, batch=1)
    return Result(
        "single append / bare sqlite3",
        found.bytes_alone_s / found.ledger_s,
        0.6,
        True,
        "x",
        f"{found.ledger_s * 1e6:.0f} µs against {found.bytes_alone_s * 1e6:.0f} µs, "
        f"events of {found.event_bytes} bytes; the ledger locks, validates, serialises, hashes and "
        "fires triggers around the same commit",
    )


def batched(folder: Path, rounds: int) -> Result:
    """A hundred events, one durable commit."""
    found = against_bare(folder, rounds=max(2, rounds // 4), batch=100)
    return Result(
        "batch of 100 / bare executemany",
        found.rows_s / found.ledger_s,
        0.5,
        True,
        "x",
        f"{found.ledger_s * 1e3:.2f} ms against {found.rows_s * 1e3:.2f} ms, events of "
        f"{found.event_bytes} bytes; their bytes alone {found.bytes_alone_s * 1e3:.2f} ms, "
        f"{found.bytes_alone_s / found.ledger_s:.2f} x; what each event costs more is its "
        "validation, canonical JSON, hash and trigger",
    )


def step_events(ledger: Ledger, number: int) -> Callable[[], list[Draft]]:
    """Everything that one training step of 512 samples records, evidence segments included."""
    uids = [f"{number * 64 + index // 8}/{index % 8}" for index in range(SAMPLES)]
    digests = [hashlib.md5(uid.encode(), usedforsecurity=False).hexdigest() for uid in uids]
    rewards = [float(index % 3 == 0) for index in range(SAMPLES)]
    generated = {
        "uid": uids,
        "group": [index // 8 for index in range(SAMPLES)],
        "turns": [3] * SAMPLES,
        "tokens": [65] * SAMPLES,
        "token_digest": digests,
        "logp_digest": digests[::-1],
        "version_min": [number] * SAMPLES,
        "version_max": [number] * SAMPLES,
        "replica": ["rollout-n.0"] * SAMPLES,
        "incarnation": ["rollout-n.0#1"] * SAMPLES,
    }
    rewarded = {
        "uid": uids,
        "token_digest": digests,
        "reward": rewards,
        "scorer": ["exact-match"] * SAMPLES,
    }
    consumed = {
        "uid": uids,
        "token_digest": digests,
        "reward": rewards,
        "advantage": [reward - 0.33 for reward in rewards],
        "group": generated["group"],
        "virtual_rank": [index // 128 for index in range(SAMPLES)],
        "tokens": [65] * SAMPLES,
    }

    def record() -> list[Draft]:
        segments = write_segments(ledger, [generated, rewarded, consumed])
        events: list[Event] = [
            training.SamplesDrawn(
                attempt="a1",
                iteration=number,
                rule="permutation",
                seed=7,
                epoch=0,
                start=number * 64,
                indices=tuple(range(64)),
                group_size=8,
            ),
            training.SamplesGenerated(
                attempt="a1",
                iteration=number,
                count=SAMPLES,
                tokens=SAMPLES * 65,
                sampled_tokens=SAMPLES * 40,
                policy_version=number,
                digest=SHA,
                segment=segments[0],
            ),
            training.SamplesRewarded(
                attempt="a1",
                iteration=number,
                count=SAMPLES,
                reward_mean=0.33,
                digest=SHA,
                segment=segments[1],
            ),
            training.BatchConsumed(
                attempt="a1",
                iteration=number,
                count=SAMPLES,
                tokens=SAMPLES * 65,
                policy_version=number,
                version_min=number,
                digest=SHA,
                segment=segments[2],
            ),
            training.UpdateApplied(
                attempt="a1",
                iteration=number,
                policy_version=number + 1,
                params_before=DIGEST,
                params_after=DIGEST,
                masters_before=DIGEST,
                masters_after=DIGEST,
                optimizer_before=DIGEST,
                optimizer_after=DIGEST,
                optimizer_step=number,
                learning_rate=1e-4,
                tokens=SAMPLES * 65,
                divisor=33280.0,
                loss=0.0123,
                kl=0.001,
                grad_norm=0.7,
                clipped=False,
                skipped=False,
                virtual_ranks=tuple(
                    training.VirtualRank(virtual_rank=v, pid=4711, device="n/0", groups=16)
                    for v in range(4)
                ),
            ),
        ]
        return [Draft(event) for event in events]

    return record


def step(folder: Path, rounds: int) -> Result:
    """One training step of 512 samples: segments written and synced, then its events.

    Beside it the same bytes by hand: each file written, synced and renamed, its folder synced, the
    events inserted and committed.
    """
    times: list[float] = []
    bare: list[float] = []
    copies = folder / "copies"
    copies.mkdir()
    with Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger:
        other = Bare(folder / "bare.db", BYTES_ALONE)
        known: set[Path] = set()
        for number in range(max(5, rounds)):
            record = step_events(ledger, number)
            start = time.perf_counter()
            receipt = ledger.append("job", record(), key=f"step-{number}")
            times.append(time.perf_counter() - start)
            files = set((folder / "ledger.db.evidence").iterdir()) - known
            known |= files
            contents = [(copies / file.name, file.read_bytes()) for file in files]
            events = [(e.position, e.data) for e in ledger.read(receipt.first - 1)]
            start = time.perf_counter()
            for file, content in contents:
                _write_synced(file, content)
            os.fsync(descriptor := os.open(copies, os.O_RDONLY))
            os.close(descriptor)
            other.insert(events)
            bare.append(time.perf_counter() - start)
        other.connection.close()
    value, least = median(times[1:]) * 1e3, median(bare[1:]) * 1e3
    return Result(
        "training step of 512 samples",
        value,
        10,
        False,
        "ms",
        f"best {min(times) * 1e3:.2f} ms; the same files and rows by hand {least:.2f} ms, "
        f"{least / value:.2f} x; the ledger also makes the columns and compresses them",
    )


def _write_synced(path: Path, content: bytes) -> None:
    draft = path.with_name("." + path.name)
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fdatasync(file.fileno())
    draft.rename(path)


BENCHMARKS: dict[str, Callable[[Path, int], Result]] = {
    "single": single,
    "batch": batched,
    "step": step,
    "postgres": ledger_postgres.group_commit,
    "postgres-batch": ledger_postgres.batched,
}


def main() -> int:
    """Run them all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=sorted(BENCHMARKS))
    given = parser.parse_args()
    missed = 0
    for name, benchmark in BENCHMARKS.items():
        if given.only not in (None, name):
            continue
        folder = Path(tempfile.mkdtemp(prefix="shiftbook-benchmark-"))
        try:
            result = benchmark(folder, given.rounds)
        finally:
            shutil.rmtree(folder)
        print(result.line(), flush=True)
        missed += not result.met
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
