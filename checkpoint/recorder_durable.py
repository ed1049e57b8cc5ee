"""Records of state that lasts: bundles saved and restored, and the states of generators."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.failed_saves import going_on, tell_failed
from shiftbook.checkpoint.recorder_book import Book, Held, whole
from shiftbook.checkpoint.recorder_saving import note, of_bundle
from shiftbook.checkpoint.recorder_state import RNG, Part, State, roots, value_digest
from shiftbook.ledger.canonical import encode
from shiftbook.ledger.events.probes import RandomStatesRecorded
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved

if TYPE_CHECKING:
    from shiftbook.checkpoint.pending_bundle import PendingBundle


def rng_parts(states: Mapping[str, Any]) -> dict[str, Part]:
    """Parts of a state that hold random generators, one for each owner."""
    return {f"{RNG}{owner}": {"state": state} for owner, state in states.items()}


class SaveInBackground:
    """What a recorder holds back of a save that goes on, until it has ended."""

    def __init__(
        self,
        pending: PendingBundle,
        event: CheckpointSaved,
        noted: Path,
        begun_ns: int,
        read_back: Callable[[Path], State] | None,
    ) -> None:
        self._pending, self._event, self._read_back = pending, event, read_back
        self._noted, self._begun_ns = noted, begun_ns

    @property
    def done(self) -> bool:
        """True when the bundle is there, or will not come."""
        return self._pending.done

    def held(self) -> Held | None:
        """The record of the bundle; None where the save failed. Waits for its end."""
        if self._pending.failure() is not None:
            return None
        saved = self._pending.result()
        event = of_bundle(self._event, saved, self._pending.save_s or 0.0)
        if self._read_back is not None:
            read = {"file_parts": roots(self._read_back(saved.path))}
            event = CheckpointSaved.model_validate(event.model_dump() | read)
        return whole(Held(event), self._begun_ns)

    def close(self) -> None:
        """The record is safe: the note of it goes."""
        self._noted.unlink(missing_ok=True)


class DurableRecords(Book):
    """What was saved, what was loaded, and where the generators stood."""

    @contextmanager
    def checkpoint(
        self,
        path: str | Path,
        state: State,
        *,
        iteration: int,
        version: int,
        cursor: int,
        in_flight: Sequence[str] = (),
        parent: str | None = None,
        read_back: Callable[[], State] | None = None,
    ) -> Iterator[str]:
        """Around a save: digests are taken from the live state here; gives the bundle's id.

        Write the id into the file. ``iteration`` is the number of iterations completed, ``cursor``
        the ordinal of the next draw, ``in_flight`` uids drawn and held in the bundle. With
        ``read_back`` the file is read again when the block ends, and compared by the verifier.
        Where the process is killed within the block, the attempt that opens with this bundle
        records its save.
        """
        tell_failed("this save has not begun: see to the cause, then save again")
        before = going_on()
        begun = time.perf_counter()
        event = self._save_of(
            str(path), state, iteration, version, cursor, in_flight=in_flight, parent=parent
        )
        self.flush()  # what the bundle goes on from stands in the ledger before the file is whole
        noted = note(self._spool, event, time.time_ns())
        yield event.bundle
        if left := [save.what for save in going_on() if save not in before]:
            raise RecorderMisuse(
                f"expected the bundle to be whole as the block of checkpoint ends, found {left[0]} "
                "that goes on in the background; wait for its result() in the block, or record it "
                "with checkpoint_in_background"
            )
        tell_failed("the save that this block is about was not recorded")
        file = Path(path)
        after = {
            "bytes": file.stat().st_size if file.is_file() else 0,
            "save_s": time.perf_counter() - begun,
            "file_parts": None if read_back is None else roots(read_back()),
        }
        self._add(CheckpointSaved.model_validate(event.model_dump() | after))
        self.flush()
        noted.unlink(missing_ok=True)

    def checkpoint_in_background(
        self,
        pending: PendingBundle,
        state: State,
        *,
        cursor: int,
        in_flight: Sequence[str] | None = None,
        parent: str | None = None,
        read_back: Callable[[Path], State] | None = None,
    ) -> None:
        """A save that goes on: call it right after `save_bundle_async` or `save_sharded_async`.

        The digests are taken from the live state here; iteration, version, parent and uids in
        flight are those of the bundle's fields where they are not given. The record is made when
        the bundle is there, with the id of its manifest, and none where the save fails. With
        ``read_back`` the bundle at that path is read again then, as in ``checkpoint``; without it
        the verifier reads the manifest, which has the tensors. What
        happens meanwhile comes after it in the ledger, so it is held back until then: ``flush``,
        ``amend``, ``finish`` and ``close`` know of that, and a call waits for the save where more
        events than ``MAX_BUFFERED`` stand behind it. Raises RecorderMisuse for another job's or
        attempt's bundle.
        """
        fields = pending.fields
        if (fields.job, fields.attempt) != (self.job, self.attempt):
            raise RecorderMisuse(
                f"expected a bundle of job {self.job!r} and attempt {self.attempt!r}, found one of "
                f"{fields.job!r} and {fields.attempt!r}; give its fields those of the recorder"
            )
        event = self._save_of(
            str(pending.root_dir.resolve()),
            state,
            fields.iteration,
            fields.policy_version,
            cursor,
            in_flight=(fields.in_flight_uids or ()) if in_flight is None else in_flight,
            parent=fields.parent if parent is None else parent,
        )
        self.flush()
        begun_ns = time.time_ns()
        noted = note(self._spool, event, begun_ns)
        self._pending.append(SaveInBackground(pending, event, noted, begun_ns, read_back))

    def _save_of(
        self,
        path: str,
        state: State,
        iteration: int,
        version: int,
        cursor: int,
        *,
        in_flight: Sequence[str],
        parent: str | None,
    ) -> CheckpointSaved:
        """The record of a save as it stands before it; its id is a digest of what it says."""
        parts = roots(state)
        content = {"job": self.job, "attempt": self.attempt, "iteration": iteration}
        content |= {"version": version, "cursor": cursor, "parts": parts}
        return CheckpointSaved(
            attempt=self.attempt,
            bundle=hashlib.sha256(encode(content)).hexdigest(),
            parent=parent,
            path=path,
            iteration=iteration,
            policy_version=version,
            parts=parts,
            cursor=cursor,
            bytes=0,
            save_s=0.0,
            in_flight=tuple(in_flight),
        )

    def restored(
        self,
        bundle: str,
        state: State,
        *,
        iteration: int,
        version: int,
        cursor: int,
        kind: Literal["resume", "warm-start", "transfer"] = "resume",
        file_state: State | None = None,
        restore_s: float = 0.0,
    ) -> None:
        """A bundle was loaded: the live objects as they stand after it.

        ``file_state`` is what the file held, by the same names, before it went into them.
        """
        self._after = "restore"
        parts = roots(state)
        self._policy = (version, parts.get("model", self._policy[1]))
        self._add(
            CheckpointRestored(
                attempt=self.attempt,
                bundle=bundle,
                kind=kind,
                iteration=iteration,
                policy_version=version,
                parts=parts,
                cursor=cursor,
                restore_s=restore_s,
                file_parts=None if file_state is None else roots(file_state),
            )
        )

    def random_states(
        self,
        iteration: int,
        moment: Literal["start", "before", "after", "resized"],
        states: Mapping[str, Any],
    ) -> None:
        """States of all generators by owner (tensors, bytes or texts), at one moment."""
        self._add(
            RandomStatesRecorded(
                attempt=self.attempt,
                iteration=iteration,
                moment=moment,
                states={owner: value_digest(state) for owner, state in states.items()},
            )
        )
