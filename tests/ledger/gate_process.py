"""Child processes of the gate's tests: ``python -m tests.ledger.gate_process ROLE ...``.

Roles: ``lock`` holds a device, ``race`` competes for one, ``controller`` moves step by step as it
is told, ``block`` moves in a context manager and kills itself at a named point.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shiftbook.ledger.errors import DeviceHeld, GateError
from shiftbook.ledger.fencing import DeviceLock
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.topology import Topology
from tests.ledger.gate_cases import (
    BETWEEN,
    FILE_MOVER,
    FINGERPRINT,
    HALF,
    WIDE,
    open_file_mover,
    opened,
    proposal,
    start,
    step,
)


def tell(**message: Any) -> None:
    """Write one line to the parent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def told() -> Iterator[dict[str, Any]]:
    """Lines of the parent, until it closes the pipe."""
    for line in sys.stdin:
        yield json.loads(line)


def lock(directory: str, device: str) -> None:
    """Take a device's lock and hold it until told otherwise."""
    held = DeviceLock(Path(directory), device)
    try:
        held.acquire(0.2)
    except DeviceHeld as error:
        tell(held=False, error=str(error))
        return
    tell(held=True)
    for message in told():
        if message["do"] == "release":
            held.release()
        elif message["do"] == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            tell(child=child)
            continue
        tell(held=held.held)


def race(url: str, job: str, directory: str) -> None:
    """Compete for the one device of two jobs, round by round."""
    device = "n/0"
    topology = Topology.of({"rollout": [device]})
    gate = Gate(Ledger.open(url, lock_timeout_s=60.0), by=job)
    gate.open_job(job, opened(devices=(device,), topology=topology))
    lock_ = DeviceLock(Path(directory), device)
    tell(ready=True)
    attempt = ""
    for message in told():
        if message["do"] == "try":
            attempt = f"{job}-{message['round']}"
            try:
                start(gate, job, attempt, topology)
            except GateError as error:
                tell(won=False, error=type(error).__name__)
                continue
            lock_.acquire(0.1)  # raises where the other job's process still owns the device
            tell(won=True)
        else:
            lock_.release()
            gate.release(job, holder=attempt, reason="round over")
            tell(released=True)


def controller(url: str, job: str) -> None:
    """Propose, take steps and call the worker (the parent) as told."""
    gate = Gate(Ledger.open(url), by="controller")
    grant = None
    for message in told():
        try:
            if message["do"] == "grant":
                operation = gate.propose(job, proposal(WIDE))
                grant = gate.grant(job, operation, mover=FILE_MOVER)
                tell(**dataclasses.asdict(grant))
            else:
                assert grant is not None
                step(gate, grant, message["do"])
                tell(done=message["do"])
        except GateError as error:
            tell(error=type(error).__name__, says=str(error))


def block(url: str, job: str, point: str) -> None:
    """Move in a context manager; die by SIGKILL, or raise, at ``point``."""
    action, _, where = point.partition(":")

    def pass_(here: str) -> None:
        if here != where:
            return
        if action == "raise":
            raise OSError(f"failed at {here}")
        os.kill(os.getpid(), signal.SIGKILL)

    ledger = Ledger.open(url)
    gate, mover = Gate(ledger, by="block"), open_file_mover(ledger, job)
    with gate.reallocation(
        job,
        after=WIDE,
        bottleneck="rollout",
        expected_gain_s=12.0,
        mover=mover,
        mover_name=FILE_MOVER,
    ) as move:
        pass_("granted")
        mover.write(HALF, working=False)
        pass_("stopped")
        move.quiesced()
        pass_("quiesced")
        mover.write(BETWEEN, working=False)
        pass_("moving")
        mover.write(WIDE, working=False)
        move.transferred(moved_bytes=7)
        pass_("transferred")
        move.verified({"p": FINGERPRINT}, {"p": FINGERPRINT})
        pass_("verified")
        mover.write(WIDE, working=True)
        pass_("resumed")
    pass_("committed")
    tell(committed=True)


if __name__ == "__main__":
    roles = {"lock": lock, "race": race, "controller": controller, "block": block}
    roles[sys.argv[1]](*sys.argv[2:])
