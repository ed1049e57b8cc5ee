"""Records of engines: processes, weight syncs, first uses, and log-probabilities said again."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.patch_format import Patch
from shiftbook.checkpoint.recorder_book import Book, Held
from shiftbook.checkpoint.recorder_state import Part, State, roots
from shiftbook.checkpoint.recorder_sync import SyncRecord
from shiftbook.ledger.events.life import ReplicaLost, ReplicaStarted
from shiftbook.ledger.events.probes import LogProbsReplayed
from shiftbook.ledger.events.state import StateFirstUsed


class EngineRecords(Book):
    """Which processes served, and what they held and said."""

    def started(self, component: str, replica: str, incarnation: str) -> None:
        """A process serves a replica; a new incarnation serves nothing before its first sync."""
        self._add(
            ReplicaStarted(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=incarnation,
                devices=(),
                pid=os.getpid(),
                node=platform.node(),
            )
        )

    def lost(self, component: str, replica: str, incarnation: str, cause: str) -> None:
        """A replica's process is gone."""
        self._add(
            ReplicaLost(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=incarnation,
                cause=cause,
            )
        )

    def moment(self) -> int:
        """Now, for ``Generated``: counts the begins and ends of this recorder's weight syncs."""
        return self._moment

    @contextmanager
    def sync(
        self,
        version: int,
        source: Part,
        targets: Sequence[str],
        *,
        encoding: str = "full",
        patch: Patch | None = None,
    ) -> Iterator[SyncRecord]:
        """Around one weight sync of ``version``; call ``delivered`` for each engine.

        ``patch`` is what goes out, as ``read_patch`` gives it. Of a lossy one the bound and the
        largest error are recorded, which the plan must declare, and deliveries are compared with
        the tensors that it leads to.
        """
        self._syncs += 1
        self._moment += 1
        operation = f"sync-{self.attempt}-{self._syncs}"
        record = SyncRecord(
            self.attempt, version, source, tuple(targets), encoding, self._epoch, patch
        )
        self._add(record.started(), operation)
        try:
            yield record
        finally:
            self._moment += 1
            self._add_all([Held(event, operation) for event in record.ended()])

    def first_use(
        self,
        component: str,
        replica: str,
        incarnation: str,
        state: State,
        *,
        version: int,
        use: str,
        after: Literal["restore", "sync", "move", "start"] = "sync",
    ) -> None:
        """State as its consumer read it, at its first use after a load; ``model`` is the policy."""
        parts = roots(state)
        self._first_used(component, replica, incarnation, after, use, parts, version)

    def _first_used(
        self,
        component: str,
        replica: str,
        incarnation: str,
        after: Literal["restore", "sync", "move", "start"],
        use: str,
        parts: dict[str, str],
        version: int | None = None,
    ) -> None:
        self._add(
            StateFirstUsed(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=incarnation,
                after=after,
                use=use,
                policy_version=self._policy[0] if version is None else version,
                parts=parts,
            )
        )

    def replayed(
        self,
        iteration: int,
        what: Literal["behaviour", "reference", "proximal"],
        used: Any,
        replayed: Any,
        *,
        replica: str,
        version: int,
        samples: int = 1,
        other_tokens: int = 0,
        calibrating: bool = False,
    ) -> None:
        """Log-probabilities as used, and as other code gives them under the stamped version.

        ``other_tokens`` counts tokens that the declared randomness would have drawn otherwise:
        ``drawn_otherwise`` says it for one token.
        """
        import numpy as np

        a, b = (np.asarray(v, dtype=np.float64).reshape(-1) for v in (used, replayed))
        if a.shape != b.shape:
            raise RecorderMisuse(
                f"expected as many replayed log-probabilities as used ones, found {b.size} and "
                f"{a.size}; compare the same tokens"
            )
        gaps = np.abs(a - b)
        self._add(
            LogProbsReplayed(
                attempt=self.attempt,
                iteration=iteration,
                what=what,
                replica=replica,
                version=version,
                samples=samples,
                tokens=a.size,
                mean_gap=float(gaps.mean()) if a.size else 0.0,
                largest_gap=float(gaps.max()) if a.size else 0.0,
                other_tokens=other_tokens,
                calibrating=calibrating,
            )
        )
