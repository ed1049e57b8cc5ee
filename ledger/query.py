"""SQL that a user typed, run over the mirror: one SELECT, no files, no settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import duckdb

from shiftbook.ledger.errors import InvalidQuery
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.mirror_build import TABLES

FETCH_ROWS = 10_000
"""Rows taken from DuckDB at a time: bounds the memory of a long result."""

_WORD = re.compile(r"\w+")
_PART_OF = {"segments": "samples", "sample_rows": "samples"}
"""Tables from which another one is joined."""

_REACHES_ANY = re.compile(r"query|query_table|show|summarize|duckdb_\w+|pragma_\w+|sqlite_master")
"""Words of a query that reads tables which it may not name."""


@dataclass(frozen=True)
class Answer:
    """Columns with their types, and the rows, which are read once."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


def tables_of(sql: str) -> tuple[str, ...]:
    """Tables of the mirror that a query may read: those that it names, in whatever place.

    All of them where it names none, or has a word by which it could reach one whose name it makes.
    """
    words = set(_WORD.findall(sql.casefold()))
    named = {_PART_OF.get(word, word) for word in words}.intersection(TABLES)
    if not named or any(_REACHES_ANY.fullmatch(word) for word in words):
        return TABLES
    return tuple(name for name in TABLES if name in named)


def run_query(mirror: Mirror, sql: str) -> Answer:
    """Run one SELECT; raise InvalidQuery for anything else, in one line.

    The connection refuses files and settings by itself; that only a single SELECT passes keeps
    temporary tables and transactions out as well.
    """
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise InvalidQuery(_advice(error)) from error
    if len(statements) != 1:
        raise InvalidQuery(
            f"expected one statement, found {len(statements)}; "
            f"give a single SELECT over {', '.join(TABLES)}"
        )
    kind = statements[0].type
    if kind != duckdb.StatementType.SELECT:
        raise InvalidQuery(
            f"expected a SELECT, found {kind.name}: the ledger's copy is read-only; "
            f"tables: {', '.join(TABLES)}"
        )
    cursor = mirror.connection.cursor()
    try:
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        cursor.execute(sql)
    except duckdb.Error as error:
        raise InvalidQuery(_advice(error)) from error
    described = cursor.description or []
    types = tuple(str(column[1]) for column in described)
    return Answer(
        tuple(unique([str(column[0]) for column in described])),
        types,
        _rows(cursor, [index for index, kind in enumerate(types) if kind == "JSON"]),
    )


def unique(names: list[str]) -> list[str]:
    """Column names, each once: a second ``n`` becomes ``n_2``, so that no JSON field is lost."""
    seen: dict[str, int] = {}
    result: list[str] = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return result


def _rows(cursor: duckdb.DuckDBPyConnection, json_at: list[int]) -> Iterator[tuple[Any, ...]]:
    while True:
        try:
            chunk = cursor.fetchmany(FETCH_ROWS)
        except duckdb.Error as error:
            raise InvalidQuery(_advice(error)) from error
        if not chunk:
            return
        yield from (_with_values(row, json_at) for row in chunk) if json_at else chunk


def _with_values(row: tuple[Any, ...], json_at: list[int]) -> tuple[Any, ...]:
    """DuckDB gives JSON as its text; a body printed as JSON should be a value, not a string."""
    values = list(row)
    for index in json_at:
        if isinstance(values[index], str):
            values[index] = json.loads(values[index])
    return tuple(values)


def _advice(error: duckdb.Error) -> str:
    """DuckDB's own sentence without the drawing of the query, and what can be asked."""
    text = str(error).split("\n\nLINE", maxsplit=1)[0]
    said = " ".join(text.split())
    if "disabled by configuration" in said:
        said += "; a query touches no file, not even to spill what does not fit into memory"
    return f"{said} (tables: {', '.join(TABLES)}; `shiftbook sql 'describe TABLE'` shows columns)"
