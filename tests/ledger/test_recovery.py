"""Recovery of moves whose controller died.

Goal: recovery ends every open move in the way that its last step allows, finds the mover by
itself, survives its own crash, and leaves alone what another recovery holds. Method: moves brought
to each step by a controller that then says nothing more, and a cluster that lives in a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from shiftbook.ledger import mover as mover_module
from shiftbook.ledger.errors import (
    DeviceHeld,
    IllegalStep,
    InvalidInput,
    LedgerUnreachable,
    RecoverLater,
    ShiftbookError,
    UnknownJob,
)
from shiftbook.ledger.fencing import DeviceLock
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.mover import VacantMover, load_mover
from shiftbook.ledger.recovery import (
    Outcome,
    end_or_poison,
    finish_or_poison,
    recover,
    restore_or_poison,
)
from shiftbook.ledger.topology import Topology
from tests.ledger.gate_cases import (
    FILE_MOVER,
    HALF,
    WIDE,
    Clock,
    FileMover,
    advance,
    open_file_mover,
    open_gate,
    opened,
    proposal,
    running,
    start,
    world_path,
)

ENDS = {
    "proposed": "abandoned",
    "granted": "abandoned",
    "quiesced": "rolled_back",
    "transferred": "rolled_back",
    "verified": "committed",
}


@pytest.fixture
def gate(store_url: str) -> Iterator[Gate]:
    made = open_gate(store_url, Clock())
    yield made
    made.ledger.close()


@pytest.fixture
def mover(gate: Gate) -> FileMover:
    return FileMover.create(world_path(gate.ledger), HALF)


def left_at(gate: Gate, reached: str, *, named: str | None = None) -> str:
    """A move whose controller died at a step."""
    operation = gate.propose("j", proposal())
    if reached != "proposed":
        grant = gate.grant("j", operation, mover=named)
        if reached != "granted":
            advance(gate, grant, reached)
    return operation


def status(gate: Gate, operation: str) -> str:
    return gate.ledger.state().job("j").operations[operation].status


@pytest.mark.parametrize("reached", list(ENDS))
def test_each_step_has_its_end(gate: Gate, mover: FileMover, reached: str) -> None:
    running(gate)
    operation = left_at(gate, reached)
    where = WIDE if reached in ("transferred", "verified") else HALF
    mover.write(where, working=reached == "proposed")
    (outcome,) = recover(gate.ledger, "j", mover, reason="test")
    assert outcome == Outcome(operation, reached, ENDS[reached], "test")
    assert status(gate, operation) == ENDS[reached]
    assert mover.inspect().matches(gate.ledger.state().job("j").topology)
    assert mover.working()
    assert recover(gate.ledger, "j", mover) == []


@pytest.mark.parametrize("reached", list(ENDS))
@pytest.mark.parametrize("proposer", ["operator", "scheduler"])
def test_a_controller_that_starts_leaves_what_an_operator_asked_for(
    gate: Gate, mover: FileMover, reached: str, proposer: Literal["operator", "scheduler"]
) -> None:
    """Only an operator's proposal stays, and is then granted by what stands; all else is ended."""
    running(gate)
    operation = gate.propose("j", proposal(proposer=proposer))
    if reached != "proposed":
        grant = gate.grant("j", operation)
        if reached != "granted":
            advance(gate, grant, reached)
    where = WIDE if reached in ("transferred", "verified") else HALF
    mover.write(where, working=reached in ("proposed", "granted"))
    stays = (reached, proposer) == ("proposed", "operator")
    outcomes = recover(gate.ledger, "j", mover, leave_asked=True)
    assert [outcome.ended for outcome in outcomes] == ([] if stays else [ENDS[reached]])
    assert status(gate, operation) == ("proposed" if stays else ENDS[reached])
    if stays:
        assert gate.grant("j", operation).operation == operation


def test_a_granted_move_that_had_changed_something_is_rolled_back(
    gate: Gate, mover: FileMover
) -> None:
    running(gate)
    operation = left_at(gate, "granted")
    mover.write(WIDE, working=False)
    (outcome,) = recover(gate.ledger, "j", mover)
    assert (outcome.ended, status(gate, operation)) == ("rolled_back", "rolled_back")
    assert mover.inspect().matches(HALF)


@pytest.mark.parametrize("reached", ["granted", "quiesced", "transferred", "verified"])
def test_poisoned_only_when_the_way_that_is_left_fails_each_time(
    gate: Gate, mover: FileMover, reached: str
) -> None:
    running(gate)
    operation = left_at(gate, reached)
    mover.broken = True
    (outcome,) = recover(gate.ledger, "j", mover)
    assert outcome.ended == status(gate, operation) == "poisoned"
    assert mover.log == ["finish" if reached == "verified" else "restore"] * 3
    assert set(gate.ledger.state().quarantine) == {"n/0", "n/1"}


@pytest.mark.parametrize("reached", ["proposed", "granted", "quiesced", "verified"])
def test_each_way_is_refused_where_it_is_not_the_way(
    gate: Gate, mover: FileMover, reached: str
) -> None:
    running(gate)
    operation = gate.propose("j", proposal())
    grant = gate.grant("j", operation)
    if reached == "proposed":  # and closed under its controller
        gate.abandon("j", operation, "a weight sync goes first")
    elif reached != "granted":
        advance(gate, grant, reached)
    wrong = {"proposed": [restore_or_poison, finish_or_poison, end_or_poison]}.get(
        reached, [restore_or_poison if reached == "verified" else finish_or_poison]
    )
    found = status(gate, operation)
    for way in wrong:
        with pytest.raises(IllegalStep, match=f"{operation} is {found}"):
            way(gate, grant, mover, "x")
    assert mover.log == [], "nothing was touched"
    assert status(gate, operation) == found
    if reached != "proposed":
        assert end_or_poison(gate, grant, mover, "x") == ENDS[reached]


