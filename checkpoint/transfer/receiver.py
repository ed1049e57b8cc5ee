"""A receiver: one tensor-parallel rank of an engine, which pulls its slices of a version.

It serves nothing before its first verified version. A new version is gathered in a second copy,
checked against the fingerprints together with the target's other ranks, and only then put in the
place of the old one; a receiver that did not take it holds the old one and serves nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shiftbook.checkpoint.errors import (
    BaseRefused,
    SourceLost,
    TransferDamaged,
    TransferError,
    TransferRefused,
)
from shiftbook.checkpoint.fingerprint import Fingerprint
from shiftbook.checkpoint.layouts import piece_fingerprints
from shiftbook.checkpoint.transfer.budget import Budget
from shiftbook.checkpoint.transfer.catalogue import Catalogue, read_catalogue
from shiftbook.checkpoint.transfer.desk import Report, Sums
from shiftbook.checkpoint.transfer.link import Link
from shiftbook.checkpoint.transfer.parcel import unpack
from shiftbook.checkpoint.transfer.plan import Order, Stored, orders
from shiftbook.checkpoint.transfer.pull import Pull, Pulled, parcel_bytes
from shiftbook.checkpoint.transfer.staging import Staging
from shiftbook.ledger.plan import SyncPlan

LIMIT_BYTES = 192 << 20
"""Of parcels under way, beside the second copy."""
VERDICT_S = 60.0
ASK_S = 5.0
"""A question that waits is asked again after this time."""
DESK_TRIES = 3
LOSSLESS = SyncPlan()

Install = Callable[[Mapping[str, Any]], bool | None]
"""Loads the tensors (bits by stored name) into the engine; what it raises keeps the old version.
True says that it read them back from the engine and found the version's fingerprints."""


@dataclass(frozen=True)
class Synced:
    """What a receiver serves after a sync, and what it took to get there."""

    version: int
    encoding: Literal["whole", "patch"]
    moved_bytes: int
    full_bytes: int
    sync_s: float
    pulled: Pulled
    resumed: bool


