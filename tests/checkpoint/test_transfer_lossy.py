"""Goal: versions that lose something travel as such, to who declared it, and never further off.

Method: trainer ranks publish small updates of all elements, which int8 steps code shorter than
anything without loss; engines of 1, 2 and 4 ranks, one of them late, pull them over Flight. All
must hold one policy, bit for bit, each element within the bound of the trainer's, also after many
updates in one direction; who declares less is refused and goes on without harm. The events of such
a sync go through the gate and the verifier's invariant. Two ranks of an engine and two of a trainer
as processes are in `test_transfer_processes.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import TransferDamaged, TransferRefused
from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.patch import Lossy
from shiftbook.checkpoint.patch_format import TensorPatch
from shiftbook.checkpoint.patch_numbers import StepsOf, coded_steps, decode_int8
from shiftbook.checkpoint.transfer.catalogue import Catalogue, join_catalogues
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.receiver import Receiver, Synced
from shiftbook.checkpoint.transfer.record import LedgeredSync
from shiftbook.ledger.errors import LossNotDeclared
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import SyncPlan
from tests.checkpoint.transfer_states import (
    Trainer,
    drifted,
    engine,
    equal,
    logical,
    shards,
    state,
    sync_all,
)
from tests.ledger.sample_ledger import Clock, Writer, open_sample

BOUND = 1e-4
DECLARED = SyncPlan(encoding="int8-difference", max_error=BOUND)
LOSSY = Lossy(max_error=BOUND)
FLOATS = ("float64", "float32", "float16")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path, lossy=LOSSY)
    yield made
    made.close()


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest distance of an element that may lose something; others must be equal."""
    found = 0.0
    for name in one:
        if str(one[name].dtype) in FLOATS:
            away = np.abs(one[name].astype("f8") - other[name].astype("f8"))
            found = max(found, float(away.max(initial=0)))
        else:
            assert one[name].tobytes() == other[name].tobytes(), name
    return found


def pulled(receivers: list[Receiver]) -> dict[str, Any]:
    return logical([r.tensors for r in receivers], len(receivers))


def test_every_layout_gets_one_policy_within_the_bound(trainer: Trainer) -> None:
    """Engines of three layouts take 6 versions, one engine only the last, whole; the trainer moves
    its weights in one direction, and what was left over does not add up."""
    engines = {
        name: engine(lambda n=name: trainer.links(n), name, ranks, syncs=DECLARED)  # type: ignore[misc]
        for name, ranks in (("one", 1), ("two", 2), ("four", 4), ("late", 2))
    }
    weights, errors = state(1), []
    for version in range(1, 7):
        names = [n for n in engines if n != "late" or version == 6]
        catalogue = trainer.publish(version, weights)
        trainer.desk.open(catalogue, {n: len(engines[n]) for n in names}, limit_s=30)
        done = sync_all([receiver for n in names for receiver in engines[n]])
        assert all(isinstance(one, Synced) for one in done), done
        held = {n: pulled(engines[n]) for n in names}
        assert {root({k: fingerprint(v).hex for k, v in h.items()}) for h in held.values()} == {
            catalogue.root
        }
        if version == 1:
            assert catalogue.loss is None
            assert equal(held["one"], weights)
        else:
            assert catalogue.loss is not None
            encodings = [one.encoding for one in done if isinstance(one, Synced)]
            assert encodings[:7] == ["patch"] * 7
            full = sum(one.full_bytes for one in done[:7] if isinstance(one, Synced))
            moved = sum(one.moved_bytes for one in done[:7] if isinstance(one, Synced))
            assert moved < full / 2
            errors.append(furthest(held["two"], weights))
            assert 0 < errors[-1] <= catalogue.loss.largest_error <= BOUND
            # The trainer's own fingerprints stand beside those of what is served.
            prints = {name: fingerprint(array).hex for name, array in weights.items()}
            assert catalogue.source_fingerprints == prints
            assert root(prints) != catalogue.root
        weights = drifted(weights)
    assert errors[-1] < 2 * max(errors[:2])
    outcomes = {one.target: one.outcome for one in trainer.desk.outcomes()}
    assert outcomes == dict.fromkeys(engines, "serving")


