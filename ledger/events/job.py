"""Events of a job's life: opened, attempted, amended, forked, closed."""

from __future__ import annotations

from typing import Any

from shiftbook.ledger.events.base import Count, Event, Hex128, Part, Sha256
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.topology import Device, Topology


class ElasticRange(Part):
    """Fewest and most replicas of a component."""

    minimum: Count
    maximum: Count


class Edge(Part):
    """Work that flows from one component to another."""

    source: str
    target: str


class JobOpened(Event):
    """A job declares itself: what it is made of, where it stands, and what it means to do."""

    components: tuple[str, ...]
    edges: tuple[Edge, ...]
    devices: tuple[Device, ...]
    topology: Topology
    elastic: dict[str, ElasticRange]
    plan: Plan
    job_path: str
    """Python path of the program, ``module:name``, so that it can be run again."""
    config: dict[str, Any] = {}
    replay: str | None = None
    """Python path of a target that `shiftbook replay` runs with the config; absent for none."""


class AttemptStarted(Event):
    """A process life of a job begins, under a standing grant for its devices.

    ``epoch`` is the position of the LeaseGranted event right before it. Lineage is a tree:
    ``parent`` is the attempt it continues and ``bundle`` the bundle it restores, both absent for
    the first.
    """

    attempt: str
    parent: str | None = None
    bundle: Sha256 | None = None
    iteration: Count
    epoch: Count
    topology: Topology
    policy_version: Count
    policy_fingerprint: Hex128
    pid: Count


class PlanAmended(Event):
    """A declared change of one field of the plan (dotted path), from one value to another."""

    field: str
    before: Any = None
    after: Any = None
    reason: str


class ExperimentForked(Event):
    """The job leaves its parent's experiment on purpose; comparisons end here."""

    parent: str
    reason: str


class JobClosed(Event):
    """The job ended, with the policy it ended with."""

    outcome: str
    """``finished``, ``failed`` or ``cancelled``."""
    iterations: Count
    policy_version: Count
    policy_fingerprint: Hex128
    reason: str | None = None
