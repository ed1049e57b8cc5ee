"""Goal: nothing that goes wrong on the way makes a receiver serve wrong weights, or stops others.

Method: links are cut, slowed and spoilt by a proxy, sources alter, lose or withhold what they
published, receivers lie, stall, disagree and run out of disk; after each, what a receiver serves
is compared with what it served before or with the trainer's bits, and errors and outcomes are read.
"""

from __future__ import annotations

import datetime
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.slow_link import SlowLink
from shiftbook.checkpoint.errors import (
    BaseRefused,
    ServingFailed,
    SourceLost,
    StagingFailed,
    TokenRefused,
    TransferDamaged,
    TransferError,
    TransferRefused,
)
from shiftbook.checkpoint.layouts import split
from shiftbook.checkpoint.transfer.budget import Budget
from shiftbook.checkpoint.transfer.catalogue import join_catalogues
from shiftbook.checkpoint.transfer.certificates import make_certificates
from shiftbook.checkpoint.transfer.cluster import ClusterLink, serve_store
from shiftbook.checkpoint.transfer.desk import Desk
from shiftbook.checkpoint.transfer.flight import FlightLink, FlightSource
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.parcel import BoxName, Ticket
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.pull import parcel_bytes
from shiftbook.checkpoint.transfer.receiver import Receiver, Synced
from shiftbook.checkpoint.transfer.source import Source
from shiftbook.checkpoint.transfer.staging import Staging
from shiftbook.checkpoint.transfer.tokens import issue_token
from tests.checkpoint.transfer_states import (
    SECRET,
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
from tests.scheduler.waiting import until

LARGE = 1 << 20
"""Elements of the tensor that is long enough to be cut in mid-way: 4 MB."""


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.close()


def large(seed: int = 0) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).standard_normal((1024, LARGE // 1024), np.float32)}


def large_receiver(links: Any, target: str = "e", **how: Any) -> Receiver:
    stored = Stored("float32", split("w", (1024, LARGE // 1024), 0, 0, 1))
    how = {"limit_bytes": 3 << 20, "verdict_s": 20.0, **how}
    return Receiver(target, links, {"w": stored}, **how)


def outcome_of(trainer: Trainer, target: str) -> Any:
    return {one.target: one for one in trainer.desk.outcomes()}[target]


# Who may pull.


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (issue_token(b"o" * 32, "e", 60), "under this source's secret"),
        (issue_token(SECRET, "e", 5, now_s=time.time() - 10), r"ended \d+ s ago"),
        (issue_token(SECRET, "e", 60)[:-2] + "00", "under this source's secret"),
        ("", "under this source's secret"),
        ("rubbish.rubbish", "under this source's secret"),
    ],
    ids=["wrong", "expired", "altered", "none", "rubbish"],
)
def test_a_wrong_token_is_refused_and_not_repeated(trainer: Trainer, token: str, says: str) -> None:
    trainer.desk.open(trainer.publish(1, state(1)), {"e": 1}, limit_s=5)
    receiver = engine(lambda: trainer.links("e", token=token), "e", 1)[0]
    with pytest.raises(TransferRefused, match=says) as caught:
        receiver.sync()
    if len(token) > 8:
        assert token[-12:] not in str(caught.value)
    assert receiver.version is None


def test_a_token_speaks_for_its_own_target_only(trainer: Trainer) -> None:
    trainer.desk.open(trainer.publish(1, state(1)), {"e": 1, "f": 1}, limit_s=2)
    receiver = engine(lambda: trainer.links("f"), "e", 1)[0]
    with pytest.raises(TransferRefused, match="speak for itself"):
        receiver.sync()
    assert receiver.version is None
    good = engine(lambda: trainer.links("e"), "e", 1)[0]
    good.sync()
    assert outcome_of(trainer, "e").outcome == "serving"
    assert outcome_of(trainer, "f").outcome == "lost"


def test_a_wrong_certificate_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    """Another authority, one that ended, and one that names another host."""
    trainer.publish(1, state(1))
    other = make_certificates(tmp_path / "other", ["127.0.0.1"])
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=40)
    ended = make_certificates(tmp_path / "ended", ["127.0.0.1"], now=past)
    elsewhere = make_certificates(tmp_path / "elsewhere", ["elsewhere.example"])
    source = Source(trainer.offers[0])
    with (
        FlightSource(source, ended, SECRET) as late,
        FlightSource(source, elsewhere, SECRET) as far,
    ):
        for port, files in (
            (trainer.served[0].port, other),
            (late.port, ended),
            (far.port, elsewhere),
        ):
            link = FlightLink(0, "127.0.0.1", port, authority=files.authority, token="x")
            with pytest.raises((TransferRefused, SourceLost)) as caught:
                link.ask("catalogue", {})
            said = str(caught.value)
            assert "certificate" in said or "ostname" in said, said
            assert "127.0.0.1" in said
    missing = tmp_path / "nowhere.pem"
    with pytest.raises(TransferRefused, match="could not read"):
        FlightLink(0, "127.0.0.1", 1, authority=missing, token="x")


def test_what_cannot_be_served_says_why(trainer: Trainer, tmp_path: Path) -> None:
    source, port = Source(trainer.offers[0]), trainer.served[0].port
    with pytest.raises(ServingFailed, match=f"127.0.0.1:{port}.*in use"):
        FlightSource(source, trainer.files, SECRET, port=port)
    gone = make_certificates(tmp_path / "gone", ["127.0.0.1"])
    gone.key.unlink()
    with pytest.raises(ServingFailed, match=r"server\.key"):
        FlightSource(source, gone, SECRET)
    gone.key.write_text("no key")
    with pytest.raises(ServingFailed, match="do not belong together"):
        FlightSource(source, gone, SECRET)
    store = serve_store()
    with pytest.raises(ServingFailed, match="free port"):
        serve_store(port=store.port)


# Links and sources that fail.


def test_a_cut_link_is_taken_up_where_it_was(trainer: Trainer) -> None:
    """Three cuts within 4 MB: what had arrived does not travel again."""
    weights = large()
    catalogue = trainer.offers[0].publish(1, weights)
    trainer.desk.open(catalogue, {"e": 1}, limit_s=60)
    with SlowLink("127.0.0.1", trainer.served[0].port, cut_after=1_500_000, cuts=3) as line:
        receiver = large_receiver(trainer.links("e", {0: line.port})[:1])
        done = receiver.sync()
        assert line.cuts_left == 0
        assert done.pulled.again >= 2
        assert line.passed_bytes < 2 * catalogue.nbytes
    assert np.array_equal(receiver.tensors["w"].view(np.float32), weights["w"])
    assert outcome_of(trainer, "e").outcome == "serving"


def test_bytes_altered_under_tls_are_pulled_again(trainer: Trainer) -> None:
    weights = large()
    trainer.desk.open(trainer.offers[0].publish(1, weights), {"e": 1}, limit_s=60)
    with SlowLink("127.0.0.1", trainer.served[0].port, flip_at=1_000_000) as line:
        receiver = large_receiver(trainer.links("e", {0: line.port})[:1])
        assert receiver.sync().pulled.again >= 1
    assert np.array_equal(receiver.tensors["w"].view(np.float32), weights["w"])


class Altering(Offers):
    """Flips a bit of each parcel's last byte, `times` times."""

    def __init__(self, rank: int, times: int) -> None:
        super().__init__(rank)
        self.times = times

    @contextmanager
    def parcel(self, ticket: Ticket) -> Iterator[list[Any]]:
        with super().parcel(ticket) as buffers:
            if self.times > 0:
                self.times -= 1
                last = bytearray(buffers[-1])
                last[-1] ^= 1
                buffers = [*buffers[:-1], last]
            yield buffers


@pytest.mark.parametrize("encoding", ["whole", "patch"])
def test_an_altered_parcel_is_pulled_again_and_never_served(tmp_path: Path, encoding: str) -> None:
    """Once altered: pulled again. Altered each time: the receiver keeps what it had."""
    trainer = Trainer(tmp_path, ranks=1)
    offers = Altering(0, 0)
    first, second = state(1), nudged(state(1), 2)
    try:
        with FlightSource(Source(offers, trainer.desk), trainer.files, SECRET) as served:
            receiver = engine(lambda: trainer.links("e", {0: served.port}), "e", 1)[0]
            versions = [first, second] if encoding == "patch" else [first]
            for version, weights in enumerate(versions, 1):
                offers.times = 1 if version == len(versions) else 0
                trainer.desk.open(offers.publish(version, weights), {"e": 1}, limit_s=30)
                done = receiver.sync()
            assert (done.encoding, done.pulled.again) == (encoding, 1)
            assert equal(logical([receiver.tensors], 1), versions[-1])

            offers.times = 1000
            last = len(versions) + 1
            trainer.desk.open(offers.publish(last, nudged(versions[-1], 5)), {"e": 1}, limit_s=30)
            with pytest.raises(TransferDamaged, match="altered"):
                receiver.sync(whole=encoding == "whole")
            assert receiver.version == len(versions)
            assert not receiver.serving
            assert equal(logical([receiver.held], 1), versions[-1])
            assert outcome_of(trainer, "e").outcome == "failed"
    finally:
        trainer.close()


def test_a_source_whose_memory_rots_is_found_by_the_sums(trainer: Trainer) -> None:
    """Each box agrees with its own fingerprint, taken late; the sum with the catalogue's does not.

    Of two engines, the one that needs the altered slice fails on both of its ranks; so does the
    other, and each keeps serving what it served.
    """
    first, second = state(1), nudged(state(1), 2)
    engines = {
        name: engine(lambda n=name: trainer.links(n), name, ranks)
        for name, ranks in (("one", 1), ("two", 2))
    }
    every = [receiver for receivers in engines.values() for receiver in receivers]
    for version, weights in ((1, first), (2, second)):
        catalogue = trainer.publish(version, weights)
        trainer.desk.open(catalogue, {"one": 1, "two": 2}, limit_s=30)
        if version == 2:
            (held,) = trainer.offers[1]._versions[2].boxes["down"]
            held.bits[0, 0] ^= np.uint64(1)
        done = sync_all(every)
    assert all(isinstance(one, TransferDamaged) for one in done), done
    assert all("down" in str(one) for one in done)
    for name, receivers in engines.items():
        assert [(r.version, r.serving) for r in receivers] == [(1, False)] * len(receivers)
        assert equal(logical([r.held for r in receivers], len(receivers)), first)
        outcome = outcome_of(trainer, name)
        assert (outcome.outcome, outcome.differing) == ("failed", ("down",))


def test_a_dead_source_is_named_and_replicas_take_over(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    try:
        sharded = trainer.publish(1, state(1))
        trainer.desk.open(sharded, {"e": 1}, limit_s=5)
        trainer.served[1].close()
        receiver = engine(lambda: trainer.links("e", stall_s=3.0), "e", 1)[0]
        with pytest.raises(SourceLost, match=r"expected one of ranks \[1\].*start the source"):
            receiver.sync()
        assert receiver.version is None

        everywhere = [o.stage(2, state(2)) for o in trainer.offers]
        catalogue = join_catalogues(everywhere)
        assert all(held.ranks == (0, 1) for held in catalogue.holdings)
        for offers in trainer.offers:
            offers.open(catalogue)
        trainer.desk.open(catalogue, {"e": 1}, limit_s=30)
        receiver.sync()
        assert equal(logical([receiver.tensors], 1), state(2))
    finally:
        trainer.close()


def test_a_source_that_never_was_is_lost_on_both_transports(
    trainer: Trainer, tmp_path: Path
) -> None:
    with pytest.raises(SourceLost, match="expected one of 2 sources"):
        engine(lambda: trainer.links("e", {0: 1, 1: 1}), "e", 1)[0].sync()
    store = serve_store()
    link = ClusterLink(0, "127.0.0.1", store.port, name="e", stall_s=1.0)
    with pytest.raises(SourceLost, match="rank 0 by the store"):
        link.ask("catalogue", {})
    nowhere = ClusterLink(0, "127.0.0.1", 1, name="e", stall_s=1.0)
    with pytest.raises(SourceLost, match="expected the store"):
        nowhere.ask("catalogue", {})


def test_nothing_new_and_an_old_version_are_refused(trainer: Trainer) -> None:
    receiver = engine(lambda: trainer.links("e"), "e", 1)[0]
    with pytest.raises(TransferRefused, match="expected a version after None"):
        receiver.sync()
    catalogue = trainer.publish(1, state(1))
    ticket = Ticket(version=9, boxes=(BoxName(name="norm", offset=(0,), size=(4,)),))
    link = trainer.links("e")[0]
    with pytest.raises(TransferRefused, match=r"one of the versions \[1\]"):
        link.fetch(ticket, most_bytes=1000)
    for name, offset, size in (
        ("norm", (60,), (9,)),
        ("norm", (0, 0), (4, 4)),
        ("nothing", (0,), (1,)),
    ):
        wrong = Ticket(version=1, boxes=(BoxName(name=name, offset=offset, size=size),))
        with pytest.raises(TransferRefused, match="a box that rank 0 holds"):
            link.fetch(wrong, most_bytes=1000)
    with pytest.raises(TransferRefused, match="boxes in a ticket"):
        link.fetch(Ticket(version=1, boxes=()), most_bytes=1000)
    with pytest.raises(TransferRefused, match="a question among"):
        link.ask("nonsense", {})
    with pytest.raises(TransferRefused, match="the desk at rank 1"):
        trainer.links("e")[1].ask("report", {})
    assert catalogue.version == 1


# Receivers that are wrong.


def test_a_receiver_that_lies_about_its_base_gets_everything(trainer: Trainer) -> None:
    """It says that it stands on version 1, and its bits are others: no difference is applied."""
    first, second = state(1), nudged(state(1), 2)
    honest, liar = (engine(lambda n=n: trainer.links(n), n, 2) for n in ("honest", "liar"))
    trainer.desk.open(trainer.publish(1, first), {"honest": 2, "liar": 2}, limit_s=30)
    sync_all([*honest, *liar])
    for receiver in liar:
        bits = {name: array.copy() for name, array in receiver.tensors.items()}
        bits["o"][5, 3] ^= np.uint32(1)
        receiver.stands_on(1, str(receiver.root), bits)
    trainer.desk.open(trainer.publish(2, second), {"honest": 2, "liar": 2}, limit_s=30)
    done = sync_all([*honest, *liar])
    assert [one.encoding for one in done if isinstance(one, Synced)] == ["patch"] * 2 + [
        "whole"
    ] * 2
    for receivers in (honest, liar):
        assert equal(logical([r.tensors for r in receivers], 2), second)
    assert [one.outcome for one in trainer.desk.outcomes()] == ["serving", "serving"]


def test_a_difference_from_another_version_is_refused(trainer: Trainer) -> None:
    for version in (1, 2, 3):
        trainer.publish(version, nudged(state(1), version))
    box = BoxName(name="norm", offset=(0,), size=(64,))
    for base in (1, 3, 7):
        with pytest.raises(BaseRefused, match="expected a receiver on version 2"):
            trainer.links("e")[0].fetch(
                Ticket(version=3, base_version=base, boxes=(box,)), most_bytes=1000
            )


def test_one_wrong_rank_keeps_its_whole_engine_from_serving(trainer: Trainer) -> None:
    """Rank 1 stores what rank 0 should: together they do not hold each element once."""
    trainer.desk.open(trainer.publish(1, state(1)), {"e": 2, "f": 1}, limit_s=30)
    wrong = [
        Receiver("e", trainer.links("e"), layouts(0, 2), rank=rank, ranks=2, limit_bytes=4 << 20)
        for rank in (0, 1)
    ]
    right = engine(lambda: trainer.links("f"), "f", 1)
    done = sync_all([*wrong, *right])
    assert [type(one) for one in done] == [TransferDamaged, TransferDamaged, Synced]
    assert [r.version for r in wrong] == [None, None]
    failed = outcome_of(trainer, "e")
    assert failed.outcome == "failed"
    assert "do not hold each element once" in failed.reason
    assert outcome_of(trainer, "f").outcome == "serving"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("norm"), "expected a version with tensor norm"),
        (lambda w: w.update(norm=w["norm"][:32]), r"expected norm as float32 \(64,\), found"),
        (lambda w: w.update(norm=w["norm"].astype("f8")), "found float64"),
        (lambda w: w.update(more=np.ones(4)), "1 tensors differ, more first"),
    ],
    ids=["missing key", "shape", "dtype", "extra key"],
)
def test_another_model_is_refused(trainer: Trainer, change: Any, says: str) -> None:
    weights = state(1)
    trainer.desk.open(trainer.publish(1, weights), {"e": 1}, limit_s=30)
    receiver = engine(lambda: trainer.links("e"), "e", 1)[0]
    receiver.sync()
    other = nudged(weights, 3)
    change(other)
    trainer.desk.open(trainer.publish(2, other), {"e": 1}, limit_s=30)
    with pytest.raises(TransferError, match=says):
        receiver.sync()
    assert (receiver.version, receiver.serving) == (1, False)
    with pytest.raises(TransferRefused, match="version 2 to be taken"):
        _ = receiver.tensors
    assert equal(logical([receiver.held], 1), weights)
    assert re.search(says, str(outcome_of(trainer, "e").reason))


