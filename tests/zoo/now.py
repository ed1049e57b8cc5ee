"""Where a run of the zoo stands: what a fault looks at to know whether it is its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Now:
    """The present iteration and process life; ``notes`` is room for what a fault remembers."""

    iteration: int = 0
    life: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Before a run."""
        self.iteration, self.life = 0, 0
        self.notes.clear()


NOW = Now()
"""Of the one run that this process makes at a time."""
