"""Retention that asks the ledger: which bundles lineage and golden traces still need."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.shelf import list_bundles, retain
from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.state import CheckpointRestored
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.ledger import Ledger

GOLDEN_TRACE = "# Shiftbook golden trace"
"""How every golden trace begins."""


def needed_bundles(ledger: Ledger) -> set[str]:
    """Ids of the bundles that the lineage of any job in the ledger needs.

    These are all that an attempt began from or that were restored, in their own job or in a fork,
    and of each job that is not closed the newest of its effective lineage, from which it would go
    on, and the states that were registered for it, from which it may begin. The bundle that an
    attempt began from stays when the job is closed: the verifier compares what came out of the
    restore with it.
    """
    needed = set()
    for stored in ledger.read(types=("AttemptStarted", "CheckpointRestored")):
        event = stored.parsed()
        if isinstance(event, AttemptStarted | CheckpointRestored) and event.bundle is not None:
            needed.add(event.bundle)
    for job in ledger.state().jobs.values():
        if job.status != "closed" and job.last_bundle is not None:
            needed.add(job.last_bundle.bundle)
        if job.status != "closed":
            needed.update(job.registered)
    return needed


def _bundle_places(job: JobState) -> Iterator[tuple[str, str]]:
    """Id and folder of every bundle that a job saved or that was registered for it."""
    for saved in job.bundles.values():
        yield saved.bundle, saved.path
    for taken in job.registered.values():
        yield taken.bundle, taken.path


def named_bundles(trace: Path, bundles: Collection[str]) -> set[str]:
    """Those of the bundle ids that a golden trace names, in full or by their first 12 digits."""
    try:
        text = trace.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(
            f"expected a golden trace, could not read {trace} ({error}); nothing was deleted",
            path=str(trace),
        ) from error
    if not text.startswith(GOLDEN_TRACE):
        raise BundleError(
            f"expected a golden trace at {trace}, found another kind of file; nothing was deleted; "
            "give what `shiftbook replay --update-golden` wrote",
            path=str(trace),
        )
    return {bundle for bundle in bundles if bundle[:12] in text}


def retain_needed(
    root_dir: str | os.PathLike[str],
    keep: int,
    ledger: Ledger,
    *,
    golden: Iterable[Path] = (),
    protected: Collection[str] = (),
    on_damaged: Callable[[BundleError], object] = lambda error: None,
) -> list[Path]:
    """`retain`, which never deletes what the ledger's lineage or a golden trace needs.

    A bundle is needed when its id is, or when the ledger has the needed one at its path. Bundles
    of jobs that the ledger does not know stay as well. Returns what was deleted, oldest first.
    """
    saved = list_bundles(root_dir)
    needed = needed_bundles(ledger) | set(protected)
    jobs = ledger.state().jobs
    places = {
        Path(path).resolve()
        for job in jobs.values()
        for bundle, path in _bundle_places(job)
        if bundle in needed
    }
    for trace in golden:
        needed |= named_bundles(trace, [bundle.bundle_id for bundle in saved])
    for bundle in saved:
        if bundle.path.resolve() in places or bundle.manifest.job not in jobs:
            needed.add(bundle.bundle_id)
    return retain(root_dir, keep, protected=needed, on_damaged=on_damaged)
