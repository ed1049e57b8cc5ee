"""Goal: engines of any tensor-parallel size end with the trainer's bits, over either transport.

Method: trainer ranks with shards, replicas and a scalar serve in this process, over real TLS
sockets or pairs of gloo groups; engines of 1, 2 and 4 ranks pull whole weights and differences. The
logical tensors are put together again from what the ranks serve and compared bit for bit, and the
outcomes, bytes and catalogue are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shiftbook.checkpoint.errors import TransferRefused
from shiftbook.checkpoint.fingerprint import fingerprint, root
from shiftbook.checkpoint.transfer.boxes import Box, whole
from shiftbook.checkpoint.transfer.catalogue import Shard, join_catalogues
from shiftbook.checkpoint.transfer.cluster import ClusterLink, ClusterSource, serve_store
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.plan import orders
from shiftbook.checkpoint.transfer.receiver import Receiver, Synced
from shiftbook.checkpoint.transfer.source import Source
from tests.checkpoint.transfer_states import (
    Trainer,
    engine,
    equal,
    layouts,
    logical,
    nudged,
    shards,
    state,
    sync_all,
)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.close()


def test_boxes_meet_and_split() -> None:
    """Every way to cut a small tensor: the pieces tile it, and overlaps are what indices say."""
    shape = (5, 3, 4)
    for most in (1, 2, 3, 4, 7, 12, 13, 60, 100):
        seen = np.zeros(shape, dtype=int)
        for piece in whole(shape).pieces(most):
            assert piece.elements <= most
            seen[piece.window(whole(shape))] += 1
        assert (seen == 1).all(), most
    ranges = [(a, b) for a, b in itertools.product(range(5), repeat=2) if a < b]
    for (a, b), (c, d) in itertools.product(ranges, repeat=2):
        one, other = Box((a, 0), (b - a, 2)), Box((c, 1), (d - c, 3))
        common = one.overlap(other)
        rows = sorted(set(range(a, b)) & set(range(c, d)))
        if not rows:
            assert common is None
        else:
            assert common == Box((rows[0], 1), (len(rows), 1))
            assert common.inside(one)
            assert common.inside(other)
    assert list(Box((), ()).pieces(1)) == [Box((), ())]
    assert Box((), ()).overlap(Box((), ())) == Box((), ())


def test_the_catalogue_is_that_of_the_whole_tensors(trainer: Trainer) -> None:
    weights = state(1)
    catalogue = trainer.publish(7, weights)
    expected = {name: fingerprint(array).hex for name, array in weights.items()}
    assert catalogue.fingerprints == expected
    assert catalogue.root == root(expected)
    assert catalogue.nbytes == sum(array.nbytes for array in weights.values())
    norm = [held for held in catalogue.holdings if held.name == "norm"]
    assert [held.ranks for held in norm] == [(0, 1)]


def test_each_box_of_a_layout_is_ordered_once(trainer: Trainer) -> None:
    catalogue = trainer.publish(1, state(1))
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            mine = layouts(rank, ranks)
            seen = {name: np.zeros(one.layout.stored, dtype=int) for name, one in mine.items()}
            plan = orders(catalogue, mine, parcel_bytes=1000)
            for order in plan:
                assert order.nbytes <= 1000
                for target in order.targets:
                    array = seen[target.stored]
                    array[target.at.window(whole(array.shape))] += 1
            for name, stored in mine.items():
                padding = [p for p in stored.layout.pieces if p.logical is None]
                for piece in padding:
                    seen[name][: piece.at[0] + piece.size[0]][piece.at[0] :] += 1
                assert (seen[name] == 1).all(), (ranks, rank, name)
            assert len({order.key for order in plan}) == len(plan)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_flight_whole_and_difference(trainer: Trainer, ranks: int) -> None:
    first = state(ranks)
    second = nudged(first, seed=ranks)
    receivers = engine(lambda: trainer.links("engine"), "engine", ranks)
    with pytest.raises(TransferRefused, match="its first version"):
        _ = receivers[0].tensors

    trainer.desk.open(trainer.publish(1, first), {"engine": ranks}, limit_s=120)
    done = sync_all(receivers)
    assert all(isinstance(one, Synced) and one.encoding == "whole" for one in done), done
    assert equal(logical([r.tensors for r in receivers], ranks), first)
    (outcome,) = trainer.desk.outcomes()
    assert (outcome.outcome, outcome.transport) == ("serving", "flight")
    assert outcome.moved_bytes >= outcome.full_bytes - 30 * 64 * 2  # padding does not travel

    catalogue = trainer.publish(2, second)
    assert catalogue.base_version == 1
    trainer.desk.open(catalogue, {"engine": ranks}, limit_s=120)
    done = sync_all(receivers)
    assert all(isinstance(one, Synced) and one.encoding == "patch" for one in done), done
    assert equal(logical([r.tensors for r in receivers], ranks), second)
    (outcome,) = trainer.desk.outcomes()
    assert outcome.outcome == "serving"
    assert outcome.root == catalogue.root
    assert 0 < outcome.moved_bytes < outcome.full_bytes / 2


def test_cluster_whole_and_difference() -> None:
    """The same over pairs of gloo groups, with two engines, one of which skips a version."""
    first = state(3)
    versions = [first, nudged(first, 4), nudged(first, 5)]
    offers = [Offers(rank) for rank in range(2)]
    store = serve_store()
    from shiftbook.checkpoint.transfer.desk import Desk

    desk = Desk()
    sources = [
        ClusterSource(Source(o, desk if o.rank == 0 else None), "127.0.0.1", store.port)
        for o in offers
    ]

    def links(name: str) -> list[ClusterLink]:
        return [
            ClusterLink(rank, "127.0.0.1", store.port, name=name, stall_s=10.0) for rank in (0, 1)
        ]

    engines = {name: engine(lambda n=name: links(n), name, n) for name, n in (("a", 1), ("b", 2))}
    try:
        for version, weights in enumerate(versions):
            base = offers[0].newest()
            local = [o.stage(version, shards(weights, o.rank, 2)) for o in offers]
            catalogue = join_catalogues(local, base=base)
            for o in offers:
                o.open(catalogue)
            awake = ["a", "b"] if version != 1 else ["a"]
            desk.open(catalogue, {name: len(engines[name]) for name in awake}, limit_s=120)
            done = sync_all([r for name in awake for r in engines[name]])
            assert all(isinstance(one, Synced) for one in done), done
            encodings = {one.encoding for one in done if isinstance(one, Synced)}
            # The engine that skipped version 1 cannot use a difference that leads from it.
            assert encodings == [{"whole"}, {"patch"}, {"patch", "whole"}][version]
            for name in awake:
                held = [r.tensors for r in engines[name]]
                assert equal(logical(held, len(held)), weights)
            assert [o.outcome for o in desk.outcomes()] == ["serving"] * len(awake)
    finally:
        for source in sources:
            source.close()


def test_torch_tensors_of_any_dtype_pass_as_they_are(tmp_path: Path) -> None:
    """bfloat16 and fp8 have no numpy dtype; their bits travel."""
    torch = pytest.importorskip("torch")
    from shiftbook.checkpoint.layouts import split
    from shiftbook.checkpoint.transfer.plan import Stored

    weights = {
        "a": torch.randn(6, 4).to(torch.bfloat16),
        "b": torch.randn(8, 4).to(torch.float8_e4m3fn),
        "t": torch.randn(4, 6).to(torch.bfloat16).t(),
    }
    trainer = Trainer(tmp_path, ranks=1)
    try:
        trainer.desk.open(trainer.offers[0].publish(1, weights), {"e": 1}, limit_s=120)
        mine = {
            name: Stored(str(t.dtype).removeprefix("torch."), split(name, t.shape, 0, 0, 1))
            for name, t in weights.items()
        }
        receiver = Receiver("e", trainer.links("e"), mine)
        receiver.sync()
        for name, tensor in weights.items():
            bits = tensor.contiguous().view(
                torch.uint8 if tensor.element_size() == 1 else torch.int16
            )
            found = receiver.tensors[name]
            assert np.array_equal(found, bits.numpy().view(found.dtype)), name
        assert [o.outcome for o in trainer.desk.outcomes()] == ["serving"]
    finally:
        trainer.close()


def test_nan_is_carried_and_counted(trainer: Trainer) -> None:
    first = state(8)
    second = {name: array.copy() for name, array in first.items()}
    second["q"][3, 5:9] = np.nan
    second["phase"][2] = complex(np.nan, 1)
    receivers = engine(lambda: trainer.links("e"), "e", 2)
    for version, weights in ((1, first), (2, second)):
        catalogue = trainer.publish(version, weights)
        trainer.desk.open(catalogue, {"e": 2}, limit_s=120)
        assert all(isinstance(one, Synced) for one in sync_all(receivers))
    assert (catalogue.nan, catalogue.tensors["q"].nan) == (5, 4)
    assert equal(logical([r.tensors for r in receivers], 2), second)


def test_a_version_that_changed_nothing_is_a_delivery_too(trainer: Trainer) -> None:
    """An empty patch: version and desk go on, and hardly a byte travels."""
    weights = state(9)
    receivers = engine(lambda: trainer.links("e"), "e", 1)
    for version in (1, 2):
        trainer.desk.open(trainer.publish(version, weights), {"e": 1}, limit_s=120)
        (done,) = sync_all(receivers)
        assert isinstance(done, Synced), done
    assert receivers[0].version == 2
    assert done.encoding == "patch"
    assert done.moved_bytes < 0.2 * done.full_bytes
    assert equal(logical([receivers[0].tensors], 1), weights)


def test_only_the_slices_that_are_needed_travel(trainer: Trainer) -> None:
    """A rank of four moves about a fourth of what a rank of one moves, from both sources."""
    trainer.publish(1, state(1))
    moved = {}
    for ranks in (1, 4):
        trainer.desk.open(trainer.offers[0].newest(), {f"e{ranks}": ranks}, limit_s=120)
        name = f"e{ranks}"
        before = [offers.served.parcels for offers in trainer.offers]
        receivers = engine(lambda n=name: trainer.links(n), name, ranks)
        done = sync_all(receivers)
        moved[ranks] = [one.moved_bytes for one in done if isinstance(one, Synced)]
        after = [offers.served.parcels for offers in trainer.offers]
        assert all(a > b for a, b in zip(after, before, strict=True))
    assert len(moved[4]) == 4
    assert max(moved[4]) < 0.4 * moved[1][0], moved


def test_a_rank_that_publishes_another_thing_is_refused() -> None:
    weights = state(1)
    locals_ = [Offers(rank).stage(1, shards(weights, rank, 2)) for rank in (0, 1)]
    join_catalogues(locals_)
    with pytest.raises(TransferRefused, match="hold each element"):
        join_catalogues(locals_[:1])
    drifted = {**weights, "norm": weights["norm"] + 1}
    with pytest.raises(TransferRefused, match="drifted"):
        join_catalogues([locals_[0], Offers(1).stage(1, shards(drifted, 1, 2))])
    with pytest.raises(TransferRefused, match="one version"):
        join_catalogues([locals_[0], Offers(1).stage(2, shards(weights, 1, 2))])
    with pytest.raises(TransferRefused, match="found none"):
        join_catalogues([Offers(0).stage(1, [])])
    overlapping = [Shard("w", np.ones((3, 2)), (r, 0), (4, 2)) for r in (0, 1)]
    with pytest.raises(TransferRefused, match="overlap"):
        join_catalogues([Offers(r).stage(1, [overlapping[r]]) for r in (0, 1)])
    other = Shard("w", np.ones((2, 2), dtype=np.float32), (2, 0), (4, 2))
    with pytest.raises(TransferRefused, match="add up only"):
        join_catalogues(
            [
                Offers(0).stage(1, [Shard("w", np.ones((2, 2)), (0, 0), (4, 2))]),
                Offers(1).stage(1, [other]),
            ]
        )
    with pytest.raises(TransferRefused, match="box inside"):
        Offers(0).stage(1, [Shard("w", np.ones((3, 2)), (2, 0), (4, 2))])


def test_versions_only_go_up_and_two_are_kept(trainer: Trainer) -> None:
    weights = state(1)
    for version in (1, 2, 5):
        trainer.publish(version, nudged(weights, version))
    assert sorted(trainer.offers[0]._versions) == [2, 5]
    for version in (5, 4):
        with pytest.raises(TransferRefused, match="only go up"):
            trainer.publish(version, weights)
