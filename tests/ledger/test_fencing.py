"""What a worker obeys.

Goal: a mutating method runs only under a grant that the ledger holds, that is in force, that
names the worker's device, and that allows the method at this step. Method: every method that
exists is tried at every step with every kind of wrong grant, by a worker that has just been
started and by one that has been running; and a real controller process is stopped through its
time limit, recovered by another, and continued.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from shiftbook.ledger.errors import LedgerUnreachable, StaleGrant
from shiftbook.ledger.fencing import ALLOWED, FINISHING, STANDING, GrantChecker
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.recovery import recover
from tests.ledger.gate_cases import (
    HALF,
    WIDE,
    Clock,
    FileMover,
    Process,
    advance,
    await_,
    open_gate,
    opened,
    proposal,
    running,
    start,
    step,
    world_path,
)

METHODS = (
    "quiesce",
    "snapshot",
    "place",
    "restore",
    "probe",
    "resume",
    "drop",
    "undo",
    "load_weights",
    "call",
)
"""Every mutating method of a worker."""

MAY = {
    "granted": {"quiesce", "undo"},
    "quiesced": {"snapshot", "place", "restore", "undo"},
    "transferred": {"restore", "probe", "undo"},
    "verified": {"resume", "drop"},
    "committed": set(),
    "rolled_back": set(),
    "poisoned": set(),
    "abandoned": set(),
}
"""What a move's grant allows, written from the contract and not from the code."""

REACHED = ("granted", "quiesced", "transferred", "verified")


@pytest.fixture
def gate(store_url: str) -> Iterator[Gate]:
    made = open_gate(store_url)
    yield made
    made.ledger.close()


def worker(gate: Gate, device: str | tuple[str, ...] = "n/0", job: str = "j") -> GrantChecker:
    """A worker that has just been started, with a read-only handle of its own."""
    url = gate.ledger.url
    return GrantChecker(lambda: Ledger.open(url, read_only=True), job, device)


def refused(checker: GrantChecker, grant: Grant | None, method: str) -> bool:
    """True when the worker does not obey."""
    try:
        checker.check(grant, method)
    except StaleGrant:
        return True
    return False


def moving(gate: Gate, reached: str) -> Grant:
    grant = gate.grant("j", gate.propose("j", proposal()))
    if reached in ("committed", "verified", "transferred", "quiesced"):
        advance(gate, grant, reached)
    elif reached == "abandoned":
        gate.abandon("j", grant.operation, "x")
    elif reached != "granted":
        step(gate, grant, reached)
    return grant


def test_the_tables_name_every_method() -> None:
    named = set(STANDING) | FINISHING | {name for allowed in ALLOWED.values() for name in allowed}
    assert named == set(METHODS)


@pytest.mark.parametrize("reached", list(MAY))
def test_a_move_allows_what_its_step_allows(gate: Gate, reached: str) -> None:
    running(gate)
    grant = moving(gate, reached)
    checker = worker(gate)
    for method in METHODS:
        if method in MAY[reached]:
            assert checker.check(grant, method) == gate.holds(grant)
        else:
            with pytest.raises(StaleGrant, match=f"{method}: {grant.operation} is {reached}"):
                checker.check(grant, method)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_runs_without_a_good_grant(gate: Gate, method: str) -> None:
    standing = running(gate)
    gate.open_job("k", opened(devices=("n/8", "n/9")))
    done = moving(gate, "committed")
    back = gate.grant("j", gate.propose("j", proposal(HALF)))
    reached = next((name for name in REACHED if method in MAY[name]), "granted")
    if reached != "granted":
        advance(gate, back, reached)
    forged = {
        "an epoch at which something else stands": Grant("j", back.operation, back.devices, 0),
        "an epoch that nothing stands at": Grant("j", back.operation, back.devices, 10_000),
        "a lease's epoch for a move": Grant("j", back.operation, back.devices, standing.epoch),
        "a move's epoch for an attempt": Grant("j", "a1", back.devices, back.epoch),
        "another operation": Grant("j", done.operation, back.devices, back.epoch),
        "more devices": Grant("j", back.operation, (*back.devices, "n/2"), back.epoch),
        "another attempt": Grant("j", "a7", standing.devices, standing.epoch),
    }
    foreign = {
        "another job's": Grant("k", back.operation, back.devices, back.epoch),
        "other devices": Grant("j", back.operation, ("n/1",), back.epoch),
    }
    checker = worker(gate)
    for attempt in ("just started", "running", "started again"):
        if attempt == "started again":
            checker = worker(gate)
        wrong = {"none": None, "expired": done, **forged, **foreign}
        for name, grant in wrong.items():
            assert refused(checker, grant, method), f"{method} ran with {name}, worker {attempt}"
        if method in MAY[reached]:
            assert checker.check(back, method)

    newer = gate.take_over("j", back.operation, "presumed dead")
    for late in (checker, worker(gate)):
        with pytest.raises(StaleGrant, match=f"epoch {back.epoch}; in force is epoch"):
            late.check(back, method)
        if method in MAY[reached]:
            assert late.check(newer, method)
        assert late.floor == newer.epoch


