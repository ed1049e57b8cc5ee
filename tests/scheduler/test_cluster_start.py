"""Goal: a cluster that does not come up leaves nothing behind.

Method: a real head is given up as soon as the first of its processes is there, as where the time
for it runs out; another one cannot start at all. No process names the folder afterwards, and the
folder is gone.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shiftbook.scheduler import cluster as clusters
from shiftbook.scheduler.cluster import ClusterFile, connect, processes, start_head
from shiftbook.scheduler.errors import ClusterError


def of(folder: Path) -> list[int]:
    return list(processes(ClusterFile("127.0.0.1:1", "", str(folder), 2)))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the next cluster has its files: a short path, since sockets lie in it."""
    made: Path = Path("/tmp") / f"sb-start-{tmp_path_factory.getbasetemp().name}"

    def make(prefix: str, dir: str) -> str:
        made.mkdir()
        return str(made)

    monkeypatch.setattr("tempfile.mkdtemp", make)
    return made


@pytest.mark.ray
def test_a_head_that_takes_too_long_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def run(command: list[str], *, timeout: float, check: bool, **given: Any) -> None:
        with subprocess.Popen(command, **given) as starting:
            while starting.poll() is None and not seen:
                seen.extend(pid for pid in of(folder) if pid != starting.pid)
            starting.kill()
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(clusters.subprocess, "run", run)
    with pytest.raises(ClusterError, match="expected a Ray node within 60 s, found none"):
        start_head(2)
    assert seen
    assert not folder.exists()
    assert of(folder) == []


@pytest.mark.ray
def test_a_head_that_cannot_start_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "OBJECT_STORE_BYTES", 1)
    with pytest.raises(ClusterError, match="the Ray head did not start"):
        start_head(2)
    assert not folder.exists()
    assert of(folder) == []


@pytest.mark.ray
def test_a_process_on_another_cluster_does_not_use_it_instead(ray_cluster: Any) -> None:
    assert connect(ray_cluster.file).is_initialized(), "its own cluster, again"
    other = ClusterFile("127.0.0.1:1", ray_cluster.file.token_path, "", 2)
    with pytest.raises(ClusterError, match="found a connection to"):
        connect(other)
