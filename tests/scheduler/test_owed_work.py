"""Goal: no barrier ever waits for a component without devices.

Method: a job whose elastic range would allow rollout to stand nowhere is asked to give up its last
rollout slot, by the real gate on a real ledger, while its episodes run, while all of them wait on
tools, and when nothing is owed any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shiftbook.jobs.config import opened
from shiftbook.jobs.runner import Place
from shiftbook.ledger.errors import Rejected
from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.policies import drawn_proposal, owed_units

DEVICES = ("n0/0", "n0/1")


def telemetry(*, outstanding: int, running: int, at_tools: int) -> dict[str, Any]:
    """What the loop tells: ``at_tools`` of the outstanding episodes wait on a tool."""
    channels = {
        name: {"depth": 0, "in_hand": count}
        for name, count in (("rollout", running), ("tool", at_tools))
    }
    progress = {"outstanding": outstanding, "groups": 8, "referenced": 8, "trained": 8}
    return {"progress": progress, "channels": channels}


@pytest.mark.parametrize(
    ("outstanding", "running", "at_tools", "refused"),
    [(12, 8, 4, True), (3, 0, 3, True), (1, 0, 1, True), (0, 0, 0, False)],
)
def test_the_last_rollout_slot(
    tmp_path: Path, outstanding: int, running: int, at_tools: int, refused: bool
) -> None:
    place = Place(tmp_path)
    job = opened(place.config("job", schedule="dynamic"), DEVICES)
    elastic = job.elastic | {"rollout": ElasticRange(minimum=0, maximum=2)}
    job = job.model_copy(update={"elastic": elastic})
    with Ledger.open(place.ledger_url) as ledger:
        gate = Gate(ledger)
        gate.open_job("job", job)
        before = Topology.of(
            {"rollout": ["n0/0"], "tool": [], "inference": ["n0/1"], "trainer": ["n0/1"]}
        )
        gate.start_attempt(
            "job",
            "job-a0",
            parent=None,
            bundle=None,
            iteration=0,
            topology=before,
            policy_version=0,
            policy_fingerprint="0" * 32,
            pid=1,
        )
        after = Topology.of(before.placement() | {"rollout": []})
        owed = owed_units(telemetry(outstanding=outstanding, running=running, at_tools=at_tools))
        proposal = drawn_proposal(job, before, after, owed)
        if not refused:
            assert gate.propose("job", proposal)
            return
        with pytest.raises(Rejected) as rejected:
            gate.propose("job", proposal)
        assert rejected.value.rule == "owes-work"
        assert "rollout" in rejected.value.reason
