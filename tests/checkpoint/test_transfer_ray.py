"""Goal: over Ray's object store no receiver serves wrong weights, whoever dies, stalls or lies.

Method: a Ray cluster of this test's own; each trainer rank and the receivers that die or stall are
actors in processes of their own, killed with SIGKILL and stopped with SIGSTOP. What is served is
compared bit for bit with what the trainer published.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shiftbook.checkpoint.errors import SourceLost, TransferDamaged, TransferError, TransferRefused
from shiftbook.checkpoint.transfer.catalogue import Catalogue, LocalCatalogue, join_catalogues
from shiftbook.checkpoint.transfer.desk import Desk
from shiftbook.checkpoint.transfer.object_store import RayLink, RaySource, actor_options
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.parcel import BoxName, Ticket
from shiftbook.checkpoint.transfer.receiver import Receiver
from shiftbook.checkpoint.transfer.source import Source
from shiftbook.scheduler.cluster import import_ray
from tests.checkpoint.transfer_process import digest, weights
from tests.checkpoint.transfer_states import engine, equal, layouts, logical, shards, sync_all
from tests.one_cluster import OneCluster

RANKS = 2
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


class Trainer(RaySource):
    """A trainer rank; the desk is rank 0's."""

    def __init__(self, rank: int) -> None:
        self.offers, self.desk = Offers(rank), Desk() if rank == 0 else None
        self.spoils = ""
        self.serve_transfers(Source(self.offers, self.desk))

    def pid(self) -> int:
        return os.getpid()

    def stage(self, version: int) -> Any:
        local = self.offers.stage(version, shards(weights(version), self.offers.rank, RANKS))
        return local.model_dump(mode="json")

    def open(self, catalogue: Any, targets: dict[str, int], limit_s: float) -> None:
        found = Catalogue.model_validate(catalogue)
        self.offers.open(found)
        if self.desk is not None:
            self.desk.open(found, targets, limit_s=limit_s)

    def outcomes(self) -> Any:
        assert self.desk is not None
        return {one.target: one.model_dump(mode="json") for one in self.desk.outcomes()}

    def spoil(self, how: str) -> None:
        self.spoils = how

    def transfer_parcel(self, ticket: dict[str, Any]) -> Any:
        parcel = super().transfer_parcel(ticket)
        if self.spoils == "alter" and isinstance(parcel, np.ndarray):
            parcel[parcel.size // 2] ^= 1
        if self.spoils == "lengthen" and isinstance(parcel, np.ndarray):
            return np.concatenate([parcel, np.zeros(64 << 20, np.uint8)])
        return "rubbish" if self.spoils == "rubbish" else parcel


class Engine:
    """One rank of an engine, in a process of its own."""

    def __init__(self, target: str, rank: int, ranks: int, trainers: list[Any]) -> None:
        links = [RayLink(r, t, name=target, stall_s=30.0) for r, t in enumerate(trainers)]
        self.receiver = Receiver(
            target,
            links,
            layouts(rank, ranks),
            rank=rank,
            ranks=ranks,
            limit_bytes=8 << 20,
            verdict_s=15.0,
        )

    def pid(self) -> int:
        return os.getpid()

    def sync(self, wait_s: float) -> dict[str, Any]:
        try:
            done = self.receiver.sync(wait_s=wait_s)
        except TransferError as error:
            return {"error": f"{type(error).__name__}: {error}", "serving": self.receiver.serving}
        return {"version": done.version, "digest": digest(dict(self.receiver.tensors))}


class World:
    """Two trainer ranks; engines are made where they are needed."""

    def __init__(self, ray: Any) -> None:
        self.ray, self.root = ray, ""
        made = ray.remote(**actor_options(), num_cpus=0)(Trainer)
        self.trainers = [made.remote(rank) for rank in range(RANKS)]

    def get(self, *references: Any) -> Any:
        return self.ray.get(list(references), timeout=90)

    def publish(self, version: int, targets: dict[str, int], limit_s: float = 60.0) -> None:
        parts = self.get(*(t.stage.remote(version) for t in self.trainers))
        catalogue = join_catalogues([LocalCatalogue.model_validate(part) for part in parts])
        if version > 1:
            catalogue = catalogue.model_copy(
                update={"base_version": version - 1, "base_root": self.root}
            )
        self.root = catalogue.root
        plain = catalogue.model_dump(mode="json")
        self.get(*(t.open.remote(plain, targets, limit_s) for t in self.trainers))

    def links(self, target: str, stall_s: float = 20.0) -> list[RayLink]:
        return [RayLink(r, t, name=target, stall_s=stall_s) for r, t in enumerate(self.trainers)]

    def engine(self, target: str, ranks: int, **how: Any) -> list[Receiver]:
        return engine(lambda: self.links(target, **how), target, ranks)

    def outcome(self, target: str) -> Any:
        return self.get(self.trainers[0].outcomes.remote())[0][target]


@pytest.fixture(scope="module")
def cluster(one_cluster: OneCluster) -> Iterator[Any]:
    one_cluster.close()
    ray = import_ray()
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def world(cluster: Any) -> Iterator[World]:
    made = World(cluster)
    yield made
    for actor in made.trainers:
        cluster.kill(actor)


def held(receivers: list[Receiver]) -> dict[str, np.ndarray]:
    return logical([one.tensors for one in receivers], len(receivers))


def test_engines_that_die_stall_or_lie_do_not_serve_and_stop_nobody(world: World) -> None:
    """`well` takes both versions; a rank of `pair` is killed and `still` is stopped when version 2
    comes; `liar` says that it holds version 1 and does not."""
    made = world.ray.remote(num_cpus=0)(Engine)
    pair = [made.remote("pair", rank, 2, world.trainers) for rank in range(2)]
    still = made.remote("still", 0, 1, world.trainers)
    well, liar = world.engine("well", 2), world.engine("liar", 1)
    targets = {"well": 2, "pair": 2, "still": 1, "liar": 1}
    pids = world.get(pair[1].pid.remote(), still.pid.remote())

    world.publish(1, targets)
    away = [one.sync.remote(30.0) for one in (*pair, still)]
    first = sync_all([*well, *liar], wait_s=30.0)
    assert [getattr(one, "encoding", one) for one in first] == ["whole"] * 3
    assert [one.get("version", one) for one in world.get(*away)] == [1, 1, 1]
    assert equal(held(well), weights(1))

    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    late = still.sync.remote(5.0)
    liar[0].tensors["o"].view(np.uint8)[0, 0] ^= 1
    world.publish(2, targets, limit_s=15.0)
    left = pair[0].sync.remote(5.0)
    second = sync_all([*well, *liar], wait_s=30.0)
    assert [getattr(one, "encoding", one) for one in second] == ["patch", "patch", "whole"]
    assert equal(held(well), weights(2))
    assert equal(held(liar), weights(2))
    (answer,) = world.get(left)
    assert "error" in answer
    assert not answer["serving"]
    assert world.outcome("pair")["outcome"] in ("lost", "failed")
    assert world.outcome("still")["outcome"] == "lost"
    for target in ("well", "liar"):
        found = world.outcome(target)
        assert (found["outcome"], found["transport"]) == ("serving", "ray")

    os.kill(pids[1], signal.SIGCONT)
    (answer,) = world.get(late)
    assert "ended for it" in answer["error"], answer
    assert not answer["serving"]
    for actor in (pair[0], still):
        world.ray.kill(actor)


@pytest.mark.parametrize(
    ("how", "says"),
    [("alter", "altered"), ("lengthen", "at most"), ("rubbish", "found str")],
)
def test_spoilt_bytes_are_never_served(world: World, how: str, says: str) -> None:
    receivers = world.engine("e", 1)
    world.publish(1, {"e": 1})
    receivers[0].sync(wait_s=10.0)
    world.get(world.trainers[1].spoil.remote(how))
    world.publish(2, {"e": 1})
    with pytest.raises(TransferDamaged, match=says):
        receivers[0].sync(wait_s=10.0)
    assert not receivers[0].serving
    assert receivers[0].version == 1
    assert world.outcome("e")["outcome"] == "failed"
    world.get(world.trainers[1].spoil.remote(""))
    world.publish(3, {"e": 1})
    assert receivers[0].sync(wait_s=10.0).version == 3
    assert equal(held(receivers), weights(3))


def test_a_source_that_dies_or_stalls_is_named(world: World) -> None:
    receivers = world.engine("e", 1, stall_s=3.0)
    world.publish(1, {"e": 1})
    receivers[0].sync(wait_s=10.0)
    (pid,) = world.get(world.trainers[1].pid.remote())
    world.publish(2, {"e": 1}, limit_s=120.0)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SourceLost, match=r"ranks \[1\]"):
        receivers[0].sync(wait_s=5.0)
    assert not receivers[0].serving
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SourceLost, match=r"ranks \[1\]"):
        receivers[0].sync(wait_s=5.0)
    assert receivers[0].version == 1


def test_what_is_no_source_is_refused(world: World) -> None:
    class Other:
        """An actor that serves nothing."""

        def pid(self) -> int:
            return os.getpid()

    other = world.ray.remote(num_cpus=0)(Other).remote()
    with pytest.raises(TransferRefused, match="inherits RaySource"):
        RayLink(0, other, name="e").ask("catalogue", {})
    silent = world.ray.remote(**actor_options(), num_cpus=0)(RaySource).remote()
    with pytest.raises(SourceLost, match="has not begun"):
        RayLink(0, silent, name="e").ask("catalogue", {})
    link = world.links("e")[0]
    with pytest.raises(TransferRefused, match="found what"):
        link.ask("what", {})
    asked = Ticket(version=9, boxes=(BoxName(name="q", offset=(0, 0), size=(1, 1)),))
    with pytest.raises(TransferRefused):
        link.fetch(asked, most_bytes=100)
    for actor in (other, silent):
        world.ray.kill(actor)
