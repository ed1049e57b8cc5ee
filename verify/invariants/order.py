"""Order of the prompts: I2, the cursor goes on where it stood; I3, indices as declared."""

from __future__ import annotations

from shiftbook.checkpoint.errors import SamplerStateError
from shiftbook.checkpoint.sampler import expected_draws
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved
from shiftbook.ledger.events.training import SamplesDrawn
from shiftbook.verify.invariants.base import Invariant, Step

MAX_DATASET = 50_000_000
"""Largest data set whose order is recomputed here; a sort of more would not end in minutes."""


class CursorContinuity(Invariant):
    """I2: each draw begins at the ordinal where the last one of the effective lineage ended.

    A new attempt goes on from its bundle's cursor, so an iteration computed again after a crash
    draws again and is legal. A bundle's cursor lies after everything consumed before it.
    """

    id = "I2"
    title = "draws go on where the lineage stood"
    needs = "SamplesDrawn.start for every draw, CheckpointSaved.cursor, AttemptStarted.bundle"
    sees = (
        SamplesDrawn,
        CheckpointSaved,
        CheckpointRestored,
    )

    def feed(self, step: Step) -> None:
        match step.event:
            case SamplesDrawn():
                self._drawn(step, step.event)
            case CheckpointSaved():
                self._saved(step, step.event)
            case CheckpointRestored():
                self._restored(step, step.event)
            case _:
                pass

    def _drawn(self, step: Step, event: SamplesDrawn) -> None:
        track = step.track
        if track.cursor is None:
            self.missing("the attempt's bundle was not saved in this ledger, its cursor is unknown")
            return
        allowed = [track.cursor] + ([track.redraw] if track.redraw is not None else [])
        behind = event.start < track.cursor
        bundle = track.mark.position if track.mark is not None else track.attempt_position
        last = track.draws[-1].position if track.draws else None
        self.expect(
            event.start in allowed,
            step.at,
            expected=f"a draw from ordinal {' or '.join(map(str, sorted(set(allowed))))}",
            found=f"from ordinal {event.start}",
            cause=(
                "the sampler began again at an old place: prompts are trained twice"
                if behind
                else "the sampler ran ahead: prompts between are never trained"
            ),
            action="Restore the sampler's cursor from the bundle the attempt started from.",
            others=(last, bundle),
        )

    def _saved(self, step: Step, event: CheckpointSaved) -> None:
        cursor = step.track.cursor
        if cursor is None:
            self.missing("the attempt's bundle was not saved in this ledger, its cursor is unknown")
            return
        closed_to = max((d.stop for d in step.track.closed), default=0)
        used = max((s.ordinal + 1 for s in step.track.samples.values() if s.consumed), default=0)
        lowest = max(closed_to, used)
        last = step.track.draws[-1].position if step.track.draws else None
        self.expect(
            lowest <= event.cursor <= cursor,
            step.at,
            expected=f"a bundle cursor from {lowest} (consumed) to {cursor} (drawn)",
            found=f"cursor {event.cursor}",
            cause="cursor and state of the bundle were taken at different moments",
            action="Take cursor, buffer and tensors from one moment, at the save call.",
            others=(last,),
        )

    def _restored(self, step: Step, event: CheckpointRestored) -> None:
        mark = step.track.find_mark(event.bundle)
        if event.kind != "resume":
            return
        if mark is None:
            self.missing("the restored bundle was not saved in this ledger, its cursor is unknown")
            return
        self.expect(
            event.cursor == mark.saved.cursor,
            step.at,
            expected=f"the bundle's cursor {mark.saved.cursor}",
            found=f"cursor {event.cursor} after the restore",
            cause="the sampler's state was not restored with the rest",
            action="Restore the sampler from the bundle before the first draw.",
            others=(mark.position,),
        )


class DeclaredOrder(Invariant):
    """I3: the drawn indices are the permutation that rule, seed and epoch give.

    The order is recomputed from the plan, so it depends on no worker, topology or library.
    """

    id = "I3"
    title = "drawn indices follow the declared permutation"
    needs = "SamplesDrawn with rule, seed, epoch, start and indices"
    sees = (SamplesDrawn,)

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, SamplesDrawn):
            return
        if step.plan is None:
            self.missing("the job declared no plan")
            return
        data, update = step.plan.data, step.plan.update
        declared = {
            "rule": (data.sampler_rule, event.rule),
            "seed": (data.seed, event.seed),
            "group size": (update.group_size, event.group_size),
        }
        for name, (expected, found) in declared.items():
            self.expect(
                expected == found,
                step.at,
                expected=f"{name} {expected}, as the plan declares",
                found=f"{name} {found}",
                cause="the sampler was built from other values than the plan's",
                action="Build it from the plan, or declare the change with PlanAmended.",
            )
        if data.dataset_size > MAX_DATASET:
            self.missing(f"data sets above {MAX_DATASET} prompts are not recomputed")
            return
        try:
            draws = expected_draws(
                data.sampler_rule,
                data.seed,
                data.dataset_size,
                event.start,
                len(event.indices),
                data.mixture,
            )
        except SamplerStateError:
            self.missing("this build does not know the declared sampler rule")
            return
        indices = tuple(draw.index for draw in draws)
        at = next(
            (i for i, (a, b) in enumerate(zip(indices, event.indices, strict=True)) if a != b), 0
        )
        self.expect(
            indices == event.indices,
            step.at,
            expected=f"ordinal {event.start + at} draws index {indices[at] if indices else None}",
            found=f"index {event.indices[at] if event.indices else None}",
            cause="another seed, another epoch's order, or an order that depends on the workers",
            action="Draw with the declared rule; the order may depend on nothing but the plan.",
        )
        epoch = draws[0].epoch if draws else event.epoch
        self.expect(
            event.epoch == epoch,
            step.at,
            expected=f"epoch {epoch} at ordinal {event.start}",
            found=f"epoch {event.epoch}",
            cause="the epoch was not restored, or counted per worker",
            action="Derive the epoch from the ordinal: ordinal // dataset size.",
        )
