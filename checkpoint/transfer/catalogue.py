"""The catalogue of a version: its tensors with their fingerprints, and which rank holds which box.

Each rank describes what it holds, with partial fingerprints. Those of all ranks add up to the
fingerprints of whole tensors; a gap or an overlap does not, so no catalogue comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.elements import element_view
from shiftbook.checkpoint.errors import (
    FingerprintError,
    TransferDamaged,
    TransferRefused,
)
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint
from shiftbook.checkpoint.patch_format import Lossy
from shiftbook.checkpoint.patch_numbers import Steps, count_nan
from shiftbook.checkpoint.positions import ITEM_BYTES
from shiftbook.checkpoint.transfer.boxes import Box, whole
from shiftbook.ledger.events.base import Count, Hex128
from shiftbook.ledger.events.sync import SyncLoss

FORMAT: Final = "shiftbook-transfer-v1"


class Message(BaseModel):
    """What goes from one process to another as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Shard:
    """What a rank holds of a logical tensor: a box of it, as a numpy array or torch tensor."""

    name: str
    tensor: Any
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole logical tensor."""

    @classmethod
    def of(cls, name: str, tensor: Any) -> Shard:
        """A whole tensor, or this rank's shard of a DTensor (FSDP2 parameters are DTensors)."""
        if type(tensor).__name__ != "DTensor":
            shape = tuple(int(n) for n in tensor.shape)
            return cls(name, tensor, (0,) * len(shape), shape)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(placement.is_partial() for placement in tensor.placements):
            raise TransferRefused(
                f"{name}: expected a DTensor of shards and replicas, found placements "
                f"{tensor.placements}; redistribute the partial sums first",
                where=name,
            )
        local = tensor.to_local()
        size, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if tuple(size) != tuple(local.shape):
            raise TransferRefused(
                f"{name}: expected a local shard of shape {tuple(size)}, found "
                f"{tuple(local.shape)}; its shards are no boxes: pass each box as a Shard",
                where=name,
            )
        return cls(name, local, tuple(int(n) for n in offset), tuple(int(n) for n in tensor.shape))


class BoxLoss(Message):
    """What a lossy encoding left of a box: how far it is from the trainer's, and what that one adds
    to the fingerprint of the trainer's tensor."""

    sums: tuple[Count, Count]
    largest_error: float


class HeldPart(Message):
    """One box that a rank holds, and what it adds to the fingerprint of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    offset: tuple[Count, ...]
    size: tuple[Count, ...]
    sums: tuple[Count, Count]
    cover: Count
    nan: Count
    loss: BoxLoss | None = None
    """Absent where the box is the trainer's, bit for bit."""

    @property
    def box(self) -> Box:
        """Where it stands in the logical tensor."""
        return Box(self.offset, self.size)


class LocalCatalogue(Message):
    """All that one rank holds of a version."""

    rank: Count
    version: Count
    parts: tuple[HeldPart, ...]
    lossy: Lossy | None = None
    """The encoding that the rank may use, and its bound."""


class Entry(Message):
    """One logical tensor of a version."""

    dtype: str
    shape: tuple[Count, ...]
    fingerprint: Hex128
    nan: Count = 0
    """Elements that are no number; they are carried like any others."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Holding(Message):
    """A box, and the ranks that hold it."""

    name: str
    offset: tuple[Count, ...]
    size: tuple[Count, ...]
    ranks: tuple[Count, ...]

    @property
    def box(self) -> Box:
        """Where it stands in the logical tensor."""
        return Box(self.offset, self.size)


class CatalogueLoss(Message):
    """How far a version as it is served is from the trainer's, and what the trainer's is."""

    encoding: Literal["int8-difference"]
    max_error: float
    largest_error: float
    source: dict[str, Hex128]
    """Fingerprints of the trainer's tensors, where they are others than those that are served."""


