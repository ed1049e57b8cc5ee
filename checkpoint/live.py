"""The live snapshot: a training state that a trainer's move carries in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shiftbook.checkpoint.compare import FingerprintMap, root
from shiftbook.checkpoint.errors import LiveSnapshotDamaged
from shiftbook.checkpoint.fingerprint import fingerprint_tensors

_ACCUMULATORS = "accumulators"


@dataclass(frozen=True)
class LiveSnapshot:
    """The parts of a bundle and the half-done update, with fingerprints taken at the source.

    `tensors` holds tensors by part and name; `accumulators` whatever GradientAccumulator.snapshot()
    gave (nested dicts and sequences with tensors in them); `uids` the samples whose gradients are
    in the accumulators; `rng` generator states as hex by owner. `fingerprints` holds 32 hex digits
    by `part/name`, the accumulators' tensors under `accumulators/<path>`.
    """

    policy_version: int
    iteration: int
    tensors: Mapping[str, Mapping[str, Any]]
    accumulators: Mapping[str, Any] = field(default_factory=dict)
    uids: tuple[str, ...] = ()
    rng: Mapping[str, str] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def take(
        cls,
        *,
        policy_version: int,
        iteration: int,
        tensors: Mapping[str, Mapping[str, Any]],
        accumulators: Mapping[str, Any] | None = None,
        uids: tuple[str, ...] = (),
        rng: Mapping[str, str] | None = None,
    ) -> LiveSnapshot:
        """Make a snapshot of tensors as they are now; nothing is copied.

        The caller keeps the tensors unchanged until the receiver has checked them.
        """
        bare = cls(policy_version, iteration, tensors, accumulators or {}, uids, rng or {})
        fingerprints = fingerprint_tensors(dict(bare.named_tensors()))
        return cls(
            policy_version, iteration, tensors, bare.accumulators, uids, bare.rng, fingerprints
        )

    def named_tensors(self) -> Iterator[tuple[str, Any]]:
        """Each tensor with its name, `part/name`."""
        for part, members in self.tensors.items():
            for name, tensor in members.items():
                yield f"{part}/{name}", tensor
        yield from _walk(_ACCUMULATORS, self.accumulators)

    @property
    def nbytes(self) -> int:
        """Bytes of state that a move of this snapshot transfers: tensors and generator states."""
        tensors = sum(int(tensor.nbytes) for _, tensor in self.named_tensors())
        return tensors + sum(len(state) // 2 for state in self.rng.values())

    @property
    def root(self) -> str:
        """One digest of all fingerprints; 32 hex digits."""
        return root(self.fingerprints)

    def part_roots(self) -> dict[str, str]:
        """Root fingerprint of each part, accumulators included where there are some."""
        by_part: dict[str, dict[str, str]] = {}
        for name, value in self.fingerprints.items():
            part, _, member = name.partition("/")
            by_part.setdefault(part, {})[member] = value
        return {part: root(members) for part, members in by_part.items()}

    def check(self) -> None:
        """Recompute all fingerprints; LiveSnapshotDamaged names the first tensor that differs."""
        found = fingerprint_tensors(dict(self.named_tensors()))
        difference = FingerprintMap(self.fingerprints).compare(found)
        if difference.equal:
            return
        first = (difference.changed + difference.missing + difference.extra)[0]
        raise LiveSnapshotDamaged(
            f"live snapshot of policy version {self.policy_version}: tensor {first}: expected "
            f"{self.fingerprints.get(first, 'no such tensor')}, found "
            f"{found.get(first, 'no such tensor')} ({difference.describe()}); transfer it again, "
            "the source still holds its state",
            tensor=first,
        )


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and arrays inside nested containers, each with its path."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _walk(f"{path}/{key}", member)
    elif isinstance(value, list | tuple):
        for position, member in enumerate(value):
            yield from _walk(f"{path}/{position}", member)
    elif hasattr(value, "nbytes") and hasattr(value, "shape"):
        yield path, value
