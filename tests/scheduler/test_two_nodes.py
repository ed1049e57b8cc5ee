"""Goal: moves go across nodes, and losing a node's raylet loses nothing.

Method: two real raylets of ``ray.cluster_utils`` run on this machine, with a slot each. Lawful
moves are drawn at random over both; in the second run the raylet of one node is killed after the
first iteration and the node comes back. Samples, rewards and policy must equal those of a run on
one node.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import verify

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SIZE = {"iterations": 3, "groups": 8, "schedule": "dynamic", "random_moves": 7}


def run(folder: Path, job: str, kills: str) -> dict[int, str]:
    """Run a job over two nodes in a process of its own; policy by iteration."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.scheduler.two_nodes",
            str(folder),
            job,
            repr(SIZE),
            kills,
        ],
        cwd=Path(__file__).parents[2],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        capture_output=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    url = f"sqlite:///{folder / 'ledger.db'}"
    with Ledger.open(url) as ledger:
        moves = ledger.state().job(job).operations.values()
        committed = [move for move in moves if move.status == "committed"]
        devices = {d for move in committed for d in move.before.changed_devices(move.after)}
        prints = {
            stored.body["iteration"]: stored.body["policy_fingerprint"]
            for stored in ledger.read(job=job, types={"IterationCompleted"})
        }
    assert devices == {"n0/0", "n1/0"}, [(m.strategy, m.status) for m in moves]
    verdict = verify(url)
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
    return prints


@pytest.mark.parametrize("kills", ["nothing", "raylet"])
def test_moves_across_nodes(on_ray: Any, tmp_path: Path, kills: str) -> None:
    job = f"one-node-{kills}"
    on_ray.run(job, schedule="static", iterations=3, groups=8)
    expected = {number: entry[2] for number, entry in on_ray.record(job).items()}
    assert run(tmp_path / "two", "two-nodes", kills) == expected
