"""Finds the pipeline in the channels' traffic and says when it is not the declared one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shiftbook.ledger.events.job import Edge
from shiftbook.ledger.events.observation import PipelineObserved

STALE_AFTER_S = 5.0
"""For how long the traffic must differ from the declaration before moves freeze."""

SILENT_AFTER_S = 60.0
"""For how long a declared edge must be silent, while others carry work, to count as gone."""

FOUND_BY = "work answered by channel"


class PipelineGraph:
    """Declared components and edges beside those that carry work."""

    def __init__(
        self,
        components: Iterable[str],
        edges: Iterable[Edge],
        *,
        stale_after_s: float = STALE_AFTER_S,
        silent_after_s: float = SILENT_AFTER_S,
    ) -> None:
        self.components = tuple(components)
        self.declared = frozenset((edge.source, edge.target) for edge in edges)
        self.stale_after_s = stale_after_s
        self.silent_after_s = silent_after_s
        self._counts: dict[tuple[str, str], int] = {}
        self._last_s: dict[tuple[str, str], float] = {}
        self._started_s: float | None = None
        self._differs_since_s: float | None = None
        self._now_s = 0.0

    def observe(self, traffic: Mapping[tuple[str, str], int], now_s: float) -> None:
        """Take cumulative counts of work by (source, target); a count that falls starts anew."""
        self._now_s = max(self._now_s, now_s)
        for edge, count in traffic.items():
            if count != self._counts.get(edge, 0) and count > 0:
                self._last_s[edge] = self._now_s
                if self._started_s is None:
                    self._started_s = self._now_s
            self._counts[edge] = count
        if not (self.undeclared or self.silent):
            self._differs_since_s = None
        elif self._differs_since_s is None:
            self._differs_since_s = self._now_s

    @property
    def found(self) -> frozenset[tuple[str, str]]:
        """Edges that carried work within the silence limit."""
        return frozenset(
            edge for edge, at in self._last_s.items() if self._now_s - at <= self.silent_after_s
        )

    @property
    def undeclared(self) -> frozenset[tuple[str, str]]:
        """Edges that carry work and were not declared."""
        return self.found - self.declared

    @property
    def silent(self) -> frozenset[tuple[str, str]]:
        """Declared edges without work for longer than the limit while others carried some."""
        if self._started_s is None or not self.found:
            return frozenset()
        since = self._started_s
        return frozenset(
            edge
            for edge in self.declared
            if self._now_s - self._last_s.get(edge, since) > self.silent_after_s
        )

    @property
    def stale(self) -> bool:
        """True once the traffic has differed from the declaration for longer than the threshold."""
        since = self._differs_since_s
        return since is not None and self._now_s - since > self.stale_after_s

    def difference(self) -> str:
        """What differs, in words; empty where nothing does."""
        parts = [f"{a} → {b} carries work and is not declared" for a, b in sorted(self.undeclared)]
        parts += [
            f"{a} → {b} is declared and silent for {self.silent_after_s:g} s"
            for a, b in sorted(self.silent)
        ]
        return "; ".join(parts)

    def event(self) -> PipelineObserved:
        """The pipeline as an event: the components and edges that carried work."""
        found = sorted(self.found)
        seen = {name for edge in found for name in edge}
        named = [*self.components, *sorted(seen - set(self.components))]
        return PipelineObserved(
            components=tuple(name for name in named if name in seen),
            edges=tuple(Edge(source=a, target=b) for a, b in found),
            found_by=FOUND_BY,
            matches_declared=not (self.undeclared or self.silent),
        )