def test_the_commit_of_recovery_says_what_had_moved(gate: Gate, mover: FileMover) -> None:
    running(gate)
    operation = left_at(gate, "verified")
    recover(gate.ledger, "j", mover)
    committed = next(gate.ledger.read(operation=operation, reverse=True, limit=1))
    assert committed.type == "ReallocationCommitted"
    assert committed.body["moved_bytes"] == 5


def test_the_mover_is_found_by_the_grant_or_by_the_config(gate: Gate, mover: FileMover) -> None:
    running(gate)
    left_at(gate, "quiesced", named=FILE_MOVER)
    assert recover(gate.ledger, "j")[0].ended == "rolled_back"

    config = {"mover": FILE_MOVER}
    gate.open_job("k", opened(devices=("n/8", "n/9")).model_copy(update={"config": config}))
    gate.release("j", holder="a1", reason="x")
    here = Topology.of({"rollout": ["n/8"], "trainer": ["n/9"]})
    there = Topology.of({"rollout": ["n/8", "n/9"], "trainer": ["n/9"]})
    start(gate, "k", topology=here)
    grant = gate.grant("k", gate.propose("k", proposal(there)))
    advance(gate, grant, "transferred")
    assert recover(gate.ledger, "k")[0].ended == "rolled_back"
    assert open_file_mover(gate.ledger, "k").inspect().matches(here)


def test_a_move_that_names_no_mover_is_poisoned(gate: Gate) -> None:
    running(gate)
    operation = left_at(gate, "quiesced")
    (outcome,) = recover(gate.ledger, "j")
    assert outcome.ended == "poisoned"
    cause = next(gate.ledger.read(operation=operation, reverse=True, limit=1)).body["cause"]
    assert "no mover is known" in cause


def test_a_mover_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Entry:
        name: str

        def load(self) -> object:
            return open_file_mover

    def entries(*, group: str, name: str) -> list[Entry]:
        assert group == "shiftbook.movers"
        return [Entry(name)] if name == "ours" else []

    monkeypatch.setattr(mover_module, "entry_points", entries)
    assert load_mover("ours") is open_file_mover


@pytest.mark.parametrize("name", ["nobody", "nobody.at.all:mover", "json:mover", ":", ""])
def test_a_mover_that_is_not_there(name: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"expected a mover: an entry point of shiftbook\.movers"
    ):
        load_mover(name)


def test_a_recovery_that_dies_is_recovered_by_the_next(gate: Gate, mover: FileMover) -> None:
    class Death(BaseException):
        pass

    class Dying(FileMover):
        def restore(self, topology: Topology, grant: Grant) -> None:
            raise Death

    running(gate)
    operation = left_at(gate, "transferred")
    mover.write(WIDE, working=False)
    with pytest.raises(Death):
        recover(gate.ledger, "j", Dying(mover.path))
    assert status(gate, operation) == "transferred"
    assert recover(gate.ledger, "j", mover)[0].ended == "rolled_back"
    assert mover.inspect().matches(HALF)


def test_a_recovery_that_another_takes_over_leaves_it_alone(gate: Gate, mover: FileMover) -> None:
    class Overtaken(FileMover):
        def restore(self, topology: Topology, grant: Grant) -> None:
            self.log.append("restore")
            # A worker would refuse this grant after the other recovery took the move over.
            assert recover(gate.ledger, "j", mover)[0].ended == "rolled_back"
            raise OSError("refused")

    running(gate)
    left_at(gate, "transferred")
    overtaken = Overtaken(mover.path)
    (outcome,) = recover(gate.ledger, "j", overtaken)
    assert outcome.ended == "rolled_back"
    assert "left to another controller" in outcome.reason
    assert overtaken.log == ["restore"]
    assert not gate.ledger.state().quarantine


@pytest.mark.parametrize("reached", ["quiesced", "verified"])
@pytest.mark.parametrize(
    "error", [LedgerUnreachable("no route to the ledger"), RecoverLater("the loop starts anew")]
)
def test_what_cannot_act_now_poisons_nothing(
    gate: Gate, mover: FileMover, reached: str, error: ShiftbookError
) -> None:
    class CutOff(FileMover):
        def restore(self, topology: Topology, grant: Grant) -> None:
            raise error

        finish = restore

    running(gate)
    operation = left_at(gate, reached)
    with pytest.raises(type(error)):
        recover(gate.ledger, "j", CutOff(mover.path))
    assert status(gate, operation) == reached
    assert recover(gate.ledger, "j", mover)[0].ended == ENDS[reached]


@pytest.mark.parametrize("reached", ["granted", "quiesced", "verified"])
def test_where_every_process_is_dead_the_locks_say_so(
    gate: Gate, tmp_path: Path, reached: str
) -> None:
    running(gate)
    operation = left_at(gate, reached)
    locks = tmp_path / "locks"
    with DeviceLock(locks, "n/1"):
        with pytest.raises(DeviceHeld, match="n/1"):
            recover(gate.ledger, "j", VacantMover(locks, ("n/0", "n/1")))
        assert status(gate, operation) == reached
    recover(gate.ledger, "j", VacantMover(locks, ("n/0", "n/1")))
    assert status(gate, operation) == {"granted": "rolled_back"}.get(reached, ENDS[reached])
    assert start(gate, "j", "a2")


def test_recover_names_an_unknown_job(gate: Gate) -> None:
    with pytest.raises(UnknownJob):
        recover(gate.ledger, "nope")
