"""Replay: an iteration computed again after a crash gives the same record as the first time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from sys import intern

from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import AttemptStarted, ExperimentForked, PlanAmended
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved
from shiftbook.ledger.events.training import (
    BatchConsumed,
    SamplesDrawn,
    SamplesGenerated,
    SamplesRewarded,
    UpdateApplied,
)
from shiftbook.verify.invariants.base import End, Invariant, Step, short
from shiftbook.verify.lineage import WINDOW

UNORDERED = 1e-5
"""Relative difference of two norms of one gradient whose float32 sums were taken in two orders,
where the plan declares none: rounding makes some 1e-9, a lost group more than a thousandth."""

MOST_BUNDLES = 256
"""Bundles within an iteration that are remembered: a restore goes back to one of the last."""


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

    The first record of each iteration stands against every later one, over all attempts; a life
    that begins within an iteration, from a bundle saved there, goes on counting its parts. An
    amendment or a fork ends the comparison. A job that declares ``distribution`` is not compared.
    With an unordered reduction an update has no bits to come to: where one begins from the same
    state with the same samples as before, the norm of its gradient may differ by the plan's
    tolerance, and its weight not at all; what comes after it is another policy's.
    """

    id = "replay"
    title = "recomputed iterations give the same record"
    needs = "digests of an iteration in both attempts; with unordered sums grad_norm and tokens"
    sees = (
        PlanAmended,
        ExperimentForked,
        AttemptStarted,
        CheckpointSaved,
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
        self._at_bundle: OrderedDict[str, dict[tuple[int, str], int]] = OrderedDict()
        """The same of iterations that were begun and not completed when a bundle was saved."""
        self._again = 0
        self._left: OrderedDict[int, frozenset[str]] = OrderedDict()
        """What was recorded of iterations before an amendment, a fork or a warm start."""
        self._apart = False
        """Whether some of it was recorded again after that."""
        self._unordered = False
        self._norms: OrderedDict[tuple[str, ...], tuple[UpdateApplied, int]] = OrderedDict()
        """The first update from each state with each batch, with its position."""
        self._batch: tuple[int, list[str]] = (-1, [])
        """Iteration and digests of what was consumed since the last update."""

    def feed(self, step: Step) -> None:
        event = step.event
        if isinstance(event, PlanAmended | ExperimentForked) or _begins_anew(event):
            self._left.update((n, frozenset(known)) for n, known in self._first.items())
            while len(self._left) > WINDOW:
                self._left.popitem(last=False)
            self._first.clear()
            self._norms.clear()
            return
        if isinstance(event, CheckpointSaved):
            self._saved(event)
            return
        if isinstance(event, AttemptStarted | CheckpointRestored):
            self._seen = dict(self._at_bundle.get(event.bundle or "", ()))
            self._batch = (-1, [])
        if step.plan is None or step.plan.sampling.batch_composition != "bitwise":
            return
        if step.plan.update.reduction == "unordered":
            self._unordered = True
            self._within(step)
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
                self._apart = self._apart or name in self._left.get(iteration, ())
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

    def _saved(self, event: CheckpointSaved) -> None:
        """Remember what came before a bundle that is saved within an iteration."""
        begun = {key: n for key, n in self._seen.items() if key[0] >= event.iteration}
        if not begun:
            return
        self._at_bundle[event.bundle] = begun
        self._at_bundle.move_to_end(event.bundle)
        if len(self._at_bundle) > MOST_BUNDLES:
            self._at_bundle.popitem(last=False)

    def _within(self, step: Step) -> None:
        """An update whose sums have no order, against the first one from the same state."""
        event = step.event
        if isinstance(event, BatchConsumed):
            number, digests = self._batch
            earlier = digests if number == event.iteration else []
            self._batch = (event.iteration, [*earlier, event.digest])
            return
        if not isinstance(event, UpdateApplied) or step.plan is None:
            return
        number, digests = self._batch
        self._batch = (-1, [])
        before = (event.params_before, event.masters_before, event.optimizer_before)
        if number != event.iteration:
            return
        known = self._norms.setdefault((*before, *digests), (event, step.at))
        if len(self._norms) > WINDOW:
            self._norms.popitem(last=False)
        first, position = known
        if first is event:
            return
        self._again += 1
        tolerance = step.plan.tolerances.get(self.id, UNORDERED)
        gap = abs(event.grad_norm - first.grad_norm)
        within = gap <= tolerance * abs(first.grad_norm)
        self.expect(
            within and event.tokens == first.tokens,
            step.at,
            expected=(
                f"iteration {event.iteration}: a gradient over {first.tokens} tokens with norm "
                f"{first.grad_norm:.6g} within {tolerance:g}"
            ),
            found=f"{event.tokens} tokens, norm {event.grad_norm:.6g}",
            cause="more differs than the order of the sums: a group was lost, doubled or changed",
            action="Compare the rows of both records; restore whatever they depend on.",
            others=(position, step.track.attempt_position),
        )

    def idle_because(self, end: End) -> str | None:
        if self._again:
            return None
        if self._unordered:
            return "no update was computed twice from one state; its sums have no order"
        if self._apart:
            return "iterations were computed again after an amendment, a fork or a warm start alone"
        bitwise = end.job.plan is None or end.job.plan.sampling.batch_composition == "bitwise"
        return "no iteration was computed twice" if bitwise else "the plan promises no bits"