class Receiver:
    """Pulls, checks and takes versions for one rank of a target.

    `links` lead to the sources, the first one to that with the desk. `layouts` say what this rank
    stores, `syncs` what its plan declares: a version that lost more is refused. `limit_bytes`
    bounds what is under way beside the second copy, which lies in memory or, with `spool`, in a
    file in that folder.
    """

    def __init__(
        self,
        target: str,
        links: Sequence[Link],
        layouts: Mapping[str, Stored],
        *,
        rank: int = 0,
        ranks: int = 1,
        syncs: SyncPlan = LOSSLESS,
        incarnation: str | None = None,
        limit_bytes: int = LIMIT_BYTES,
        spool: Path | None = None,
        verdict_s: float = VERDICT_S,
        transport: str = "",
        threads: int = 1,
    ) -> None:
        if not links:
            raise TransferRefused("expected links to sources, found none; name where they serve")
        self.target, self.rank, self.ranks = target, rank, ranks
        self.incarnation = incarnation or uuid.uuid4().hex
        self._links, self._layouts, self._syncs = list(links), dict(layouts), syncs
        self._limit_bytes, self._spool = limit_bytes, spool
        self._verdict_s, self._threads = verdict_s, threads
        self._transport = transport or type(links[0]).__name__.removesuffix("Link").lower()
        self.version: int | None = None
        self.root: str | None = None
        self._tensors: Mapping[str, Any] | None = None
        self._missed: int | None = None
        self.taking: Catalogue | None = None
        """The version that `install` is called with; None while it gets back what was held."""

    @property
    def serving(self) -> bool:
        """True when it holds a verified version and took the newest that it knows of."""
        return self._tensors is not None and self._missed is None

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Bits by stored name of the version that it serves. Raises TransferRefused when it may
        serve none: before its first sync, and after one that it did not take."""
        if not self.serving:
            missing = "its first version" if self._tensors is None else f"version {self._missed}"
            raise TransferRefused(
                f"{self.target}: expected {missing} to be taken, found it was not; it serves "
                "nothing before a sync succeeds",
                where=self.target,
            )
        return self.held

    @property
    def held(self) -> Mapping[str, Any]:
        """Bits by stored name of the last verified version, whether it serves or not; empty before
        the first."""
        return self._tensors or {}

    def stands_on(self, version: int, root: str, tensors: Mapping[str, Any]) -> None:
        """Take over weights that the target already has (restored from a bundle, say) as the base
        of differences. They are checked when a difference arrives."""
        self.version, self.root, self._tensors = version, root, tensors

    def sync(
        self, *, wait_s: float = 0.0, whole: bool = False, install: Install | None = None
    ) -> Synced:
        """Pull the newest version and take it, if its fingerprints agree on all ranks.

        Waits up to `wait_s` for a version that is newer than its own. A difference is pulled where
        the sources have one from the version it stands on, and everything when that is refused
        (or `whole` asks for it). Raises TransferError; the receiver then holds what it held, and
        serves nothing before a later sync succeeds, unless it knows of no newer version. After a
        SourceLost it may sync again: with a spool it goes on where it was.

        `install` loads the tensors into an engine that keeps them in another form; on a failure it
        is called again with what was held.
        """
        catalogue = self._catalogue(wait_s)
        self._missed = catalogue.version
        began_s = time.monotonic()
        try:
            self._check_loss(catalogue)
            staging, synced = self._gather(catalogue, whole, began_s)
            with staging:
                self._agree(catalogue, staging, synced, loaded=install is not None)
                self._load(catalogue, staging.arrays, install)
            self._tensors = dict(staging.arrays)
            self.version, self.root = catalogue.version, catalogue.root
            self._missed = None
        except SourceLost:
            raise  # it may try again; the desk waits until its time limit, or until `give_up`
        except TransferError as error:
            self._tell(catalogue.version, f"{type(error).__name__}: {error}")
            raise
        finally:
            for link in self._links:
                link.close()
        return synced

    def give_up(self, version: int, reason: str) -> None:
        """Tell the desk that this target does not take a version, so that nobody waits for it."""
        self._tell(version, reason)
        self._links[0].close()

    def _catalogue(self, wait_s: float) -> Catalogue:
        """The newest version that is newer than this receiver's, from the first who answers."""
        deadline = time.monotonic() + wait_s
        lost: list[str] = []
        while True:
            lost.clear()
            for link in self._links:
                left_s = min(ASK_S, max(0.0, deadline - time.monotonic()))
                body = {"newer_than": self.version, "wait_s": left_s}
                try:
                    found = link.ask("catalogue", body, wait_s=left_s)["catalogue"]
                except SourceLost as error:
                    link.close()
                    lost.append(f"rank {link.rank}: {error}")
                    continue
                if found is not None:
                    return read_catalogue(found)
                break
            if len(lost) == len(self._links):
                raise SourceLost(
                    f"{self.target}: expected one of {len(lost)} sources to answer, found none "
                    f"({'; '.join(lost)})",
                    where=self.target,
                )
            if time.monotonic() >= deadline:
                raise TransferRefused(
                    f"{self.target}: expected a version after {self.version} within {wait_s:g} s, "
                    "found none; publish one, or wait longer",
                    where=self.target,
                )

    def _check_loss(self, catalogue: Catalogue) -> None:
        """Raise TransferRefused for a version that lost more than this target's plan declares."""
        loss = catalogue.loss
        if loss is None:
            return
        objection = self._syncs.objection(loss.encoding, loss.max_error, loss.largest_error)
        if objection is not None:
            raise TransferRefused(
                f"{self.target}: expected version {catalogue.version} within the plan's syncs, "
                f"found {objection}; publish it without loss, or declare syncs.encoding and "
                "syncs.max_error",
                where=self.target,
            )

    def _gather(self, catalogue: Catalogue, whole: bool, began_s: float) -> tuple[Staging, Synced]:
        """A second copy that holds the version, as a difference where that can be had."""
        based = (
            not whole
            and self._tensors is not None
            and catalogue.base_version is not None
            and (self.version, self.root) == (catalogue.base_version, catalogue.base_root)
        )
        if based:
            try:
                return self._pulled(catalogue, catalogue.base_version, began_s)
            except BaseRefused:
                pass  # it does not hold what it believed to hold: everything, then
        return self._pulled(catalogue, None, began_s)

    def _pulled(
        self, catalogue: Catalogue, base_version: int | None, began_s: float
    ) -> tuple[Staging, Synced]:
        most = parcel_bytes(self._limit_bytes, len(self._links))
        todo = orders(catalogue, self._layouts, parcel_bytes=most, base_version=base_version)
        base = self._tensors if base_version is not None else None
        staging = Staging(
            self._layouts,
            base,
            file=self._file(),
            identity=self._identity(catalogue, base_version, most),
        )
        resumed = staging.resumed
        try:
            accept_error = None if catalogue.loss is None else self._syncs.max_error
            pulled = self._pull(todo, staging, accept_error)
            if resumed and self._differs_from_sources(catalogue, staging):
                # A machine that went down in mid-write leaves a file that its journal promises.
                staging.again()
                pulled = self._pull(todo, staging, accept_error)
        except BaseException as error:
            staging.close(keep=isinstance(error, SourceLost))
            raise
        synced = Synced(
            catalogue.version,
            "whole" if base_version is None else "patch",
            pulled.moved_bytes,
            staging.nbytes,
            time.monotonic() - began_s,
            pulled,
            resumed,
        )
        return staging, synced

    def _pull(self, todo: Sequence[Order], staging: Staging, accept_error: float | None) -> Pulled:
        def put(order: Order, data: memoryview) -> None:
            unpack(data, order.ticket, staging.places(order), accept_error=accept_error)
            staging.finished(order)

        left = [order for order in todo if order.key not in staging.done]
        return Pull(self._links, left, put, Budget(self._limit_bytes)).run()

    def _differs_from_sources(self, catalogue: Catalogue, staging: Staging) -> bool:
        """Whether a whole tensor on this rank is another one; slices show at the desk."""
        first = self._parts(staging.arrays)["0"]
        return any(
            value != _hex(catalogue, name)
            for name, value in first.items()
            if value[2] == _hex(catalogue, name)[2]
        )

    def _agree(
        self, catalogue: Catalogue, staging: Staging, synced: Synced, *, loaded: bool
    ) -> None:
        """Hand in the partial fingerprints, and wait for the verdict on the whole target."""
        report = Report(
            **self._names(catalogue.version),
            ranks=self.ranks,
            parts=self._parts(staging.arrays),
            encoding=synced.encoding,
            transport=self._transport,
            moved_bytes=synced.moved_bytes,
            full_bytes=synced.full_bytes,
            sync_s=synced.sync_s,
            again=synced.pulled.again,
            resumed=synced.resumed,
            loaded=loaded,
        )
        answer = self._await("report", report.model_dump(mode="json"), "verdict", "wait")
        if answer["verdict"] != "commit":
            raise TransferDamaged(
                f"{self.target}: expected the fingerprints of version {catalogue.version} on all "
                f"{self.ranks} ranks, found otherwise: {answer.get('reason')}; it serves nothing "
                "until a sync succeeds",
                where=self.target,
            )

    def _await(
        self, kind: str, body: Mapping[str, Any], key: str, not_yet: Any
    ) -> Mapping[str, Any]:
        """Ask the desk until its answer depends on no other rank any more."""
        deadline = time.monotonic() + self._verdict_s
        while True:
            left_s = max(0.0, min(ASK_S, deadline - time.monotonic()))
            answer = self._ask_desk(kind, {**body, "wait_s": left_s}, wait_s=left_s)
            if answer.get(key) != not_yet:
                return answer
            if time.monotonic() >= deadline:
                raise SourceLost(
                    f"{self.target}: expected all {self.ranks} ranks to {kind} within "
                    f"{self._verdict_s:g} s, found some silent; sync again when they are back",
                    where=self.target,
                )

    def _load(
        self, catalogue: Catalogue, arrays: Mapping[str, Any], install: Install | None
    ) -> None:
        """Load into the engine, and wait until all ranks of the target have; else undo it."""
        names = self._names(catalogue.version)
        self.taking = catalogue
        try:
            if install is not None:
                names["resident"] = install(arrays) is True
            self._await("confirm", names, "confirmed", False)
        except BaseException as error:
            self.taking = None
            undone = self._undo(install)
            if isinstance(error, TransferError) or not isinstance(error, Exception):
                raise
            raise TransferError(
                f"{self.target}: the engine did not load version {catalogue.version} "
                f"({type(error).__name__}: {error}); {undone}",
                where=self.target,
            ) from error
        finally:
            self.taking = None

    def _undo(self, install: Install | None) -> str:
        """Load what was held again; when that fails too, nothing is held any more."""
        if install is None or self._tensors is None:
            return f"it keeps version {self.version}"
        try:
            install(self._tensors)
        except Exception as error:
            self._tensors, held = None, self.version
            self.version = self.root = None
            return f"nor version {held} again ({type(error).__name__}): it holds none"
        return f"it keeps version {self.version}"

    def _parts(self, arrays: Mapping[str, Any]) -> dict[str, dict[str, Sums]]:
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

    def _names(self, version: int) -> dict[str, Any]:
        return {
            "target": self.target,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "version": version,
        }

    def _ask_desk(
        self, kind: str, body: Mapping[str, Any], *, wait_s: float = 0.0
    ) -> dict[str, Any]:
        """Ask the source with the desk; it is asked again when the link breaks, with one effect."""
        for tried in range(1, DESK_TRIES + 1):
            try:
                return self._links[0].ask(kind, body, wait_s=wait_s)
            except SourceLost:
                self._links[0].close()
                if tried == DESK_TRIES:
                    raise
                threading.Event().wait(0.1 * tried)
        raise AssertionError("unreachable")

    def _tell(self, version: int, reason: str) -> None:
        """Say why this target does not take a version, if anybody still listens."""
        try:
            self._links[0].ask("failed", {**self._names(version), "reason": reason})
        except TransferError:
            self._links[0].close()  # the desk finds out by its time limit

    def _file(self) -> Path | None:
        if self._spool is None:
            return None
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.target)
        return self._spool / f"{name}-{self.rank}.weights"

    def _identity(self, catalogue: Catalogue, base_version: int | None, most: int) -> str:
        layouts = repr(sorted(self._layouts.items()))
        text = f"{catalogue.root} {catalogue.version} {base_version} {most} {layouts}"
        return hashlib.sha256(text.encode()).hexdigest()


def _sums(part: Any) -> Sums:
    return f"{part.sums[0]:x}", f"{part.sums[1]:x}", f"{part.cover:x}"


def _hex(catalogue: Catalogue, name: str) -> Sums:
    entry = catalogue.tensors[name]
    return _sums(Fingerprint.from_hex(entry.fingerprint, entry.dtype, entry.shape))
