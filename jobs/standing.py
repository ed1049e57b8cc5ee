"""Where an attempt stands: its grant, topology, weights and bundle, and what replicas load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.bundle import restore_bundle
from shiftbook.jobs.lossy_sync import PART, Coded, LossySource
from shiftbook.jobs.model import ModelConfig, parameter_shapes
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.published import Published
from shiftbook.jobs.start import Start
from shiftbook.jobs.sync_encoding import PatchSource
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.topology import Topology


class Standing:
    """The present state of one attempt; written by the training and by whoever moves or repairs.

    What has no value yet when this is made is set as the attempt starts.
    """

    grant: Grant
    """The attempt's standing grant."""
    topology: Topology
    version: int
    """Policy version that the trainer holds."""
    bundle: str
    bundle_path: str | None
    saved: CheckpointSaved
    """Event of the last bundle."""

    def __init__(
        self,
        base_policy: Path,
        tolerance: float | None = None,
        patches: PatchSource | None = None,
        lossy: LossySource | None = None,
    ) -> None:
        self._lossy = lossy
        self._base_policy, self._tolerance, self._patches = base_policy, tolerance, patches
        self.published: Published | None = None
        self.reference_prints: dict[str, str] = {}
        """Of the reference policy, as inference read it."""
        self.stalls: dict[str, float] = {}
        """Seconds that components stood still in the present iteration."""
        self.moves = 0
        """Moves committed in the present iteration."""
        self._store: Any = None

    @property
    def attempt(self) -> str | None:
        """Name of the attempt; None until it is granted."""
        grant = getattr(self, "grant", None)
        return grant.operation if grant is not None else None

    @property
    def last_published(self) -> Published:
        """The weights that were published last; there are some from the start of an attempt."""
        assert self.published is not None
        return self.published

    def publish(self, start: Start) -> None:
        """Put out the weights of the version that the attempt starts with."""
        served = None
        if start.path is None:
            weights = load_policy(self._base_policy)
        else:
            parts = ["model"] if self._lossy is None else ["model", PART]
            stored = restore_bundle(start.path, parts)
            weights = {name: stored["model"][name] for name in parameter_shapes(ModelConfig())}
            served = stored.get(PART)
        if self._lossy is None:
            self.put_out(weights, start.version)
            return
        self._lossy.begin(weights, start.version, served or weights)
        self._publish_coded(weights, self._lossy, self._lossy.held)

    def served_next(self, weights: Mapping[str, Any], version: int) -> dict[str, Any] | None:
        """What engines will hold of the next version, where that is state of its own."""
        return None if self._lossy is None else self._lossy.code(weights, version).served

    def served_root(self, version: int) -> str | None:
        """Root of what engines hold of a version, where that is state of its own."""
        return None if self._lossy is None else self._lossy.root_of(version)

    def put_out(self, weights: Mapping[str, Any], version: int) -> Published:
        """Publish the weights of a version."""
        if self._lossy is not None:
            coded = self._lossy.settle(weights, version)
            return self._publish_coded(weights, self._lossy, coded)
        self.published = Published.of(weights, version, self._tolerance, self._patches)
        return self.published

    def _publish_coded(
        self, weights: Mapping[str, Any], lossy: LossySource, coded: Coded
    ) -> Published:
        self.published = Published.coded(weights, coded, lossy.loss(coded), self._tolerance)
        return self.published

    def take_saved(self, saved: CheckpointSaved) -> None:
        """A bundle is the last one from now on."""
        self.saved = saved
        self.bundle, self.bundle_path = saved.bundle, saved.path

    def payload(self, component: str) -> dict[str, Any]:
        """What a replica of a component is restored from."""
        if component == "rollout":
            return self.last_published.offered()
        if component == "trainer":
            parts = self.saved.parts  # a bundle stands before anything is brought up
            return {
                "store": self._rendezvous(),
                "bundle": self.bundle_path,
                "fingerprints": {n: v for n, v in parts.items() if n not in ("reference", PART)},
            }
        if component == "inference":
            return {"fingerprints": self.reference_prints}
        return {}

    def _rendezvous(self) -> tuple[str, int]:
        """The lasting rendezvous of the trainer's groups lives here, outside of its ranks."""
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return "127.0.0.1", int(self._store.port)

    def begin_iteration(self) -> None:
        """Count moves and stalls from zero."""
        self.stalls, self.moves = {}, 0

    def add_stalls(self, stalls: Mapping[str, float]) -> None:
        """Add seconds, by component."""
        for component, stall_s in stalls.items():
            self.stalls[component] = self.stalls.get(component, 0.0) + stall_s
