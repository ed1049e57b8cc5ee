"""Saves under way: what a crash between a bundle's file and its record would lose, on local disk.

The record of a save needs what comes after it (how long it took, what the file holds), so it is
appended when the block ends. A process that is killed before that leaves a whole file of which the
ledger knows nothing. So the record as it stands before the save lies in the spool folder meanwhile,
and the attempt that goes on from that very bundle appends it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from shiftbook.checkpoint.recorder_leftovers import spool_writer
from shiftbook.checkpoint.shelf import SavedBundle, list_bundles
from shiftbook.ledger.durable import sync_path
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.evidence import WritablePlace, write_segments
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.long_fields import set_apart

SUFFIX = ".saving"


def note(folder: Path, event: CheckpointSaved, occurred_ns: int) -> Path:
    """Write down durably that this bundle is being saved; the file to remove once it is recorded.

    A disk that takes nothing more stops no save: then a crash within it is as if nothing was saved.
    """
    file = folder / f"{spool_writer(event.attempt)}.{event.bundle[:16]}{SUFFIX}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".part")
        with draft.open("wb") as out:
            out.write(b"%d\n" % occurred_ns + event.model_dump_json().encode("utf-8"))
            out.flush()
            os.fsync(out.fileno())
        draft.replace(file)
        sync_path(folder)
    return file


def append_save(
    ledger: Ledger, job: str, folder: Path, evidence: WritablePlace, bundle: str | None
) -> None:
    """Append the record of the save of ``bundle`` where the job's last attempt was killed before
    it was appended; what lies in the folder of other saves that never ended is removed."""
    known = ledger.state().job(job)
    for file in list(_left(folder, known.attempts)):
        saved = _read(file)
        if saved is not None:
            event, occurred_ns = saved
            event = _on_shelf(event, bundle) or event
            new = event.bundle == bundle and event.bundle not in known.bundles
            if new and event.attempt == known.attempt:
                _append(ledger, job, evidence, event, occurred_ns)
        file.unlink(missing_ok=True)


def of_bundle(event: CheckpointSaved, saved: SavedBundle, save_s: float) -> CheckpointSaved:
    """The record of a save, which named a shelf, now that the bundle stands on it."""
    found = {
        "bundle": saved.bundle_id,
        "path": str(saved.path.resolve()),
        "bytes": saved.manifest.bytes,
        "save_s": save_s,
    }
    return CheckpointSaved.model_validate(event.model_dump() | found)


def _on_shelf(event: CheckpointSaved, bundle: str | None) -> CheckpointSaved | None:
    """The record of a save that went on in the background, where this very bundle came of it."""
    if bundle is None or not Path(event.path).is_dir():
        return None
    with contextlib.suppress(OSError):
        for saved in reversed(list_bundles(event.path)):
            held = saved.manifest
            said = (event.attempt, event.iteration, event.policy_version)
            if saved.bundle_id == bundle and said == (
                held.attempt,
                held.iteration,
                held.policy_version,
            ):
                return of_bundle(event, saved, 0.0)
    return None


def _left(folder: Path, attempts: Iterable[str]) -> Iterable[Path]:
    starts = tuple(f"{spool_writer(name)}." for name in attempts)
    with contextlib.suppress(OSError):
        for file in sorted(folder.iterdir()):
            if starts and file.name.startswith(starts) and file.suffix == SUFFIX:
                yield file


def _read(file: Path) -> tuple[CheckpointSaved, int] | None:
    """The record and when the save began; None of a file that cannot be read as one."""
    try:
        begun, _, body = file.read_bytes().partition(b"\n")
        return CheckpointSaved.model_validate_json(body), int(begun)
    except (OSError, ValueError, ValidationError):
        return None


def _append(
    ledger: Ledger, job: str, evidence: WritablePlace, event: CheckpointSaved, occurred_ns: int
) -> None:
    path = Path(event.path)
    size = path.stat().st_size if path.is_file() else event.bytes
    whole, rows = set_apart(event.model_copy(update={"bytes": size}))
    if rows is not None:
        whole = whole.model_copy(update={"segment": write_segments(evidence, [rows])[0]})
    draft = Draft(whole, occurred_ns=occurred_ns)
    ledger.append(job, [draft], key=f"saved:{event.bundle}")
