"""Goal: moves, repairs, updates and the end of a job keep out of each other's way.

Method: each asks for the way while another has it.
"""

from __future__ import annotations

from pathlib import Path

from shiftbook.jobs.right_of_way import RightOfWay
from shiftbook.jobs.standing import Standing
from shiftbook.ledger.topology import Topology

TOPOLOGY = Topology.of({"rollout": ["n0/0"], "trainer": ["n0/1"]})


def way() -> RightOfWay:
    return RightOfWay("job", Standing(Path("policy.safetensors")), lambda: None)


def test_no_move_of_the_trainer_begins_in_an_update() -> None:
    right = way()
    with right.trainer():
        assert not right.begin_move("move-1", ["trainer"])
        assert right.begin_move("move-2", ["rollout"])
    right.end_move("move-2", TOPOLOGY, {}, committed=True)
    assert right.begin_move("move-3", ["trainer"])


def test_no_move_begins_in_a_repair() -> None:
    right = way()
    with right.repair():
        assert not right.begin_move("move-1", ["rollout"])
    assert right.begin_move("move-1", ["rollout"])


def test_no_move_begins_once_the_job_is_about_to_end() -> None:
    """One that began before goes on to its end."""
    right = way()
    assert right.begin_move("move-1", ["trainer"])
    right.close()
    assert right.moving == "move-1"
    right.end_move("move-1", TOPOLOGY, {}, committed=True)
    assert right.moving is None
    assert not right.begin_move("move-2", ["trainer"])


def test_a_sync_without_the_gate_and_moves_keep_apart() -> None:
    """A controller may reach the ledger while the loop, whose records are spooled, does not."""
    right = way()
    assert right.begin_move("move-1", ["inference"])
    assert not right.begin_sync()
    right.end_move("move-1", TOPOLOGY, {}, committed=True)
    assert right.begin_sync()
    assert not right.begin_move("move-2", ["inference"])
    right.end_sync()
    assert right.begin_move("move-2", ["inference"])