@pytest.mark.parametrize(
    ("syncs", "says"),
    [
        (SyncPlan(), "the plan does not declare"),
        (SyncPlan(encoding="int8-difference", max_error=BOUND / 2), "above the plan's"),
    ],
)
def test_who_did_not_declare_it_refuses(trainer: Trainer, syncs: SyncPlan, says: str) -> None:
    """It serves no more, and holds what it held; the other engine goes on."""
    weights = state(1)
    strict = engine(lambda: trainer.links("strict"), "strict", 2, syncs=syncs)
    open_ = engine(lambda: trainer.links("open"), "open", 1, syncs=DECLARED)
    trainer.desk.open(trainer.publish(1, weights), {"strict": 2, "open": 1}, limit_s=30)
    sync_all([*strict, *open_])
    trainer.desk.open(trainer.publish(2, drifted(weights)), {"strict": 2, "open": 1}, limit_s=30)
    for whole in (False, True):
        with pytest.raises(TransferRefused, match=says):
            strict[0].sync(whole=whole)
    assert (strict[0].version, strict[0].serving) == (1, False)
    assert isinstance(open_[0].sync(), Synced)
    outcomes = {one.target: one for one in trainer.desk.outcomes()}
    assert outcomes["open"].outcome == "serving"
    assert outcomes["strict"].outcome == "failed"
    assert says in str(outcomes["strict"].reason)
    # An anchor loses nothing: it may be taken by all.
    third = drifted(drifted(weights))
    catalogue = trainer.publish(3, third, anchor=True)
    assert catalogue.loss is None
    trainer.desk.open(catalogue, {"strict": 2, "open": 1}, limit_s=30)
    done = sync_all([*strict, *open_])
    assert [one.encoding for one in done if isinstance(one, Synced)] == ["whole", "whole", "patch"]
    assert equal(pulled(strict), third)
    assert equal(pulled(open_), third)


def test_what_a_lossy_source_says_is_checked(trainer: Trainer) -> None:
    """Steps that a catalogue without a loss hides are not applied, and an error beyond the bound or
    bits that are not those of the catalogue are found before anything is served."""
    weights = state(1)
    receiver = engine(lambda: trainer.links("e"), "e", 1, syncs=DECLARED)[0]
    trainer.desk.open(trainer.publish(1, weights), {"e": 1}, limit_s=30)
    receiver.sync()
    catalogue = trainer.publish(2, drifted(weights))
    assert catalogue.loss is not None
    beyond = catalogue.loss.model_copy(update={"largest_error": 2 * BOUND})
    with pytest.raises(ValueError, match="beyond its bound"):
        Catalogue.model_validate(catalogue.model_copy(update={"loss": beyond}).model_dump())

    (held,) = trainer.offers[1]._versions[2].boxes["down"]
    assert held.steps is not None
    held.steps.steps[7] ^= 1
    trainer.desk.open(catalogue, {"e": 1}, limit_s=30)
    with pytest.raises(TransferDamaged, match="down"):
        receiver.sync()
    assert (receiver.version, receiver.serving) == (1, False)
    held.steps.steps[7] ^= 1

    hidden = catalogue.model_copy(update={"loss": None})
    for offers in trainer.offers:
        offers._versions[2].catalogue = hidden
    trainer.desk.open(hidden, {"e": 1}, limit_s=30)
    done = receiver.sync()
    assert (done.encoding, done.version) == ("whole", 2)  # its patches are refused


