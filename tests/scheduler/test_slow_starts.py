"""Goal: an engine may take its time to start, and nobody waits for one that is dead.

Method: real worker processes whose component is made only when the test says so, some of them
killed or stopped meanwhile; the pauses and limits of the supervisor are made short.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shiftbook.scheduler import fleet as fleet_limits
from shiftbook.scheduler import supervision
from shiftbook.scheduler.errors import WorkerLost
from shiftbook.scheduler.fleet import Fleet, FleetSpec
from shiftbook.scheduler.supervision import Supervisor
from shiftbook.scheduler.workers.host import Assignment
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LONG_S = 600.0
AT_ONCE_S = 20.0
"""A tenth of the limit and less: Ray notices a death within a second or two of a busy machine."""
REPLICAS = ("slow-0", "slow-1")


@pytest.fixture
def fleet(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    import ray

    monkeypatch.setattr(supervision, "TELL_S", 0.2)
    path = "tests.scheduler.slow_start:SlowStart"
    spec = FleetSpec({"slow": path}, devices={}, without_device={"slow": len(REPLICAS)})
    made = Fleet(spec, start=True)
    made.each(REPLICAS, "status", limit_s=60.0)
    yield made
    for replica in REPLICAS:
        ray.kill(made.handle(replica), no_restart=True)


def supervisor(
    fleet: Fleet, folder: Path, limit_s: float, tell: Callable[[str | None], None]
) -> Supervisor:
    config = {"folder": str(folder), "seed": 0}
    assignment = Assignment("slow", f"sqlite:///{folder}/ledger.db", "loop:slow", config)
    fleet.spec.start_limit_s["slow"] = limit_s
    return Supervisor(fleet, assignment, lambda component: {}, tell=tell)


def let(folder: Path, *replicas: str) -> None:
    """Let components be made."""
    for replica in replicas:
        (folder / f"{replica}.ready").touch()


def pid_of(fleet: Fleet, replica: str) -> int:
    return int(fleet.each([replica], "status")[replica]["pid"])


def test_a_start_may_take_as_long_as_the_engine_needs(fleet: Fleet, tmp_path: Path) -> None:
    """Beyond the usual limit of a process, told each time, and let go on as it is."""
    told: list[str | None] = []
    pids = {replica: pid_of(fleet, replica) for replica in REPLICAS}

    def tell(text: str | None) -> None:
        told.append(text)
        if len(told) == 3:
            let(tmp_path, "slow-1")
        elif "1 to go" in str(text):
            let(tmp_path, "slow-0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "RESTART_LIMIT_S", 0.1)
        found = supervisor(fleet, tmp_path, LONG_S, tell).living()
    assert {replica: status["pid"] for replica, status in found.items()} == pids
    assert {status["job"] for status in found.values()} == {"slow"}
    *texts, last = told
    assert last is None, "nobody is waited for any more"
    assert len(texts) >= 4
    assert all(text and "at most 600 s" in text for text in texts)
    assert "2 to go" in str(texts[0])
    assert "slow-0: waited" in str(texts[-1])
    assert "1 to go" in str(texts[-1])


def test_one_that_takes_longer_than_it_may_is_given_up(fleet: Fleet, tmp_path: Path) -> None:
    let(tmp_path, "slow-1")
    waiting = supervisor(fleet, tmp_path, 1.0, lambda text: None)
    with pytest.raises(
        WorkerLost, match=r"slow-0: expected it to be ready within 1 s.*start_limit_s"
    ):
        waiting.living()
    # It was healthy: with a longer limit the same process is there.
    pid = pid_of(fleet, "slow-0")
    let(tmp_path, "slow-0")
    found = supervisor(fleet, tmp_path, LONG_S, lambda text: None).living()
    assert found["slow-0"]["pid"] == pid


def test_one_that_dies_while_it_starts_is_noticed_at_once(fleet: Fleet, tmp_path: Path) -> None:
    let(tmp_path, "slow-1")
    began_s: list[float] = []

    def tell(text: str | None) -> None:
        if text is not None and not began_s and (tmp_path / "slow-0.begun").exists():
            began_s.append(time.monotonic())
            os.kill(pid_of(fleet, "slow-0"), signal.SIGKILL)

    waiting = supervisor(fleet, tmp_path, LONG_S, tell)
    with pytest.raises(WorkerLost, match="slow-0 ended"):
        waiting.living()
    assert time.monotonic() - began_s[0] < AT_ONCE_S
    # The process in its place is waited for in turn.
    let(tmp_path, "slow-0")
    assert set(waiting.living()) == set(REPLICAS)


def test_one_that_is_too_busy_to_answer_is_not_taken_for_gone(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that holds the interpreter (here: a stopped process) leaves no room for an answer."""
    monkeypatch.setattr(supervision, "RESTART_LIMIT_S", 0.1)
    let(tmp_path, *REPLICAS)
    pid = pid_of(fleet, "slow-0")
    told: list[str | None] = []

    def tell(text: str | None) -> None:
        told.append(text)
        if len(told) == 2:
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    try:
        found = supervisor(fleet, tmp_path, LONG_S, tell).living()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found["slow-0"]["pid"] == pid
    assert "slow-0: waited" in str(told[0])
    assert "for an answer" in str(told[0])


def test_one_that_is_gone_for_good_is_given_up_soon(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(supervision, "RESTART_LIMIT_S", 1.0)
    let(tmp_path, *REPLICAS)
    gone = ray.get_actor("host:slow-0", namespace="shiftbook")
    ray.kill(gone, no_restart=True)

    def dead() -> bool:
        return fleet.roll_call()[0]["slow-0"] is None

    until(dead)
    with pytest.raises(WorkerLost, match="slow-0: expected a process within 1 s"):
        supervisor(fleet, tmp_path, LONG_S, lambda text: None).living()


def test_a_step_and_an_answer_may_take_as_long_as_the_engine_needs(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is busy for longer than others may be (here: a stopped process), with the
    limits of one that is quick to start and of one that is slow."""
    monkeypatch.setattr(fleet_limits, "STEP_LIMIT_S", 0.3)
    monkeypatch.setattr(fleet_limits, "STATUS_LIMIT_S", 0.3)
    pid = pid_of(fleet, "slow-0")
    for quick in (True, False):
        fleet.spec.start_limit_s["slow"] = 0.5 if quick else LONG_S
        os.kill(pid, signal.SIGSTOP)
        waking = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
        waking.start()
        if quick:
            with pytest.raises(WorkerLost, match="slow-0 within 0 s"):
                fleet.each(["slow-0"], "status")
            assert fleet.roll_call()[1] == {"slow-0"}
        else:
            assert fleet.each(["slow-0"], "status")["slow-0"]["pid"] == pid
            statuses, silent = fleet.roll_call()
            assert silent == set()
            assert statuses["slow-0"] is not None
        waking.join()


def test_one_that_is_known_to_be_gone_is_waited_for_no_longer(fleet: Fleet, tmp_path: Path) -> None:
    """Its successor would answer, but nobody knows when."""
    fleet.spec.start_limit_s["slow"] = LONG_S
    gone: set[str] = set()
    pid = pid_of(fleet, "slow-0")
    os.kill(pid, signal.SIGSTOP)
    noticing = threading.Timer(0.5, gone.add, ("slow-0",))
    noticing.start()
    began_s = time.monotonic()
    with pytest.raises(WorkerLost, match="answer of slow-0, its process ended"):
        fleet.gather({"slow-0": fleet.send("slow-0", "status")}, gone=gone)
    assert time.monotonic() - began_s < AT_ONCE_S
    os.kill(pid, signal.SIGCONT)
