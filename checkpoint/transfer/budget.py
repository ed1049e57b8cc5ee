"""A limit in bytes on what is under way at once, kept by those who take part in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shiftbook.checkpoint.errors import SourceLost, TransferRefused


class Budget:
    """At most `limit_bytes` are taken at any moment; who asks for more than there is waits.

    What was taken counts for `hold_s` seconds at most: someone who stalls holds up nobody longer.
    """

    def __init__(self, limit_bytes: int, *, hold_s: float = 60.0) -> None:
        self.limit_bytes, self._hold_s = limit_bytes, hold_s
        self.peak_bytes = 0
        self._changed = threading.Condition()
        self._taken: dict[int, tuple[float, int]] = {}
        self._count = 0

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Hold some bytes for the block. Raises TransferRefused for more than the limit, and
        SourceLost when there is no room within `hold_s`."""
        mine = self.take(nbytes)
        try:
            yield
        finally:
            self.give_back(mine)

    def take(self, nbytes: int) -> int:
        """As `taken`, for a holder that is no block: gives a number for `give_back`."""
        if nbytes > self.limit_bytes:
            raise TransferRefused(
                f"expected parcels of at most {self.limit_bytes} bytes, was asked for {nbytes}; "
                "ask for smaller ones, or raise the limit"
            )
        deadline = time.monotonic() + self._hold_s
        with self._changed:
            while self._now() + nbytes > self.limit_bytes:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise SourceLost(
                        f"expected room for {nbytes} bytes within {self._hold_s:g} s, found "
                        f"{self._now()} of {self.limit_bytes} taken; others stall: try again"
                    )
                self._changed.wait(min(left_s, 0.2))
            self._count += 1
            self._taken[self._count] = (time.monotonic() + self._hold_s, nbytes)
            self.peak_bytes = max(self.peak_bytes, self._now())
            return self._count

    def give_back(self, number: int) -> None:
        """What was taken under this number is free again."""
        with self._changed:
            self._taken.pop(number, None)
            self._changed.notify_all()

    def _now(self) -> int:
        now_s = time.monotonic()
        for number in [n for n, (until_s, _) in self._taken.items() if until_s < now_s]:
            del self._taken[number]
        return sum(nbytes for _, nbytes in self._taken.values())
