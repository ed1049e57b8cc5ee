"""Evidence segments: rows beside the ledger in Parquet files that are named by their SHA-256."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from shiftbook.ledger.dialect import sync_path
from shiftbook.ledger.errors import EvidenceError
from shiftbook.ledger.events.base import Segment

Rows: TypeAlias = "Mapping[str, Sequence[Any]] | pa.Table"
"""A table, or columns of one length by name."""


class Beside(Protocol):
    """Whatever has a ledger file, such as a Ledger."""

    @property
    def path(self) -> Path | None: ...


def evidence_folder(place: Beside | Path) -> Path:
    """Folder of the segments of a ledger; a path is that folder itself."""
    if isinstance(place, Path):
        return place
    if place.path is None:
        raise EvidenceError(
            "expected a ledger in a file, whose segments lie beside it, found one in a server; "
            "name the folder instead"
        )
    return place.path.with_name(place.path.name + ".evidence")


def write_segment(place: Beside | Path, rows: Rows) -> Segment:
    """Write rows as a segment, durable on return; the same rows give the same file.

    ``rows`` is a table or ``{column: values}`` with columns of one length. Raises EvidenceError.
    """
    return write_segments(place, [rows])[0]


def write_segments(place: Beside | Path, many: Sequence[Rows]) -> list[Segment]:
    """Write several segments, which costs less than one by one: the folder is synced once."""
    folder = evidence_folder(place)
    try:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            sync_path(folder.parent)
        segments = [_write(folder, _table(rows)) for rows in many]
        sync_path(folder)
    except OSError as error:
        raise EvidenceError(
            f"expected to write evidence to {folder}, found: {error.strerror or error}; "
            "make the folder writable and give it space"
        ) from error
    return segments


def _table(rows: Rows) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    try:
        return pa.table({name: pa.array(values) for name, values in rows.items()})
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise EvidenceError(
            f"expected columns of one length, each of one type, found others ({error})"
        ) from error


def _write(folder: Path, table: pa.Table) -> Segment:
    sink = pa.BufferOutputStream()
    # Nothing that depends on the machine or the time enters the file. Digests and uids differ
    # from row to row, so a dictionary would only be a second copy of them.
    pq.write_table(
        table.replace_schema_metadata(None),
        sink,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    data = sink.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    target = folder / f"{sha256}.parquet"
    # A file under its final name is complete and synced; one that was damaged since is replaced.
    if not _intact(target, len(data)):
        draft = folder / f".{sha256}.{secrets.token_hex(4)}"
        try:
            with draft.open("xb") as file:
                file.write(data)
                file.flush()
                os.fdatasync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    return Segment(
        sha256=sha256, rows=table.num_rows, columns=tuple(table.column_names), bytes=len(data)
    )


def _intact(target: Path, size: int) -> bool:
    """True where the file stands with its size and content."""
    try:
        if target.stat().st_size != size:
            return False
        return hashlib.sha256(target.read_bytes()).hexdigest() == target.stem
    except FileNotFoundError:
        return False


def read_segment(place: Beside | Path, segment: Segment) -> pa.Table:
    """Read a segment; raise EvidenceError where it is missing, torn, altered or not as bound."""
    path = evidence_folder(place) / f"{segment.sha256}.parquet"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EvidenceError(
            f"expected evidence at {path}, found: {error.strerror}; restore it from a copy"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != segment.sha256:
        raise EvidenceError(
            f"expected {path} with SHA-256 {segment.sha256} and {segment.bytes} bytes, found "
            f"{found} and {len(data)} bytes; restore it from a copy"
        )
    try:
        # A segment is small: threads, and looking for partitions, would take six times as long.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise EvidenceError(f"expected Parquet in {path}, found other bytes ({error})") from error
    columns = tuple(table.column_names)
    if (table.num_rows, columns, len(data)) != (segment.rows, segment.columns, segment.bytes):
        raise EvidenceError(
            f"expected {segment.rows} rows of {', '.join(segment.columns)} in {segment.bytes} "
            f"bytes in {path}, found {table.num_rows} rows of {', '.join(columns)} in "
            f"{len(data)}; the event that binds it is wrong"
        )
    return table
