"""What engines hold after lossy syncs: by version, the root that each sync says it leads to."""

from __future__ import annotations

from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.state import StateFirstUsed
from shiftbook.ledger.events.sync import WeightSyncStarted
from shiftbook.verify.lineage import MODEL, WINDOW


class LossyRoots:
    """Roots of the last versions that went out with a loss.

    Whether a loss was declared is judged where the sync begins (I6); the root is a version's other
    face, and reading it in an engine is no second policy.
    """

    def __init__(self) -> None:
        self._roots: dict[int, set[str]] = {}

    def take(self, event: Event) -> None:
        """Note what a sync says; other events say nothing."""
        if isinstance(event, WeightSyncStarted) and event.lossy is not None:
            self._roots.setdefault(event.version, set()).add(event.lossy.root)
            if len(self._roots) > WINDOW:
                del self._roots[min(self._roots)]

    def explain(self, event: StateFirstUsed) -> bool:
        """True where an engine reads, after a sync, what a lossy one of its version leads to."""
        roots = self._roots.get(event.policy_version, ())
        return event.after == "sync" and event.parts.get(MODEL) in roots
