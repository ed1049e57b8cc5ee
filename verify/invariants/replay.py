"""Replay: an iteration computed again after a crash gives the same record as the first time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from sys import intern

from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import AttemptStarted, ExperimentForked, PlanAmended
from shiftbook.ledger.events.state import CheckpointRestored
from shiftbook.ledger.events.training import (
    BatchConsumed,
    SamplesDrawn,
    SamplesGenerated,
    SamplesRewarded,
    UpdateApplied,
)
from shiftbook.verify.invariants.base import End, Invariant, Step, short
from shiftbook.verify.lineage import WINDOW


def _record(event: Event) -> Iterator[tuple[str, int, str]]:
    """(what, iteration, value) of what must come out the same."""
    match event:
        case SamplesDrawn():
            yield f"draw {event.start}", event.iteration, str(event.indices)
        case SamplesGenerated():
            yield "digest of generated samples", event.iteration, event.digest
        case SamplesRewarded():
            yield "digest of rewards", event.iteration, event.digest
        case BatchConsumed():
            yield "digest of consumed samples", event.iteration, event.digest
        case UpdateApplied():
            yield "policy after the update", event.iteration, event.params_after
            yield "masters after the update", event.iteration, event.masters_after
            yield "optimizer after the update", event.iteration, event.optimizer_after
        case _:
            pass


def _begins_anew(event: Event) -> bool:
    """True for a warm start: what follows is another training on purpose."""
    return isinstance(event, CheckpointRestored) and event.kind != "resume"


class Replay(Invariant):
    """A recomputed iteration has identical digests where the plan declares bits.

    The first record of each iteration stands against every later one, over all attempts. An
    amendment or a fork ends the comparison. A job that declares ``distribution`` is not compared.
    """

    id = "replay"
    title = "recomputed iterations give the same record"
    needs = "digests of an iteration in both attempts"
    sees = (
        PlanAmended,
        ExperimentForked,
        AttemptStarted,
        CheckpointRestored,
        SamplesDrawn,
        SamplesGenerated,
        SamplesRewarded,
        BatchConsumed,
        UpdateApplied,
    )

    def begin(self) -> None:
        self._first: OrderedDict[int, dict[str, tuple[str, int]]] = OrderedDict()
        self._seen: dict[tuple[int, str], int] = {}
        """How often the present life recorded something of an iteration: batches come in parts."""
        self._again = 0

    def feed(self, step: Step) -> None:
        event = step.event
        if isinstance(event, PlanAmended | ExperimentForked) or _begins_anew(event):
            self._first.clear()
            return
        if isinstance(event, AttemptStarted | CheckpointRestored):
            self._seen.clear()
        if step.plan is None or step.plan.sampling.batch_composition != "bitwise":
            return
        for what, iteration, value in _record(event):
            known = self._first.setdefault(iteration, {})
            if len(self._first) > WINDOW:
                self._first.popitem(last=False)
            if len(self._seen) > WINDOW:
                del self._seen[next(iter(self._seen))]
            part = self._seen.get((iteration, what), 0)
            self._seen[iteration, what] = part + 1
            name = intern(f"{what} ({part})")  # nearly the same names in each iteration and job
            if name not in known:
                known[name] = (value, step.at)
                continue
            first, position = known[name]
            self._again += 1
            self.expect(
                value == first,
                step.at,
                expected=f"iteration {iteration}: {what} {short(first)} again",
                found=short(value),
                cause="the iteration depends on more than its declared state: RNG or leftovers",
                action="Compare the rows of both records; restore whatever they depend on.",
                others=(position, step.track.attempt_position),
            )

    def idle_because(self, end: End) -> str | None:
        return None if self._again else "no iteration was computed twice"
