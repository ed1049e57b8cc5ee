"""Goal: a worker obeys only the grant that the ledger holds for it now.

Method: a real job runs on Ray. Each method of a worker that changes something is called with no
grant, with a stale, forged, foreign and expired one, and again after the worker's process was
killed and started anew. Each call must be refused, and must change nothing.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import StaleGrant
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.topology import Topology
from tests.scheduler.test_faults import in_training, propose_until
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STILL = ("state", "prepared", "layout", "pid", "incarnation")


def arguments(method: str) -> tuple[Any, ...]:
    """Arguments beside the grant, as a controller would send them."""
    from shiftbook.scheduler.workers.component import Layout

    return {
        "place": (Layout(0, 1, "elsewhere"),),
        "restore": ({},),
        "call": ("sync", {"weights": {}, "version": 99}),
    }.get(method, ())


def bad_grants(on_ray: Any, job: str, closed: str) -> dict[str, Grant | None]:
    """One grant of each kind that must not be obeyed."""
    state = on_ray.ledger.state().job(job)
    attempt = state.current_attempt()
    expired = state.operations[closed]
    good = Grant(job, expired.operation, expired.devices, expired.epoch)
    return {
        "none": None,
        "expired": good,
        "stale": dataclasses.replace(good, epoch=expired.epoch - 1),
        "forged position": dataclasses.replace(good, epoch=10**6),
        "forged event": Grant(job, attempt.attempt, expired.devices, 0),
        "another operation's": dataclasses.replace(good, operation="move-0"),
        "another device's": Grant(job, attempt.attempt, ("n0/9",), attempt.epoch),
        "another job's": Grant("somebody-else", attempt.attempt, expired.devices, attempt.epoch),
    }


def test_no_method_obeys_a_bad_grant(on_ray: Any) -> None:
    import ray

    from shiftbook.scheduler.workers.host import MUTATING

    job = "guarded"
    running = on_ray.start(job, schedule="dynamic", proposer="operator", iterations=6, groups=8)
    ray.get(running.controller.pause.remote(), timeout=30)
    in_training(on_ray, job)
    first_slot, last_slot = on_ray.devices[:2]
    ray.get(running.controller.resume.remote(), timeout=30)
    after = Topology.of(
        {"rollout": [first_slot], "tool": [], "inference": [last_slot], "trainer": [last_slot]}
    )

    def one_closed() -> str | None:
        moves = on_ray.ledger.state().job(job).operations
        done = [name for name, move in moves.items() if move.status == "committed"]
        return done[-1] if done else None

    propose_until(on_ray, job, after, one_closed)
    closed = one_closed()
    assert closed is not None
    ray.get(running.controller.pause.remote(), timeout=30)
    until(lambda: on_ray.ledger.state().job(job).open_operation is None, 60)

    def refused_everywhere(replica: str) -> None:
        handle: Any = ray.get_actor(f"host:{replica}", namespace="shiftbook")
        before = ray.get(handle.status.remote(), timeout=30)
        for kind, grant in bad_grants(on_ray, job, closed).items():
            for method in MUTATING:
                call = getattr(handle, method).remote(grant, *arguments(method))
                with pytest.raises(StaleGrant):
                    ray.get(call, timeout=60)
                now = ray.get(handle.status.remote(), timeout=30)
                assert {k: now[k] for k in STILL} == {k: before[k] for k in STILL}, (kind, method)

    victim = f"trainer-{first_slot.replace('/', '.')}"
    refused_everywhere(f"rollout-{first_slot.replace('/', '.')}")
    refused_everywhere(victim)

    status = on_ray.statuses()[victim]
    os.kill(status["pid"], signal.SIGKILL)

    def again() -> bool:
        now = on_ray.statuses().get(victim)
        return now is not None and now["pid"] != status["pid"] and now["job"] == job

    until(again, 90)
    refused_everywhere(victim)
    running.end()


def test_a_stopped_controller_that_goes_on_can_do_nothing(on_ray: Any) -> None:
    """SIGSTOP in the middle of a move, recovery by another process, SIGCONT: all is refused."""
    import ray

    from shiftbook.ledger.recovery import recover
    from shiftbook.scheduler.mover import open_mover

    job = "stopped"
    running = on_ray.start(job, schedule="dynamic", proposer="operator", iterations=6, groups=8)
    ray.get(running.controller.pause.remote(), timeout=30)
    in_training(on_ray, job)
    first_slot, last_slot = on_ray.devices[:2]
    pid = ray.get(running.controller.status.remote(), timeout=30)["pid"]
    ray.get(running.controller.stop_at.remote("quiesced"), timeout=30)
    after = Topology.of(
        {"rollout": [first_slot], "tool": [], "inference": [last_slot], "trainer": [last_slot]}
    )
    ray.get(running.controller.resume.remote(), timeout=30)

    def stopped() -> bool:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1]
        return state.split()[0] == "T"

    propose_until(on_ray, job, after, stopped)
    # The controller may have been stopped in a move of its own, which serves as well.
    operation = on_ray.ledger.state().job(job).open_operation
    assert on_ray.ledger.state().job(job).operations[operation].status == "quiesced"
    outcomes = recover(on_ray.ledger, job, open_mover(on_ray.ledger, job), by="test")
    assert [(o.operation, o.ended) for o in outcomes] == [(operation, "rolled_back")]
    size = on_ray.ledger.head().size
    os.kill(pid, signal.SIGCONT)

    def told() -> Any:
        return ray.get(running.controller.status.remote(), timeout=30)["error"]

    error = until(told, 60)
    assert operation in error
    events = [stored.type for stored in on_ray.ledger.read(size - 1, job=job, operation=operation)]
    assert events == [], "the controller that was stopped wrote nothing more of its move"
    running.wait(150)
    running.end()
    verdict = on_ray.verdict(job)
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