def test_a_quick_receiver_waits_for_the_sync_and_for_slower_ranks(trainer: Trainer) -> None:
    """Rank 0 offers the version first; the sync begins after the engine has pulled everything."""
    weights = state(1)
    receivers = engine(lambda: trainer.links("e"), "e", 2)
    parts = [o.stage(1, shards(weights, o.rank, 2)) for o in trainer.offers]
    catalogue = join_catalogues(parts)
    done: list[Any] = []
    syncing = threading.Thread(target=lambda: done.extend(sync_all(receivers, wait_s=10)))
    syncing.start()
    trainer.offers[0].open(catalogue)
    deadline = time.monotonic() + 20
    while trainer.offers[0].served.parcels < 2:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert trainer.offers[1].served.parcels == 0
    trainer.offers[1].open(catalogue)
    while trainer.offers[1].served.parcels < 2:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert not done
    trainer.desk.open(catalogue, {"e": 2}, limit_s=30)
    syncing.join()
    assert all(isinstance(one, Synced) for one in done), done
    assert outcome_of(trainer, "e").outcome == "serving"


def test_a_failure_before_the_sync_begins_is_not_forgotten(trainer: Trainer) -> None:
    other = state(1)
    other.pop("norm")
    catalogue = trainer.publish(1, other)
    receiver = engine(lambda: trainer.links("e"), "e", 1)[0]
    with pytest.raises(TransferRefused, match="tensor norm"):
        receiver.sync()
    trainer.desk.open(catalogue, {"e": 1}, limit_s=600)
    assert "tensor norm" in str(outcome_of(trainer, "e").reason)


