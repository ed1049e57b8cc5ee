"""Goal: what a receiver took is what the engine behind it serves, and nothing else ever is.

Method: two trainer ranks serve versions over Flight, with TLS and tokens; two torch engines pull
them, whole and as patches. What each engine answers to prompts and turns is held bit for bit
against an engine of its own that was given the trainer's weights. Then one engine gets parcels that
are altered on their way, or breaks as it loads: it is on the version before, the other one on the
new one, and the ledger says so for each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import TransferDamaged, TransferError, TransferRefused
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.transfer.flight import FlightSource
from shiftbook.checkpoint.transfer.receiver import Receiver
from shiftbook.checkpoint.transfer.record import LedgeredSync
from shiftbook.checkpoint.transfer.source import Source
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.engine_types import TurnRequest
from shiftbook.jobs.errors import EngineError
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.model import ModelConfig, init_params
from shiftbook.jobs.probe import probe_prompts
from shiftbook.jobs.pulled import PulledEngine, stored_whole
from shiftbook.jobs.serving import ServedEngine
from shiftbook.jobs.task import new_episode
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from tests.checkpoint.transfer_states import SECRET, Trainer
from tests.ledger.sample_ledger import Clock, Writer, open_sample

torch.set_num_threads(1)
CONFIG = ModelConfig(layers=2, width=32, heads=2)
JOB = "far"
TARGETS = {"east": 1, "west": 1}


def policy(version: int) -> dict[str, Tensor]:
    """Each version is the one before it with some elements moved, so that patches are short."""
    weights = {n: (8 * t).to(torch.bfloat16) for n, t in init_params(CONFIG, 0).items()}
    for step in range(1, version):
        generator = torch.Generator().manual_seed(step)
        for tensor in weights.values():
            moved = torch.rand(tensor.shape, generator=generator) < 0.05
            tensor[moved] *= 1.5
    return weights


class Spoilt:
    """A rank's offers, whose parcels arrive with a flipped bit while `spoil` is set."""

    def __init__(self, offers: Any) -> None:
        self._offers = offers
        self.spoil = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._offers, name)

    @contextmanager
    def parcel(self, ticket: Any) -> Iterator[list[Any]]:
        with self._offers.parcel(ticket) as buffers:
            if self.spoil:
                last = bytearray(buffers[-1])
                last[-1] ^= 1
                buffers = [*buffers[:-1], last]
            yield buffers


class Fragile(TorchEngine):
    """The reference engine, which can be told to load nothing, or to break in mid-load."""

    fault = ""

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        fault, self.fault = self.fault, ""
        if fault == "loads nothing":
            self.version = version
            return
        super().load(weights, version)
        if fault == "breaks":
            raise RuntimeError("half of it was written")


class World:
    """Trainer ranks, a second way to them that can be spoilt, a ledger, and two engines."""

    def __init__(self, folder: Path, book: Ledger) -> None:
        self.trainer = Trainer(folder)
        self.book = book
        self.spoilt = [Spoilt(offers) for offers in self.trainer.offers]
        self.crooked = [
            FlightSource(
                Source(one, self.trainer.desk if rank == 0 else None),  # type: ignore[arg-type]
                self.trainer.files,
                SECRET,
                port=0,
            )
            for rank, one in enumerate(self.spoilt)
        ]
        ports = {rank: served.port for rank, served in enumerate(self.crooked)}
        self.engines = {
            "east": self.engine("east", {}),
            "west": self.engine("west", ports),
        }

    def engine(self, target: str, ports: Mapping[int, int]) -> PulledEngine:
        receiver = Receiver(
            target,
            self.trainer.links(target, ports),
            stored_whole(CONFIG),
            limit_bytes=4 << 20,
            verdict_s=20.0,
        )
        return PulledEngine(receiver, ServedEngine(Fragile(CONFIG, 4), CONFIG), CONFIG)

    def begin(self, version: int) -> LedgeredSync:
        attempt = self.book.state().job(JOB).current_attempt()
        assert attempt is not None
        sync = LedgeredSync(
            Gate(self.book),
            JOB,
            attempt=attempt.attempt,
            epoch=attempt.epoch,
            desk=self.trainer.desk,
        )
        sync.begin(self.trainer.publish(version, policy(version)), TARGETS, limit_s=30)
        return sync

    def standings(self) -> dict[str, tuple[str, int | None]]:
        engines = self.book.state().job(JOB).engines
        return {name: (one.standing, one.version) for name, one in engines.items()}

    def close(self) -> None:
        for served in self.crooked:
            served.close()
        self.trainer.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_sample(tmp_path / "ledger.db", Clock()) as book:
        Writer(book, Clock(), JOB, "dynamic", random.Random(0)).open()
        made = World(tmp_path, book)
        yield made
        made.close()


def turns(count: int = 3) -> list[TurnRequest]:
    return [
        new_episode(0, format_uid(n, 0), n, CONFIG.context).next_request() for n in range(count)
    ]


def said(engine: Any) -> list[tuple[str, list[int], list[float]]]:
    """Tokens and log-probabilities of some turns, through the engine's own decode steps."""
    for request in turns():
        engine.submit(request)
    engine = getattr(engine, "served", engine)
    inner = getattr(engine, "engine", engine)
    found = []
    while inner.running or inner.waiting:
        found += engine.step()
    return sorted((r.uid, r.tokens, r.logps) for r in found)


