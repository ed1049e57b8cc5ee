"""Channels carry the work between components, where the scheduler can see it and nothing is lost.

A channel knows what waits, what was handed to whom, and what was answered. What a worker owes is
what was handed to it and neither answered nor given back, so it can be derived at any moment, also
when the worker dies before it could say anything. Execution is at least once; an answer counts
only when its worker owes it, so consumption is exactly once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shiftbook.scheduler.routing import TurnQueue

Worker = tuple[str, str]
"""(replica, incarnation)."""
RESERVE_S = 0.05
"""How long a piece is kept for a worker that has room for it and does not ask."""


@dataclass
class Work:
    """A piece of work and how urgent it is."""

    key: Hashable
    item: Any
    lane: int = 0
    """Part of the channel that it belongs to; a virtual rank for the trainer's."""
    tool_calls_done: int = 0
    cached_tokens: int = 0
    source: str | None = None
    """Component that it comes from, where that is not the channel's."""


@dataclass
class Counts:
    """Cumulative counts of one channel; seconds on the monotonic clock."""

    put: int = 0
    handed: int = 0
    answered: int = 0
    returned: int = 0
    duplicates: int = 0
    last_answer_s: float = 0.0
    by_source: dict[str, int] = field(default_factory=dict)
    """Answered pieces by the component that they came from."""


@dataclass
class Channel:
    """Work on its way from one component to another.

    ``width`` is how many pieces a worker works on side by side, at the same cost whether it has
    that many or fewer (the lanes of an engine). Where it is known, few pieces go to few workers,
    which leaves the other ones' devices to other components; and nobody gets pieces to wait behind
    its own while another could work on them now.
    """

    source: str
    target: str
    width: int | None = None
    counts: Counts = field(default_factory=Counts)
    _lanes: dict[int, TurnQueue[Hashable, Work]] = field(default_factory=dict)
    _owed: dict[Worker, dict[Hashable, Work]] = field(default_factory=dict)
    _gone: set[Worker] = field(default_factory=set)
    """Processes that are lost: a take of theirs that was held open gets nothing any more."""
    _refused_s: dict[Worker, float] = field(default_factory=dict)
    """Since when a worker asks in vain for what is kept for others."""

    @property
    def depth(self) -> int:
        """Pieces that wait for a worker."""
        return sum(len(queue) for queue in self._lanes.values())

    def put(self, work: Work) -> None:
        """Add a piece of work."""
        self.counts.put += 1
        self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        queue = self._lanes.get(work.lane)
        if queue is None:
            queue = self._lanes[work.lane] = TurnQueue()
        queue.put(
            work.key,
            work,
            tool_calls_done=work.tool_calls_done,
            cached_tokens=work.cached_tokens,
            now_s=time.monotonic(),
        )

    def take(
        self,
        worker: Worker,
        limit: int,
        lanes: Collection[int] | None = None,
        held: Collection[str] = (),
    ) -> list[Work]:
        """Hand up to ``limit`` pieces to a worker, the most urgent first.

        ``held`` names the replicas that get nothing now, for whom nothing is kept.
        """
        if worker in self._gone:
            return []
        now_s = time.monotonic()
        owed = self._owed.setdefault(worker, {})
        limit = min(limit, self._share(worker, now_s, held))
        taken: list[Work] = []
        allowed = [
            queue for lane, queue in sorted(self._lanes.items()) if lanes is None or lane in lanes
        ]
        while len(taken) < limit:
            # The fullest lane first: lanes stay level, so that whoever gets some of them later
            # gets its share of the work.
            fullest = max(allowed, key=len, default=None)
            if fullest is None or not len(fullest):
                break
            taken += [work for _, work in fullest.take(1, now_s)]
        for work in taken:
            owed[work.key] = work
        self.counts.handed += len(taken)
        return taken

    def _share(self, worker: Worker, now_s: float, held: Collection[str]) -> int:
        """How many of the waiting pieces a worker may have: first those that fuller workers have
        no room for, as far as it has room itself, then those that nobody has room for."""
        waiting = self.depth
        if self.width is None or not waiting:
            return waiting
        mine = (len(self._owed[worker]), worker)
        fuller = emptier = 0
        for other, owed in self._owed.items():
            if other != worker and other[0] not in held:
                room = max(0, self.width - len(owed))
                if (len(owed), other) > mine:
                    fuller += room
                else:
                    emptier += room
        left = waiting - fuller
        room = max(0, self.width - mine[0])
        share = left if left <= room else max(room, left - emptier)
        if share > 0 or mine[0] >= self.width:
            self._refused_s.pop(worker, None)
            return max(0, share)
        # Whoever it is kept for may be stuck or dying: it is not kept for long.
        waited_s = now_s - self._refused_s.setdefault(worker, now_s)
        return min(room, waiting) if waited_s >= RESERVE_S else 0

    def answer(self, worker: Worker, key: Hashable) -> Work | None:
        """Count an answer; None when this worker does not owe it (any more)."""
        work = self._owed.get(worker, {}).pop(key, None)
        if work is None:
            self.counts.duplicates += 1
            return None
        self.counts.answered += 1
        source = work.source or self.source
        self.counts.by_source[source] = self.counts.by_source.get(source, 0) + 1
        self.counts.last_answer_s = time.monotonic()
        return work

    def give_back(self, worker: Worker, items: Iterable[tuple[Hashable, Any]]) -> list[Hashable]:
        """Take work back from a worker, as it stands now; only what it owes."""
        owed = self._owed.get(worker, {})
        returned: list[Hashable] = []
        for key, item in items:
            work = owed.pop(key, None)
            if work is not None:
                work.item = item
                self._enqueue(work)
                returned.append(key)
        self.counts.returned += len(returned)
        return returned

    def lose(self, worker: Worker) -> list[Hashable]:
        """A worker is gone: what it owed waits again, as it was handed to it."""
        self._gone.add(worker)
        owed = self._owed.pop(worker, {})
        for work in owed.values():
            self._enqueue(work)
        self.counts.returned += len(owed)
        return list(owed)

    def owed(self, worker: Worker) -> list[Hashable]:
        """Keys that a worker owes."""
        return list(self._owed.get(worker, {}))

    def in_hand(self, replica: str | None = None) -> int:
        """Pieces handed out and not answered, of one replica or of all."""
        return sum(len(owed) for (name, _), owed in self._owed.items() if replica in (None, name))

    def clear(self) -> None:
        """Forget everything that waits or is owed (a new attempt begins)."""
        self._lanes.clear()
        self._owed.clear()
        self._refused_s.clear()

    def workers(self, replica: str) -> list[Worker]:
        """Processes of a replica that took work, or asked for it."""
        return [worker for worker in self._owed if worker[0] == replica]


