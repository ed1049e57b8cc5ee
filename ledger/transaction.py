"""What one holder of the append lock sees and adds: versions, sequences, keys, rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.canonical import decode, encode, leaf_hash
from shiftbook.ledger.dialect import Connection, Dialect
from shiftbook.ledger.envelope import StoredEvent, serialise
from shiftbook.ledger.errors import IdempotencyConflict, InvalidEvent, VersionConflict
from shiftbook.ledger.events.base import Event, lifted
from shiftbook.ledger.group_commit import Item, Request
from shiftbook.ledger.receipt import Receipt
from shiftbook.ledger.tables import Statement, Statements, one

Row = tuple[Any, ...]
"""One event in the order of the table's columns."""

MAX_NAME_BYTES = 1_000
"""Longest name of a job, key, operation or writer; an index of PostgreSQL holds 2,700 bytes."""

_POSITION, _VERSION, _DATA = 0, 2, 10


@dataclass
class KnownHead:
    """What a handle knows of the ledger's end; old as soon as another handle appends."""

    size: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    """Version of the last event, by job."""
    sequences: dict[str, int] = field(default_factory=dict)
    """Sequence of the last event, by writer."""

    def moved_to(self, size: int) -> None:
        """Forget jobs and writers: somebody else appended."""
        self.size = size
        self.versions.clear()
        self.sequences.clear()


class Transaction:
    """Stages events behind the head; nothing stands before the commit."""

    def __init__(
        self,
        dialect: Dialect,
        connection: Connection,
        statements: Statements,
        known: KnownHead,
        *,
        writer: str,
        actor: str,
        recorded_ns: int,
    ) -> None:
        self._dialect = dialect
        self._connection = connection
        self._statements = statements
        self._known = known
        self._writer = writer
        self._actor = actor
        self._recorded_ns = recorded_ns
        self.size = known.size
        self.rows: list[Row] = []
        self._versions: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._keys: dict[tuple[str, str], list[Row]] = {}
        self._beside = 0

    @property
    def wrote(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.rows) or self._beside > 0

    def ask(self, statement: Statement, **values: Any) -> list[Any]:
        """Rows of a query, as they stand while nobody else writes."""
        found = self._connection.execute(statement.text, statement.bind(**values))
        return list(found.fetchall())

    def add(self, statement: Statement, **values: Any) -> None:
        """Insert into a table beside the events, in the same commit."""
        self._connection.execute(statement.text, statement.bind(**values))
        self._beside += 1

    def define(self, text: str) -> None:
        """Make a table or trigger, in the same commit."""
        self._connection.execute(text)
        self._beside += 1

    def append(self, request: Request) -> Receipt:
        """Give a request's events their places, or raise why they have none.

        Raises IdempotencyConflict, VersionConflict or InvalidEvent; then nothing is staged.
        """
        try:
            return self._append(request)
        except UnicodeEncodeError as error:
            raise InvalidEvent(
                f"expected names and keys that are Unicode text, found {error.object!r}"
            ) from error

    def _append(self, request: Request) -> Receipt:
        job, key = request.job, request.key
        _refuse_names(job, key)
        if key is not None:
            earlier = self._earlier(job, key)
            if earlier:
                return _same(job, key, earlier, request.items)
        version = self.version(job)
        if request.expected_version is not None and request.expected_version != version:
            raise VersionConflict(job, request.expected_version, version)
        rows: list[Row] = []
        sequences: dict[str, int] = {}
        position, recorded_ns, actor = self.size, self._recorded_ns, self._actor
        named: tuple[str, str | None] | None = None
        for event, operation, cause, occurred_ns, own_writer, own_sequence in request.items:
            writer = own_writer or self._writer
            if named != (writer, operation):
                _refuse_names(writer, operation)
                named = writer, operation
            if cause is not None or occurred_ns is not None:
                _refuse_numbers(event, cause, occurred_ns, position)
            last = sequences.get(writer)
            sequence = (self.sequence(writer) if last is None else last) + 1
            if own_sequence is not None and own_sequence != sequence:
                raise InvalidEvent(
                    f"writer {writer!r}: expected sequence {sequence}, found {own_sequence}; "
                    "append what this writer recorded in order, each once"
                )
            sequences[writer] = sequence
            version += 1
            data = serialise(
                event,
                operation,
                cause,
                occurred_ns,
                position,
                job,
                version,
                recorded_ns,
                writer,
                sequence,
                actor,
                key,
            )
            rows.append(
                (
                    position,
                    job,
                    version,
                    event.type_(),
                    event.schema_,
                    operation,
                    key,
                    writer,
                    sequence,
                    recorded_ns,
                    data,
                    leaf_hash(data),
                )
            )
            position += 1
        self.rows += rows
        self.size = position
        self._versions[job] = version
        self._sequences.update(sequences)
        if key is not None:
            self._keys[job, key] = rows
        return Receipt(job, rows[0][_POSITION], position - 1, rows[0][_VERSION], version)

    def restore(self, events: Sequence[StoredEvent]) -> None:
        """Stage events with the bytes that they had in the ledger they come from.

        Raises InvalidEvent where one is not next in position, version or sequence.
        """
        for stored in events:
            places = (
                ("position", stored.position, self.size),
                ("version", stored.version, self.version(stored.job) + 1),
                ("sequence", stored.sequence, self.sequence(stored.writer) + 1),
            )
            for name, found, expected in places:
                if found != expected:
                    raise InvalidEvent(
                        f"event {stored.position} of job {stored.job!r} and writer "
                        f"{stored.writer!r}: expected {name} {expected}, found {found}; "
                        "import a ledger's events in their order"
                    )
            self.rows.append(
                (
                    stored.position,
                    stored.job,
                    stored.version,
                    stored.type,
                    stored.schema,
                    stored.operation,
                    stored.key,
                    stored.writer,
                    stored.sequence,
                    stored.recorded_ns,
                    stored.data,
                    stored.leaf,
                )
            )
            self.size = stored.position + 1
            self._versions[stored.job] = stored.version
            self._sequences[stored.writer] = stored.sequence

    def version(self, job: str) -> int:
        """Version of a job's last event, -1 where it has none."""
        return self._last(self._versions, self._known.versions, self._statements.version, job)

    def sequence(self, writer: str) -> int:
        """Sequence of a writer's last event, -1 where it has none."""
        return self._last(self._sequences, self._known.sequences, self._statements.sequence, writer)

    def _last(
        self, own: dict[str, int], known: dict[str, int], statement: Statement, of: str
    ) -> int:
        found = own.get(of)
        if found is None:
            found = known.get(of)
        if found is None:
            found = one(self._connection, statement, of=of)[0]
            found = known[of] = -1 if found is None else int(found)
        return found

    def _earlier(self, job: str, key: str) -> list[tuple[int, int, bytes]]:
        staged = self._keys.get((job, key))
        if staged:
            return [(row[_POSITION], row[_VERSION], row[_DATA]) for row in staged]
        keyed = self._statements.keyed
        rows = self._connection.execute(keyed.text, keyed.bind(job=job, key=key)).fetchall()
        return sorted((row[0], row[1], bytes(row[2])) for row in rows)

    def write(self) -> int:
        """Insert what was staged; return its bytes."""
        self._dialect.write(self._connection, self._statements, self.rows)
        return sum(len(row[_DATA]) for row in self.rows)

    def keep(self) -> None:
        """After the commit: what was staged is known from now on."""
        self._known.size = self.size
        self._known.versions.update(self._versions)
        self._known.sequences.update(self._sequences)


