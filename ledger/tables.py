"""The tables of a store and every statement on them, in SQLAlchemy Core, compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    cast,
    func,
    insert,
    literal_column,
    or_,
    select,
)
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.sql import ClauseElement

from shiftbook.ledger.dialect import Connection, Dialect
from shiftbook.ledger.envelope import StoredEvent, unseal
from shiftbook.ledger.errors import InvalidEvent, NotALedger

STORAGE_SCHEMA = 1
"""Version of the tables below; a ledger with a higher one is refused."""

INSERT_ROWS = 50
"""Rows of one INSERT of a large batch; a statement for each row costs a third more."""

METADATA = MetaData()
_Integer = BigInteger().with_variant(Integer, "sqlite")
# By code point on both stores: an index in the order of a locale would break when the server's
# operating system brings another version of that locale.
_Text = Text().with_variant(Text(collation="C"), "postgresql")

EVENTS = Table(
    "events",
    METADATA,
    Column("position", _Integer, primary_key=True, autoincrement=False),
    Column("job", _Text, nullable=False),
    Column("version", _Integer, nullable=False),
    Column("type", _Text, nullable=False),
    Column("schema", Integer, nullable=False),
    Column("operation", _Text),
    Column("key", _Text),
    Column("writer", _Text, nullable=False),
    Column("sequence", _Integer, nullable=False),
    Column("recorded_ns", _Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("leaf", LargeBinary, nullable=False),
    UniqueConstraint("job", "version", name="events_job_version"),
    UniqueConstraint("writer", "sequence", name="events_writer_sequence"),
)
_e = EVENTS.c
Index(
    "events_job_key",
    _e.job,
    _e.key,
    sqlite_where=_e.key.is_not(None),
    postgresql_where=_e.key.is_not(None),
)
Index(
    "events_operation",
    _e.operation,
    sqlite_where=_e.operation.is_not(None),
    postgresql_where=_e.operation.is_not(None),
)
Index("events_job_position", _e.job, _e.position)
Index("events_type_position", _e.type, _e.position)

META = Table(
    "meta",
    METADATA,
    Column("name", _Text, primary_key=True),
    Column("value", _Text, nullable=False),
)

META_NAMES = ("storage_schema",)
"""Every name that the table ``meta`` may hold; ``verify`` finds any other."""

HEADS = Table(
    "heads",
    METADATA,
    Column("size", _Integer, primary_key=True, autoincrement=False),
    Column("note", LargeBinary, nullable=False),
)
"""Signed heads by their number of events; the note is stored as it was signed."""

NODES = Table(
    "nodes",
    METADATA,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("number", _Integer, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
)
"""Roots of full tiles: hash ``number`` of tile level ``level`` (from 1) in C2SP tlog-tiles. Written
with the head that covers them, so that no proof reads more than a tile of each level."""

APPEND_ONLY = (EVENTS, HEADS, NODES)
"""Tables that only grow, in order and without gaps; triggers hold them to it."""


REVISION = Table("derived_revision", METADATA, Column("version_num", String(32), primary_key=True))
"""Where alembic keeps the revision of the tables beside the events, see derived.py."""

KNOWN = ("0001", "0002")
"""Revisions that this build knows, oldest first."""


class Statement:
    """A Core statement compiled once; the driver keeps it prepared by its text."""

    __slots__ = ("_constants", "names", "text")

    def __init__(self, dialect: Dialect, clause: ClauseElement) -> None:
        compiled = clause.compile(dialect=dialect.sql)
        self.text = str(compiled)
        self.names: tuple[str, ...] = tuple(getattr(compiled, "positiontup", None) or ())
        self._constants: dict[str, Any] = dict(compiled.params)

    def bind(self, **values: Any) -> tuple[Any, ...]:
        """Parameters in the order in which the text has them; constants fill themselves in."""
        known = {**self._constants, **values}
        return tuple(known[name] for name in self.names)


class StoredRow(NamedTuple):
    """An event as the columns have it, nothing parsed and nothing checked."""

    position: int
    job: str
    version: int
    data: bytes
    leaf: bytes

    def event(self) -> StoredEvent:
        """Parse the bytes; raise InvalidEvent where they are no event.

        ``leaf`` is the stored one; that it belongs to the bytes is the verifier's to check.
        """
        try:
            return unseal(self.data, self.leaf)
        except InvalidEvent as error:
            raise InvalidEvent(f"position {self.position}: {error}") from error


def whole(position: Any, url: str) -> int:
    """A position, -1 for none; raise NotALedger for what a forged row has in its place."""
    if position is None:
        return -1
    if type(position) is not int:
        raise NotALedger(
            f"expected whole numbers as the positions in {url}, found {position!r:.60}: the table "
            "was edited; `shiftbook verify` says more; restore the ledger from a copy"
        )
    return position


def _many_rows() -> list[dict[str, Any]]:
    return [
        {column.name: bindparam(f"{column.name}_{row}") for column in EVENTS.columns}
        for row in range(INSERT_ROWS)
    ]


def one(connection: Connection, statement: Statement, **values: Any) -> Any:
    """First row of a statement's result, None where there is none."""
    return connection.execute(statement.text, statement.bind(**values)).fetchone()


