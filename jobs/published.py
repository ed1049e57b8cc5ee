"""A policy version as it is sent to engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs.config import SyncEncoding
from shiftbook.jobs.lossy_sync import Coded
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.probe import TOLERANCE, Probe, expected_logps
from shiftbook.jobs.sync_encoding import PatchOffer, PatchSource
from shiftbook.ledger.events.sync import SyncLoss
from shiftbook.scheduler.workers.transfer import offer


@dataclass(frozen=True)
class Published:
    """A policy version as it is sent: bfloat16 tensors in the object store, and fingerprints.

    ``source`` are the fingerprints of the trainer's weights, which are others where a sync may lose
    something (``loss``); all engines then hold what is sent. ``probe`` is what an engine must say
    under it, by the training side's own forward. ``patch`` leads to it from the version before;
    None where it goes whole to everybody.
    """

    version: int
    reference: Any
    prints: dict[str, str]
    root: str
    bytes: int
    probe: Probe
    patch: PatchOffer | None = None
    source: dict[str, str] = field(default_factory=dict)
    """Empty where it is what is sent."""
    loss: SyncLoss | None = None

    @property
    def source_prints(self) -> dict[str, str]:
        """Of the trainer's weights."""
        return self.source or self.prints

    @classmethod
    def of(
        cls,
        weights: Mapping[str, Any],
        version: int,
        tolerance: float | None = None,
        patches: PatchSource | None = None,
    ) -> Published:
        """Fingerprint at the source and put into the object store of the loop's node."""
        prints = fingerprint_tensors(weights)
        size = sum(t.nbytes for t in weights.values())
        probe = Probe(expected_logps(weights, ModelConfig()), tolerance or TOLERANCE)
        patch = None if patches is None else patches.next(weights, version, prints)
        return cls(version, offer(dict(weights)), prints, root(prints), size, probe, patch)

    @classmethod
    def coded(
        cls,
        weights: Mapping[str, Any],
        coded: Coded,
        loss: SyncLoss | None,
        tolerance: float | None = None,
    ) -> Published:
        """As `of`, of a version that engines hold as it was coded."""
        patch = None
        if coded.patch is not None and coded.base is not None:
            patch = PatchOffer(*coded.base, offer(coded.patch), len(coded.patch))
        return cls(
            coded.version,
            offer(coded.served),
            coded.prints,
            coded.root,
            sum(tensor.nbytes for tensor in coded.served.values()),
            Probe(expected_logps(coded.served, ModelConfig()), tolerance or TOLERANCE),
            patch,
            fingerprint_tensors(weights),
            loss,
        )

    def offered(self, encoding: SyncEncoding = "full") -> dict[str, Any]:
        """What an engine takes the version from: the weights, or the patch."""
        sent = {"weights": self.reference} if encoding == "full" else {"patch": self.patch}
        return sent | {
            "version": self.version,
            "fingerprints": {f"model/{k}": v for k, v in self.prints.items()},
            "probe": self.probe,
        }
