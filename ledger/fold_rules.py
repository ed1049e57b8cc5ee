"""The registry of the fold: what an event of each type changes.

A rule takes the state of the ledger, that of the event's job, the stored event and its body, and
changes the two states. It narrows the body to its model by an assert; the registry guarantees it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Protocol

from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.job_state import JobState, LeaseState


class Shared(Protocol):
    """What jobs share, of the state of a ledger."""

    leases: dict[str, LeaseState]
    quarantine: dict[str, str]


Rule = Callable[[Shared, JobState, StoredEvent, Event], None]

RULES: MutableMapping[str, Rule] = {}
"""Type of event to its rule; the modules ``fold_*`` fill it as they are imported."""


def on(model: type[Event]) -> Callable[[Rule], Rule]:
    """Register a rule for a type of event."""

    def register(rule: Rule) -> Rule:
        RULES[model.__name__] = rule
        return rule

    return register
