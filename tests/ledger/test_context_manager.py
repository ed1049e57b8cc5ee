"""A move as a context manager, for schedulers that only want it recorded, fenced and undone.

Goal: a rejection begins nothing; leaving the block commits; an exception, an early end or a
SIGKILL at any point leaves the processes where the ledger says that they are, by rolling back
before ``verified`` and finishing after it. Method: a cluster that lives in a file, moved by this
process and by child processes that die inside the block.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shiftbook.ledger.errors import (
    IllegalStep,
    InvalidInput,
    Poisoned,
    Rejected,
    RolledBack,
    StaleGrant,
    UnknownJob,
)
from shiftbook.ledger.events.reallocation import ReallocationCommitted, ReallocationProposed
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.job_state import JobState, OperationState
from shiftbook.ledger.reallocation import Move
from shiftbook.ledger.recovery import recover
from shiftbook.ledger.topology import Topology
from tests.ledger.gate_cases import (
    BETWEEN,
    FILE_MOVER,
    FINGERPRINT,
    HALF,
    OTHER_FINGERPRINT,
    TRAIN,
    WIDE,
    Clock,
    FileMover,
    Process,
    open_gate,
    running,
    world_path,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(store_url: str, clock: Clock) -> Iterator[Gate]:
    made = open_gate(store_url, clock)
    running(made)
    yield made
    made.ledger.close()


@pytest.fixture
def mover(gate: Gate) -> FileMover:
    return FileMover.create(world_path(gate.ledger), HALF)


def job(gate: Gate) -> JobState:
    return gate.ledger.state().job("j")


def last(gate: Gate) -> OperationState:
    return list(job(gate).operations.values())[-1]


def run(
    gate: Gate, mover: FileMover | None, upto: str = "verified", after: Topology = WIDE
) -> Iterator[Move]:
    """Enter a block and take its steps; the caller raises, or lets it end."""
    with gate.reallocation(
        "j", after=after, bottleneck="rollout", expected_gain_s=12.0, mover=mover
    ) as move:
        if upto == "granted":
            yield move
            return
        if mover:
            mover.write(HALF, working=False)
        move.quiesced()
        if upto == "quiesced":
            yield move
            return
        if mover:
            mover.write(after, working=False)
        move.transferred(moved_bytes=7)
        if upto == "transferred":
            yield move
            return
        move.verified({"p": FINGERPRINT}, {"p": FINGERPRINT})
        if mover:
            mover.write(after, working=True)
        yield move


def matches(gate: Gate, mover: FileMover) -> None:
    """The real processes stand where the ledger says, and they work."""
    assert mover.inspect().matches(job(gate).topology)
    assert mover.working()
    assert job(gate).open_operation is None


def test_leaving_the_block_commits(gate: Gate, mover: FileMover, clock: Clock) -> None:
    with gate.reallocation(
        "j",
        after=WIDE,
        bottleneck="rollout",
        expected_gain_s=12.0,
        mover=mover,
        expected_cost_s=2.0,
        bottleneck_after="trainer",
        owed={"rollout": 4},
    ) as move:
        assert move.grant.devices == ("n/0", "n/1")
        clock.forward(0.5)
        assert move.quiesced() == move.grant
        clock.forward(0.25)
        move.transferred(moved_bytes=7, parts={"weights": 7})
        clock.forward(0.25)
        move.verified({"p": FINGERPRINT}, {"p": FINGERPRINT})
        mover.write(WIDE, working=True)
    matches(gate, mover)
    assert last(gate).status == "committed"
    events = {e.type: e.parsed() for e in gate.ledger.read(operation=move.operation)}
    assert events["ReallocationQuiesced"].plain()["quiesce_s"] == 0.5
    assert events["ReallocationTransferred"].plain()["transfer_s"] == 0.25
    committed = events["ReallocationCommitted"]
    assert isinstance(committed, ReallocationCommitted)
    assert (committed.moved_bytes, committed.stall_s) == (7, 1.0)
    proposed = events["ReallocationProposed"]
    assert isinstance(proposed, ReallocationProposed)
    assert (proposed.predicted_gain_s, proposed.predicted_cost_s) == (12.0, 2.0)
    assert proposed.owed == {"rollout": 4}
    assert proposed.gain_interval.high == float("inf")


def test_a_rejection_raises_on_entry(gate: Gate, mover: FileMover) -> None:
    with (
        pytest.raises(Rejected, match="owes-work"),
        gate.reallocation("j", after=TRAIN, bottleneck="trainer", expected_gain_s=1.0, mover=mover),
    ):
        pytest.fail("the block ran")
    assert mover.log == []
    matches(gate, mover)
    with pytest.raises(UnknownJob):
        gate.reallocation("nope", after=WIDE, bottleneck="x", expected_gain_s=1.0)


@pytest.mark.parametrize("upto", ["granted", "quiesced", "transferred"])
def test_an_exception_rolls_back_and_goes_on(gate: Gate, mover: FileMover, upto: str) -> None:
    block = run(gate, mover, upto)
    move = next(block)
    with pytest.raises(OSError, match="cable") as caught:
        block.throw(OSError("the cable"))
    ended = "abandoned" if upto == "granted" else "rolled_back"
    assert caught.value.__notes__ == [f"{move.operation}: {ended}"]
    assert last(gate).status == ended
    assert mover.log == ["restore"]
    matches(gate, mover)


@pytest.mark.parametrize("upto", ["granted", "quiesced", "transferred"])
def test_leaving_early_rolls_back_with_an_error(gate: Gate, mover: FileMover, upto: str) -> None:
    block = run(gate, mover, upto)
    next(block)
    missing = {"granted": "quiesced", "quiesced": "transferred", "transferred": "verified"}[upto]
    with pytest.raises(RolledBack, match=f"expected the step {missing} before the end"):
        next(block)
    matches(gate, mover)


def test_after_verified_an_exception_finishes_the_move(gate: Gate, mover: FileMover) -> None:
    block = run(gate, mover)
    move = next(block)
    mover.write(BETWEEN, working=False)
    with pytest.raises(OSError, match="late") as caught:
        block.throw(OSError("late"))
    assert caught.value.__notes__ == [f"{move.operation}: committed"]
    assert last(gate).status == "committed"
    assert mover.log == ["finish"]
    assert job(gate).topology.matches(WIDE)
    matches(gate, mover)


def test_commit_waits_for_the_mover_to_confirm(gate: Gate, mover: FileMover) -> None:
    block = run(gate, mover)
    next(block)
    mover.write(BETWEEN, working=False)
    with pytest.raises(StopIteration):
        next(block)
    assert mover.log == ["finish"]
    matches(gate, mover)
    assert last(gate).status == "committed"


@pytest.mark.parametrize("with_mover", [True, False])
def test_a_late_commit_is_still_a_commit(
    gate: Gate, mover: FileMover, clock: Clock, with_mover: bool
) -> None:
    block = run(gate, mover if with_mover else None)
    next(block)
    clock.forward(1e6)
    with pytest.raises(StopIteration):
        next(block)
    assert last(gate).status == "committed"
    assert last(gate).taken_over
    assert mover.log == []


def test_a_late_exception_after_verified_finishes_all_the_same(
    gate: Gate, mover: FileMover, clock: Clock
) -> None:
    block = run(gate, mover)
    next(block)
    clock.forward(1e6)
    mover.write(BETWEEN, working=False)
    with pytest.raises(OSError, match="late"):
        block.throw(OSError("late"))
    assert last(gate).status == "committed"
    matches(gate, mover)


@pytest.mark.parametrize("upto", ["granted", "quiesced", "transferred", "verified"])
def test_without_a_mover_an_exception_poisons(gate: Gate, upto: str) -> None:
    block = run(gate, None, upto)
    move = next(block)
    with pytest.raises(OSError, match="cable") as caught:
        block.throw(OSError("the cable"))
    assert caught.value.__notes__ == [f"{move.operation}: poisoned"]
    assert set(gate.ledger.state().quarantine) == {"n/0", "n/1"}


def test_without_a_mover_leaving_early_poisons(gate: Gate) -> None:
    block = run(gate, None, "quiesced")
    next(block)
    with pytest.raises(Poisoned, match="expected the step transferred"):
        next(block)


def test_without_a_mover_a_whole_block_commits(gate: Gate) -> None:
    block = run(gate, None)
    next(block)
    with pytest.raises(StopIteration):
        next(block)
    assert last(gate).status == "committed"


def test_a_hiccup_of_the_mover_costs_nothing(gate: Gate, mover: FileMover) -> None:
    mover.failures = 2
    block = run(gate, mover, "transferred")
    next(block)
    with pytest.raises(OSError, match="cable"):
        block.throw(OSError("the cable"))
    assert mover.log == ["restore"] * 3
    matches(gate, mover)


@pytest.mark.parametrize("upto", ["quiesced", "verified"])
def test_a_mover_that_can_do_neither_poisons(gate: Gate, mover: FileMover, upto: str) -> None:
    block = run(gate, mover, upto)
    move = next(block)
    mover.broken = True
    with pytest.raises(OSError, match="cable") as caught:
        block.throw(OSError("the cable"))
    assert caught.value.__notes__ == [f"{move.operation}: poisoned"]
    cause = gate.ledger.event(last(gate).last_position).body["cause"]
    assert "the cluster does not answer" in cause
    assert "the cable" in cause


def test_an_unconfirmed_restore_is_no_roll_back(gate: Gate, mover: FileMover) -> None:
    class Liar(FileMover):
        def _act(self, name: str, topology: Topology) -> None:
            self.log.append(name)

    liar = Liar(mover.path)
    block = run(gate, liar, "transferred")
    next(block)
    with pytest.raises(OSError, match="cable"):
        block.throw(OSError("the cable"))
    assert last(gate).status == "poisoned"
    cause = gate.ledger.event(last(gate).last_position).body["cause"]
    assert "the mover sees" in cause


def test_different_fingerprints_roll_back(gate: Gate, mover: FileMover) -> None:
    block = run(gate, mover, "transferred")
    move = next(block)
    with pytest.raises(IllegalStep, match="fingerprints") as refused:
        move.verified({"p": FINGERPRINT}, {"p": OTHER_FINGERPRINT})
    with pytest.raises(IllegalStep) as caught:
        block.throw(refused.value)
    assert caught.value.__notes__ == [f"{move.operation}: rolled_back"]
    matches(gate, mover)


def test_a_block_that_recovery_took_over_touches_nothing(gate: Gate, mover: FileMover) -> None:
    block = run(gate, mover, "transferred")
    move = next(block)
    (outcome,) = recover(gate.ledger, "j", mover, by="recover")
    assert outcome.ended == "rolled_back"
    mover.log.clear()
    with pytest.raises(StaleGrant) as refused:
        move.verified({"p": FINGERPRINT}, {"p": FINGERPRINT})
    with pytest.raises(StaleGrant) as caught:
        block.throw(refused.value)
    assert "left as it is" in caught.value.__notes__[0]
    assert mover.log == []
    matches(gate, mover)


POINTS = {
    "granted": "abandoned",
    "stopped": "abandoned",
    "quiesced": "rolled_back",
    "moving": "rolled_back",
    "transferred": "rolled_back",
    "verified": "committed",
    "resumed": "committed",
}
"""Where a process dies, and how recovery ends its move."""


@pytest.mark.parametrize("point", list(POINTS))
def test_a_process_killed_inside_the_block_is_recovered(
    gate: Gate, mover: FileMover, point: str
) -> None:
    with Process("block", gate.ledger.url, "j", f"kill:{point}") as killed:
        assert killed.child.wait() == -9
    assert last(gate).open
    assert last(gate).mover == FILE_MOVER
    (outcome,) = recover(gate.ledger, "j")
    assert outcome.ended == POINTS[point] == last(gate).status
    matches(gate, mover)
    assert recover(gate.ledger, "j") == []
    # What recovery left behind, the next process can move.
    after = HALF if job(gate).topology.matches(WIDE) else WIDE
    block = run(gate, mover, after=after)
    next(block)
    with pytest.raises(StopIteration):
        next(block)
    matches(gate, mover)


def test_a_process_that_raises_inside_the_block_ends_its_own_move(
    gate: Gate, mover: FileMover
) -> None:
    with Process("block", gate.ledger.url, "j", "raise:moving") as child:
        assert child.child.wait() == 1
    assert last(gate).status == "rolled_back"
    matches(gate, mover)


def test_recovery_says_when_the_named_mover_is_not_installed(gate: Gate, mover: FileMover) -> None:
    with gate.reallocation(
        "j", after=WIDE, bottleneck="rollout", expected_gain_s=1.0, mover_name="nowhere:mover"
    ) as move:
        with pytest.raises(InvalidInput, match="found 'nowhere:mover'"):
            recover(gate.ledger, "j")
        assert gate.holds(move.grant).status == "granted", "nothing was taken over"
        move.quiesced()
        move.transferred(moved_bytes=0)
        move.verified({"p": FINGERPRINT}, {"p": FINGERPRINT})
