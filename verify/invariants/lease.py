"""Leases: a device has one owner at a time, and nothing happens on a device that is not owned."""

from __future__ import annotations

from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.lease import LeaseExpired, LeaseGranted, LeaseReleased
from shiftbook.ledger.events.life import ReplicaStarted
from shiftbook.ledger.events.reallocation import (
    OperationTakenOver,
    ReallocationCommitted,
    ReallocationGranted,
)
from shiftbook.ledger.events.sync import WeightSyncStarted
from shiftbook.verify.invariants.base import Invariant, Step

_TWO_OWNERS = "two jobs use one device: their work is slowed, or each other's memory overwritten"


class Lease(Invariant):
    """No device is leased twice; every move, replica and sync stays inside leased devices."""

    id = "lease"
    title = "one owner for each device; moves and syncs inside leased devices"
    needs = "LeaseGranted before anything that uses devices"
    sees = (
        LeaseGranted,
        AttemptStarted,
        ReallocationCommitted,
        ReplicaStarted,
        WeightSyncStarted,
        LeaseReleased,
        LeaseExpired,
        ReallocationGranted,
        OperationTakenOver,
    )

    def feed(self, step: Step) -> None:
        event = step.event
        match event:
            case LeaseGranted():
                self._granted(step, event)
            case LeaseReleased() | LeaseExpired():
                self._owned(step, event.devices, f"{step.stored.type} of")
            case AttemptStarted():
                self._owned(step, event.topology.devices(), "the attempt's topology uses")
            case ReallocationGranted() | OperationTakenOver():
                self._owned(step, event.devices, "the move is granted")
                if isinstance(event, ReallocationGranted):
                    for device in event.devices:
                        self._usable(step, device)
            case ReallocationCommitted():
                self._owned(step, event.after.devices(), "the move ends on")
            case ReplicaStarted():
                self._owned(step, event.devices, f"{event.replica} started on")
            case WeightSyncStarted():
                replicas = [step.job.replicas.get(target) for target in event.targets]
                devices = {d for r in replicas if r is not None for d in r.devices}
                self._owned(step, tuple(sorted(devices)), "the sync writes to")
            case _:
                pass

    def _granted(self, step: Step, event: LeaseGranted) -> None:
        for device in event.devices:
            held = step.state.leases.get(device)
            self.expect(
                held is None or held.job == step.stored.job,
                step.at,
                expected=f"{device} free or already leased by {step.stored.job}",
                found=f"leased by {held.job}" if held else "",
                cause=_TWO_OWNERS,
                action="Stop one of the jobs, then release its lease through the gate.",
                others=(held.epoch,) if held else (),
            )
            self._usable(step, device)

    def _usable(self, step: Step, device: str) -> None:
        poisoned = step.state.quarantine.get(device)
        self.expect(
            poisoned is None,
            step.at,
            expected=f"{device} out of quarantine",
            found=f"{device} was poisoned by operation {poisoned}",
            cause="a device whose state is unknown was given out again",
            action="Look at what runs on the device, then lift its quarantine through the gate.",
        )

    def _owned(self, step: Step, devices: tuple[str, ...], what: str) -> None:
        for device in devices:
            held = step.state.leases.get(device)
            self.expect(
                held is not None and held.job == step.stored.job,
                step.at,
                expected=f"{device} leased by {step.stored.job}",
                found=f"{what} {device}, leased by {held.job if held else 'nobody'}",
                cause=_TWO_OWNERS if held else "the device was used without a lease",
                action="Let the gate grant the lease before the device is used.",
                others=(held.epoch,) if held else (),
            )
