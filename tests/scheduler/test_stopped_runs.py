"""Goal: a run that is stopped leaves no process behind, and one that could not stop its own (kill
-9) does not stand in the way of the next; two at once on one ledger are refused.

Method: the demo as a user starts it, in a process of its own, ended by signals as soon as its
cluster is up. What belongs to a cluster is known by the folder that its processes name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shiftbook.jobs.runner import Place
from shiftbook.scheduler.cluster import ClusterFile, cluster_path, left_behind, processes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 120.0
SHIFTBOOK = (sys.executable, "-c", "from shiftbook.ledger.cli import main; main()")


class Demo:
    """A demo in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder)
        command = ["demo", "--out", str(folder), "--schedule", "static", "--iterations", "2"]
        self.process = subprocess.Popen(
            [*SHIFTBOOK, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        )

    def up(self) -> ClusterFile:
        """Its cluster, once the workers are being started."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Ray head up"), line
        return ClusterFile.load(cluster_path(self.place.ledger_url))

    def ended(self, number: signal.Signals) -> int:
        """Exit code after a signal."""
        self.process.send_signal(number)
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "demo"
    left = left_behind(Place(tmp_path / "demo").ledger_url)
    for pid in processes(left) if left is not None else ():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_run_leaves_nothing(folder: Path, sent: signal.Signals) -> None:
    demo = Demo(folder)
    cluster = demo.up()
    assert list(processes(cluster))
    assert demo.ended(sent) == 128 + sent
    assert not list(processes(cluster))
    assert not Path(cluster.temp_dir).exists()
    assert not cluster_path(demo.place.ledger_url).exists()


def test_a_second_run_at_once_is_refused_and_one_after_kill_9_clears_up(folder: Path) -> None:
    first = Demo(folder)
    cluster = first.up()
    second = Demo(folder)
    out, _ = second.process.communicate(timeout=DEADLINE_S)
    assert second.process.returncode == 2
    assert f"found it held by process {first.process.pid}" in out
    assert first.process.poll() is None

    assert first.ended(signal.SIGKILL) == -signal.SIGKILL
    assert list(processes(cluster))
    third = Demo(folder)
    assert third.up().temp_dir != cluster.temp_dir
    assert not list(processes(cluster))
    assert third.ended(signal.SIGTERM) == 143


def test_only_what_a_cluster_made_is_taken_for_left_behind(folder: Path) -> None:
    """A file beside the ledger must not lead to processes and folders of others."""
    folder.mkdir()
    place = Place(folder)
    mine = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()  # ray"],
        stdin=subprocess.PIPE,
        env={**os.environ, "WHERE": str(folder)},
    )
    try:
        named = ClusterFile("127.0.0.1:1", "", str(folder), 2)
        named.save(cluster_path(place.ledger_url))
        assert mine.pid in set(processes(named))
        assert left_behind(place.ledger_url) is None
        cluster_path(place.ledger_url).write_text(json.dumps({"temp_dir": 7}))
        assert left_behind(place.ledger_url) is None
    finally:
        mine.communicate()
