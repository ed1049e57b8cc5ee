"""What a trainer rank offers: its boxes of a version, kept in host memory until newer ones came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shiftbook.checkpoint.errors import BaseRefused, TransferRefused
from shiftbook.checkpoint.patch import Lossy, encode_patch
from shiftbook.checkpoint.transfer.budget import Budget
from shiftbook.checkpoint.transfer.catalogue import (
    Catalogue,
    HeldBits,
    LocalCatalogue,
    Shard,
    described,
    held_bits,
    join_catalogues,
)
from shiftbook.checkpoint.transfer.lossy import lossy_box, steps_of
from shiftbook.checkpoint.transfer.parcel import (
    MOST_BOXES,
    BoxName,
    Head,
    Ticket,
    box_fingerprint,
    host_place,
    sealed,
)

LIMIT_BYTES = 256 << 20
OPEN_S = 10.0
"""How long a request for a staged version waits until it is opened."""
KEPT_VERSIONS = 2
"""The newest and the one before, which differences lead from."""

Exchange = Callable[[LocalCatalogue], Iterable[LocalCatalogue]]
"""Hands in what this rank holds and gives what all ranks hold; see `cluster.over_group`."""


@dataclass
class _Version:
    """The boxes of one version on this rank; the catalogue comes when all ranks have theirs."""

    boxes: dict[str, list[HeldBits]]
    catalogue: Catalogue | None = None


def _compile_patches(boxes: Mapping[str, Iterable[HeldBits]]) -> None:
    """Make a patch of a few elements of each kind, before a receiver waits for a real one.

    The first patch of a process without compiled kernels on disk takes some ten seconds, which a
    receiver would take for a source that is lost.
    """
    kinds = {(held.dtype, held.bits.dtype) for every in boxes.values() for held in every}
    for dtype, unit in kinds:
        base, new = np.zeros(8, unit), np.zeros(8, unit)
        new.view(np.uint8)[-1] = 1
        one, other = ({"x": host_place(dtype, bits)} for bits in (base, new))
        encode_patch(one, other, base_version=0, version=1, nan="carry")


def _bits_of(held: HeldBits, asked: BoxName) -> tuple[str, Any]:
    return held.dtype, held.bits[asked.box.window(held.box)]


@dataclass
class Served:
    """What a rank has sent so far."""

    parcels: int = 0
    bytes: int = 0
    whole: int = 0
    patches: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class Offers:
    """The versions that one rank serves. Every method may be called from any thread.

    With `lossy`, which the plan must declare, a version may differ from the trainer's within that
    bound; all receivers get the same bits, and the next difference contains what this one left
    over. `limit_bytes` bounds what answers under way take beside the versions themselves.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        lossy: Lossy | None = None,
        limit_bytes: int = LIMIT_BYTES,
        hold_s: float = 60.0,
    ) -> None:
        self.rank, self._lossy = rank, lossy
        self.served = Served()
        self.budget = Budget(limit_bytes, hold_s=hold_s)
        self._changed = threading.Condition()
        self._versions: dict[int, _Version] = {}

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Any] | Iterable[Shard],
        *,
        exchange: Exchange | None = None,
        anchor: bool = False,
        threads: int = 1,
    ) -> Catalogue:
        """Copy what this rank holds to host memory and serve it; the trainer may go on at once.

        `tensors` are whole ones or DTensors by name, or shards. Without `exchange` this rank alone
        holds the version; with it every rank publishes. The version before is kept as the base
        of differences, older ones go. Raises TransferRefused where the ranks' boxes do not make
        whole tensors, and where the version is not a newer one. An `anchor` loses nothing: ranks
        that were started anew hold nothing of what the others lost before.
        """
        local = self.stage(version, tensors, anchor=anchor, threads=threads)
        try:
            every = [local] if exchange is None else exchange(local)
            catalogue = join_catalogues(every, base=self.newest())
        except BaseException:
            self.withdraw(version)
            raise
        self.open(catalogue)
        return catalogue

    def stage(
        self,
        version: int,
        tensors: Mapping[str, Any] | Iterable[Shard],
        *,
        anchor: bool = False,
        threads: int = 1,
    ) -> LocalCatalogue:
        """The first half of `publish`: keep the boxes and describe them; nobody can pull yet."""
        newest = self.newest()
        if newest is not None and version <= newest.version:
            raise TransferRefused(
                f"expected a version after {newest.version}, which is offered, found {version}; "
                "versions only go up"
            )
        shards = (
            [Shard.of(name, tensor) for name, tensor in tensors.items()]
            if isinstance(tensors, Mapping)
            else tensors
        )
        boxes: dict[str, list[HeldBits]] = {}
        parts = []
        base = None if newest is None or anchor else self._versions.get(newest.version)
        for shard in sorted(shards, key=lambda one: one.name):
            exact = held_bits(shard)
            held, loss = exact, None
            if self._lossy is not None and base is not None:
                held, loss = lossy_box(shard.name, exact, base.boxes, self._lossy, threads)
            boxes.setdefault(shard.name, []).append(held)
            part = described(shard.name, held, threads=threads)
            parts.append(part if loss is None else part.model_copy(update={"loss": loss}))
        if newest is not None:
            _compile_patches(boxes)
        with self._changed:
            self._versions[version] = _Version(boxes)
        return LocalCatalogue(
            rank=self.rank, version=version, parts=tuple(parts), lossy=self._lossy
        )

    def open(self, catalogue: Catalogue) -> None:
        """The second half of `publish`: serve a staged version under its catalogue."""
        with self._changed:
            staged = self._versions.get(catalogue.version)
            if staged is None:
                raise TransferRefused(
                    f"expected version {catalogue.version} to be staged on rank {self.rank}, found "
                    f"{sorted(self._versions)}; stage it first"
                )
            staged.catalogue = catalogue
            self._drop_steps(but=catalogue.version)
            opened = sorted(v for v, one in self._versions.items() if one.catalogue is not None)
            for old in opened[:-KEPT_VERSIONS]:
                del self._versions[old]
            self._changed.notify_all()

    def _drop_steps(self, but: int) -> None:
        """Only differences to the newest version are made; a base needs its bits alone."""
        for version, one in self._versions.items():
            if version != but and one.catalogue is not None:
                one.boxes = {
                    name: [replace(held, steps=None) for held in every]
                    for name, every in one.boxes.items()
                }

    def withdraw(self, version: int) -> None:
        """Offer a version no more."""
        with self._changed:
            self._versions.pop(version, None)

    def newest(self) -> Catalogue | None:
        """The catalogue of the newest version that is served."""
        with self._changed:
            every = [one.catalogue for one in self._versions.values() if one.catalogue is not None]
        return max(every, key=lambda one: one.version, default=None)

    def catalogue(self, *, newer_than: int | None = None, wait_s: float = 0.0) -> Catalogue | None:
        """The newest version's catalogue; waits up to `wait_s` for one after `newer_than`."""
        deadline = time.monotonic() + wait_s
        while True:
            found = self.newest()
            if found is not None and (newer_than is None or found.version > newer_than):
                return found
            with self._changed:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)

    @contextmanager
    def parcel(self, ticket: Ticket) -> Iterator[list[Any]]:
        """The buffers that answer a ticket, while the block lasts. Raises TransferRefused."""
        if not 0 < len(ticket.boxes) <= MOST_BOXES:
            raise TransferRefused(
                f"expected 1 to {MOST_BOXES} boxes in a ticket, found {len(ticket.boxes)}"
            )
        new = self._version(ticket.version)
        held = [self._box(new, asked, ticket.version) for asked in ticket.boxes]
        found = [_bits_of(one, asked) for one, asked in zip(held, ticket.boxes, strict=True)]
        nbytes = sum(int(bits.nbytes) for _, bits in found)
        with self.budget.taken(2 * nbytes if ticket.base_version is not None else nbytes):
            if ticket.base_version is None:
                buffers = self._whole(ticket, found)
            else:
                buffers = self._patch(ticket, new, held, found, nbytes)
            yield buffers
        with self.served.lock:
            self.served.parcels += 1
            self.served.bytes += sum(memoryview(part).nbytes for part in buffers)

    def _version(self, version: int) -> _Version:
        with self._changed:
            found = self._versions.get(version)
            if found is not None and found.catalogue is None:
                # Another rank was quicker to open it, and a receiver quick to come here.
                self._changed.wait_for(lambda: found.catalogue is not None, timeout=OPEN_S)
            known = sorted(v for v, one in self._versions.items() if one.catalogue is not None)
        if found is None or found.catalogue is None:
            raise TransferRefused(
                f"expected one of the versions {known} that rank {self.rank} offers, was asked for "
                f"{version}; ask for the newest catalogue"
            )
        return found

    def _box(self, version: _Version, asked: BoxName, number: int) -> HeldBits:
        for held in version.boxes.get(asked.name, ()):
            if len(asked.offset) == len(asked.size) and asked.box.inside(held.box):
                return held
        raise TransferRefused(
            f"{asked.name}: expected a box that rank {self.rank} holds of version {number}, was "
            f"asked for {asked.size} at {asked.offset}; go by the catalogue of this version",
            where=asked.name,
        )

    def _whole(self, ticket: Ticket, found: list[tuple[str, Any]]) -> list[Any]:
        head = Head(
            version=ticket.version,
            encoding="whole",
            boxes=len(found),
            fingerprints=tuple(box_fingerprint(dtype, bits) for dtype, bits in found),
        )
        with self.served.lock:
            self.served.whole += 1
        flat = [np.ascontiguousarray(bits).reshape(-1).view(np.uint8) for _, bits in found]
        return sealed(head, [part.data for part in flat if part.size])

    def _patch(
        self,
        ticket: Ticket,
        new: _Version,
        held: list[HeldBits],
        found: list[tuple[str, Any]],
        nbytes: int,
    ) -> list[Any]:
        assert new.catalogue is not None
        base = self._versions.get(ticket.base_version or 0)
        if ticket.base_version != new.catalogue.base_version or base is None:
            raise BaseRefused(
                f"expected a receiver on version {new.catalogue.base_version}, which differences "
                f"to version {ticket.version} lead from, found one on {ticket.base_version}; pull "
                "the whole weights"
            )
        before = {}
        for number, asked in enumerate(ticket.boxes):
            try:
                old = self._box(base, asked, ticket.base_version or 0)
            except TransferRefused as error:  # other shapes, or held elsewhere in that version
                raise BaseRefused(str(error), where=asked.name) from error
            before[str(number)] = host_place(*_bits_of(old, asked))
        after = {str(i): host_place(dtype, bits) for i, (dtype, bits) in enumerate(found)}
        if any(before[i].dtype != after[i].dtype for i in after):
            raise BaseRefused("a tensor has another dtype than in the base; pull the whole weights")
        patch = encode_patch(
            before,
            after,
            base_version=ticket.base_version or 0,
            version=ticket.version,
            lossy=self._lossy,
            steps=steps_of(held, ticket.boxes),
            nan="carry",
        )
        if len(patch) >= nbytes:
            return self._whole(ticket, found)
        with self.served.lock:
            self.served.patches += 1
        head = Head(
            version=ticket.version,
            base_version=ticket.base_version,
            encoding="patch",
            boxes=len(found),
        )
        return sealed(head, [patch])
