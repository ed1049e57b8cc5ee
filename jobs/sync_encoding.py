"""How a policy version goes to the engines: whole, or as a patch on the one before it.

Ray's object store carries either. The sender keeps the version that it put out last; an engine
keeps the last one that it verified, and a patch is applied to a copy of that, so whatever is
refused leaves the engine as it was. Patches are imported where they are made: their compiler must
not stand in a process before vLLM starts there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import PatchRefused, PatchUnencodable
from shiftbook.jobs.config import JobConfig
from shiftbook.scheduler.workers.transfer import fetch, offer

TRANSPORT = "ray"
"""What carries the job's syncs: Ray's object store."""


@dataclass(frozen=True)
class PatchOffer:
    """A patch in the object store, and the version that it stands on."""

    base_version: int
    base_root: str
    reference: Any
    bytes: int


@dataclass(frozen=True)
class _Sent:
    version: int
    weights: dict[str, Tensor]
    prints: dict[str, str]


class PatchSource:
    """Makes the patch from the version that was put out last to the next one.

    There is none at first, for every ``anchor_every``-th version, where it would be no shorter than
    the weights, and for weights that are no numbers: then they go whole.
    """

    def __init__(self, anchor_every: int) -> None:
        self._anchor_every = anchor_every
        self._sent: _Sent | None = None
        self._since_anchor = 0

    @classmethod
    def declared(cls, config: JobConfig) -> PatchSource | None:
        """As the job is configured; None where its syncs send whole weights."""
        return cls(config.anchor_every) if config.sync_encoding == "patch" else None

    def next(
        self, weights: Mapping[str, Tensor], version: int, prints: Mapping[str, str]
    ) -> PatchOffer | None:
        """The patch to ``weights``, whose fingerprints are ``prints``; None where they go whole.

        ``weights`` are kept until the next call and must not change until then.
        """
        from shiftbook.checkpoint.patch import encode_patch

        base, self._sent = self._sent, _Sent(version, dict(weights), dict(prints))
        self._since_anchor += 1
        if base is None or self._since_anchor >= self._anchor_every:
            self._since_anchor = 0
            return None
        try:
            data = encode_patch(
                base.weights,
                weights,
                base_version=base.version,
                version=version,
                base_fingerprints=base.prints,
            )
        except PatchUnencodable:
            return None  # the engine says what is wrong with such weights
        if len(data) >= sum(tensor.nbytes for tensor in weights.values()):
            return None
        return PatchOffer(base.version, root(base.prints), offer(data), len(data))


def patched(
    held: tuple[Mapping[str, Tensor], int] | None,
    patch: PatchOffer,
    accept_error: float | None = None,
) -> tuple[dict[str, Tensor], int]:
    """What a patch makes of the weights and version that an engine verified last, and its bytes.

    The weights are copied. ``accept_error`` is what the job declares that a patch may lose. Raises
    PatchRefused for another base and a larger loss, PatchDamaged for bytes that are no
    patch.
    """
    from shiftbook.checkpoint.patch import apply_patch

    if held is None:
        raise PatchRefused(
            f"expected an engine on version {patch.base_version}, found one without a version; "
            "send it the whole weights"
        )
    weights, version = held
    own = {name: tensor.clone() for name, tensor in weights.items()}
    data = bytes(fetch(patch.reference))
    apply_patch(data, own, version=version, accept_error=accept_error)
    return own, len(data)