class Exchange:
    """All channels of a job, and who may be fed from them; safe to use from several threads."""

    def __init__(self, channels: Iterable[Channel]) -> None:
        self.by_target = {channel.target: channel for channel in channels}
        self.lock = threading.RLock()
        self._held: set[str] = set()

    def hold(self, replica: str) -> None:
        """Stop handing work to a replica."""
        with self.lock:
            self._held.add(replica)

    def feed(self, replica: str) -> None:
        """Hand work to a replica again."""
        with self.lock:
            self._held.discard(replica)

    def is_held(self, replica: str) -> bool:
        """True while a replica gets nothing."""
        return replica in self._held

    def take(
        self, component: str, worker: Worker, limit: int, lanes: Collection[int] | None
    ) -> list[Work]:
        """Hand work to a worker of a component, unless it is held."""
        with self.lock:
            if worker[0] in self._held:
                return []
            return self.by_target[component].take(worker, limit, lanes, self._held)

    def look_again_s(self, component: str) -> float:
        """How soon to look again for a worker that got nothing, if nothing arrives before."""
        with self.lock:
            channel = self.by_target[component]
            return RESERVE_S if channel.width and channel.depth else math.inf

    def edges(self) -> dict[tuple[str, str], int]:
        """Answered pieces by (source, target): the pipeline as its traffic shows it."""
        with self.lock:
            return {
                (source, channel.target): count
                for channel in self.by_target.values()
                for source, count in channel.counts.by_source.items()
            }
