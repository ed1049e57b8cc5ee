"""Records of state that lasts: bundles saved and restored, and the states of generators."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from shiftbook.checkpoint.recorder_book import Book
from shiftbook.checkpoint.recorder_saving import note
from shiftbook.checkpoint.recorder_state import RNG, Part, State, roots, value_digest
from shiftbook.ledger.canonical import encode
from shiftbook.ledger.events.probes import RandomStatesRecorded
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved


def rng_parts(states: Mapping[str, Any]) -> dict[str, Part]:
    """Parts of a state that hold random generators, one for each owner."""
    return {f"{RNG}{owner}": {"state": state} for owner, state in states.items()}


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
        parts = roots(state)
        begun = time.perf_counter()
        content = {"job": self.job, "attempt": self.attempt, "iteration": iteration}
        content |= {"version": version, "cursor": cursor, "parts": parts}
        bundle = hashlib.sha256(encode(content)).hexdigest()
        event = CheckpointSaved(
            attempt=self.attempt,
            bundle=bundle,
            parent=parent,
            path=str(path),
            iteration=iteration,
            policy_version=version,
            parts=parts,
            cursor=cursor,
            bytes=0,
            save_s=0.0,
            in_flight=tuple(in_flight),
        )
        self.flush()  # what the bundle goes on from stands in the ledger before the file is whole
        noted = note(self._spool, event, time.time_ns())
        yield bundle
        file = Path(path)
        after = {
            "bytes": file.stat().st_size if file.is_file() else 0,
            "save_s": time.perf_counter() - begun,
            "file_parts": None if read_back is None else roots(read_back()),
        }
        self._add(CheckpointSaved.model_validate(event.model_dump() | after))
        self.flush()
        noted.unlink(missing_ok=True)

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