class Statements:
    """Every statement that appends and looks up."""

    def __init__(self, dialect: Dialect) -> None:
        def make(clause: ClauseElement) -> Statement:
            return Statement(dialect, clause)

        job: BindParameter[str] = bindparam("job")
        key: BindParameter[str] = bindparam("key")
        of: BindParameter[str] = bindparam("of")
        of_position: BindParameter[int] = bindparam("of")
        self._dialect = dialect
        self.insert = make(insert(EVENTS))
        self.head = make(
            select(_e.position, _e.leaf, _e.data).order_by(_e.position.desc()).limit(1)
        )
        self.leaf = make(select(_e.leaf).where(_e.position == of_position))
        self.last = make(select(func.max(_e.position)))
        self.version = make(select(func.max(_e.version)).where(_e.job == of))
        self.sequence = make(select(func.max(_e.sequence)).where(_e.writer == of))
        self.keyed = make(
            # Without an order, so that no planner prefers an index that has the order alone.
            select(_e.position, _e.version, _e.data).where(_e.job == job, _e.key == key)
        )
        self.next_job = make(select(func.min(_e.job)).where(_e.job > of))
        self.first_of_job = make(select(_e.position).where(_e.job == of, _e.version == 0))
        self.page = make(_page(bindparam("after"), bindparam("until"), bindparam("count")))
        self.schema = make(select(META.c.value).where(META.c.name == "storage_schema"))
        self.add_meta = make(insert(META))
        self.revision = make(select(REVISION.c.version_num))
        self.add_revision = make(insert(REVISION))

    @cached_property
    def insert_many(self) -> Statement:
        """Compiled with the first large batch: it takes as long as all others, and few need it."""
        return Statement(self._dialect, insert(EVENTS).values(_many_rows()))

    def insert_rows(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows of events, INSERT_ROWS in one statement where there are so many."""
        whole = len(rows) - len(rows) % INSERT_ROWS
        for start in range(0, whole, INSERT_ROWS):
            values = chain.from_iterable(rows[start : start + INSERT_ROWS])
            connection.execute(self.insert_many.text, tuple(values))
        for row in rows[whole:]:
            connection.execute(self.insert.text, row)

    @staticmethod
    def create(dialect: Dialect) -> list[str]:
        """Statements that make the tables, indexes and triggers."""
        texts = []
        for table in (*APPEND_ONLY, META, REVISION):
            texts.append(str(CreateTable(table).compile(dialect=dialect.sql)))
            for index in sorted(table.indexes, key=lambda index: str(index.name)):
                texts.append(str(CreateIndex(index).compile(dialect=dialect.sql)))
        return [*texts, *dialect.triggers()]


def _page(
    after: BindParameter[int], until: BindParameter[int], count: BindParameter[int]
) -> ClauseElement:
    """Rows of a stretch as one: how many, the last position, the sizes, and all bytes in a row."""
    rows = (
        # An attacker's text is bytes as well, so that sizes count bytes.
        select(_e.position, cast(_e.data, LargeBinary).label("data"))
        .where(_e.position > after, _e.position <= until)
        .order_by(_e.position)
        .limit(count)
        .subquery()
    )
    # Constants, since a separator that is a parameter is not compiled once.
    comma: Any = literal_column("','")
    nothing: Any = literal_column("''")
    return select(
        func.count(),
        func.max(rows.c.position),
        func.aggregate_strings(cast(func.length(rows.c.data), Text), comma),
        cast(func.aggregate_strings(rows.c.data, nothing), LargeBinary),
    )


def _hidden(column: ColumnElement[str], hide: bool) -> ColumnElement[str]:
    """The same value, where no index is to be used for it."""
    return column.concat(literal_column("''")) if hide else column


def reading(
    dialect: Dialect, *, job: bool, types: int, operation: bool, reverse: bool
) -> Statement:
    """Statement that reads a stretch of events through the given number of filters.

    The filter that leaves fewest events decides which index is read: the operation, else the job,
    else the type. The others are hidden from the planner, which has no figures to choose by.
    """
    clause = select(_e.position, _e.job, _e.version, _e.data, _e.leaf).where(
        _e.position > bindparam("after"), _e.position <= bindparam("until")
    )
    if job:
        clause = clause.where(_hidden(_e.job, operation) == bindparam("job"))
    if types:
        names: list[BindParameter[str]] = [bindparam(f"type_{index}") for index in range(types)]
        kind = _hidden(_e.type, job or operation)
        clause = clause.where(or_(*(kind == name for name in names)))
    if operation:
        clause = clause.where(_e.operation == bindparam("operation"))
    order = _e.position.desc() if reverse else _e.position
    return Statement(dialect, clause.order_by(order).limit(bindparam("count")))
