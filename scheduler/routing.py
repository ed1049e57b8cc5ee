"""The order in which waiting turns get lanes: episodes near their end first, none for ever last."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shiftbook.scheduler.errors import RequestError

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

AGEING_S = 2.0
"""Seconds of waiting that weigh as much as one completed tool call."""

MAX_WAIT_S = 10.0
"""Seconds after which a request goes before all younger ones, whatever they have completed."""

HALF_CACHE_TOKENS = 256
"""Cached tokens that weigh half a completed tool call; no number of them weighs a whole one."""


def urgency(tool_calls_done: int, cached_tokens: int, arrived_s: float, ageing_s: float) -> float:
    """Rank of a waiting request, lower first; the order of two requests never changes with time.

    Completed tool calls count first and the cached prefix decides between equals, as in DynaRL
    (OSDI 2026); each ``ageing_s`` seconds of waiting count as one more call. The wait of all
    requests grows alike, so ranks by the time of arrival order them for good.
    """
    cached = cached_tokens / (cached_tokens + HALF_CACHE_TOKENS)
    return arrived_s / ageing_s - tool_calls_done - cached


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Key, Item]):
    key: Key
    item: Item
    arrived_s: float
    ticket: int


class TurnQueue(Generic[Key, Item]):
    """Requests that wait for a lane, most urgent first. Not thread-safe: its owner locks it.

    ``put``, ``take`` (per item) and ``remove`` are O(log n) amortised: entries that left by another
    way are skipped when they surface.
    """

    def __init__(self, *, ageing_s: float = AGEING_S, max_wait_s: float = MAX_WAIT_S) -> None:
        if ageing_s <= 0 or max_wait_s <= 0:
            raise RequestError(
                f"expected ageing_s and max_wait_s above 0, found {ageing_s} and {max_wait_s}"
            )
        self.ageing_s = ageing_s
        self.max_wait_s = max_wait_s
        self._entries: dict[Key, _Entry[Key, Item]] = {}
        self._by_urgency: list[tuple[float, int, Key]] = []
        self._by_arrival: list[tuple[float, int, Key]] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def put(
        self, key: Key, item: Item, *, tool_calls_done: int, cached_tokens: int, now_s: float
    ) -> None:
        """Add a request.

        ``now_s`` is when its wait began: a request that a replica handed back keeps its first
        arrival. Raises RequestError when the key waits already, or a number is negative.
        """
        if key in self._entries:
            raise RequestError(
                f"request {key!r} waits already; remove it before it is put again, "
                "or it would be answered twice"
            )
        if tool_calls_done < 0 or cached_tokens < 0 or not math.isfinite(now_s):
            raise RequestError(
                f"request {key!r}: expected counts of at least 0 and a finite time, found "
                f"{tool_calls_done} calls, {cached_tokens} cached tokens, {now_s} s"
            )
        ticket = self._tickets
        self._tickets += 1
        self._entries[key] = _Entry(key, item, now_s, ticket)
        rank = urgency(tool_calls_done, cached_tokens, now_s, self.ageing_s)
        heapq.heappush(self._by_urgency, (rank, ticket, key))
        heapq.heappush(self._by_arrival, (now_s, ticket, key))

    def take(self, n: int, now_s: float) -> list[tuple[Key, Item]]:
        """Remove and return up to ``n`` requests: the overdue by arrival, then the most urgent."""
        taken: list[tuple[Key, Item]] = []
        while len(taken) < n and self._entries:
            overdue = self.oldest_wait_s(now_s) > self.max_wait_s
            entry = self._surface(self._by_arrival if overdue else self._by_urgency)
            assert entry is not None
            del self._entries[entry.key]
            taken.append((entry.key, entry.item))
        self._shed()
        return taken

    def remove(self, key: Key) -> Item:
        """Withdraw a waiting request and return its item; raise RequestError where none waits."""
        entry = self._entries.pop(key, None)
        if entry is None:
            raise RequestError(
                f"no request {key!r} waits here ({len(self)} wait); it was taken or never put"
            )
        self._shed()
        return entry.item

    def oldest_wait_s(self, now_s: float) -> float:
        """Seconds that the longest-waiting request has waited; 0 where nothing waits."""
        entry = self._surface(self._by_arrival)
        return max(0.0, now_s - entry.arrived_s) if entry else 0.0

    def keys(self) -> list[Key]:
        """Keys of the waiting requests, in order of arrival at this queue."""
        return [entry.key for entry in sorted(self._entries.values(), key=lambda e: e.ticket)]

    def _surface(self, heap: list[tuple[float, int, Key]]) -> _Entry[Key, Item] | None:
        """The first entry of a heap that still waits; entries that left are dropped on the way."""
        while heap:
            _, ticket, key = heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.ticket == ticket:
                return entry
            heapq.heappop(heap)
        return None

    def _shed(self) -> None:
        # Entries that left through the other heap must not pile up in this one.
        for heap in (self._by_urgency, self._by_arrival):
            if len(heap) > 2 * len(self._entries) + 64:
                live = [
                    (rank, ticket, key)
                    for rank, ticket, key in heap
                    if (entry := self._entries.get(key)) is not None and entry.ticket == ticket
                ]
                heap[:] = live
                heapq.heapify(heap)
