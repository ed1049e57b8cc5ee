"""What a component must offer to be hosted, moved and observed."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Layout:
    """Where a replica stands in its component: its rank among ``world`` replicas, and for which
    generation of the group it was placed (an operation id, so that no two ever meet)."""

    rank: int
    world: int
    generation: str


@dataclass
class Loaded:
    """What a replica holds after a load, as it reads it."""

    fingerprints: dict[str, str]
    """By part, or ``part/name``: 32 hex digits."""
    moved_bytes: int
    """Bytes that came from elsewhere."""
    parts: dict[str, int] = field(default_factory=dict)
    """Those bytes by what they were."""
    said: dict[str, Any] = field(default_factory=dict)
    """What else the component has to say of the load, for its job's record."""


@dataclass
class Drained:
    """What a replica hands over when it stops."""

    items: list[tuple[Hashable, Any]]
    partial_tokens: int = 0
    replay_tokens: int = 0
    """Tokens whose KV is lost, so that the receiver computes them again."""
    moved_bytes: int = 0


@dataclass
class Answer:
    """A finished piece of work."""

    key: Hashable
    value: Any
    ended_s: float = 0.0
    """Monotonic clock of the machine."""


@dataclass
class Parcel:
    """What a worker sends to its job at once: answers, figures, and how much work it can take."""

    component: str
    worker: tuple[str, str]
    answers: list[Answer]
    figures: dict[str, Any]
    first_use: dict[str, Any] | None
    limit: int
    lanes: list[int] | None


class Component(Protocol):
    """A component's replica inside its process; one thread calls it at a time."""

    lanes: Collection[int] | None
    """Which parts of its channel this replica takes; None for all."""
    urgent: bool
    """True where it goes first on a device that it shares."""

    def prepare(self, layout: Layout, payload: dict[str, Any]) -> Loaded:
        """Build the state for a layout beside the present one, which stays as it is."""

    def activate(self) -> None:
        """Make what was prepared the present state."""

    def discard(self) -> None:
        """Forget what was prepared."""

    def drop(self) -> None:
        """Hold nothing: no weights, no KV, no optimizer state."""

    def snapshot(self) -> dict[str, Any]:
        """State that another replica needs to take over; this one keeps its own."""

    def drain(self) -> Drained:
        """Give up all work in hand."""

    def submit(self, key: Hashable, item: Any) -> None:
        """Take a piece of work."""

    def step(self) -> list[Answer]:
        """Do one unit of work; empty when nothing ended in it."""

    def has_work(self) -> bool:
        """True when a step would do something now."""

    def room(self) -> int:
        """Pieces that it would take now."""

    def hungry(self) -> bool:
        """True when it will soon have nothing to do, so that work should be asked for now."""

    def linger_s(self) -> float:
        """Seconds that an answer may wait for others to leave with it."""

    def wake_after_s(self) -> float | None:
        """Seconds until work in hand becomes due; None when there is none."""

    def resident_bytes(self) -> int:
        """Bytes of weights, KV, optimizer state and gradients held now."""

    def load(self) -> dict[str, float]:
        """Figures for telemetry: running, waiting, kv_use, prefix_hit_rate, tokens."""

    def first_use(self) -> dict[str, Any] | None:
        """Fingerprints of state as it was first used after a load, once; None otherwise."""

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """A method of this component's own, such as a trainer's update."""

    def close(self) -> None:
        """End helpers such as child processes."""