def test_silent_ranks_are_lost_and_may_not_come_late(trainer: Trainer) -> None:
    """One engine never starts, one has a rank that never starts; the third serves all the same."""
    trainer.desk.open(trainer.publish(1, state(1)), {"gone": 1, "half": 2, "well": 1}, limit_s=3)
    half = engine(lambda: trainer.links("half"), "half", 2)
    well = engine(lambda: trainer.links("well"), "well", 1)
    done = sync_all([half[0], *well])
    assert isinstance(done[0], TransferError)
    assert isinstance(done[1], Synced)
    outcomes = {one.target: one for one in trainer.desk.outcomes()}
    assert {t: o.outcome for t, o in outcomes.items()} == {
        "gone": "lost",
        "half": "lost",
        "well": "serving",
    }
    assert "1 of 2 ranks kept silent" in str(outcomes["half"].reason)
    late = engine(lambda: trainer.links("gone"), "gone", 1)[0]
    with pytest.raises(TransferRefused, match="ended for it"):
        late.sync()
    assert late.version is None


STOPPED = """
import sys
from pathlib import Path
from shiftbook.checkpoint.errors import TransferError
from shiftbook.checkpoint.layouts import split
from shiftbook.checkpoint.transfer.flight import FlightLink
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.receiver import Receiver

port, authority, token = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
link = FlightLink(0, "127.0.0.1", port, authority=authority, token=token)
stored = {"w": Stored("float32", split("w", (1024, 1024), 0, 0, 1))}
receiver = Receiver("e", [link], stored, limit_bytes=3 << 20)
for _ in range(2):
    try:
        receiver.sync(wait_s=30)
        print("took", receiver.version, receiver.serving)
    except TransferError as error:
        print(type(error).__name__, receiver.version, receiver.serving)
"""


