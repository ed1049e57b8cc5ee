"""Evidence through an outage: segments that their store cannot take wait beside a spool."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import EvidenceError, EvidenceOutOfReach, SpoolError
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.object_folder import NoBucket
from shiftbook.ledger.segment_place import (
    DRAFT,
    LocalFolder,
    SegmentPlace,
    WritablePlace,
    segment_name,
    segment_sha256,
)

SUFFIX = ".segments"
"""Of the folder beside a writer's spool."""

DAMAGED = ".damaged"
"""Of a waiting segment whose bytes are no longer those of its name."""

NO_SEGMENT = "0" * 64
"""SHA-256 of no segment, to ask a store for."""


class SpooledSegments:
    """Takes the segments of one writer: into their store, or beside the spool while that is away.

    A segment that is kept here is brought to the store before any event that names it is appended.
    While one is kept all are, so an outage is waited for once and not at each segment. Files stand
    in ``folder`` under their SHA-256, synced; how many is bounded by the disk alone.
    """

    def __init__(
        self,
        place: WritablePlace | None,
        folder: Path,
        *,
        lock: threading.Lock,
        claim: Callable[[], object],
    ) -> None:
        """``claim`` makes the file whose lock says that somebody looks after the folder; it is
        called under ``lock``, which also guards what is kept."""
        self._place = place
        self._folder = LocalFolder(folder)
        self._lock = lock
        self._claim = claim
        self._kept: set[str] = set()
        self._brought: set[str] = set()
        """Segments of waiting records that this process has seen in the store."""
        self.cause = ""
        """What the store said when it did not take a segment."""

    @property
    def kept(self) -> int:
        """Segments that wait here."""
        return len(self._kept)

    def where(self, sha256: str) -> str:
        """Name of a segment's file in the store, for people."""
        return self._store().where(sha256)

    def get(self, sha256: str) -> bytes | None:
        """Bytes of a segment, from wherever it is now; raise EvidenceError."""
        found = self._folder.get(sha256) if sha256 in self._kept else None
        return self._store().get(sha256) if found is None else found

    def put(self, sha256: str, data: bytes) -> None:
        """Give a segment to the store, or keep it here, durably, while that is out of reach.

        Raises SpoolError where neither can be, and EvidenceError as the place of segments does.
        """
        if not self._kept:
            try:
                self._store().put(sha256, data)
                return
            except EvidenceOutOfReach as error:
                self.cause = str(error)
        with self._lock:
            self._claim()
            try:
                self._folder.put(sha256, data)
                self._folder.settle()
            except EvidenceError as error:
                raise SpoolError(
                    f"expected to keep a segment at {self._folder.where(sha256)} while its store "
                    f"is out of reach, found: {error}; the record is not kept; make space there, "
                    "or name another folder"
                ) from error
            self._kept.add(sha256)
            self._brought.discard(sha256)

    def settle(self) -> None:
        """Make durable what the store was given; what is kept here is so already."""
        if self._place is not None:
            self._place.settle()

    def named(self, drafts: Iterable[Draft]) -> tuple[str, ...]:
        """Places in the store of those segments of drafts that are kept here."""
        if not self._kept:
            return ()
        segments = (getattr(draft.event, "segment", None) for draft in drafts)
        found = {s.sha256: None for s in segments if isinstance(s, Segment)}
        return tuple(self.where(sha256) for sha256 in found if sha256 in self._kept)

    def take_over(self, wheres: Iterable[str]) -> None:
        """Look after segments that a process which ended has kept for its records."""
        self._kept |= {_sha256(where) for where in wheres}

    def bring(self, wheres: Sequence[str]) -> list[str]:
        """Bring the segments of a record to the store; what is wrong with each that is lost.

        Raises EvidenceError where one could not be brought now: its record has to wait.
        """
        lost = []
        for where in wheres:
            sha256 = _sha256(where)
            if sha256 in self._brought:
                continue
            if self._place is None or self._place.where(sha256) != where:
                found = "none" if self._place is None else self._place.where(sha256)
                raise EvidenceError(
                    f"expected the place of evidence that records wait for, of {where}, "
                    f"found {found}; name it (--evidence, or SHIFTBOOK_EVIDENCE)"
                )
            fault = self._bring(sha256)
            if fault is not None:
                lost.append(fault)
        return lost

    def bring_all(self) -> None:
        """Bring what is kept and was named by no record yet; raise EvidenceError as ``bring``."""
        for sha256 in sorted(self._kept):
            self._bring(sha256)

    def _bring(self, sha256: str) -> str | None:
        data = self._folder.get(sha256)
        whole = data is not None and segment_sha256(data) == sha256
        if data is not None and whole:
            self._store().put(sha256, data)
            self._store().settle()
        elif self._in_store(sha256):  # brought by a process that ended, or by another writer
            whole = True
        with self._lock:
            self._kept.discard(sha256)
            if whole:
                self._brought.add(sha256)
                self._drop(sha256)
                return None
            return self._lose(sha256, data is not None)

    def _in_store(self, sha256: str) -> bool:
        stored = self._store().get(sha256)
        return stored is not None and segment_sha256(stored) == sha256

    def _drop(self, sha256: str) -> None:
        with contextlib.suppress(OSError):  # at worst it is removed with the folder
            (self._folder.folder / segment_name(sha256)).unlink(missing_ok=True)

    def _lose(self, sha256: str, damaged: bool) -> str:
        path = self._folder.folder / segment_name(sha256)
        if not damaged:
            return f"its segment {path} is gone, and {self.where(sha256)} is not there"
        kept = self._folder.folder.with_name(f"{path.name}{DAMAGED}")
        with contextlib.suppress(OSError):
            path.replace(kept)
        return f"its segment {path} is damaged, and {self.where(sha256)} is not there; see {kept}"

    def clear(self) -> None:
        """Remove the folder, under the lock: everything that was kept here is in the store."""
        self._brought.clear()
        folder = self._folder.folder
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()) if folder.is_dir() else ():
                if DRAFT.fullmatch(path.name) or path.name == segment_name(path.stem):
                    path.unlink()
            folder.rmdir()

    def _store(self) -> WritablePlace:
        if self._place is None:
            raise EvidenceError("expected a place of evidence, found none; name one (--evidence)")
        return self._place


def _sha256(where: str) -> str:
    return where.rsplit("/", 1)[-1].removesuffix(segment_name(""))


def refuse_wrong_place(place: SegmentPlace) -> None:
    """Raise EvidenceOutOfReach where a store lets us in nowhere: then it is no outage that ends.

    A store that does not answer is one, and is recorded through.
    """
    try:
        place.get(NO_SEGMENT)
    except EvidenceOutOfReach as error:
        if isinstance(error.__cause__, NoBucket | PermissionError):
            raise