class Catalogue(Message):
    """A version as all its sources serve it."""

    format: Literal["shiftbook-transfer-v1"] = FORMAT
    version: Count
    base_version: Count | None = None
    """The version before, which the sources still hold, so that they can send differences."""
    base_root: Hex128 | None = None
    root: Hex128
    tensors: dict[str, Entry]
    holdings: tuple[Holding, ...]
    loss: CatalogueLoss | None = None
    """Absent where the version that is served is the trainer's."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if root(self.fingerprints) != self.root:
            raise ValueError("the root is not that of the tensors")
        if (self.base_version is None) != (self.base_root is None):
            raise ValueError("a base version without its root, or a root without its version")
        for entry in self.tensors.values():
            if entry.dtype not in ITEM_BYTES:
                raise ValueError(f"unknown dtype {entry.dtype!r}")
        if self.loss is not None and not (
            self.loss.source.keys() <= self.tensors.keys()
            and 0 <= self.loss.largest_error <= self.loss.max_error
        ):
            raise ValueError("a loss beyond its bound, or of tensors that are not there")
        for held in self.holdings:
            known = self.tensors.get(held.name)
            if known is None or not held.box.inside(whole(known.shape)) or not held.ranks:
                raise ValueError(f"{held.name}: a box outside of its tensor")
        return self

    @property
    def fingerprints(self) -> dict[str, str]:
        """By name, of whole tensors."""
        return {name: entry.fingerprint for name, entry in self.tensors.items()}

    @property
    def source_fingerprints(self) -> dict[str, str]:
        """By name, of the trainer's whole tensors; those that are served, where nothing is lost."""
        return self.fingerprints | ({} if self.loss is None else self.loss.source)

    @property
    def sync_loss(self) -> SyncLoss | None:
        """What a sync to this version says of its loss; None where there is none."""
        if self.loss is None:
            return None
        return SyncLoss(
            encoding=self.loss.encoding,
            max_error=self.loss.max_error,
            largest_error=self.loss.largest_error,
            root=self.root,
            whole="decoded",
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def nan(self) -> int:
        """Elements of all tensors that are no number."""
        return sum(entry.nan for entry in self.tensors.values())


@dataclass(frozen=True, slots=True)
class HeldBits:
    """A box in host memory, as the unsigned bits of its elements."""

    box: Box
    dtype: str
    shape: tuple[int, ...]
    bits: Any
    steps: Steps | None = None
    """That led to it from the box of the version before, where a lossy encoding made it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return int(self.bits.nbytes)


def held_bits(shard: Shard) -> HeldBits:
    """A copy in host memory, which nobody writes to. Raises TransferRefused."""
    array, dtype = element_view(shard.tensor, None)
    box = Box(shard.offset, tuple(int(n) for n in array.shape))
    if not box.inside(whole(shard.shape)):
        raise TransferRefused(
            f"{shard.name}: expected a box inside {shard.shape}, found {box.size} at "
            f"{box.offset}; pass the whole tensor's shape and where the shard starts in it",
            where=shard.name,
        )
    return HeldBits(box, dtype, shard.shape, np.array(array, order="C"))


def described(name: str, held: HeldBits, *, threads: int = 1) -> HeldPart:
    """A box with its partial fingerprint and its count of NaN."""
    part = fingerprint(
        held.bits, offset=held.box.offset, shape=held.shape, dtype=held.dtype, threads=threads
    )
    units = held.bits.reshape(-1)
    if ITEM_BYTES[held.dtype] == 16:
        units = units.view(np.uint64)
    return HeldPart(
        name=name,
        dtype=held.dtype,
        shape=held.shape,
        offset=held.box.offset,
        size=held.box.size,
        sums=part.sums,
        cover=part.cover,
        nan=count_nan(held.dtype, units),
    )


def join_catalogues(
    locals_: Iterable[LocalCatalogue], *, base: Catalogue | None = None
) -> Catalogue:
    """The catalogue of a version from what all its ranks hold.

    Boxes that several ranks hold count once, and must have one content. Raises TransferRefused
    where the ranks disagree, or where their boxes do not cover each element once.
    """
    every = sorted(locals_, key=lambda one: one.rank)
    versions = sorted({one.version for one in every})
    if len(versions) != 1 or len({one.rank for one in every}) != len(every):
        raise TransferRefused(
            f"expected one version from ranks of their own, found versions {versions} from ranks "
            f"{[one.rank for one in every]}; publish the same version on each rank once"
        )
    lossy = every[0].lossy
    if any(one.lossy != lossy for one in every):
        raise TransferRefused(
            f"expected ranks that may lose the same, found {[one.lossy for one in every]}; make "
            "their offers with one encoding and one bound"
        )
    boxes: dict[tuple[str, Box], tuple[HeldPart, list[int]]] = {}
    for one in every:
        for part in one.parts:
            first, ranks = boxes.setdefault((part.name, part.box), (part, []))
            if part != first:
                raise TransferRefused(
                    f"{part.name}: ranks {ranks[0]} and {one.rank} hold one box with other "
                    "contents, shapes or dtypes; replicas have drifted apart: publish from one of "
                    "them, or find out why",
                    where=part.name,
                )
            ranks.append(one.rank)
    if not boxes:
        raise TransferRefused("expected tensors to publish, found none; name what should be sent")
    return Catalogue(
        version=versions[0],
        base_version=base.version if base else None,
        base_root=base.root if base else None,
        **_described([part for part, _ in boxes.values()], lossy),
        holdings=tuple(
            Holding(name=name, offset=box.offset, size=box.size, ranks=tuple(ranks))
            for (name, box), (_, ranks) in boxes.items()
            if box.elements
        ),
    )


def _described(parts: Sequence[HeldPart], lossy: Lossy | None) -> dict[str, Any]:
    """Entries, root and loss of a version whose ranks hold these boxes."""
    sums = _summed(parts)
    nan = dict.fromkeys(sums, 0)
    for part in parts:
        nan[part.name] += part.nan
    entries = {
        name: Entry(dtype=value.dtype, shape=value.shape, fingerprint=value.hex, nan=nan[name])
        for name, value in sums.items()
    }
    found = {
        "tensors": entries,
        "root": root({name: entry.fingerprint for name, entry in entries.items()}),
    }
    lossful = {part.name: part for part in parts if part.loss is not None}
    if not lossful:
        return found
    errors = [part.loss.largest_error for part in parts if part.loss is not None]
    if lossy is None or not max(errors) <= lossy.max_error:
        raise TransferRefused(
            f"expected errors of at most {lossy.max_error if lossy else 0}, found {max(errors)}; "
            "make the offers with the bound that the plan declares"
        )
    source = _summed([part for part in parts if part.name in lossful], source=True)
    loss = CatalogueLoss(
        encoding=lossy.encoding,
        max_error=lossy.max_error,
        largest_error=max(errors),
        source={name: value.hex for name, value in source.items()},
    )
    return found | {"loss": loss}


def _summed(parts: Sequence[HeldPart], *, source: bool = False) -> dict[str, Fingerprint]:
    """Of whole tensors, by sorted name: as they are served, or as the trainer has them."""
    sums: dict[str, Fingerprint] = {}
    for part in parts:
        held = part.loss.sums if source and part.loss is not None else part.sums
        value = Fingerprint(part.dtype, part.shape, held, part.cover)
        try:
            sums[part.name] = sums[part.name] + value if part.name in sums else value
        except FingerprintError as error:
            raise TransferRefused(f"{part.name}: {error}", where=part.name) from error
    for name, value in sums.items():
        if not value.complete:
            raise TransferRefused(
                f"{name}: expected ranks that together hold each element of {value.shape} once, "
                "found a gap or boxes that overlap in part; publish from every rank",
                where=name,
            )
    return dict(sorted(sums.items()))


def read_catalogue(value: Any) -> Catalogue:
    """A catalogue as it came over a wire. Raises TransferDamaged."""
    try:
        return Catalogue.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "catalogue"
        raise TransferDamaged(
            f"expected a catalogue of format {FORMAT}, found {place}: {first['msg']}; the source "
            "is of another version of Shiftbook, or its answer was altered"
        ) from error
