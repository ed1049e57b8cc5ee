"""Goal: over gloo, bytes that are altered on their way never come to be served, and others go on.

Method: two trainer ranks serve over pairs of gloo groups; rank 1 alters what it sends to the ranks
of one engine and to nobody else, after the parcel was made and sealed: a bit at its end, a bit in
its head, or its last byte is missing. Once, so that pulling again mends it, and then each time.
What both engines serve is compared with the trainer's bits. The same over Flight is in
`test_transfer_faults.py`, over Ray's object store in `test_transfer_ray.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shiftbook.checkpoint.errors import TransferDamaged, TransferError
from shiftbook.checkpoint.transfer.catalogue import join_catalogues
from shiftbook.checkpoint.transfer.cluster import ClusterLink, ClusterSource, serve_store
from shiftbook.checkpoint.transfer.desk import Desk, Outcome
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.receiver import Receiver, Synced
from shiftbook.checkpoint.transfer.source import Source
from tests.checkpoint.transfer_states import engine, equal, logical, nudged, shards, state, sync_all

Parts = list[Any]


def _last_bit(parts: Parts) -> Parts:
    last = bytearray(parts[-1])
    last[-1] ^= 1
    return [*parts[:-1], last]


def _head(parts: Parts) -> Parts:
    """The version that it is of: from a digit to another."""
    head = bytearray(parts[0])
    at = head.index(b"version") + len(b'version":')
    head[at] ^= 1
    return [head, *parts[1:]]


def _cut(parts: Parts) -> Parts:
    return [*parts[:-1], bytearray(parts[-1])[:-1]]


ALTERED: dict[str, Callable[[Parts], Parts]] = {
    "a bit at the end": _last_bit,
    "a bit in the head": _head,
    "the last byte": _cut,
}


class _Wire:
    """A wire that alters the parcel that it is given to send; the answer before it is sound."""

    def __init__(self, wire: Any, alter: Callable[[Parts], Parts]) -> None:
        self._wire, self._alter, self._sent = wire, alter, 0

    def send(self, *parts: Any) -> None:
        self._sent += 1
        self._wire.send(*(self._alter(list(parts)) if self._sent == 2 else parts))


class AlteringSource(ClusterSource):
    """Alters the next `times` parcels to `victim`."""

    victim, times, alter = "west", 0, staticmethod(_last_bit)

    def _answer(self, wire: Any, question: Any, peer: str) -> None:
        if question.get("kind") == "fetch" and peer == self.victim and self.times > 0:
            self.times -= 1
            wire = _Wire(wire, self.alter)
        super()._answer(wire, question, peer)


class World:
    """Two trainer ranks, and two engines of two ranks each."""

    def __init__(self) -> None:
        self.offers, self.desk = [Offers(rank) for rank in range(2)], Desk()
        self.store = serve_store()
        self.sources = [
            AlteringSource(Source(o, self.desk if o.rank == 0 else None), "127.0.0.1", port)
            for o, port in ((o, self.store.port) for o in self.offers)
        ]
        self.engines = {name: engine(self._to(name), name, 2) for name in ("east", "west")}

    def _to(self, name: str) -> Callable[[], list[ClusterLink]]:
        port = self.store.port
        return lambda: [
            ClusterLink(rank, "127.0.0.1", port, name=name, stall_s=10.0) for rank in (0, 1)
        ]

    def publish(self, version: int, weights: dict[str, Any]) -> None:
        base = self.offers[0].newest()
        parts = [o.stage(version, shards(weights, o.rank, 2)) for o in self.offers]
        catalogue = join_catalogues(parts, base=base)
        for offers in self.offers:
            offers.open(catalogue)
        self.desk.open(catalogue, dict.fromkeys(self.engines, 2), limit_s=30)

    def sync(self, **how: Any) -> dict[str, list[Synced | TransferError]]:
        both = [receiver for receivers in self.engines.values() for receiver in receivers]
        done = sync_all(both, **how)
        return {"east": done[:2], "west": done[2:]}

    def outcomes(self) -> dict[str, Outcome]:
        return {one.target: one for one in self.desk.outcomes()}

    def close(self) -> None:
        for source in self.sources:
            source.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def held(receivers: list[Receiver]) -> dict[str, Any]:
    return logical([one.held for one in receivers], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "whole"),
    [
        ("a bit at the end", False),
        ("a bit at the end", True),
        ("a bit in the head", False),
        ("the last byte", True),
    ],
)
def test_altered_bytes_are_pulled_again_and_never_served(
    world: World, what: str, whole: bool
) -> None:
    encoding = "whole" if whole else "patch"
    crooked, (east, west) = world.sources[1], world.engines.values()
    versions = [state(1)]
    for later in range(2, 5):
        versions.append(nudged(versions[-1], later))
    world.publish(1, versions[0])
    assert all(isinstance(one, Synced) for done in world.sync().values() for one in done)

    crooked.alter, crooked.times = ALTERED[what], 1  # type: ignore[assignment]
    world.publish(2, versions[1])
    done = world.sync(whole=whole)
    assert [one.encoding for each in done.values() for one in each] == [encoding] * 4  # type: ignore[union-attr]
    assert sum(one.pulled.again for one in done["west"]) == 1  # type: ignore[union-attr]
    assert sum(one.pulled.again for one in done["east"]) == 0  # type: ignore[union-attr]
    for receivers in (east, west):
        assert equal(held(receivers), versions[1])

    crooked.times = 1000
    world.publish(3, versions[2])
    done = world.sync(whole=whole)
    assert [type(one) for one in done["east"]] == [Synced, Synced]
    assert any(isinstance(one, TransferDamaged) for one in done["west"])
    assert all(isinstance(one, TransferError) for one in done["west"])
    assert {name: one.outcome for name, one in world.outcomes().items()} == {
        "east": "serving",
        "west": "failed",
    }
    assert all(receiver.serving for receiver in east)
    assert [(receiver.version, receiver.serving) for receiver in west] == [(2, False)] * 2
    assert equal(held(east), versions[2])
    assert equal(held(west), versions[1])

    crooked.times = 0
    world.publish(4, versions[3])
    assert all(isinstance(one, Synced) for done in world.sync().values() for one in done)
    assert {one.outcome for one in world.outcomes().values()} == {"serving"}
    for receivers in (east, west):
        assert equal(held(receivers), versions[3])