@pytest.mark.slow
def test_a_receiver_that_was_stopped_within_its_pull_serves_the_next_version(
    trainer: Trainer,
) -> None:
    """Its version ends without it; when it goes on it may not serve that, and takes the next."""
    first = trainer.offers[0].publish(1, large())
    with SlowLink("127.0.0.1", trainer.served[0].port, rate_bytes_s=2e6) as line:
        child = subprocess.Popen(
            [
                *(sys.executable, "-c", STOPPED, str(line.port)),
                *(str(trainer.files.authority), issue_token(SECRET, "e", 600)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            until(lambda: line.passed_bytes > 1_000_000)
            child.send_signal(signal.SIGSTOP)
            trainer.desk.open(first, {"e": 1}, limit_s=1)
            assert outcome_of(trainer, "e").outcome == "lost"
            trainer.desk.open(trainer.offers[0].publish(2, large(1)), {"e": 1}, limit_s=60)
            child.send_signal(signal.SIGCONT)
            said = child.communicate(timeout=60)[0].splitlines()
        finally:
            child.kill()
    assert said == ["TransferRefused None False", "took 2 True"]
    assert outcome_of(trainer, "e").outcome == "serving"


def test_a_target_that_is_known_to_be_dead_is_waited_for_no_longer(trainer: Trainer) -> None:
    trainer.desk.open(trainer.publish(1, state(1)), {"dead": 1, "e": 1}, limit_s=600)
    engine(lambda: trainer.links("e"), "e", 1)[0].sync()
    trainer.desk.lose("dead", "its process ended")
    assert [one.outcome for one in trainer.desk.outcomes()] == ["lost", "serving"]


def test_an_engine_that_fails_to_load_goes_back(trainer: Trainer) -> None:
    first, second = state(1), nudged(state(1), 2)
    receiver = engine(lambda: trainer.links("e"), "e", 1)[0]
    loaded: list[int] = []
    trainer.desk.open(trainer.publish(1, first), {"e": 1}, limit_s=30)
    receiver.sync(install=lambda tensors: loaded.append(id(tensors["norm"])))

    def refuse(tensors: Any) -> None:
        loaded.append(id(tensors["norm"]))
        if len(loaded) == 2:
            raise ValueError("prepacked")

    trainer.desk.open(trainer.publish(2, second), {"e": 1}, limit_s=30)
    with pytest.raises(TransferError, match=r"did not load version 2.*prepacked.*keeps version 1"):
        receiver.sync(install=refuse)
    assert loaded[2] == loaded[0]
    assert not receiver.serving
    assert equal(logical([receiver.held], 1), first)
    assert outcome_of(trainer, "e").outcome == "failed"

    def broken(tensors: Any) -> None:
        raise MemoryError("gone")

    trainer.desk.open(trainer.publish(3, second), {"e": 1}, limit_s=30)
    with pytest.raises(TransferError, match=r"nor version 1 again.*it holds none"):
        receiver.sync(install=broken)
    assert (receiver.version, dict(receiver.held)) == (None, {})


def test_a_rank_that_dies_before_it_confirms_takes_its_engine_along(trainer: Trainer) -> None:
    """Rank 0 has loaded; rank 1 is gone: rank 0 goes back to what it had."""
    trainer.desk.open(trainer.publish(1, state(1)), {"e": 2}, limit_s=30)
    receivers = engine(lambda: trainer.links("e"), "e", 2, verdict_s=2.0)
    reached = threading.Event()
    undone: list[str] = []

    class Died(BaseException):
        pass

    def die(tensors: Any) -> None:
        reached.set()
        raise Died

    def dying() -> None:
        with pytest.raises(Died):
            receivers[1].sync(install=die)

    other = threading.Thread(target=dying)
    other.start()
    with pytest.raises(SourceLost, match="all 2 ranks to confirm"):
        receivers[0].sync(install=lambda tensors: undone.append("loaded"))
    other.join()
    assert reached.is_set()
    assert [r.version for r in receivers] == [None, None]
    trainer.desk.lose("e", "rank 1 died")
    assert outcome_of(trainer, "e").outcome == "lost"


# Memory and disk.


def test_a_limit_that_is_too_small_is_refused(trainer: Trainer) -> None:
    trainer.publish(1, state(1))
    receiver = engine(lambda: trainer.links("e"), "e", 1, limit_bytes=100_000)[0]
    with pytest.raises(TransferRefused, match="expected a limit of at least 786432 bytes"):
        receiver.sync()
    assert parcel_bytes(786_432, 2) == 64 << 10


def test_a_budget_keeps_its_limit_and_frees_what_stalls() -> None:
    budget = Budget(100, hold_s=0.3)
    with pytest.raises(TransferRefused, match="at most 100 bytes"):
        budget.take(101)
    budget.take(80)  # by someone who never gives it back
    first = budget.take(20)
    budget.give_back(first)
    assert budget.peak_bytes == 100
    with budget.taken(60):  # waits until the first one's time is over
        assert budget.peak_bytes == 100
    tight = Budget(100, hold_s=60.0)
    tight._hold_s = 0.1
    tight.take(90)
    tight._taken = {1: (1e18, 90)}
    with pytest.raises(SourceLost, match="others stall"):
        tight.take(20)


def test_a_large_tensor_passes_within_the_limit(trainer: Trainer) -> None:
    """4 MB through a limit of 1 MB at the receiver, and of 0.5 MB at the source."""
    weights = large()
    offers = Offers(0, limit_bytes=500_000)
    desk = Desk()
    with FlightSource(Source(offers, desk), trainer.files, SECRET) as served:
        desk.open(offers.publish(1, weights), {"e": 1}, limit_s=30)
        receiver = large_receiver(trainer.links("e", {0: served.port})[:1], limit_bytes=1_000_000)
        done = receiver.sync()
    assert done.pulled.parcels >= 12
    assert 0 < done.pulled.peak_bytes <= 1_000_000
    assert 0 < offers.budget.peak_bytes <= 500_000
    assert np.array_equal(receiver.tensors["w"].view(np.float32), weights["w"])


def test_a_spool_goes_on_after_a_lost_source(trainer: Trainer, tmp_path: Path) -> None:
    """A second receiver, as of a process started again, pulls only what the first had not."""
    weights = large()
    catalogue = trainer.offers[0].publish(1, weights)
    trainer.desk.open(catalogue, {"e": 1}, limit_s=60)
    spool = tmp_path / "spool"
    with SlowLink("127.0.0.1", trainer.served[0].port, cut_after=2_500_000, cuts=1000) as line:
        line._since_cut = 0
        first = large_receiver(trainer.links("e", {0: line.port}, stall_s=3.0)[:1], spool=spool)
        original = line._is_cut

        def cut_for_good(count: int) -> bool:
            if original(count):
                line._cut_after = 1
                return True
            return False

        line._is_cut = cut_for_good  # type: ignore[method-assign]
        with pytest.raises(SourceLost):
            first.sync()
    assert first.version is None
    assert sorted(path.name for path in spool.iterdir()) == ["e-0.weights", "e-0.weights.journal"]
    second = large_receiver(trainer.links("e")[:1], spool=spool)
    done = second.sync()
    assert done.resumed
    assert 0 < done.moved_bytes < 0.8 * catalogue.nbytes
    assert np.array_equal(second.tensors["w"].view(np.float32), weights["w"])
    assert not list(spool.iterdir())
    assert outcome_of(trainer, "e").outcome == "serving"


@pytest.mark.parametrize("spooled", [True, False])
@pytest.mark.parametrize("newer", [1, 2])
@pytest.mark.parametrize("encoding", ["whole", "patch"])
def test_a_version_that_goes_while_it_is_pulled(
    trainer: Trainer, tmp_path: Path, encoding: str, newer: int, spooled: bool
) -> None:
    """Sources keep two versions. With one more published in mid-pull the pull ends well (a patch
    whose base went becomes whole weights); with two more it is refused, nothing of it is served,
    and the next sync takes the newest."""
    offers, desk = trainer.offers[0], trainer.desk
    versions = [large(seed) for seed in range(2)]
    for _ in range(newer + 1):
        versions.append({"w": versions[-1]["w"].copy()})
        versions[-1]["w"][:, len(versions)] += 1.0
    spool = tmp_path / "spool" if spooled else None
    calls: list[int] = []
    armed = threading.Event()

    def token() -> str:
        if armed.is_set():
            calls.append(len(calls))
            if len(calls) == 5:  # after the catalogue and some parcels
                for number in range(3, 3 + newer):
                    offers.publish(number, versions[number])
        return issue_token(SECRET, "e", 600)

    link = trainer.links("e", token=token)[:1]
    receiver = large_receiver(link, spool=spool)
    if encoding == "patch":
        desk.open(offers.publish(1, versions[1]), {"e": 1}, limit_s=60)
        receiver.sync()
    desk.open(offers.publish(2, versions[2]), {"e": 1}, limit_s=60)
    armed.set()
    if newer == 1:
        done = receiver.sync()
        assert done.version == 2
        assert np.array_equal(receiver.tensors["w"].view(np.float32), versions[2]["w"])
    else:
        with pytest.raises(TransferRefused, match=r"versions \[3, 4\].* was asked for 2"):
            receiver.sync()
        assert receiver.version == (1 if encoding == "patch" else None)
        assert not receiver.serving
        assert outcome_of(trainer, "e").outcome == "failed"
        if encoding == "patch":
            assert np.array_equal(receiver.held["w"].view(np.float32), versions[1]["w"])
    armed.clear()
    newest = offers.newest()
    assert newest is not None
    desk.open(newest, {"e": 1}, limit_s=60)
    assert receiver.sync().version == 2 + newer
    assert np.array_equal(receiver.tensors["w"].view(np.float32), versions[2 + newer]["w"])
    assert outcome_of(trainer, "e").outcome == "serving"
    assert spool is None or not list(spool.iterdir())


@pytest.mark.parametrize("spooled", [True, False])
def test_a_token_that_ends_within_a_pull_costs_no_parcel(
    trainer: Trainer, tmp_path: Path, spooled: bool
) -> None:
    """It serves nothing; with a good token it goes on where it was, where there is a spool."""
    weights = large()
    catalogue = trainer.offers[0].publish(1, weights)
    trainer.desk.open(catalogue, {"e": 1}, limit_s=60)
    good = issue_token(SECRET, "e", 600)
    ended = issue_token(SECRET, "e", 5, now_s=time.time() - 10)
    calls: list[str] = []

    def token() -> str:
        calls.append(ended if 3 < len(calls) < 100 else good)
        return calls[-1]

    spool = tmp_path / "spool"
    receiver = large_receiver(trainer.links("e", token=token)[:1], spool=spool if spooled else None)
    with pytest.raises(TokenRefused, match=r"ended \d+ s ago; issue a new one"):
        receiver.sync()
    assert not receiver.serving
    assert receiver.version is None
    calls += [good] * 100
    done = receiver.sync()
    assert done.resumed == spooled
    assert (done.moved_bytes < 0.8 * catalogue.nbytes) == spooled
    assert np.array_equal(receiver.tensors["w"].view(np.float32), weights["w"])
    assert not spooled or not list(spool.iterdir())
    assert outcome_of(trainer, "e").outcome == "serving"


def test_a_spool_that_tells_a_tale_is_found_out(trainer: Trainer, tmp_path: Path) -> None:
    """As after a power cut: the journal promises parcels that the file does not hold."""
    weights = large()
    trainer.desk.open(trainer.offers[0].publish(1, weights), {"e": 1}, limit_s=60)
    spool = tmp_path / "spool"
    with SlowLink("127.0.0.1", trainer.served[0].port, cut_after=2_500_000, cuts=10_000) as line:
        line_is_cut = line._is_cut

        def cut_for_good(count: int) -> bool:
            if line_is_cut(count):
                line._cut_after = 1
                return True
            return False

        line._is_cut = cut_for_good  # type: ignore[method-assign]
        first = large_receiver(trainer.links("e", {0: line.port}, stall_s=3.0)[:1], spool=spool)
        with pytest.raises(SourceLost):
            first.sync()
    file = spool / "e-0.weights"
    file.write_bytes(bytes(file.stat().st_size))
    second = large_receiver(trainer.links("e")[:1], spool=spool)
    assert second.sync().resumed
    assert np.array_equal(second.tensors["w"].view(np.float32), weights["w"])


FULL = """
import resource, signal, sys
from pathlib import Path
from shiftbook.checkpoint.errors import StagingFailed
from shiftbook.checkpoint.layouts import split
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.staging import Staging

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
stored = Stored("float32", split("w", (1024, 1024), 0, 0, 1))
try:
    Staging({"w": stored}, None, file=Path(sys.argv[1]))
except StagingFailed as error:
    print(error)
"""


def test_a_full_disk_shows_before_the_first_parcel(trainer: Trainer, tmp_path: Path) -> None:
    """The system refuses a file of this size; and more than the disk has is not tried at all."""
    file = tmp_path / "spool" / "w"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=True
    )
    assert f"expected room for 4194304 bytes at {file}" in done.stdout
    assert not file.exists()
    huge = {"w": Stored("float32", split("w", (1 << 22, 1 << 22), 0, 0, 1))}
    with pytest.raises(StagingFailed, match="bytes free on the disk"):
        Staging(huge, None, file=file)
    assert not file.exists()

    trainer.desk.open(trainer.offers[0].publish(1, large()), {"e": 1}, limit_s=30)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    receiver = large_receiver(trainer.links("e")[:1], spool=blocked)
    with pytest.raises(StagingFailed, match="free some"):
        receiver.sync()
    assert receiver.version is None
    assert outcome_of(trainer, "e").outcome == "failed"


FULL_WITHIN = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from shiftbook.checkpoint.errors import StagingFailed
from shiftbook.checkpoint.layouts import split
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.staging import Staging

disk = Path(sys.argv[1])
for spare in (0, 4096):
    seen = os.statvfs(disk)
    rows = (seen.f_bavail * seen.f_frsize - spare) // 4096
    stored = {"w": Stored("float32", split("w", (rows, 1024), 0, 0, 1))}
    noted = 0
    try:
        staging = Staging(stored, None, file=disk / "w", identity="i" * 64)
        try:
            while True:
                staging.finished(SimpleNamespace(key=f"{noted:064d}"))
                noted += 1
        finally:
            staging.close()
    except StagingFailed as error:
        print(noted, sorted(path.name for path in disk.iterdir()), error)
"""


def test_a_disk_that_fills_up_within_a_pull_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """The second copy has its room; what notes its parcels has none, or none any more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1m none {disk} && exec "$@"'
    inside = ("unshare", "-rm", "sh", "-c", mount, "sh", sys.executable)
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    probe = subprocess.run([*inside, "-c", "pass"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"this user may not mount: {probe.stderr.strip()}")
    done = subprocess.run(
        [*inside, "-c", FULL_WITHIN, str(disk)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    at_once, later = (line.split(" ", 2) for line in done.stdout.splitlines())
    assert (at_once[0], at_once[1]) == ("0", "[]")
    assert int(later[0]) > 10
    assert later[1] == "[]"
    for _, _, said in (at_once, later):
        assert f"expected room for the journal of {disk / 'w'}, found No space left" in said


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda noted: noted, 3),
        (lambda noted: noted[:-4], 2),
        (lambda noted: noted + bytes(64), 3),
        (lambda noted: bytes(len(noted)), 0),
        (lambda noted: noted + bytes(64) + b"\n", 0),
        (lambda noted: b"\xff\xfe" + noted, 0),
        (lambda noted: noted + b"[1, 2]\n", 0),
        (lambda noted: noted.replace(b"i", b"j"), 0),
        (lambda noted: b"", 0),
    ],
    ids=["whole", "cut", "nulls", "all-nulls", "null-line", "no-text", "no-key", "other", "empty"],
)
def test_a_damaged_journal_costs_at_most_the_parcels_that_it_noted(
    tmp_path: Path, damage: Any, kept: int
) -> None:
    """As a process or a machine that went down leaves it; the copy goes on, and again after."""
    stored = {"w": Stored("float32", split("w", (8, 8), 0, 0, 1))}
    orders = [SimpleNamespace(key=f"parcel-{number}") for number in range(5)]

    def staged() -> Staging:
        return Staging(stored, None, file=tmp_path / "w", identity="iii")

    first = staged()
    for order in orders[:3]:
        first.finished(order)  # type: ignore[arg-type]
    first.close(keep=True)
    journal = tmp_path / "w.journal"
    journal.write_bytes(damage(journal.read_bytes()))
    second = staged()
    assert second.done == {order.key for order in orders[:kept]}
    second.finished(orders[4])  # type: ignore[arg-type]
    second.close(keep=True)
    third = staged()
    assert third.done == {order.key for order in (*orders[:kept], orders[4])}
    third.close()
    assert not list(tmp_path.iterdir())


MEASURED = """
import resource, sys
from pathlib import Path
from shiftbook.checkpoint.layouts import split
from shiftbook.checkpoint.transfer.flight import FlightLink
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.receiver import Receiver

port, authority, token, limit = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
link = FlightLink(0, "127.0.0.1", port, authority=authority, token=token)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def receiver(rows):
    stored = {"w": Stored("float32", split("w", (rows, 4096), 0, 0, 1))}
    return Receiver("e", [link], stored, limit_bytes=limit)


receiver(64).sync()  # libraries and compiled kernels
before = peak()
print("ready", flush=True)
sys.stdin.readline()
big = receiver(16384)
big.sync(wait_s=60)
print(before, peak(), big.tensors["w"].nbytes)
"""


def test_the_memory_of_a_process_grows_by_the_copy_and_the_limit(trainer: Trainer) -> None:
    """256 MB into a process whose parcels may take 24 MB: its peak is measured from outside."""
    limit = 24 << 20
    offers = trainer.offers[0]
    trainer.desk.open(
        offers.publish(1, {"w": np.ones((64, 4096), np.float32)}), {"e": 1}, limit_s=60
    )
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            MEASURED,
            str(trainer.served[0].port),
            str(trainer.files.authority),
            issue_token(SECRET, "e", 600),
            str(limit),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    large_one = np.random.default_rng(1).standard_normal((16384, 4096), np.float32)
    trainer.desk.open(offers.publish(2, {"w": large_one}), {"e": 1}, limit_s=60)
    out, _ = child.communicate("go\n", timeout=120)
    before, after, copy = map(int, out.split())
    assert copy == large_one.nbytes == 256 << 20
    assert after - before <= copy + limit + (16 << 20), (after - before - copy) / 2**20