def check_serves(engine: PulledEngine, version: int) -> None:
    """The engine is on a version: its tensors, its answers and its turns are those of an engine of
    its own that was given the trainer's weights."""
    weights = policy(version)
    fresh = TorchEngine(CONFIG, 4)
    fresh.load(weights, version)
    assert engine.served.version == version
    prompts = probe_prompts(CONFIG)
    inner = engine.served.engine
    resident = inner.resident()
    assert resident is not None
    assert fingerprint_tensors(resident) == fingerprint_tensors(weights)
    assert np.array_equal(inner.probe(prompts), fresh.probe(prompts))
    if engine.serving:
        assert said(engine) == said(fresh)


def deliveries(book: Ledger, operation: str | None) -> dict[str, StoredEvent]:
    events = [e for e in book.read(operation=operation) if e.type == "WeightSyncDelivered"]
    return {event.body["target"]: event for event in events}


def test_engines_serve_what_their_receivers_took(world: World) -> None:
    for version, encoding in ((1, "whole"), (2, "patch"), (3, "patch")):
        sync = world.begin(version)
        for engine in world.engines.values():
            synced = engine.sync(wait_s=5.0)
            assert (synced.version, synced.encoding) == (version, encoding)
            assert engine.taken is not None
            assert engine.taken.gap is not None
            assert engine.taken.gap.good
        sync.finish(caches_flushed=("kv",))
        assert world.standings() == dict.fromkeys(TARGETS, ("serving", version))
        for target, event in deliveries(world.book, sync.operation).items():
            check_serves(world.engines[target], version)
            assert event.body["fingerprint_of"] == "resident"
            assert event.body["encoding"] == encoding
            assert event.body["transport"] == "flight"
            assert event.body["root"] == root(fingerprint_tensors(policy(version)))
    used = world.engines["east"].served.first_use()
    assert used is not None
    assert used["parts"] == {"model": root(fingerprint_tensors(policy(3)))}


def test_nothing_is_served_before_the_first_version(world: World) -> None:
    engine = world.engines["east"]
    with pytest.raises(TransferRefused, match="first version"):
        engine.submit(turns(1)[0])
    assert not engine.serving
    with pytest.raises(EngineError, match="found none"):
        engine.served.step()


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "patch"])
@pytest.mark.parametrize("fault", ["altered on its way", "loads nothing", "breaks"])
def test_a_corrupted_delivery_leaves_the_engine_on_the_version_before(
    world: World, fault: str, whole: bool
) -> None:
    for version in (1, 2):
        sync = world.begin(version)
        for engine in world.engines.values():
            engine.sync(wait_s=5.0)
        sync.finish()

    east, west = world.engines["east"], world.engines["west"]
    sync = world.begin(3)
    if fault == "altered on its way":
        for one in world.spoilt:
            one.spoil = True
    else:
        west.served.engine.fault = fault  # type: ignore[attr-defined]
    assert east.sync(wait_s=5.0, whole=whole).encoding == ("whole" if whole else "patch")
    with pytest.raises(TransferDamaged if "altered" in fault else TransferError):
        west.sync(wait_s=5.0, whole=whole)
    outcomes = {one.target: one for one in sync.finish()}
    assert {n: o.outcome for n, o in outcomes.items()} == {"east": "serving", "west": "failed"}
    reason = outcomes["west"].reason
    assert reason is not None
    said_why = {"altered on its way": "altered", "loads nothing": "differing", "breaks": "half of"}
    assert said_why[fault] in reason
    check_serves(east, 3)
    check_serves(west, 2)
    assert (east.serving, west.serving) == (True, False)
    assert west.receiver.version == 2
    with pytest.raises(TransferRefused, match="version 3 to be taken"):
        west.submit(turns(1)[0])
    # The ledger says so, for each.
    assert world.standings() == {"east": ("serving", 3), "west": ("held", 2)}
    assert set(deliveries(world.book, sync.operation)) == {"east"}

    # Sound again, it takes the next version, from what it stands on.
    for one in world.spoilt:
        one.spoil = False
    sync = world.begin(4)
    assert east.sync(wait_s=5.0).encoding == "patch"
    assert west.sync(wait_s=5.0).encoding == "whole"  # of its version no patch leads here
    sync.finish()
    assert world.standings() == dict.fromkeys(TARGETS, ("serving", 4))
    for engine in world.engines.values():
        check_serves(engine, 4)


def test_an_engine_that_took_a_version_that_is_not_confirmed_goes_back(world: World) -> None:
    """The engine holds the new version, the desk no longer wants it: the old one is loaded."""
    sync = world.begin(1)
    for engine in world.engines.values():
        engine.sync(wait_s=5.0)
    sync.finish()
    world.begin(2)
    west = world.engines["west"]
    load = west.served.engine.load
    versions = []

    def overtaken(weights: Mapping[str, Tensor], version: int) -> None:
        load(weights, version)
        versions.append(version)
        if len(versions) == 1:
            world.trainer.desk.open(world.trainer.publish(3, policy(3)), TARGETS, limit_s=5)

    west.served.engine.load = overtaken  # type: ignore[method-assign]
    with pytest.raises(TransferError):
        west.sync(wait_s=5.0)
    assert versions == [2, 1]
    check_serves(west, 1)
    assert not west.serving


def test_a_receiver_of_several_ranks_is_refused(world: World) -> None:
    receiver = Receiver("e", world.trainer.links("e"), stored_whole(CONFIG), rank=0, ranks=2)
    with pytest.raises(EngineError, match="expected a receiver of one rank, found 2"):
        PulledEngine(receiver, ServedEngine(TorchEngine(CONFIG, 4), CONFIG), CONFIG)
