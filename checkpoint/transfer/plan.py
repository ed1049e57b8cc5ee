"""What a receiver has to pull, and from whom: its layouts laid over the boxes of the sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shiftbook.checkpoint.errors import TransferRefused
from shiftbook.checkpoint.layouts import Layout, Piece
from shiftbook.checkpoint.positions import ITEM_BYTES
from shiftbook.checkpoint.transfer.boxes import Box
from shiftbook.checkpoint.transfer.catalogue import Catalogue
from shiftbook.checkpoint.transfer.parcel import MOST_BOXES, BoxName, Ticket


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a receiver's rank keeps it: its dtype, and which logical boxes stand where."""

    dtype: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Target:
    """Where a box goes: a window of a stored tensor."""

    stored: str
    at: Box


@dataclass(frozen=True, slots=True)
class Order:
    """One parcel to pull: what to ask, of which of the ranks that have it, and where it goes."""

    ticket: Ticket
    ranks: tuple[int, ...]
    targets: tuple[Target, ...]
    nbytes: int
    """Of its boxes; a difference is shorter."""

    @property
    def key(self) -> str:
        """Names it among the orders of one plan, also after a restart."""
        first, target = self.ticket.boxes[0], self.targets[0]
        return f"{target.stored}{target.at.offset} {first.name}{first.offset}{first.size}"


def check_layouts(catalogue: Catalogue, layouts: Mapping[str, Stored]) -> None:
    """Raise TransferRefused unless each declared box is one of the catalogue's tensors."""
    for stored_name, stored in layouts.items():
        for piece in stored.layout.pieces:
            if piece.logical is None:
                continue
            known = catalogue.tensors.get(piece.logical)
            if known is None:
                raise TransferRefused(
                    f"{stored_name}: expected a version with tensor {piece.logical}, found none "
                    f"among the {len(catalogue.tensors)} of version {catalogue.version}; it is of "
                    "another model, or the layout names it otherwise",
                    where=piece.logical,
                )
            if (known.dtype, known.shape) != (stored.dtype, piece.shape):
                raise TransferRefused(
                    f"{stored_name}: expected {piece.logical} as {stored.dtype} {piece.shape}, "
                    f"found {known.dtype} {known.shape} in version {catalogue.version}; declare "
                    "the layout of this model in the dtype that is sent",
                    where=piece.logical,
                )


def undeclared(catalogue: Catalogue, layouts: Mapping[str, Stored]) -> list[str]:
    """Tensors of the version of which these layouts take nothing, sorted."""
    declared = {piece.logical for stored in layouts.values() for piece in stored.layout.pieces}
    return sorted(
        name
        for name, entry in catalogue.tensors.items()
        if name not in declared and 0 not in entry.shape
    )


def orders(
    catalogue: Catalogue,
    layouts: Mapping[str, Stored],
    *,
    parcel_bytes: int,
    base_version: int | None = None,
) -> list[Order]:
    """The parcels that fill the layouts; each box is in one parcel, and of one holder's box.

    Copies of a box (a key-value head on several ranks) are pulled like the first. Raises
    TransferRefused for layouts that do not fit the catalogue.
    """
    check_layouts(catalogue, layouts)
    by_name: dict[str, list[tuple[Box, tuple[int, ...]]]] = {}
    for holding in catalogue.holdings:
        by_name.setdefault(holding.name, []).append((holding.box, holding.ranks))
    by_ranks: dict[tuple[int, ...], list[tuple[str, Box, Target, int]]] = {}
    for stored_name in sorted(layouts):
        stored = layouts[stored_name]
        width = ITEM_BYTES[stored.dtype]
        for piece in stored.layout.pieces:
            if piece.logical is None:
                continue
            wanted = Box(piece.offset, piece.size)
            for held, ranks in by_name.get(piece.logical, ()):
                common = wanted.overlap(held)
                if common is None:
                    continue
                for box in common.pieces(parcel_bytes // width):
                    target = Target(stored_name, _at(piece, box))
                    item = (piece.logical, box, target, box.elements * width)
                    by_ranks.setdefault(ranks, []).append(item)
    found = []
    for ranks, items in by_ranks.items():
        found += _grouped(catalogue, ranks, items, parcel_bytes, base_version)
    return found


def _at(piece: Piece, box: Box) -> Box:
    offset = tuple(
        at + a - first for at, a, first in zip(piece.at, box.offset, piece.offset, strict=True)
    )
    return Box(offset, box.size)


def _grouped(
    catalogue: Catalogue,
    ranks: tuple[int, ...],
    items: Sequence[tuple[str, Box, Target, int]],
    parcel_bytes: int,
    base_version: int | None,
) -> list[Order]:
    groups: list[list[tuple[str, Box, Target, int]]] = []
    room = 0
    for item in items:
        if not groups or item[3] > room or len(groups[-1]) == MOST_BOXES:
            groups.append([])
            room = parcel_bytes
        groups[-1].append(item)
        room -= item[3]
    return [
        Order(
            Ticket(
                version=catalogue.version,
                base_version=base_version,
                boxes=tuple(BoxName.of(name, box) for name, box, _, _ in group),
            ),
            ranks,
            tuple(target for _, _, target, _ in group),
            sum(nbytes for _, _, _, nbytes in group),
        )
        for group in groups
    ]
