"""Rows of every sample for the columnar copy: evidence segments, read in batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from shiftbook.ledger.errors import EvidenceError, EvidenceOutOfReach
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.evidence import read_segment

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger

BATCH_SEGMENTS = 2_048
BATCH_SAMPLES = 100_000
"""Evidence segments, and rows of them, taken in at once: the rows are some 20 MB."""

KEPT_SEGMENTS = 64
"""Segments kept for the next event that names the same one."""

SAMPLE_ACTS = {
    "SamplesGenerated": "generated",
    "SamplesRewarded": "rewarded",
    "BatchConsumed": "consumed",
}

_SAMPLE_COLUMNS = {
    "uid": "VARCHAR",
    "turns": "BIGINT",
    "tokens": "BIGINT",
    "token_digest": "VARCHAR",
    "version_min": "BIGINT",
    "version_max": "BIGINT",
    "replica": "VARCHAR",
    "reward": "DOUBLE",
    "scorer": "VARCHAR",
    "advantage": "DOUBLE",
    "virtual_rank": "BIGINT",
}

_ABOUT = {
    "of_act": pa.string(),
    "of_position": pa.int64(),
    "of_job": pa.string(),
    "of_attempt": pa.string(),
    "of_iteration": pa.int64(),
}
"""What the event of a segment says of all its rows; no column of a segment has such a name."""


def load_segments(connection: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
    """Read the evidence segments that are not in the copy yet; a missing one stays noted."""
    # The same rows are one file, whichever events name it.
    read = lru_cache(KEPT_SEGMENTS)(partial(_segment_rows, ledger))
    after = -1
    while True:
        named = connection.execute(
            "SELECT position, job, type, attempt, iteration, sha256, rows, columns, bytes "
            "FROM segments WHERE NOT loaded AND position > ? ORDER BY position LIMIT ?",
            [after, BATCH_SEGMENTS],
        ).fetchall()
        if not named:
            return
        ends = accumulate(max(0, name[6]) for name in named)
        named = named[: max(1, sum(end <= BATCH_SAMPLES for end in ends))]
        after = named[-1][0]
        _take_in_segments(connection, named, read)


def _take_in_segments(
    connection: duckdb.DuckDBPyConnection,
    named: list[tuple[Any, ...]],
    read: Callable[[str, int, tuple[str, ...], int], pa.Table | str],
) -> None:
    """Insert the rows of some segments, in one transaction and one statement for each shape."""
    alike: dict[str, _Alike] = {}
    problems: list[str | None] = []
    for position, job, type_, attempt, iteration, sha256, rows, columns, size in named:
        found = read(sha256, rows, tuple(columns), size)
        problems.append(found if isinstance(found, str) else None)
        if not isinstance(found, str):
            about = (SAMPLE_ACTS[type_], position, job, attempt, iteration)
            alike.setdefault(str(found.schema), _Alike()).add(found, about)
    notes = {"noted": [name[0] for name in named], "said": pa.array(problems, pa.string())}
    connection.execute("BEGIN")
    for samples in alike.values():
        _insert_samples(connection, samples.table())
    connection.register("segment_notes", pa.table(notes))
    connection.execute(
        "UPDATE segments SET loaded = said IS NULL, problem = said FROM segment_notes "
        "WHERE position = noted"
    )
    connection.unregister("segment_notes")
    connection.execute("COMMIT")


class _Alike:
    """Segments of one shape, with what its event says of each of their rows."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._about: dict[str, list[Any]] = {name: [] for name in _ABOUT}

    def add(self, table: pa.Table, about: tuple[Any, ...]) -> None:
        """Add a segment."""
        self._tables.append(table)
        for values, value in zip(self._about.values(), about, strict=True):
            values += [value] * table.num_rows

    def table(self) -> pa.Table:
        """All rows as one table."""
        table = pa.concat_tables(self._tables).combine_chunks()
        for name, values in self._about.items():
            table = table.append_column(name, pa.array(values, _ABOUT[name]))
        return table


def _insert_samples(connection: duckdb.DuckDBPyConnection, table: pa.Table) -> None:
    connection.register("segment_rows", table)
    values = ", ".join(
        f'TRY_CAST("{name}" AS {kind})' if name in table.column_names else "NULL"
        for name, kind in _SAMPLE_COLUMNS.items()
    )
    connection.execute(
        f"INSERT INTO sample_rows SELECT {', '.join(_ABOUT)}, {values} FROM segment_rows"
    )
    connection.unregister("segment_rows")


def _segment_rows(
    ledger: Ledger, sha256: str, rows: int, columns: tuple[str, ...], size: int
) -> pa.Table | str:
    """The columns of a segment that the copy keeps, or why there are none."""
    try:
        table = _read_segment(ledger, sha256, rows, list(columns), size)
    except EvidenceOutOfReach:
        raise  # it is no property of the segment, and each of them would wait as long
    except EvidenceError as error:
        return str(error)
    return table.select([name for name in _SAMPLE_COLUMNS if name in table.column_names])


def _read_segment(
    ledger: Ledger, sha256: str, rows: int, columns: list[str], size: int
) -> pa.Table:
    segment = Segment(sha256=sha256, rows=rows, columns=tuple(columns), bytes=size)
    return read_segment(ledger, segment)
