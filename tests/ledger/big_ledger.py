"""Writes ledgers of any size quickly: a thousand jobs side by side, every event lawful.

One honest run is made in memory and appended for every job, on devices of the job's own, some
iterations at a time and the jobs in turn, as they would come if all ran at once. Evidence rows are
the same for all jobs, so their files are written once. ``shiftbook verify`` finds nothing.

Usage: python -m tests.ledger.big_ledger FILE --events 200000 [--jobs 1000]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import observation, sync
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.ledger import Ledger
from tests.verify.honest_run import MOVED, PLACES, Entry, Maker, _final, make_plan, policy

JOBS = 1_000
BATCH_EVENTS = 96
"""Events of one append at least, in whole iterations: what one writer would send at once."""

WINDOWS = 6
"""Telemetry windows of an iteration."""

MOVE_EVERY = 4
"""Iterations from one move to the next; it goes to another topology and back."""


@dataclass(frozen=True)
class Part:
    """An event of the template, and what of it depends on the job."""

    event: Event
    operation: str | None
    text: str | None
    """Its body as JSON where it names devices."""

    def of(self, number: int, epoch: int) -> Draft:
        """The event of one job, which got its lease at the position ``epoch``."""
        event = self.event
        if self.text is not None:
            event = type(event).model_validate_json(self.text.replace('"n/', f'"n{number}/'))
        if isinstance(event, job_events.AttemptStarted | sync.WeightSyncStarted):
            event = event.model_copy(update={"epoch": epoch})
        operation = None if self.operation is None else f"{job_name(number)}-{self.operation}"
        return Draft(event, operation=operation)


def job_name(number: int) -> str:
    """Name of a job."""
    return f"job-{number:04d}"


def _windows(maker: Maker, iteration: int) -> None:
    for number in range(WINDOWS):
        share = (iteration * WINDOWS + number) % 97 / 97
        maker.run.add(
            observation.WindowObserved(
                attempt=maker.attempt,
                iteration=iteration,
                start_ns=1_700_000_000_000_000_000 + number,
                window_s=0.25,
                components={
                    name: observation.ComponentWindow(
                        replicas=2,
                        throughput=20.0 + share * 7,
                        queue=int(share * 40),
                        running=8,
                        waiting=int(share * 5),
                        busy_share=share,
                        remaining=40 - int(share * 40),
                    )
                    for name in ("rollout", "inference", "trainer")
                },
            )
        )


def _moves(maker: Maker, iteration: int) -> Callable[[], None] | None:
    if iteration % MOVE_EVERY:
        return None

    def go() -> None:
        maker.committed_move(PLACES, MOVED)
        maker.replica("rollout", "rollout-n.2", ("n/2",))
        maker.first_use("rollout", "rollout-n.2", "move", {"model": policy(maker.version)})
        maker.committed_move(MOVED, PLACES)
        del maker.incarnations["rollout-n.2"]

    return go


def _template(ledger: Ledger, events: int) -> Iterator[list[Part]]:
    """The run of one job, an iteration at a time, until it has so many events."""
    plan = make_plan()
    data = plan.data.model_copy(update={"epochs": 1_000_000})
    maker = Maker(plan.model_copy(update={"data": data, "iterations": 1_000_000}))
    maker.open()
    maker.start("a1", 0, PLACES)
    made, iteration = 0, 0
    while made < events:
        _windows(maker, iteration)
        maker.iteration(iteration, moves=_moves(maker, iteration))
        entries, maker.run.entries = maker.run.entries, []
        entries = entries[: events - made]
        made += len(entries)
        iteration += 1
        yield [_part(entry, ledger) for entry in entries]


def _part(entry: Entry, ledger: Ledger) -> Part:
    event = _final(entry, ledger)
    text = event.model_dump_json(exclude_none=True)
    return Part(event, entry.operation, text if '"n/' in text else None)


def write_big(
    path: Path,
    events: int,
    *,
    jobs: int = JOBS,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Make a ledger of exactly ``events`` events, shared out evenly among the jobs.

    Needs some 1.5 kB of disk for an event.
    """
    with Ledger.open(f"sqlite:///{path}", writer="writer-1", actor="sample") as ledger:
        epochs: dict[int, int] = {}
        share, rest = divmod(events, jobs)
        done = 0
        sent = [0] * jobs
        batch: list[Part] = []
        template = _template(ledger, share + 1)
        while done < events:
            part = next(template, [])
            batch += part
            if part and len(batch) < BATCH_EVENTS:
                continue
            for number in range(jobs):
                wanted = share + (number < rest) - sent[number]
                mine = batch[:wanted]
                if not mine:
                    continue
                epoch = epochs.setdefault(number, done + 1)  # the lease follows JobOpened
                ledger.append(job_name(number), [part.of(number, epoch) for part in mine])
                sent[number] += len(mine)
                done += len(mine)
                if progress is not None:
                    progress(done)
            batch = []


def main() -> None:
    """Write a ledger as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--jobs", type=int, default=JOBS)
    given = parser.parse_args()
    start = time.perf_counter()
    said = 0

    def progress(done: int) -> None:
        nonlocal said
        if done - said >= 100_000 or done == given.events:
            said = done
            rate = done / (time.perf_counter() - start)
            print(f"{done} events, {rate:.0f} a second", file=sys.stderr, flush=True)

    write_big(given.file, given.events, jobs=given.jobs, progress=progress)


if __name__ == "__main__":
    main()