def test_ranks_must_lose_the_same() -> None:
    """Another bound at one rank, and a replica that was started anew: refused, until an anchor."""
    weights = state(1)
    one, other = Offers(0, lossy=LOSSY), Offers(1, lossy=Lossy(max_error=BOUND / 2))
    with pytest.raises(TransferRefused, match="may lose the same"):
        join_catalogues([o.stage(1, shards(weights, o.rank, 2)) for o in (one, other)])

    old, new = Offers(0, lossy=LOSSY), Offers(1, lossy=LOSSY)
    old.publish(1, {"norm": weights["norm"]})
    moved = {"norm": weights["norm"] + np.float32(1e-3) * np.sin(weights["norm"] * 9)}
    parts = [o.stage(2, moved) for o in (old, new)]
    with pytest.raises(TransferRefused, match="replicas have drifted apart"):
        join_catalogues(parts)
    parts = [o.stage(3, moved, anchor=True) for o in (old, new)]
    assert join_catalogues(parts).loss is None


@pytest.mark.parametrize("grid", [(9000,), (70, 130), (9, 40, 33), (1, 1, 20000)])
def test_slices_of_steps_lead_to_slices_of_the_result(grid: tuple[int, ...]) -> None:
    """Any slice of coded steps, applied to that slice of the base, gives that of the result."""
    rng = np.random.default_rng(3)
    old = rng.standard_normal(grid).astype("f4")
    new = old + (rng.standard_normal(grid) * 1e-3 * rng.integers(1, 9, grid)).astype("f4")
    coded = coded_steps("float32", *(a.view("u4").reshape(-1) for a in (old, new)), 2e-4)
    assert coded is not None
    result = coded.result.reshape(grid)
    for _ in range(25):
        at = tuple(int(rng.integers(0, n)) for n in grid)
        shape = tuple(int(rng.integers(1, n - a + 1)) for n, a in zip(grid, at, strict=True))
        fields, stored = StepsOf(coded, grid, at, shape).encoded()
        record = TensorPatch.model_validate(
            {"dtype": "float32", "shape": shape, "base": "0" * 32, "result": "0" * 32, **fields}
        )
        window = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
        bits = np.ascontiguousarray(old.view("u4")[window]).reshape(-1)
        found = decode_int8("w", record, [memoryview(part) for part in stored], bits)
        assert np.array_equal(found.reshape(shape), result[window]), (at, shape)


def test_a_lossy_sync_is_an_operation_of_the_ledger(tmp_path: Path, trainer: Trainer) -> None:
    """The gate refuses it where the plan is silent; where it declares it the events say what the
    trainer has, what engines hold and how far that is."""
    weights = state(1)
    for declared in (False, True):
        with open_sample(tmp_path / f"{declared}.db", Clock()) as book:
            syncs = DECLARED if declared else None
            Writer(book, Clock(), "far", "dynamic", random.Random(0)).open(syncs=syncs)
            if not declared:
                trainer.publish(1, weights)
                catalogue = trainer.publish(2, drifted(weights))
            sync = _ledgered(book, trainer)
            if not declared:
                with pytest.raises(LossNotDeclared):
                    sync.begin(catalogue, {"e": 1}, limit_s=30)
                continue
            operation = sync.begin(catalogue, {"e": 1}, limit_s=30)
            receiver = engine(lambda: trainer.links("e"), "e", 1, syncs=DECLARED)[0]
            receiver.sync()
            assert [one.outcome for one in sync.finish()] == ["serving"]
            started, delivered = (
                e.body
                for e in book.read(operation=operation)
                if e.type in ("WeightSyncStarted", "WeightSyncDelivered")
            )
            new = {n: fingerprint(a).hex for n, a in drifted(weights).items()}
            assert (started["source"], started["source_root"]) == (new, root(new))
            assert started["lossy"]["root"] == delivered["root"] == catalogue.root
            assert started["lossy"]["whole"] == "decoded"
            assert delivered["encoding"] == "whole"
            assert 0 < started["lossy"]["largest_error"] <= started["lossy"]["max_error"] == BOUND


def _ledgered(book: Ledger, trainer: Trainer) -> LedgeredSync:
    attempt = book.state().job("far").current_attempt()
    assert attempt is not None
    gate = Gate(book)
    return LedgeredSync(
        gate, "far", attempt=attempt.attempt, epoch=attempt.epoch, desk=trainer.desk
    )
