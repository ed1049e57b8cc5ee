"""Declared layouts: which boxes of a stored tensor are which boxes of logical tensors.

An engine stores a rank's slice of q, k and v as one matrix, gate and up as another, and pads the
vocabulary. The fingerprint is one of logical tensors; a layout says where they are. It has to
account for each stored element exactly once, so a layout that was declared wrongly is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from shiftbook.checkpoint.errors import LayoutError
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the stored tensor that is a box of a logical one (or, without a name, padding).

    `copy` counts the ranks that hold the same box: the first is 0 and alone enters the sum.
    """

    logical: str | None
    shape: Shape
    """Of the whole logical tensor."""
    offset: Shape
    """Where the box starts in the logical tensor."""
    at: Shape
    """Where it starts in the stored tensor."""
    size: Shape
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """All pieces of one stored tensor of a given shape. LayoutError unless they tile it."""

    stored: Shape
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            _check_inside(piece, self.stored)
        for one, other in combinations(self.pieces, 2):
            if _overlap(one, other):
                raise LayoutError(
                    f"layout of a stored tensor {self.stored}: pieces {one.logical} at {one.at} "
                    f"and {other.logical} at {other.at} overlap; each stored element belongs to "
                    "one piece"
                )
        covered = sum(math.prod(piece.size) for piece in self.pieces)
        if covered != math.prod(self.stored):
            raise LayoutError(
                f"layout of a stored tensor {self.stored}: expected pieces for all "
                f"{math.prod(self.stored)} elements, found {covered}; declare the rest as padding"
            )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `first` to `first + count` of a logical tensor (or padding, without a name)."""

    logical: str | None
    shape: Shape
    first: int
    count: int
    copy: int = 0


def stack(parts: Sequence[Rows]) -> Layout:
    """Rows of several logical tensors, one below the other, as fused matrices hold them."""
    rest = parts[0].shape[1:]
    pieces = []
    row = 0
    for part in parts:
        zeros = (0,) * len(rest)
        pieces.append(
            Piece(
                part.logical,
                part.shape,
                (part.first, *zeros),
                (row, *zeros),
                (part.count, *part.shape[1:]),
                part.copy,
            )
        )
        row += part.count
    return Layout((row, *rest), tuple(piece for piece in pieces if piece.size[0]))


def split(name: str, shape: Sequence[int], dim: int, rank: int, ranks: int) -> Layout:
    """One of `ranks` equal slices along `dim`: column-parallel is 0, row-parallel 1."""
    whole = tuple(shape)
    share = _share(whole[dim], ranks, f"{name}, axis {dim}")
    size = (*whole[:dim], share, *whole[dim + 1 :])
    offset = tuple(rank * share if axis == dim else 0 for axis in range(len(whole)))
    return Layout(size, (Piece(name, whole, offset, (0,) * len(whole), size),))


def fused(shapes: Mapping[str, Sequence[int]], rank: int, ranks: int) -> Layout:
    """A rank's equal slices of several matrices, one below the other: gate and up, say."""
    parts = []
    for name, given in shapes.items():
        share = _share(given[0], ranks, name)
        parts.append(Rows(name, tuple(given), rank * share, share))
    return stack(parts)


def fused_qkv(
    names: tuple[str, str, str],
    heads: int,
    kv_heads: int,
    head_rows: int,
    rank: int,
    ranks: int,
    columns: int | None = None,
) -> Layout:
    """A rank's q, k and v rows, one below the other (`columns` None: the biases).

    With more ranks than key-value heads each head stands on several ranks, as copies.
    """
    rest = () if columns is None else (columns,)
    q_rows = _share(heads, ranks, names[0]) * head_rows
    if ranks <= kv_heads:
        kv_rows, first, copy = _share(kv_heads, ranks, names[1]) * head_rows, rank, 0
    else:
        copies = _share(ranks, kv_heads, names[1])
        kv_rows, first, copy = head_rows, rank // copies, rank % copies
    kv_shape = (kv_heads * head_rows, *rest)
    return stack(
        [
            Rows(names[0], (heads * head_rows, *rest), rank * q_rows, q_rows),
            *(Rows(name, kv_shape, first * kv_rows, kv_rows, copy) for name in names[1:]),
        ]
    )


def padded_vocabulary(
    name: str, shape: Sequence[int], padded_rows: int, rank: int, ranks: int
) -> Layout:
    """A rank's slice of an embedding whose rows were padded to `padded_rows`, the last ones."""
    whole = tuple(shape)
    if padded_rows < whole[0]:
        raise LayoutError(
            f"{name}: expected at least {whole[0]} padded rows, found {padded_rows}; "
            "give the number of rows with padding"
        )
    share = _share(padded_rows, ranks, name)
    first = rank * share
    real = max(0, min(share, whole[0] - first))
    rows = [Rows(name, whole, first, real)] if real else []
    return stack([*rows, Rows(None, (padded_rows, *whole[1:]), 0, share - real)])


def piece_fingerprints(
    stored: Any, layout: Layout, *, copy: int = 0, threads: int = 1, dtype: str | None = None
) -> dict[str, Fingerprint]:
    """Partial fingerprints, by logical name, of what one stored tensor holds.

    `join_parts` adds those of all ranks and tensors. `copy` > 0 gives those of further copies
    instead; together they must equal the first ones. Padding is not looked at. `dtype` names the
    logical dtype where the array cannot, as for `fingerprint`. Raises LayoutError when the tensor
    has another shape than the layout.
    """
    if tuple(stored.shape) != layout.stored:
        raise LayoutError(
            f"expected a stored tensor of the layout's shape {layout.stored}, found "
            f"{tuple(stored.shape)}; declare the layout with this engine's ranks and padding"
        )
    found: dict[str, Fingerprint] = {}
    for piece in layout.pieces:
        if piece.logical is None or piece.copy != copy:
            continue
        window = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.size, strict=True))
        part = fingerprint(
            stored[window], offset=piece.offset, shape=piece.shape, dtype=dtype, threads=threads
        )
        before = found.get(piece.logical)
        found[piece.logical] = part if before is None else before + part
    return found


def join_parts(parts: Iterable[Mapping[str, Fingerprint]]) -> dict[str, Fingerprint]:
    """Adds partial fingerprints by name. `Fingerprint.hex` of a sum refuses gaps and overlaps."""
    joined: dict[str, Fingerprint] = {}
    for some in parts:
        for name, part in some.items():
            joined[name] = joined[name] + part if name in joined else part
    return joined


def _share(count: int, ranks: int, what: str) -> int:
    if ranks < 1 or count % ranks:
        raise LayoutError(
            f"{what}: expected a number that {ranks} ranks divide, found {count}; "
            "pad it or use other ranks"
        )
    return count // ranks


def _check_inside(piece: Piece, stored: Shape) -> None:
    for start, whole in ((piece.at, stored), (piece.offset, piece.shape)):
        fits = len(start) == len(whole) == len(piece.size) and all(
            a >= 0 and n >= 0 and a + n <= w
            for a, n, w in zip(start, piece.size, whole, strict=True)
        )
        if not fits:
            raise LayoutError(
                f"piece {piece.logical}: expected a box inside {whole}, found {piece.size} "
                f"at {start}; correct the declared layout"
            )


def _overlap(one: Piece, other: Piece) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.at, one.size, other.at, other.size, strict=True)
    )
