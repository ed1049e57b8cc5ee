"""Events of what a job attests about itself: its data set, its random states, its own replays."""

from __future__ import annotations

from typing import Literal

from shiftbook.ledger.events.base import Count, Event, Hex128, Segment


class DataBuilt(Event):
    """The data set as it will be fed; rows index and digest of each prompt stand in the segment."""

    attempt: str
    dataset_digest: str
    tokenizer_digest: str
    size: Count
    segment: Segment | None = None


class RandomStatesRecorded(Event):
    """State of every generator by its owner, at one moment."""

    attempt: str
    iteration: Count
    moment: Literal["start", "before", "after", "resized"]
    """``start`` of an attempt, ``before`` and ``after`` a unit of work that draws, ``resized``
    where generators were made anew for other ranks."""
    states: dict[str, Hex128]
    segment: Segment | None = None
    """``states`` in rows, where they have no room here (`ledger.long_fields`)."""


class RewardsRescored(Event):
    """Some samples scored again, each by itself: attested by the job."""

    attempt: str
    iteration: Count
    samples: Count
    largest_gap: float
    """Largest |reward as used - reward again|; NaN where none is used."""
    worst: str | None = None
    """Uid of the sample with that gap."""


class LogProbsReplayed(Event):
    """A few samples computed again by other code under the version they are stamped with.

    Attested by the job: the probe runs there. ``calibrating`` says that the gap is this stack's
    noise, measured before anything was trained.
    """

    attempt: str
    iteration: Count
    what: Literal["behaviour", "reference", "proximal"]
    replica: str
    version: Count
    samples: Count
    tokens: Count
    mean_gap: float
    """Mean |log-probability as used - as replayed|."""
    largest_gap: float
    other_tokens: Count = 0
    """Tokens that the declared randomness and transform would have drawn otherwise, those left out
    whose draw lies so near an edge of the distribution that rounding decides."""
    calibrating: bool = False
