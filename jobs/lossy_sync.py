"""The sender of a job whose weight syncs may lose something: what engines hold is state of its own.

Each version is coded against what engines hold of the one before, so what was left over then is
part of the difference now. All engines hold the coded version, also those that take it whole. It
follows from the trainer's versions alone, whatever moved meanwhile; a bundle has it as the part
``served``, and a job that goes on from there goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import PatchUnencodable
from shiftbook.jobs.config import JobConfig
from shiftbook.jobs.errors import JobError
from shiftbook.ledger.events.sync import SyncLoss

PART = "served"
"""The part of a bundle that holds what engines hold."""


@dataclass(frozen=True)
class Coded:
    """A version as engines hold it, and the patch that leads there."""

    version: int
    served: dict[str, Tensor]
    prints: dict[str, str]
    largest_error: float
    """Of an element, from the trainer's."""
    base: tuple[int, str] | None = None
    """Version and root that the patch stands on; None where there is none."""
    patch: bytes | None = None

    @property
    def root(self) -> str:
        """Over its fingerprints."""
        return root(self.prints)


class LossySource:
    """Codes one version after the other. ``begin`` comes first; versions go up by one."""

    def __init__(self, max_error: float, anchor_every: int) -> None:
        self._max_error, self._anchor_every = max_error, anchor_every
        self._held: Coded | None = None
        self._next: Coded | None = None

    @classmethod
    def declared(cls, config: JobConfig) -> LossySource | None:
        """As the job is configured; None where its syncs lose nothing."""
        if config.sync_encoding != "lossy" or config.max_error is None:
            return None
        return cls(config.max_error, config.anchor_every)

    @property
    def held(self) -> Coded:
        """What engines hold, or are to hold, of the version that was settled last."""
        if self._held is None:
            raise JobError("expected a version that engines hold, found none; begin with one")
        return self._held

    def begin(
        self, weights: Mapping[str, Tensor], version: int, served: Mapping[str, Tensor]
    ) -> None:
        """Start from what a bundle says that engines hold, beside the trainer's own weights."""
        from shiftbook.checkpoint.fingerprint import fingerprint_tensors

        kept = {name: served[name].clone() for name in weights}
        error = _furthest(weights, kept)
        self._held = Coded(version, kept, fingerprint_tensors(kept), error)
        self._next = None

    def code(self, weights: Mapping[str, Tensor], version: int) -> Coded:
        """The next version as engines will hold it; called again, it begins again.

        Every ``anchor_every``-th version loses nothing and goes whole; so does one whose patch
        would be no shorter than the weights, or which holds what is no number.
        """
        from shiftbook.checkpoint.fingerprint import fingerprint_tensors
        from shiftbook.checkpoint.patch import Lossy, apply_patch, encode_patch

        base = self.held
        if version != base.version + 1:
            raise JobError(f"expected version {base.version + 1} after it, found {version}")
        data = None
        if version % self._anchor_every:
            try:
                data = encode_patch(
                    base.served,
                    weights,
                    base_version=base.version,
                    version=version,
                    base_fingerprints=base.prints,
                    lossy=Lossy(max_error=self._max_error),
                )
            except PatchUnencodable:
                data = None  # the engine says what is wrong with such weights
        if data is None or len(data) >= sum(tensor.nbytes for tensor in weights.values()):
            own = {name: tensor.clone() for name, tensor in weights.items()}
            self._next = Coded(version, own, fingerprint_tensors(own), 0.0)
            return self._next
        own = {name: tensor.clone() for name, tensor in base.served.items()}
        done = apply_patch(data, own, version=base.version, accept_error=self._max_error)
        self._next = Coded(
            version,
            own,
            done.fingerprints,
            _furthest(weights, own),
            (base.version, base.root),
            data,
        )
        return self._next

    def settle(self, weights: Mapping[str, Tensor], version: int) -> Coded:
        """Take the version that was coded as the one that engines hold from now on."""
        following = self._next
        if following is None or following.version != version:
            following = self.code(weights, version)
        self._held, self._next = following, None
        return following

    def root_of(self, version: int) -> str | None:
        """Root of what engines hold of a version; None where that is not known here."""
        known = (one for one in (self._held, self._next) if one is not None)
        return next((one.root for one in known if one.version == version), None)

    def loss(self, coded: Coded) -> SyncLoss | None:
        """What a sync of a coded version says of its loss; None where there is none."""
        if coded.largest_error == 0:
            return None
        return SyncLoss(
            encoding="int8-difference",
            max_error=self._max_error,
            largest_error=coded.largest_error,
            root=coded.root,
            whole="decoded",
        )


def _furthest(one: Mapping[str, Tensor], other: Mapping[str, Any]) -> float:
    """The largest distance of two elements."""
    return max(
        (float((one[n].double() - other[n].double()).abs().max()) for n in one if one[n].numel()),
        default=0.0,
    )
