"""The permission to run one operation: what a worker checks against the ledger before it obeys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """Operation id, devices and fencing epoch.

    ``epoch`` is the position of the event that gave it: ReallocationGranted or OperationTakenOver
    for a move, LeaseGranted for the standing grant of an attempt (``operation`` is then the
    attempt's id).
    """

    job: str
    operation: str
    devices: tuple[str, ...]
    epoch: int
