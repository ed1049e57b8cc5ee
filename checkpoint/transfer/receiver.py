"""A receiver: one tensor-parallel rank of an engine, which pulls its slices of a version.

It serves nothing before its first verified version. A new version is gathered in a second copy,
checked against the fingerprints together with the target's other ranks, and only then put in the
place of the old one; a receiver that did not take it holds the old one and serves nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shiftbook.checkpoint.errors import SourceLost, TransferError, TransferRefused
from shiftbook.checkpoint.transfer.catalogue import Catalogue
from shiftbook.checkpoint.transfer.desk import Report
from shiftbook.checkpoint.transfer.gathering import Base, Gathered, Gathering
from shiftbook.checkpoint.transfer.inquiry import Asker, Inquiry
from shiftbook.checkpoint.transfer.link import Link
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.pull import Pulled
from shiftbook.checkpoint.transfer.staging import Staging
from shiftbook.ledger.plan import SyncPlan

LIMIT_BYTES = 192 << 20
"""Of parcels under way, beside the second copy."""
VERDICT_S = 60.0
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
        self._links, self._syncs = list(links), syncs
        asker = Asker(target, rank, ranks, self.incarnation)
        self._inquiry = Inquiry(asker, self._links, verdict_s)
        self._gathering = Gathering(
            self._links,
            dict(layouts),
            max_error=syncs.max_error,
            limit_bytes=limit_bytes,
            file=None if spool is None else spool / _file_name(target, rank),
            threads=threads,
        )
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
        catalogue = self._inquiry.newest(self.version, wait_s)
        self._missed = catalogue.version
        began_s = time.monotonic()
        try:
            self._check_loss(catalogue)
            gathered = self._gathering.gather(catalogue, None if whole else self._base())
            staging = gathered.staging
            with staging:
                synced = _synced(catalogue, gathered, time.monotonic() - began_s)
                self._inquiry.agree(self._report(synced, staging, loaded=install is not None))
                self._load(catalogue, staging.arrays, install)
            self._tensors = dict(staging.arrays)
            self.version, self.root = catalogue.version, catalogue.root
            self._missed = None
        except SourceLost:
            raise  # it may try again; the desk waits until its time limit, or until `give_up`
        except TransferError as error:
            self._inquiry.tell_failed(catalogue.version, f"{type(error).__name__}: {error}")
            raise
        finally:
            for link in self._links:
                link.close()
        return synced

    def give_up(self, version: int, reason: str) -> None:
        """Tell the desk that this target does not take a version, so that nobody waits for it."""
        self._inquiry.tell_failed(version, reason)
        self._links[0].close()

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

    def _base(self) -> Base | None:
        """What a difference may start from."""
        if self._tensors is None or self.version is None or self.root is None:
            return None
        return Base(self.version, self.root, self._tensors)

    def _report(self, synced: Synced, staging: Staging, *, loaded: bool) -> Report:
        """What this rank tells the desk of what it gathered."""
        return Report(
            target=self.target,
            rank=self.rank,
            ranks=self.ranks,
            incarnation=self.incarnation,
            version=synced.version,
            parts=self._gathering.parts(staging.arrays),
            encoding=synced.encoding,
            transport=self._transport,
            moved_bytes=synced.moved_bytes,
            full_bytes=synced.full_bytes,
            sync_s=synced.sync_s,
            again=synced.pulled.again,
            resumed=synced.resumed,
            loaded=loaded,
        )

    def _load(
        self, catalogue: Catalogue, arrays: Mapping[str, Any], install: Install | None
    ) -> None:
        """Load into the engine, and wait until all ranks of the target have; else undo it."""
        self.taking = catalogue
        try:
            resident = install is not None and install(arrays) is True
            self._inquiry.confirm(catalogue.version, resident=resident)
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


def _synced(catalogue: Catalogue, gathered: Gathered, sync_s: float) -> Synced:
    return Synced(
        catalogue.version,
        gathered.encoding,
        gathered.pulled.moved_bytes,
        gathered.staging.nbytes,
        sync_s,
        gathered.pulled,
        gathered.resumed,
    )


def _file_name(target: str, rank: int) -> str:
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in target)
    return f"{name}-{rank}.weights"
