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
        self._roots: dict[int, dict[str, bool]] = {}
        """By version and root: whether who took that version whole holds it as well."""

    def take(self, event: Event) -> None:
        """Note what a sync says; other events say nothing."""
        if isinstance(event, WeightSyncStarted) and event.lossy is not None:
            roots = self._roots.setdefault(event.version, {})
            whole = event.lossy.whole == "decoded"
            roots[event.lossy.root] = whole or roots.get(event.lossy.root, False)
            if len(self._roots) > WINDOW:
                del self._roots[min(self._roots)]

    def explain(self, event: StateFirstUsed) -> bool:
        """True where an engine reads what a lossy sync of its version leads to: after a sync, and
        wherever it was brought up where that is what whole weights are."""
        whole = self._roots.get(event.policy_version, {}).get(event.parts.get(MODEL, ""))
        return whole is True or (event.after == "sync" and whole is not None)
