"""Serving with an engine: a version is taken as one operation, and nothing is sampled before it.

Taking a version is: pause (turns that run are kept with their partial tokens), load, fingerprint
what was loaded, flush the caches, probe, resume. Where any of it fails the engine goes back to the
last version that was verified, or serves nothing where there was none. What the engine reads at its
first generation after a load is read again there, since weights that arrived well are sometimes
overwritten before they are used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs.engine_types import Engine, TurnRequest, TurnResult
from shiftbook.jobs.errors import EngineError
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.probe import Gap, Probe, probe_prompts
from shiftbook.ledger.errors import ShiftbookError
from shiftbook.scheduler.errors import first_line

REFUSALS = (ShiftbookError, ValueError, KeyError, RuntimeError, AssertionError, OSError)
"""What engines of others raise for weights that do not fit, and senders that were lost."""
After = Literal["sync", "move", "start"]
FingerprintOf = Literal["resident", "handed_over"]
Encoding = Literal["whole", "patch"]


@dataclass
class Taken:
    """How it went to take a version."""

    version: int
    fingerprints: dict[str, str]
    """By declared name; empty where the load itself failed."""
    fingerprint_of: FingerprintOf = "resident"
    caches_flushed: tuple[str, ...] = ()
    gap: Gap | None = None
    """Of the probe; None where none was asked for, or the sync failed before it."""
    moved_bytes: int = 0
    encoding: Encoding = "whole"
    """How the version came here."""
    base_refused: str | None = None
    """Why a patch was not applied; the engine goes on as it was, and wants the whole weights."""
    sync_s: float = 0.0
    failure: str | None = None
    """Why the version is not served; None where it is."""
    rolled_back_to: int | None = None
    """Version that is served instead; None where none is."""

    def said(self) -> dict[str, Any]:
        """What a record says beside fingerprints and bytes."""
        return {
            "version": self.version,
            "fingerprint_of": self.fingerprint_of,
            "caches_flushed": self.caches_flushed,
            "gap": self.gap,
        }


class ServedEngine:
    """An engine that serves verified versions only; it keeps the last good weights in memory."""

    def __init__(self, engine: Engine, config: ModelConfig) -> None:
        self.engine = engine
        self._prompts = probe_prompts(config)
        self._good: tuple[Mapping[str, Tensor], int, Probe | None, dict[str, str]] | None = None
        """Weights, version, probe and fingerprints of what was verified last."""
        self._after: After | None = None
        """Set by a load, until the first generation after it."""
        self._first: dict[str, Any] | None = None

    @property
    def version(self) -> int:
        """The version that is served; -1 where none is."""
        return -1 if self._good is None else self._good[1]

    @property
    def held(self) -> tuple[Mapping[str, Tensor], int] | None:
        """Weights and version that were verified last; None where none were."""
        return None if self._good is None else self._good[:2]

    def take(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        probe: Probe | None = None,
        source: Mapping[str, str] | None = None,
        after: After = "sync",
        patch_bytes: int | None = None,
    ) -> Taken:
        """Pause, load, fingerprint, flush, probe, resume; a failure rolls back and is answered.

        ``source`` are the sender's fingerprints by declared name; what differs is a failure.
        ``patch_bytes`` is the length of the patch that ``weights`` were made by, if by one. Turns
        in hand go on afterwards, under whichever version is served; without one they are kept. One
        in hand that asks for another version refuses this one.
        """
        began_s = time.monotonic()
        kept = self.engine.drain()
        taken = Taken(version, {}, moved_bytes=sum(t.nbytes for t in weights.values()))
        if patch_bytes is not None:
            taken.encoding, taken.moved_bytes = "patch", patch_bytes
        bound = next((r for r in kept if r.version not in (None, version)), None)
        try:
            if bound is not None:
                raise EngineError(
                    f"turn {bound.turn} of {bound.uid} in hand asks for version {bound.version}"
                )
            self._load(weights, taken, probe, source)
        except REFUSALS as error:
            taken.failure = taken.failure or f"{type(error).__name__}: {first_line(error)}"
        if taken.failure is None:
            self._good = (dict(weights), version, probe, taken.fingerprints)
            self._after = after
        elif bound is not None:
            taken.rolled_back_to = None if self._good is None else self._good[1]
        else:
            taken.rolled_back_to = self._roll_back()
        for request in kept:
            self.engine.submit(request)
        taken.sync_s = time.monotonic() - began_s
        return taken

    def _load(
        self,
        weights: Mapping[str, Tensor],
        taken: Taken,
        probe: Probe | None,
        source: Mapping[str, str] | None,
    ) -> None:
        _check_numbers(weights)
        self.engine.load(weights, taken.version)
        taken.fingerprint_of, taken.fingerprints = self._read(weights)
        taken.caches_flushed = self.engine.flush()
        if source is not None:
            names = source.keys() | taken.fingerprints.keys()
            wrong = sorted(n for n in names if source.get(n) != taken.fingerprints.get(n))
            if wrong:
                taken.failure = f"differing: {', '.join(wrong[:4])}"
                return
        if probe is not None:
            taken.gap = gap = probe.compare(self.engine.probe(self._prompts))
            if not gap.good:
                taken.failure = (
                    f"probe: log-probabilities differ by {gap.mean:.2g} in the mean and "
                    f"{gap.largest:.2g} at most, expected {gap.tolerance:.2g}"
                )

    def _read(self, handed_over: Mapping[str, Tensor]) -> tuple[FingerprintOf, dict[str, str]]:
        resident = self.engine.resident()
        if resident is None:
            return "handed_over", fingerprint_tensors(dict(handed_over))
        return "resident", fingerprint_tensors(resident)

    def _roll_back(self) -> int | None:
        """Load the last good version again and verify it as it was then; None, and nothing is
        served, where that fails too."""
        good, self._good = self._good, None
        if good is None:
            return None
        weights, version, probe, prints = good
        again = Taken(version, {})
        try:
            self._load(weights, again, probe, prints)
        except REFUSALS as error:
            again.failure = first_line(error)
        if again.failure is not None:
            return None
        self._good = good
        return version

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn; it runs under verified weights only.

        Raises ``EngineError`` where another version is served than the turn asks for: an engine
        that a sync has missed must not generate for the iteration after it.
        """
        if request.version not in (None, self.version):
            raise EngineError(
                f"turn {request.turn} of {request.uid}: expected policy version {request.version}, "
                f"found {self.version} served; sync the engine first"
            )
        self.engine.submit(request)

    def step(self) -> list[TurnResult]:
        """One decode step; raises ``EngineError`` where no version was verified.

        The first one after a load reads the weights as they are now.
        """
        if self._good is None:
            raise EngineError(
                "expected a verified policy version, found none; let the engine take one first"
            )
        if self._after is not None and (self.engine.running or self.engine.waiting):
            self._look(self._after)
            self._after = None
        return self.engine.step()

    def _look(self, after: After) -> None:
        assert self._good is not None
        weights, version, probe, _ = self._good
        of, prints = self._read(weights)
        first: dict[str, Any] = {"after": after, "use": "generation", "version": version}
        # What was handed over says nothing about what is read now; behaviour does.
        first["parts"] = {"model": root(prints)} if of == "resident" else {}
        if of == "handed_over" and probe is not None:
            kept = self.engine.drain()
            first["gap"] = probe.compare(self.engine.probe(self._prompts))
            for request in kept:
                self.engine.submit(request)
        self._first = first

    def first_use(self) -> dict[str, Any] | None:
        """What was read at the first generation after a load, once; None otherwise."""
        first, self._first = self._first, None
        return first

    def drain(self) -> list[TurnRequest]:
        """Hand over all turns."""
        return self.engine.drain()

    def unload(self) -> None:
        """Hold no policy; the engine owes nothing when it is called."""
        self._good = self._after = self._first = None
        self.engine.unload()


def _check_numbers(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that are no numbers, before they are written: what an engine caches under
    them is none either, and some kernels multiply it by zero long after the cache was flushed."""
    wrong = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if wrong:
        raise EngineError(
            f"expected finite weights, found others in {', '.join(wrong[:4])}; look at the update"
        )
