"""Pulls parcels from several sources at once, within a limit of memory, through broken links."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shiftbook.checkpoint.errors import (
    SourceLost,
    TransferDamaged,
    TransferError,
    TransferRefused,
)
from shiftbook.checkpoint.transfer.budget import Budget
from shiftbook.checkpoint.transfer.link import Link
from shiftbook.checkpoint.transfer.plan import Order

TRIES = 4
"""Of one parcel, and of one source in a row."""
RETRY_S = 0.1
"""Before the second try; it doubles with each."""
HEAD_ROOM_BYTES = 64 << 10
"""A parcel is its boxes and a head; a difference is never longer than its boxes."""
LEAST_PARCEL_BYTES = 64 << 10
"""Smaller ones would be mostly heads and round trips."""
SHARES_OF_LIMIT = 3
"""A parcel under way is held as it arrives, as a whole, and as what a difference decodes to."""


def parcel_bytes(limit_bytes: int, links: int) -> int:
    """How large parcels may be so that all that are under way stay within the limit.

    Raises TransferRefused for a limit in which no sensible parcel from each link has room.
    """
    found = limit_bytes // (SHARES_OF_LIMIT * max(1, links)) - HEAD_ROOM_BYTES
    if found < LEAST_PARCEL_BYTES:
        least = SHARES_OF_LIMIT * links * (LEAST_PARCEL_BYTES + HEAD_ROOM_BYTES)
        raise TransferRefused(
            f"expected a limit of at least {least} bytes for parcels from {links} sources at once, "
            f"found {limit_bytes}; raise it, or pull from fewer sources"
        )
    return found


@dataclass
class Pulled:
    """What it took."""

    moved_bytes: int = 0
    parcels: int = 0
    again: int = 0
    """Parcels that were asked for more than once: links that broke, bytes that were altered."""
    peak_bytes: int = 0
    """The most that was under way at once, of the limit."""


class Pull:
    """One pull of many orders; `run` ends when all are done, or raises the first thing that cannot
    be mended.

    `put` takes each parcel's bytes where they belong and raises TransferDamaged for bytes that are
    not those of the source.
    """

    def __init__(
        self,
        links: Sequence[Link],
        orders: Sequence[Order],
        put: Callable[[Order, memoryview], None],
        budget: Budget,
    ) -> None:
        self._links = {link.rank: link for link in links}
        self._put, self._budget = put, budget
        self._changed = threading.Condition()
        # The longest first, so that all sources end together.
        self._waiting = sorted(orders, key=lambda order: -order.nbytes)
        self._under_way = 0
        self._tries: dict[str, int] = {}
        self._lost: dict[int, SourceLost] = {}
        self._failed: TransferError | None = None
        self.pulled = Pulled()

    def run(self) -> Pulled:
        """Pull everything. Raises SourceLost when nobody is left who has a box, TransferDamaged
        when a parcel comes altered time after time, and what the sources refuse with."""
        threads = [
            threading.Thread(target=self._work, args=(link,), daemon=True)
            for link in self._links.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.pulled.peak_bytes = self._budget.peak_bytes
        if self._failed is not None:
            raise self._failed
        if self._waiting:
            raise self._nobody_left(self._waiting[0])
        return self.pulled

    def _work(self, link: Link) -> None:
        misses = 0
        while (order := self._next(link.rank)) is not None:
            try:
                self._one(link, order)
            except SourceLost as error:
                link.close()
                misses += 1
                self._back(order)
                if misses >= TRIES:
                    self._lose(link.rank, error)
                    return
                self._pause(misses)
            except TransferDamaged as error:
                self._back(order)
                if self._count(order) >= TRIES:
                    self._fail(error)
            except TransferError as error:
                self._back(order)
                self._fail(error)
            except BaseException as error:  # a fault of this program: told, and not swallowed
                self._back(order)
                self._fail(TransferError(f"{type(error).__name__}: {error}"))
                raise
            else:
                misses = 0
                self._done()

    def _one(self, link: Link, order: Order) -> None:
        with self._budget.taken(SHARES_OF_LIMIT * (order.nbytes + HEAD_ROOM_BYTES)):
            data = link.fetch(order.ticket, most_bytes=order.nbytes + HEAD_ROOM_BYTES)
            self._put(order, data)
            with self._changed:
                self.pulled.moved_bytes += len(data)
                self.pulled.parcels += 1

    def _next(self, rank: int) -> Order | None:
        """An order that this source has; waits while others may still give one back."""
        with self._changed:
            while self._failed is None:
                for place, order in enumerate(self._waiting):
                    if rank in order.ranks:
                        self._under_way += 1
                        return self._waiting.pop(place)
                if not self._under_way:
                    break
                self._changed.wait()
            self._changed.notify_all()
            return None

    def _back(self, order: Order) -> None:
        with self._changed:
            self._waiting.insert(0, order)
            self._under_way -= 1
            self.pulled.again += 1
            self._changed.notify_all()

    def _done(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _count(self, order: Order) -> int:
        with self._changed:
            self._tries[order.key] = self._tries.get(order.key, 0) + 1
            return self._tries[order.key]

    def _pause(self, misses: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed is not None, timeout=RETRY_S * 2 ** (misses - 1)
            )

    def _fail(self, error: TransferError) -> None:
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()

    def _lose(self, rank: int, error: SourceLost) -> None:
        with self._changed:
            self._lost[rank] = error
            left = self._links.keys() - self._lost.keys()
            for order in self._waiting:
                if not left.intersection(order.ranks):
                    self._failed = self._failed or self._nobody_left(order)
            self._changed.notify_all()

    def _nobody_left(self, order: Order) -> SourceLost:
        why = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(self._lost.items()))
        first = order.ticket.boxes[0]
        return SourceLost(
            f"{first.name}: expected one of ranks {list(order.ranks)} to send the box at "
            f"{first.offset}, found none of them ({why or 'no link to them'}); start the source "
            "again, and sync again",
            where=first.name,
        )
