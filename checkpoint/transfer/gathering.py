"""Gathers a version in a second copy beside the one that is held, and sums it up for the desk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shiftbook.checkpoint.errors import BaseRefused
from shiftbook.checkpoint.fingerprint import Fingerprint
from shiftbook.checkpoint.layouts import piece_fingerprints
from shiftbook.checkpoint.transfer.budget import Budget
from shiftbook.checkpoint.transfer.catalogue import Catalogue
from shiftbook.checkpoint.transfer.desk import Sums
from shiftbook.checkpoint.transfer.link import Link
from shiftbook.checkpoint.transfer.parcel import unpack
from shiftbook.checkpoint.transfer.plan import Order, Stored, orders
from shiftbook.checkpoint.transfer.pull import Pull, Pulled, parcel_bytes
from shiftbook.checkpoint.transfer.staging import RESUMABLE, Staging


@dataclass(frozen=True)
class Base:
    """What a rank holds: a verified version, and its bits by stored name."""

    version: int
    root: str
    tensors: Mapping[str, Any]


@dataclass(frozen=True)
class Gathered:
    """A second copy that holds a version, and what it took; whoever has it closes the copy."""

    staging: Staging
    encoding: Literal["whole", "patch"]
    pulled: Pulled
    resumed: bool


class Gathering:
    """Pulls what one rank stores.

    `max_error` is what the rank's plan accepts of a version that lost something. `limit_bytes`
    bounds what is under way beside the second copy, which lies in memory, or in `file`, where a
    try that lost its source leaves it to the next.
    """

    def __init__(
        self,
        links: Sequence[Link],
        layouts: Mapping[str, Stored],
        *,
        max_error: float | None,
        limit_bytes: int,
        file: Path | None,
        threads: int,
    ) -> None:
        self._links, self._layouts = links, layouts
        self._max_error, self._limit_bytes = max_error, limit_bytes
        self._file, self._threads = file, threads

    def gather(self, catalogue: Catalogue, base: Base | None) -> Gathered:
        """The version, as a difference from `base` where the sources have one, else everything.

        Raises TransferError; a copy in a file is then kept only where a source was lost, or let
        this rank in no more.
        """
        if base is not None and (base.version, base.root) == (
            catalogue.base_version,
            catalogue.base_root,
        ):
            try:
                return self._gathered(catalogue, base)
            except BaseRefused:
                pass  # it does not hold what it believed to hold: everything, then
        return self._gathered(catalogue, None)

    def _gathered(self, catalogue: Catalogue, base: Base | None) -> Gathered:
        base_version = None if base is None else base.version
        most = parcel_bytes(self._limit_bytes, len(self._links))
        todo = orders(catalogue, self._layouts, parcel_bytes=most, base_version=base_version)
        staging = Staging(
            self._layouts,
            None if base is None else base.tensors,
            file=self._file,
            identity=self._identity(catalogue, base_version, most),
        )
        resumed = staging.resumed
        try:
            accept_error = None if catalogue.loss is None else self._max_error
            pulled = self._pull(todo, staging, accept_error)
            if resumed and self._differs_from_sources(catalogue, staging):
                # A machine that went down in mid-write leaves a file that its journal promises.
                staging.again()
                pulled = self._pull(todo, staging, accept_error)
        except BaseException as error:
            staging.close(keep=isinstance(error, RESUMABLE))
            raise
        return Gathered(staging, "whole" if base is None else "patch", pulled, resumed)

    def _pull(self, todo: Sequence[Order], staging: Staging, accept_error: float | None) -> Pulled:
        def put(order: Order, data: memoryview) -> None:
            unpack(data, order.ticket, staging.places(order), accept_error=accept_error)
            staging.finished(order)

        left = [order for order in todo if order.key not in staging.done]
        return Pull(self._links, left, put, Budget(self._limit_bytes)).run()

    def _differs_from_sources(self, catalogue: Catalogue, staging: Staging) -> bool:
        """Whether a whole tensor on this rank is another one; slices show at the desk."""
        first = self.parts(staging.arrays)["0"]
        return any(
            value != _hex(catalogue, name)
            for name, value in first.items()
            if value[2] == _hex(catalogue, name)[2]
        )

    def parts(self, arrays: Mapping[str, Any]) -> dict[str, dict[str, Sums]]:
        """Partial fingerprints by copy and by logical name, of bits by stored name."""
        found: dict[str, dict[str, Any]] = {"0": {}}
        for name, stored in self._layouts.items():
            for copy in sorted({piece.copy for piece in stored.layout.pieces if piece.logical}):
                parts = piece_fingerprints(
                    arrays[name],
                    stored.layout,
                    copy=copy,
                    threads=self._threads,
                    dtype=stored.dtype,
                )
                mine = found.setdefault(str(copy), {})
                for logical, part in parts.items():
                    mine[logical] = mine[logical] + part if logical in mine else part
        return {
            copy: {name: _sums(part) for name, part in parts.items()}
            for copy, parts in found.items()
        }

    def _identity(self, catalogue: Catalogue, base_version: int | None, most: int) -> str:
        layouts = repr(sorted(self._layouts.items()))
        text = f"{catalogue.root} {catalogue.version} {base_version} {most} {layouts}"
        return hashlib.sha256(text.encode()).hexdigest()


def _sums(part: Any) -> Sums:
    return f"{part.sums[0]:x}", f"{part.sums[1]:x}", f"{part.cover:x}"


def _hex(catalogue: Catalogue, name: str) -> Sums:
    entry = catalogue.tensors[name]
    return _sums(Fingerprint.from_hex(entry.fingerprint, entry.dtype, entry.shape))
