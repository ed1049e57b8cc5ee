"""Event types, a module for each family; the registry knows them all by name."""

from shiftbook.ledger.events import (
    job,
    lease,
    life,
    observation,
    probes,
    reallocation,
    safety,
    state,
    sync,
    training,
)
from shiftbook.ledger.events.base import REGISTRY, Event, UnknownEvent, parse

__all__ = [
    "REGISTRY",
    "Event",
    "UnknownEvent",
    "job",
    "lease",
    "life",
    "observation",
    "parse",
    "probes",
    "reallocation",
    "safety",
    "state",
    "sync",
    "training",
]
