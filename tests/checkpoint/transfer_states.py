"""A small model with everything that slices are cut from, as trainers hold and engines store it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shiftbook.checkpoint.errors import TransferError
from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.layouts import (
    Layout,
    Piece,
    Rows,
    fused,
    fused_qkv,
    padded_vocabulary,
    split,
    stack,
)
from shiftbook.checkpoint.patch import Lossy
from shiftbook.checkpoint.transfer.catalogue import Catalogue, Shard, join_catalogues
from shiftbook.checkpoint.transfer.certificates import ServerFiles, make_certificates
from shiftbook.checkpoint.transfer.desk import Desk
from shiftbook.checkpoint.transfer.flight import FlightLink, FlightSource
from shiftbook.checkpoint.transfer.link import Link
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.receiver import Receiver, Synced
from shiftbook.checkpoint.transfer.source import Source
from shiftbook.checkpoint.transfer.tokens import issue_token

HIDDEN, HEADS, KV_HEADS, HEAD_ROWS, WIDE, VOCABULARY, PADDED = 64, 8, 2, 8, 96, 50, 64
"""With 4 ranks each key-value head stands on two of them; 50 rows of the vocabulary divide by 2."""
SECRET = b"s" * 32
State = dict[str, np.ndarray]

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("float16", (VOCABULARY, HIDDEN)),
    "q": ("float32", (HEADS * HEAD_ROWS, HIDDEN)),
    "k": ("float32", (KV_HEADS * HEAD_ROWS, HIDDEN)),
    "v": ("float32", (KV_HEADS * HEAD_ROWS, HIDDEN)),
    "o": ("float32", (HIDDEN, HEADS * HEAD_ROWS)),
    "gate": ("float16", (WIDE, HIDDEN)),
    "up": ("float16", (WIDE, HIDDEN)),
    "down": ("float64", (HIDDEN, WIDE)),
    "norm": ("float32", (HIDDEN,)),
    "mask": ("bool", (HIDDEN,)),
    "phase": ("complex128", (HIDDEN,)),
    "scale": ("float32", ()),
}


def state(seed: int) -> State:
    """Random weights."""
    rng = np.random.default_rng(seed)
    found: State = {}
    for name, (dtype, shape) in SHAPES.items():
        values = rng.standard_normal(shape)
        found[name] = (values > 0) if dtype == "bool" else np.asarray(values).astype(dtype)
    return found


def nudged(old: State, seed: int, share: float = 0.01) -> State:
    """A share of the elements of each matrix changes."""
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in old.items()}
    for array in new.values():
        flat = array.reshape(-1)
        if flat.dtype != bool:
            where = rng.integers(0, flat.size, size=max(1, round(flat.size * share)))
            flat[where] *= flat.dtype.type(1.01)
    return new


def drifted(old: State) -> State:
    """Every number moves a little, all in one direction: an update that has no short difference."""
    return {
        name: np.asarray(array + 1e-3 * (1 + 0.5 * np.sin(array)), dtype=array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in old.items()
    }


def shards(weights: Mapping[str, Any], rank: int, ranks: int) -> list[Shard]:
    """Rows of each tensor, as evenly as they go; a scalar is the last rank's, and the first two
    ranks both hold the norm whole."""
    found = []
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        if not shape:
            if rank == ranks - 1:
                found.append(Shard.of(name, tensor))
            continue
        if name == "norm":
            if rank < 2:
                found.append(Shard.of(name, tensor))
            continue
        first, last = (shape[0] * r // ranks for r in (rank, rank + 1))
        offset = (first,) + (0,) * (len(shape) - 1)
        found.append(Shard(name, tensor[first:last], offset, shape))
    return found


def layouts(rank: int, ranks: int) -> dict[str, Stored]:
    """What one of an engine's ranks stores."""
    shape = {name: shape for name, (_, shape) in SHAPES.items()}
    same = {
        name: stack([Rows(name, shape[name], 0, shape[name][0], rank)])
        for name in ("norm", "mask", "phase")
    }
    every: dict[str, tuple[str, Layout]] = {
        "tokens": ("float16", padded_vocabulary("embed", shape["embed"], PADDED, rank, ranks)),
        "qkv": (
            "float32",
            fused_qkv(("q", "k", "v"), HEADS, KV_HEADS, HEAD_ROWS, rank, ranks, HIDDEN),
        ),
        "o": ("float32", split("o", shape["o"], 1, rank, ranks)),
        "gate_up": ("float16", fused({n: shape[n] for n in ("gate", "up")}, rank, ranks)),
        "down": ("float64", split("down", shape["down"], 1, rank, ranks)),
        "scale": ("float32", Layout((), (Piece("scale", (), (), (), (), rank),))),
        **{name: (SHAPES[name][0], layout) for name, layout in same.items()},
    }
    return {name: Stored(*one) for name, one in every.items()}


