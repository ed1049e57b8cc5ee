"""Evidence segments: rows beside the ledger in Parquet files that are named by their SHA-256."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from shiftbook.ledger.errors import EvidenceError
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.segment_place import (
    Beside,
    Place,
    WritablePlace,
    evidence_folder,
    segment_place,
    segment_sha256,
)

__all__ = [
    "Beside",
    "Place",
    "Rows",
    "WritablePlace",
    "as_table",
    "column_types",
    "evidence_folder",
    "read_segment",
    "segment_bytes",
    "segment_place",
    "segment_sha256",
    "writable_place",
    "write_segment",
    "write_segments",
]

COMPRESSED_FROM_BYTES = 1 << 18
"""Size of the rows in memory from which a segment is compressed.

With 512 samples zstd takes away 65 % of 110 kB, and writing and reading take 1.7 times as long
(benchmarks/evidence.py): it is begun anew for each column, and of digests it takes little.
"""

Rows: TypeAlias = "Mapping[str, Sequence[Any]] | pa.Table"
"""A table, or columns of one length by name."""


def writable_place(place: Place) -> WritablePlace:
    """As ``segment_place``; raise EvidenceError where segments can only be read."""
    found = segment_place(place)
    if not isinstance(found, WritablePlace):
        raise EvidenceError(
            "expected a folder that takes evidence, found an archive; import it into a ledger"
        )
    return found


def write_segment(place: Place, rows: Rows) -> Segment:
    """Write rows as a segment, durable on return; the same rows give the same file.

    ``rows`` is a table or ``{column: values}`` with columns of one length. Raises EvidenceError.
    """
    return write_segments(place, [rows])[0]


def write_segments(place: Place, many: Sequence[Rows]) -> list[Segment]:
    """Write several segments, which costs less than one by one: the folder is synced once."""
    made = [_file(as_table(rows)) for rows in many]
    if made:
        target = writable_place(place)
        for segment, data in made:
            target.put(segment.sha256, data)
        target.settle()
    return [segment for segment, _ in made]


def as_table(rows: Rows) -> pa.Table:
    """Rows as a table; raise EvidenceError where its columns are no columns of one table."""
    if isinstance(rows, pa.Table):
        return rows
    try:
        return pa.table({name: _array(values) for name, values in rows.items()})
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise EvidenceError(
            f"expected columns of one length, each of one type, found others ({error})"
        ) from error


_TYPES: Mapping[type, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64()}


def _array(values: Sequence[Any]) -> pa.Array:
    """A column; the type is named where the first value that is no null tells it.

    Left to infer it, pyarrow looks for pandas at each call, which takes longer than the column.
    """
    first = next((value for value in values if value is not None), None)
    kind = _TYPES.get(type(first))
    if kind is None:
        return pa.array(values)
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowException, OverflowError):  # mixed, or numbers above 63 bits
        return pa.array(values)


def segment_bytes(table: pa.Table, compression: Literal["none", "zstd"] | None = None) -> bytes:
    """The bytes of a segment's file; by its size it is compressed or not, unless that is said."""
    small = table.nbytes < COMPRESSED_FROM_BYTES
    sink = pa.BufferOutputStream()
    # Nothing that depends on the machine or the time enters the file. Digests and uids differ
    # from row to row, so a dictionary would only be a second copy of them.
    pq.write_table(
        table.replace_schema_metadata(None),
        sink,
        compression=compression or ("none" if small else "zstd"),
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    return bytes(sink.getvalue().to_pybytes())


def _file(table: pa.Table) -> tuple[Segment, bytes]:
    """A segment and the bytes of its file."""
    data = segment_bytes(table)
    segment = Segment(
        sha256=segment_sha256(data),
        rows=table.num_rows,
        columns=tuple(table.column_names),
        types=column_types(pq.read_schema(pa.BufferReader(data))),
        bytes=len(data),
    )
    return segment, data


def column_types(schema: pa.Schema) -> tuple[str, ...]:
    """Kind of each column: ``text``, ``int64``, ``float64``, ``bool``, ``list<...>`` and so on."""
    return tuple(_kind(field.type) for field in schema)


def _kind(type_: pa.DataType) -> str:
    # Names of our own, since those of the library change with its versions.
    is_ = pa.types
    if is_.is_string(type_) or is_.is_large_string(type_):
        return "text"
    if is_.is_integer(type_):
        return f"{'u' if is_.is_unsigned_integer(type_) else ''}int{type_.bit_width}"
    if is_.is_floating(type_):
        return f"float{type_.bit_width}"
    if is_.is_boolean(type_):
        return "bool"
    if is_.is_binary(type_) or is_.is_large_binary(type_) or is_.is_fixed_size_binary(type_):
        return "bytes"
    if is_.is_list(type_) or is_.is_large_list(type_) or is_.is_fixed_size_list(type_):
        return f"list<{_kind(type_.value_type)}>"
    if is_.is_struct(type_):
        return f"struct<{', '.join(f'{f.name}: {_kind(f.type)}' for f in type_)}>"
    return "none" if is_.is_null(type_) else "other"


def read_segment(place: Place, segment: Segment) -> pa.Table:
    """Read a segment; raise EvidenceError where it is missing, torn, altered or not as bound."""
    source = segment_place(place)
    data = source.get(segment.sha256)
    if data is None:
        where = source.where(segment.sha256)
        raise EvidenceError(f"expected evidence at {where}, found none; restore it from a copy")
    found = segment_sha256(data)
    if found != segment.sha256:
        raise EvidenceError(
            f"expected {source.where(segment.sha256)} with SHA-256 {segment.sha256} and "
            f"{segment.bytes} bytes, found {found} and {len(data)} bytes; restore it from a copy"
        )
    try:
        # A segment is small: threads, and looking for partitions, would take six times as long.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        where, said = source.where(segment.sha256), " ".join(str(error).split())[:200]
        raise EvidenceError(f"expected Parquet in {where}, found other bytes ({said})") from error
    types = None if segment.types is None else column_types(table.schema)
    bound = (segment.rows, segment.columns, segment.types, segment.bytes)
    held = (table.num_rows, tuple(table.column_names), types, len(data))
    if bound != held:
        raise EvidenceError(
            f"expected {_told(*bound)} in {source.where(segment.sha256)}, found {_told(*held)}; "
            "the event that binds it is wrong"
        )
    return table


def _told(
    rows: int, columns: tuple[str, ...], types: tuple[str, ...] | None, size_bytes: int
) -> str:
    """Row count, schema and size in words."""
    if types is not None and len(types) == len(columns):
        columns = tuple(f"{name} {kind}" for name, kind in zip(columns, types, strict=True))
    elif types is not None:
        columns = (*columns, f"with types {', '.join(types)}")
    return f"{rows} rows of {', '.join(columns)} in {size_bytes} bytes"
