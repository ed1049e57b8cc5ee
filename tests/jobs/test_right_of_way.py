"""Goal: moves, repairs, updates and the end of a job keep out of each other's way.

Method: each asks for the way while another has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shiftbook.jobs.right_of_way import RightOfWay
from shiftbook.jobs.standing import Standing
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.errors import MoveFailed
from shiftbook.scheduler.moves import MoveRunner
from tests.ledger.gate_cases import HALF, WIDE, open_gate, proposal, running

TOPOLOGY = Topology.of({"rollout": ["n0/0"], "trainer": ["n0/1"]})


def way() -> RightOfWay:
    return RightOfWay("job", Standing(Path("policy.safetensors")), lambda: None)


def test_no_move_of_the_trainer_begins_in_an_update() -> None:
    right = way()
    with right.trainer():
        assert right.begin_move("move-1", ["trainer"]) == "an update is under way"
        assert right.begin_move("move-2", ["rollout"]) is None
    right.end_move("move-2", TOPOLOGY, {}, committed=True)
    assert right.begin_move("move-3", ["trainer"]) is None
    assert right.begin_move("move-4", ["trainer"]) == "move-3 has the trainer"


def test_no_move_begins_in_a_repair() -> None:
    right = way()
    with right.repair():
        assert right.begin_move("move-1", ["rollout"]) == "a repair is under way"
    assert right.begin_move("move-1", ["rollout"]) is None


def test_no_move_begins_once_the_job_is_about_to_end() -> None:
    """One that began before goes on to its end."""
    right = way()
    assert right.begin_move("move-1", ["trainer"]) is None
    right.close()
    assert right.moving == "move-1"
    right.end_move("move-1", TOPOLOGY, {}, committed=True)
    assert right.moving is None
    assert right.begin_move("move-2", ["trainer"]) == "the job is about to end"


def test_a_sync_without_the_gate_and_moves_keep_apart() -> None:
    """A controller may reach the ledger while the loop, whose records are spooled, does not."""
    right = way()
    assert right.begin_move("move-1", ["inference"]) is None
    assert not right.begin_sync()
    right.end_move("move-1", TOPOLOGY, {}, committed=True)
    assert right.begin_sync()
    why = right.begin_move("move-2", ["inference"])
    assert why == "a weight sync is under way whose records wait for the ledger"
    right.end_sync()
    assert right.begin_move("move-2", ["inference"]) is None


def test_a_move_that_cannot_begin_is_abandoned_with_what_was_in_its_way(tmp_path: Path) -> None:
    """One reason, that which held: in the error and in the ledger."""
    gate = open_gate(f"sqlite:///{tmp_path / 'ledger.db'}")
    running(gate)
    nobody: Any = None  # no worker is asked anything
    right: Any = way()
    grant = gate.grant("j", gate.propose("j", proposal(WIDE)))
    why = "a repair is under way"
    with right.repair(), pytest.raises(MoveFailed, match=f"^{grant.operation}: abandoned, {why}$"):
        MoveRunner(gate, nobody, right, nobody).run(grant, HALF, WIDE)
    (abandoned,) = gate.ledger.read(types={"ReallocationAbandoned"})
    assert abandoned.body["reason"] == why
    gate.ledger.close()