def _refuse_numbers(event: Event, cause: object, occurred_ns: object, position: int) -> None:
    """Raise InvalidEvent for what the verifier would hold against the ledger for ever."""
    if cause is not None and not (type(cause) is int and 0 <= cause < position):
        raise InvalidEvent(
            f"{event.type_()}: expected as its cause the position of an event before it, which "
            f"stands at {position}, found {cause!r:.60}; give one of an earlier receipt, or None"
        )
    if occurred_ns is not None and not (type(occurred_ns) is int and 0 <= occurred_ns < 1 << 63):
        raise InvalidEvent(
            f"{event.type_()}: expected as occurred_ns a number of nanoseconds since 1970, found "
            f"{occurred_ns!r:.60}; give time.time_ns(), or None for now"
        )


def _refuse_names(*names: str | None) -> None:
    """Raise InvalidEvent for names that not every store can hold in its columns and indexes."""
    for name in names:
        if name is not None and not isinstance(name, str):
            raise InvalidEvent(f"expected names and keys that are text, found {name!r:.60}")
        if name is not None and ("\0" in name or len(name.encode()) > MAX_NAME_BYTES):
            raise InvalidEvent(
                f"expected names and keys of at most {MAX_NAME_BYTES} bytes without a NUL "
                f"character, found {name[:60]!r}"
            )


def _content(items: Sequence[Item]) -> list[tuple[str, str | None, bytes]]:
    return [(item[0].type_(), item[1], encode(item[0].plain())) for item in items]


def _told(content: Sequence[tuple[str, str | None, bytes]], other: Sequence[Any]) -> str:
    """Name a batch by the first event in which it differs from another."""
    for index, item in enumerate(content):
        if index >= len(other) or other[index] != item:
            type_, operation, body = item
            of = f" of operation {operation}" if operation else ""
            text = body.decode()
            shown = text if len(text) <= 200 else text[:200] + "…"
            return f"{len(content)} event(s), number {index + 1} being {type_}{of} {shown}"
    return f"{len(content)} event(s)"


def _same(
    job: str, key: str, earlier: Sequence[tuple[int, int, bytes]], items: Sequence[Item]
) -> Receipt:
    """Receipt of the batch that used the key first; IdempotencyConflict for other content."""
    stored = []
    for _, _, data in earlier:
        value = decode(data)
        # A retry by a newer build offers the body in its present schema.
        body = lifted(value["type"], value["schema"], value["body"])
        stored.append((value["type"], value.get("operation"), encode(body)))
    offered = _content(items)
    if stored != offered:
        raise IdempotencyConflict(
            job, key, _told(stored, offered), _told(offered, stored), earlier[0][0]
        )
    (first, first_version, _), (last, last_version, _) = earlier[0], earlier[-1]
    return Receipt(job, first, last, first_version, last_version, repeated=True)