def test_a_worker_of_another_device_refuses(gate: Gate) -> None:
    gate.open_job("j", opened(devices=("n/0", "n/1", "n/2")))
    start(gate)
    grant = gate.grant("j", gate.propose("j", proposal(WIDE)))
    assert worker(gate, ("n/0", "n/1")).check(grant, "quiesce")
    assert worker(gate, ()).check(grant, "quiesce"), "a worker without a device takes part"
    with pytest.raises(StaleGrant, match="this worker uses n/2"):
        worker(gate, "n/2").check(grant, "quiesce")
    with pytest.raises(StaleGrant, match="this worker runs k"):
        worker(gate, "n/0", job="k").check(grant, "quiesce")


def test_recovery_may_fill_a_new_place_again_after_verified(gate: Gate) -> None:
    running(gate)
    grant = moving(gate, "verified")
    newer = gate.take_over("j", grant.operation, "presumed dead")
    checker = worker(gate)
    for method in METHODS:
        if method in MAY["verified"] | FINISHING:
            assert checker.check(newer, method)
        else:
            with pytest.raises(StaleGrant):
                checker.check(newer, method)


def test_standing_grant(gate: Gate) -> None:
    standing = running(gate)
    checker = worker(gate)
    for method in METHODS:
        if method in {"place", "restore", "resume", "load_weights", "call", "undo", "drop"}:
            assert checker.check(standing, method)
        else:
            with pytest.raises(StaleGrant, match="a move needs its own"):
                checker.check(standing, method)
    newer = start(gate, "j", "a2")
    for late in (checker, worker(gate)):
        with pytest.raises(StaleGrant, match=f"a2 at epoch {newer.epoch}"):
            late.check(standing, "load_weights")
        assert late.check(newer, "load_weights")
    gate.release("j", holder="a2", reason="x")
    with pytest.raises(StaleGrant, match="leased by nobody"):
        checker.check(newer, "load_weights")


def test_a_move_that_has_quiesced_keeps_the_layout_to_itself(gate: Gate) -> None:
    standing = running(gate)
    grant = moving(gate, "granted")
    checker = worker(gate)
    for status in (None, "quiesced", "transferred", "verified", "committed"):
        if status is not None:
            step(gate, grant, status)
        for method in ("load_weights", "call", "resume"):
            assert checker.check(standing, method)
        for method in ("place", "restore", "drop", "undo"):
            if status in (None, "committed"):
                assert checker.check(standing, method)
            else:
                with pytest.raises(StaleGrant, match=f"{grant.operation} is {status} on these"):
                    checker.check(standing, method)


def test_a_poisoned_device_takes_no_standing_grant(gate: Gate) -> None:
    standing = running(gate)
    moving(gate, "poisoned")
    with pytest.raises(StaleGrant, match="quarantine"):
        worker(gate).check(standing, "load_weights")