def logical(held: Sequence[Mapping[str, Any]], ranks: int) -> State:
    """The logical tensors again from what all ranks of an engine serve; copies have to agree."""
    found = {name: np.zeros(shape, dtype=dtype) for name, (dtype, shape) in SHAPES.items()}
    for rank, tensors in enumerate(held):
        for name, stored in layouts(rank, ranks).items():
            array = tensors[name].view(found_dtype(stored))
            for piece in stored.layout.pieces:
                if piece.logical is None:
                    continue
                part = array[(..., *_window(piece.at, piece.size))]
                target = found[piece.logical][(..., *_window(piece.offset, piece.size))]
                if piece.copy:
                    assert target.tobytes() == part.tobytes(), (name, piece.logical)
                target[...] = part
    return found


def found_dtype(stored: Stored) -> np.dtype[Any]:
    """numpy's dtype of a stored tensor."""
    return np.dtype(stored.dtype)


def _window(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Bit for bit, by fingerprint."""
    return one.keys() == other.keys() and all(
        fingerprint(one[name]).hex == fingerprint(other[name]).hex for name in one
    )


@dataclass
class Trainer:
    """Some trainer ranks in this process, served over Flight."""

    folder: Path
    ranks: int = 2
    limit_bytes: int = 64 << 20
    hold_s: float = 20.0
    lossy: Lossy | None = None
    desk: Desk = field(default_factory=Desk)

    def __post_init__(self) -> None:
        self.files: ServerFiles = make_certificates(self.folder / "tls", ["127.0.0.1"])
        self.offers = [
            Offers(r, lossy=self.lossy, limit_bytes=self.limit_bytes, hold_s=self.hold_s)
            for r in range(self.ranks)
        ]
        self.served = [self.serve(rank) for rank in range(self.ranks)]

    def serve(self, rank: int, port: int = 0) -> FlightSource:
        """Serve one rank's offers."""
        source = Source(self.offers[rank], self.desk if rank == 0 else None)
        return FlightSource(source, self.files, SECRET, port=port)

    def publish(
        self, version: int, weights: Mapping[str, Any], *, anchor: bool = False
    ) -> Catalogue:
        """On every rank."""
        base = self.offers[0].newest()
        local = [
            o.stage(version, shards(weights, o.rank, self.ranks), anchor=anchor)
            for o in self.offers
        ]
        catalogue = join_catalogues(local, base=base)
        for offers in self.offers:
            offers.open(catalogue)
        return catalogue

    def links(
        self, target: str, ports: Mapping[int, int] | None = None, **how: Any
    ) -> list[FlightLink]:
        """To each rank, at another port where one is given."""
        how = {"token": issue_token(SECRET, target, 600), "stall_s": 10.0, **how}
        how.setdefault("authority", self.files.authority)
        ports = ports or {}
        return [
            FlightLink(rank, "127.0.0.1", ports.get(rank, served.port), **how)
            for rank, served in enumerate(self.served)
        ]

    def close(self) -> None:
        """Serve no more."""
        for served in self.served:
            served.close()


def engine(
    links: Callable[[], Sequence[Link]], target: str, ranks: int, **how: Any
) -> list[Receiver]:
    """The receivers of one engine."""
    how = {"limit_bytes": 4 << 20, "verdict_s": 20.0, **how}
    return [
        Receiver(target, links(), layouts(rank, ranks), rank=rank, ranks=ranks, **how)
        for rank in range(ranks)
    ]


def sync_all(receivers: Sequence[Receiver], **how: Any) -> list[Synced | TransferError]:
    """All at once, each in a thread; errors are results."""
    results: list[Any] = [None] * len(receivers)

    def one(place: int) -> None:
        try:
            results[place] = receivers[place].sync(**how)
        except TransferError as error:
            results[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(receivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
