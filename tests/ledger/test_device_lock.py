"""The lock of a device dies with its holder, and only then or when the holder gives it up.

Method: real processes hold the lock and are killed, forked, told to release, or compete.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shiftbook.ledger.errors import DeviceHeld
from shiftbook.ledger.fencing import DeviceLock, device_is_free, evidence_of_death
from tests.ledger.gate_cases import Process, await_


def test_kill_frees_the_device(tmp_path: Path) -> None:
    with Process("lock", str(tmp_path), "n/0") as holder:
        assert holder.receive() == {"held": True}
        assert not device_is_free(tmp_path, "n/0")
        with pytest.raises(DeviceHeld, match=f"n/0 .* held by pid {holder.pid}"):
            evidence_of_death(tmp_path, ["n/1", "n/0"])
        os.kill(holder.pid, signal.SIGKILL)
        holder.child.wait()
        assert device_is_free(tmp_path, "n/0")
        assert evidence_of_death(tmp_path, ["n/1", "n/0"]).endswith("n/0, n/1")
        DeviceLock(tmp_path, "n/0").acquire(0.0)


def test_a_stopped_holder_still_holds(tmp_path: Path) -> None:
    with Process("lock", str(tmp_path), "n/0") as holder:
        assert holder.receive() == {"held": True}
        os.kill(holder.pid, signal.SIGSTOP)
        assert not device_is_free(tmp_path, "n/0")
        os.kill(holder.pid, signal.SIGCONT)


def test_release_frees_the_device_while_the_process_lives(tmp_path: Path) -> None:
    with Process("lock", str(tmp_path), "n/0") as holder:
        assert holder.receive() == {"held": True}
        assert holder.ask(do="release") == {"held": False}
        assert device_is_free(tmp_path, "n/0")


def test_a_second_process_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    with Process("lock", str(tmp_path), "n/0") as first:
        assert first.receive() == {"held": True}
        with Process("lock", str(tmp_path), "n/0") as second:
            answer = second.receive()
            assert answer["held"] is False
            assert f"pid {first.pid}" in answer["error"]
        with Process("lock", str(tmp_path), "n/1") as other:
            assert other.receive() == {"held": True}


def test_a_forked_child_does_not_keep_the_lock_alive(tmp_path: Path) -> None:
    with Process("lock", str(tmp_path), "n/0") as holder:
        assert holder.receive() == {"held": True}
        child = holder.ask(do="fork")["child"]
        try:
            assert not device_is_free(tmp_path, "n/0"), "the child closed its copy only"
            os.kill(holder.pid, signal.SIGKILL)
            holder.child.wait()
            await_(lambda: device_is_free(tmp_path, "n/0"))
            os.kill(child, 0)  # the child lives on
        finally:
            os.kill(child, signal.SIGKILL)


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with DeviceLock(tmp_path, "n/0") as first:
        assert first.held
        first.acquire(0.0)
        with pytest.raises(DeviceHeld):
            DeviceLock(tmp_path, "n/0").acquire(0.0)
    assert not first.held
    first.release()
    DeviceLock(tmp_path, "n/0").acquire(0.0)


def test_a_device_that_nobody_ever_locked_is_free(tmp_path: Path) -> None:
    assert device_is_free(tmp_path / "nowhere", "n/0")
