"""Events of durable state: bundles saved and restored, and state as it was first used."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator

from shiftbook.ledger.events.base import Count, Event, Hex128, Segment, Sha256


class CheckpointSaved(Event):
    """A bundle is complete and durable."""

    attempt: str
    bundle: Sha256
    parent: Sha256 | None = None
    path: str
    iteration: Count
    """Iterations completed when it was taken."""
    policy_version: Count
    parts: dict[str, Hex128]
    """Root fingerprint of each part, taken from the live state at the call."""
    cursor: Count
    """Draw ordinal of the next sample."""
    bytes: Count
    save_s: float
    in_flight: tuple[str, ...] | None = None
    """Uids drawn and held in it; absent where the segment or the bundle's manifest says so."""
    file_parts: dict[str, Hex128] | None = None
    """Root of each part as read back from the file."""
    segment: Segment | None = None
    """``in_flight`` in rows, where it has no room here (`ledger.long_fields`)."""

    @field_validator("file_parts")
    @classmethod
    def _held_once(
        cls, found: dict[str, str] | None, info: ValidationInfo
    ) -> dict[str, str] | None:
        """The very parts where they are equal: a state remembers every bundle."""
        parts: dict[str, str] | None = info.data.get("parts")
        return parts if found == parts else found


class CheckpointRegistered(Event):
    """A state that another program saved is a bundle from now on; its files stay as they are.

    It may come before the job is opened: an attempt of it can begin from the bundle.
    """

    bundle: Sha256
    path: str
    """Folder of the bundle, which names the files."""
    source: str
    """The files' folder, or the one file."""
    form: Literal["dcp", "safetensors"]
    iteration: Count
    policy_version: Count
    parts: dict[str, Hex128]
    """Root fingerprint of each part, read from the files: the live state is gone."""
    bytes: Count
    register_s: float


class CheckpointRestored(Event):
    """A bundle was loaded; fingerprints taken from the live objects afterwards."""

    attempt: str
    bundle: Sha256
    kind: Literal["resume", "warm-start", "transfer"]
    iteration: Count
    policy_version: Count
    parts: dict[str, Hex128]
    cursor: Count
    restore_s: float
    file_parts: dict[str, Hex128] | None = None
    """Root of each part as read from the file, before it went into the live objects."""


class StateFirstUsed(Event):
    """Fingerprints of state as its consumer read it, at the first use after a load."""

    attempt: str
    component: str
    replica: str
    incarnation: str
    after: Literal["restore", "sync", "move", "start"]
    use: str
    policy_version: Count
    parts: dict[str, Hex128]
