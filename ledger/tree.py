"""The tree over a ledger as it is stored: leaf hashes, roots of full tiles, and signed heads.

Leaf hashes stand with the events. For every 256 of them the table ``nodes`` keeps the root, for
every 256 of those the next, and so on; so a head or a proof of any size reads at most a tile of
each level. Nothing here is trusted: roots are compared with signed ones by whoever uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BindParameter,
    ColumnClause,
    and_,
    bindparam,
    column,
    func,
    insert,
    literal,
    select,
    table,
)
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql import ClauseElement

from shiftbook.ledger.errors import NotALedger, SigningRefused
from shiftbook.ledger.merkle import (
    TILE_HEIGHT,
    TILE_WIDTH,
    CompactRange,
    edge_of,
    range_root,
    tree_root,
)
from shiftbook.ledger.signed_note import MAX_SIZE, SignedHead
from shiftbook.ledger.tables import EVENTS, HEADS, NODES, Statement

if TYPE_CHECKING:
    from shiftbook.ledger.dialect import Dialect
    from shiftbook.ledger.store import Store
    from shiftbook.ledger.transaction import Transaction

HEADS_PER_READ = 512
SIZES_NEAR = 2
"""Heads on either side that are named where there is none of a size."""

Node = tuple[int, int, bytes]
"""Tile level from 1, number within it, hash."""


class _Statements:
    """Every statement on the tables of the tree."""

    def __init__(self, dialect: Dialect) -> None:
        def make(clause: ClauseElement) -> Statement:
            return Statement(dialect, clause)

        start: BindParameter[int] = bindparam("start")
        stop: BindParameter[int] = bindparam("stop")
        e, h, n = EVENTS.c, HEADS.c, NODES.c
        self.leaves = make(
            select(e.leaf).where(e.position >= start, e.position < stop).order_by(e.position)
        )
        self.nodes = make(
            select(n.hash)
            .where(n.level == bindparam("at"), n.number >= start, n.number < stop)
            .order_by(n.number)
        )
        self.node_count = make(
            select(func.coalesce(func.max(n.number), -1) + 1).where(n.level == bindparam("at"))
        )
        self.last_head = make(select(h.size, h.note).order_by(h.size.desc()).limit(1))
        self.last_size = make(select(func.coalesce(func.max(h.size), 0)))
        self.heads = make(
            select(h.size, h.note)
            .where(h.size > bindparam("after"))
            .order_by(h.size)
            .limit(HEADS_PER_READ)
        )
        self.head = make(select(h.size, h.note).where(h.size == bindparam("of")))
        size: BindParameter[int] = bindparam("of")
        self.sizes_below = make(
            select(h.size).where(h.size < size).order_by(h.size.desc()).limit(SIZES_NEAR)
        )
        self.sizes_above = make(
            select(h.size).where(h.size > size).order_by(h.size).limit(SIZES_NEAR)
        )
        self.add_head = make(insert(HEADS))
        self.add_node = make(insert(NODES))
        if dialect.schema is None:
            catalog = table("sqlite_master", column("name"))
            there = catalog.c.name == bindparam("of")
        else:
            names: list[ColumnClause[Any]] = [column("table_name"), column("table_schema")]
            catalog = table("tables", *names, schema="information_schema")
            there = and_(
                catalog.c.table_name == bindparam("of"),
                catalog.c.table_schema == literal(dialect.schema),
            )
        self.there = make(select(func.count()).select_from(catalog).where(there))
        # Ledgers of before heads were signed get these with their first head.
        self.create = [
            *(str(CreateTable(t).compile(dialect=dialect.sql)) for t in (HEADS, NODES)),
            *dialect.tree_triggers(),
        ]


class Tree:
    """Reads, and for the signer extends, the stored tree of a ledger."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._statements = _Statements(store.dialect)
        self._there = False

    def exists(self) -> bool:
        """Whether the ledger has tables for heads; one of an older build gets them when signed."""
        if not self._there:
            self._there = bool(self._store.ask(self._statements.there, of=HEADS.name)[0][0])
        return self._there

    def last_head(self) -> SignedHead | None:
        """The largest head in the table, not verified; raises InvalidNote where it is damaged."""
        found = self._store.ask(self._statements.last_head) if self.exists() else []
        return SignedHead.parse(bytes(found[0][1])) if found else None

    def head(self, size: int) -> SignedHead | None:
        """The head of that size, None where none was signed."""
        found = self._store.ask(self._statements.head, of=size) if self.exists() else []
        return SignedHead.parse(bytes(found[0][1])) if found else None

    def sizes_near(self, size: int) -> list[int]:
        """Sizes at which heads were signed, the two next below and above; in order."""
        if not self.exists():
            return []
        below, above = (
            self._store.ask(statement, of=min(size, MAX_SIZE))  # a database has 64 bits for it
            for statement in (self._statements.sizes_below, self._statements.sizes_above)
        )
        return sorted(int(found) for (found,) in (*below, *above))

    def heads(self, after: int = 0) -> Iterator[SignedHead]:
        """Heads of more than ``after`` events, smallest first."""
        while self.exists():
            found = self._store.ask(self._statements.heads, after=after)
            for size, note in found:
                after = size
                yield SignedHead.parse(bytes(note))
            if len(found) < HEADS_PER_READ:
                return

    def hashes(self, level: int, start: int, stop: int) -> list[bytes]:
        """Hashes of a tile level (0: leaves) from ``start`` to ``stop``, exclusive.

        Raises NotALedger where some are missing.
        """
        if level == 0:
            found = self._store.ask(self._statements.leaves, start=start, stop=stop)
        else:
            found = self._store.ask(self._statements.nodes, at=level, start=start, stop=stop)
        if len(found) != stop - start:
            what = "leaf hashes" if level == 0 else f"nodes of level {level}"
            raise NotALedger(
                f"expected the {what} {start} to {stop - 1} in the ledger, found {len(found)} of "
                f"{stop - start}; `shiftbook verify` says what is missing, "
                "`shiftbook sign` writes missing nodes again"
            )
        return [bytes(row[0]) for row in found]

    def node(self, level: int, index: int) -> bytes:
        """Hash of a complete subtree, from at most one tile; see merkle.Subtree."""
        tile_level, inside = divmod(level, TILE_HEIGHT)
        return tree_root(self.hashes(tile_level, index << inside, (index + 1) << inside))

    def root(self, size: int) -> bytes:
        """Root over the first events, from at most a tile of each level."""
        return range_root(0, size, self.node)

    def edge(self, size: int) -> list[bytes]:
        """Right edge of the tree over the first events; see merkle.CompactRange."""
        return edge_of(size, self.node)

    def complete(self, size: int) -> int:
        """Write the nodes under the first ``size`` events that are missing; how many were.

        For ledgers whose heads came without nodes, as by an import. Reads all leaf hashes then,
        and nothing where no node is missing.
        """
        if self.exists() and self._whole(self._store.ask, size):
            return 0
        return int(self._store.transact(lambda transaction: self._complete(transaction, size)))

    def _complete(self, transaction: Transaction, size: int) -> int:
        self._create(transaction)
        counts: dict[int, int] = {}
        missing: list[Node] = []

        def on_node(level: int, number: int, value: bytes) -> None:
            if level not in counts:
                counts[level] = transaction.ask(self._statements.node_count, at=level)[0][0]
            if number >= counts[level]:
                missing.append((level, number, value))

        tree = CompactRange(on_node=on_node)
        for start in range(0, size, TILE_WIDTH):
            stop = min(start + TILE_WIDTH, size)
            for leaf in transaction.ask(self._statements.leaves, start=start, stop=stop):
                tree.append(bytes(leaf[0]))
        self._add_nodes(transaction, missing)
        return len(missing)

    def _whole(self, ask: Callable[..., list[Any]], size: int) -> bool:
        """Whether every level has the nodes that lie under ``size`` events."""
        level = 1
        while size >> level * TILE_HEIGHT:
            if ask(self._statements.node_count, at=level)[0][0] < size >> level * TILE_HEIGHT:
                return False
            level += 1
        return True

    def add_head(self, head: SignedHead, after: int, nodes: Sequence[Node]) -> None:
        """Store a head and the nodes between the last one, of size ``after``, and it.

        Raises SigningRefused where another signer came in between.
        """

        def work(transaction: Transaction) -> None:
            self._create(transaction)
            last = transaction.ask(self._statements.last_size)[0][0]
            if last != after:
                raise SigningRefused(
                    f"expected a last head of {after} events, found one of {last}: another signer "
                    "is at work; a ledger has one signer, stop one of them"
                )
            self._add_nodes(transaction, nodes)
            transaction.add(self._statements.add_head, size=head.size, note=head.data())

        self._store.transact(work)

    def _create(self, transaction: Transaction) -> None:
        if not transaction.ask(self._statements.there, of=HEADS.name)[0][0]:
            for text in self._statements.create:
                transaction.define(text)

    def _add_nodes(self, transaction: Transaction, nodes: Sequence[Node]) -> None:
        for level, number, value in nodes:
            values: dict[str, Any] = {"level": level, "number": number, "hash": value}
            transaction.add(self._statements.add_node, **values)
