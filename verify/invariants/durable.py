"""I1b: what a bundle's file holds is the state at the save call, not a later or an earlier one."""

from __future__ import annotations

from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.ledger.events.state import (
    CheckpointRegistered,
    CheckpointRestored,
    CheckpointSaved,
)
from shiftbook.verify.invariants.base import End, Invariant, Step, listed, short

A_PART = "a part of a bundle was not read back from its file after its save, nor as it was loaded"


class FileEquality(Invariant):
    """I1b: the parts read back from the file are those of the live state when it was saved.

    The file is read back right after the save, or when it is loaded, before its content goes into
    the live objects; for bundles of Shiftbook's own the manifest beside the ledger is read.
    """

    id = "I1b"
    title = "bundle on disk equals the state at the save call"
    needs = "file_parts in CheckpointSaved or CheckpointRestored, or the bundle's manifest"
    sees = (
        CheckpointSaved,
        CheckpointRegistered,
        CheckpointRestored,
    )

    def begin(self) -> None:
        self._bundles = 0
        self._unread: dict[str, set[str]] = {}
        """By bundle: parts that were not read back after its save; they may be as it is loaded."""

    def feed(self, step: Step) -> None:
        event = step.event
        if isinstance(event, CheckpointSaved):
            self._bundles += 1
            found = event.file_parts
            if found is None:
                found = self._manifest(event) or {}
            self._unread[event.bundle] = event.parts.keys() - found.keys()
            self._compare(step, event, found, ())
        elif isinstance(event, CheckpointRegistered):
            self._bundles += 1
            manifest = self._manifest(event)
            if manifest is None:
                self.missing("the manifest of a registered bundle cannot be read")
            else:
                if event.parts.keys() - manifest.keys():
                    self.missing(A_PART)
                self._compare(step, event, manifest, ())
        elif isinstance(event, CheckpointRestored) and event.file_parts is not None:
            origin = step.track.origin(event.bundle)
            if origin is not None:
                self._unread.get(event.bundle, set()).difference_update(event.file_parts)
                self._compare(step, origin[0], event.file_parts, (origin[1],))

    def _manifest(self, event: CheckpointSaved | CheckpointRegistered) -> dict[str, str] | None:
        try:
            return dict(load_manifest(event.path).part_roots)
        except BundleError:
            return None

    def _compare(
        self,
        step: Step,
        saved: CheckpointSaved | CheckpointRegistered,
        found: dict[str, str],
        others: tuple[int, ...],
    ) -> None:
        common = sorted(saved.parts.keys() & found.keys())
        wrong = [name for name in common if saved.parts[name] != found[name]]
        first = wrong[0] if wrong else ""
        self.expect(
            not wrong,
            step.at,
            expected=f"part {first} {short(saved.parts.get(first))} in the file, as at the save",
            found=f"{short(found.get(first))} (differing: {listed(wrong)})",
            cause="the file was written later than the digests, or shards are of different saves",
            action="Copy the state before the save returns; name the bundle in every shard.",
            others=others,
        )

    def close(self, end: End) -> None:
        for unread in self._unread.values():
            if unread:
                self.missing(A_PART)

    def idle_because(self, end: End) -> str | None:
        return None if self._bundles else "no bundle was saved"
