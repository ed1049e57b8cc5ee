"""The record of one weight sync: what was sent, what each engine read, how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.patch_format import Patch
from shiftbook.checkpoint.recorder_state import Part, part_root, value_digest
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.sync import (
    TargetOutcome,
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncFailed,
    WeightSyncStarted,
)

MAX_NAMED = 400
"""Tensors whose fingerprints stand in the event one by one; of more only their root does."""

MAX_NAMED_BYTES = 30_000
"""Of the names of these, which some wrappers make long."""


def _named(names: Sequence[str]) -> tuple[str, ...]:
    """The first names, as many as an event has room for."""
    ends = accumulate(len(name.encode("utf-8")) for name in names)
    return tuple(
        n for n, end in zip(names[:MAX_NAMED], ends, strict=False) if end <= MAX_NAMED_BYTES
    )


class SyncRecord:
    """Collects one sync; ``Recorder.sync`` makes it and writes it when its block ends."""

    def __init__(
        self,
        attempt: str,
        version: int,
        source: Part,
        targets: tuple[str, ...],
        encoding: str,
        epoch: int,
        patch: Patch | None = None,
    ) -> None:
        self._attempt, self._version, self._epoch = attempt, version, epoch
        self._targets, self._encoding = targets, encoding
        self._bytes = 0
        self._source: dict[str, str] = {}
        if isinstance(source, str):
            self._root = part_root(source)
        else:
            self._source = {name: value_digest(value) for name, value in source.items()}
            self._root = root(self._source)
            self._bytes = sum(int(getattr(value, "nbytes", 0)) for value in source.values())
        self._loss = None if patch is None else patch.loss
        self._expected = self._source
        if patch is not None and self._loss is not None:
            self._expected = patch.header.result_fingerprints
        self._delivered: list[WeightSyncDelivered] = []
        self._outcomes: dict[str, TargetOutcome] = {}
        self._flushed: set[str] = set()
        self._begun = time.perf_counter()

    def delivered(
        self,
        target: str,
        incarnation: str,
        resident: Part,
        *,
        caches_flushed: Sequence[str] = (),
        moved_bytes: int | None = None,
        fingerprint_of: Literal["resident", "handed_over"] = "resident",
    ) -> None:
        """One engine took the version: its tensors, by the source's names, as it reads them.

        Tied and fused tensors are handed in as the logical tensors that they stand for.
        """
        differing: tuple[str, ...] = ()
        if isinstance(resident, Mapping) and self._expected:
            held = {name: value_digest(value) for name, value in resident.items()}
            names = sorted(held.keys() | self._expected.keys())
            differing = tuple(n for n in names if held.get(n) != self._expected.get(n))
            found = root(held)
        else:
            found = part_root(resident)
        self._flushed.update(caches_flushed)
        self._delivered.append(
            WeightSyncDelivered(
                target=target,
                incarnation=incarnation,
                version=self._version,
                root=found,
                fingerprint_of=fingerprint_of,
                differing=_named(differing),
                moved_bytes=self._bytes if moved_bytes is None else moved_bytes,
                full_bytes=self._bytes,
                sync_s=time.perf_counter() - self._begun,
            )
        )
        self._outcomes[target] = TargetOutcome(target=target, outcome="serving")

    def failed(self, target: str, reason: str, *, lost: bool = False) -> None:
        """One engine did not take the version; it does not serve."""
        self._outcomes[target] = TargetOutcome(
            target=target, outcome="lost" if lost else "failed", reason=reason
        )

    def started(self) -> WeightSyncStarted:
        """The event that begins it."""
        return WeightSyncStarted(
            attempt=self._attempt,
            version=self._version,
            source=self._source if len(_named([*self._source])) == len(self._source) else {},
            source_root=self._root,
            encoding=self._encoding,
            targets=self._targets,
            epoch=self._epoch,
            lossy=self._loss,
        )

    def ended(self) -> Iterator[Event]:
        """Deliveries, and the event that ends it."""
        yield from self._delivered
        if not self._delivered:
            yield WeightSyncFailed(version=self._version, reason="no engine took the version")
            return
        for target in self._targets:
            silent = TargetOutcome(target=target, outcome="failed", reason="no delivery recorded")
            self._outcomes.setdefault(target, silent)
        yield WeightSyncCommitted(
            version=self._version,
            outcomes=tuple(self._outcomes[target] for target in self._targets),
            stall_s=time.perf_counter() - self._begun,
            caches_flushed=tuple(sorted(self._flushed)),
        )
