"""A saver that dies or finds the disk full leaves the earlier bundles and nothing half-made.

Method: `crashing_saver.py` forks savers that SIGKILL themselves right before each of their acts on
the folder in turn, and saves under a file size limit; `full_disk.py` saves, alone and by two
processes, on a file system of a few MB that is mounted for it; fsync is made to fail in this
process; a second saver waits for the first one's lock.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shiftbook.checkpoint.bundle import latest_bundle, retain, save_bundle
from shiftbook.checkpoint.errors import BundleWriteFailed
from shiftbook.checkpoint.shelf import list_bundles, shelf_lock
from tests.checkpoint.bundle_states import fields, state

ROOT = Path(__file__).parents[2]


def crash(folder: Path, how: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.crashing_saver", str(folder), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_saver_killed_at_any_act_leaves_a_good_latest_bundle(tmp_path: Path) -> None:
    told = crash(tmp_path, "kill")
    places = [line["died_before"] for line in told if "died_before" in line]
    children = [line for line in told if "act" in line]
    print(places)
    assert len(places) == len(children) - 1 >= 12
    for wanted in ("os.mkdir", "open .metadata", "fsync", "open manifest.json", "os.rename"):
        assert any(place.startswith(wanted) for place in places), wanted
    for child in children:
        assert child["iteration"] == (2 if child["new"] else 1)
    # The bundle appears by the rename of the folder and in no other way.
    renamed = places.index(next(p for p in places if p.startswith("os.rename .incoming")))
    assert not any(child["new"] for child in children[: renamed + 1])
    assert children[-1]["new"]
    assert told[-1] == {"left_over": [], "exit": 0}


def test_a_full_disk_gives_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    told = crash(tmp_path, "full")
    assert len(told) == 5
    for line in told:
        assert "could not write the bundle of iteration 2" in line["said"], line
        assert "File too large" in line["said"]
        assert "free some space" in line["said"]
        assert line["latest_is_good"]
        assert len([name for name in line["names"] if name.startswith("bundle-")]) == 1
        assert not [name for name in line["names"] if name.startswith(".incoming")]


def test_a_disk_without_space_is_said_by_every_process_and_leaves_nothing(tmp_path: Path) -> None:
    """ENOSPC of a real file system: the bundle before stands, and the next small one fits."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=6m none {disk} && exec "$@"'
    inside = ("unshare", "-rm", "sh", "-c", mount, "sh", sys.executable)
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    probe = subprocess.run([*inside, "-c", "pass"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"this user may not mount: {probe.stderr.strip()}")
    done = subprocess.run(
        [*inside, "-W", "ignore", "-m", "tests.checkpoint.full_disk", str(disk)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone, sharded, after = (json.loads(line) for line in done.stdout.splitlines())
    assert [len(step["said"]) for step in (alone, sharded, after)] == [1, 2, 0]
    for words in (*alone["said"], *sharded["said"]):
        assert "could not write the bundle" in words
        assert "No space left on device" in words
        assert "free some space" in words
    assert [step["latest"] for step in (alone, sharded, after)] == [1, 1, 4]
    assert [step["left"] for step in (alone, sharded, after)] == [[], [], []]


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_failing_fsync_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    good = save_bundle(tmp_path, fields(1), state(1))
    real = os.fsync
    lock = threading.Lock()
    calls = 0

    def failing(descriptor: int) -> None:
        nonlocal calls
        with lock:
            calls += 1
            mine = calls
        if mine == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(BundleWriteFailed, match="Input/output error"):
        save_bundle(tmp_path, fields(2), state(2))
    monkeypatch.undo()
    assert [b.bundle_id for b in list_bundles(tmp_path)] == [good.bundle_id]
    assert not list(tmp_path.glob(".incoming*"))
    assert save_bundle(tmp_path, fields(2), state(2)).manifest.iteration == 2


def test_leftovers_of_killed_processes_are_cleared(tmp_path: Path) -> None:
    bundle = save_bundle(tmp_path, fields(1), state(1))
    for name in (".incoming-1-abcd", ".leaving-bundle-00000000-abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    latest = latest_bundle(tmp_path)
    assert latest is not None
    assert latest.bundle_id == bundle.bundle_id
    assert retain(tmp_path, 1) == []
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [bundle.path]


def test_savers_of_one_folder_take_turns(tmp_path: Path) -> None:
    ended = threading.Event()

    def save() -> None:
        save_bundle(tmp_path, fields(1), state(1))
        ended.set()

    with shelf_lock(tmp_path):
        thread = threading.Thread(target=save)
        thread.start()
        assert not ended.wait(0.3)
        assert list_bundles(tmp_path) == []
    thread.join(timeout=60)
    assert ended.is_set()
    assert len(list_bundles(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BundleWriteFailed, match="choose another folder"):
        save_bundle(tmp_path / "file" / "bundles", fields(1), state(1))