def test_outage_keeps_the_standing_grant_and_stops_moves(gate: Gate) -> None:
    standing = running(gate)
    move = moving(gate, "granted")
    url, reachable = gate.ledger.url, [True]

    def open_ledger() -> Ledger:
        if not reachable[0]:
            raise LedgerUnreachable("no route to the ledger")
        return Ledger.open(url, read_only=True)

    checker = GrantChecker(open_ledger, "j", "n/0")
    unseen = GrantChecker(open_ledger, "j", "n/0")
    assert checker.check(standing, "load_weights")
    assert checker.check(move, "quiesce")
    reachable[0] = False
    checker.close()
    unseen.close()
    assert checker.check(standing, "load_weights")
    assert checker.check(standing, "call")
    with pytest.raises(StaleGrant, match="no layout changes while the ledger is unreachable"):
        checker.check(standing, "place")
    with pytest.raises(StaleGrant, match="a move needs its own"):
        checker.check(standing, "quiesce")
    with pytest.raises(StaleGrant, match="no move is made while the ledger is unreachable"):
        checker.check(move, "quiesce")
    with pytest.raises(StaleGrant, match="cannot be checked"):
        unseen.check(standing, "load_weights")
    started_in_outage = GrantChecker(open_ledger, "j", "n/0")
    assert started_in_outage.floor == -1
    with pytest.raises(StaleGrant, match="cannot be checked"):
        started_in_outage.check(move, "quiesce")
    reachable[0] = True
    assert checker.check(move, "quiesce")
    assert started_in_outage.check(standing, "load_weights")
    assert started_in_outage.floor == move.epoch


def test_a_controller_stopped_through_its_time_limit_can_do_nothing(store_url: str) -> None:
    gate = open_gate(store_url, Clock())
    running(gate, step_limit_s=2)  # a busy machine takes a while from grant to quiesced
    mover = FileMover.create(world_path(gate.ledger), HALF)
    with Process("controller", gate.ledger.url, "j") as controller:
        granted = controller.ask(do="grant")
        old = Grant("j", granted["operation"], tuple(granted["devices"]), granted["epoch"])
        checker = worker(gate)
        assert checker.check(old, "quiesce")
        mover.write(HALF, working=False)
        assert controller.ask(do="quiesced") == {"done": "quiesced"}
        os.kill(controller.pid, signal.SIGSTOP)
        stopped_s = Gate(gate.ledger).boottime_s()
        real = Gate(gate.ledger, by="parent")
        await_(lambda: real.boottime_s() > stopped_s + 2.1)

        (outcome,) = recover(gate.ledger, "j", by="parent")
        assert (outcome.found, outcome.ended) == ("quiesced", "rolled_back")
        assert mover.inspect() == HALF
        assert mover.working()

        os.kill(controller.pid, signal.SIGCONT)
        for late in ("transferred", "rolled_back", "poisoned"):
            assert controller.ask(do=late)["error"] == "StaleGrant"
        for method in METHODS:
            with pytest.raises(StaleGrant):
                checker.check(old, method)
        assert gate.ledger.state().job("j").operations[old.operation].status == "rolled_back"


def test_a_controller_that_comes_too_late_before_anybody_recovered(store_url: str) -> None:
    gate = open_gate(store_url, Clock())
    running(gate, step_limit_s=0.2)
    FileMover.create(world_path(gate.ledger), HALF)
    with Process("controller", gate.ledger.url, "j") as controller:
        granted = controller.ask(do="grant")
        os.kill(controller.pid, signal.SIGSTOP)
        real = Gate(gate.ledger)
        stopped_s = real.boottime_s()
        await_(lambda: real.boottime_s() > stopped_s + 0.3)
        os.kill(controller.pid, signal.SIGCONT)
        answer = controller.ask(do="quiesced")
        assert answer["error"] == "StepTimeout"
        assert granted["operation"] in answer["says"]
        assert controller.ask(do="rolled_back") == {"done": "rolled_back"}
