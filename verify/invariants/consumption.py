"""Consumption: I10, every sample at most as often as declared; I10b, none is lost."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.events.observation import IterationCompleted
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.events.training import BatchConsumed, SamplesDropped, UpdateApplied
from shiftbook.ledger.plan import Plan
from shiftbook.verify.invariants.base import Invariant, Step, listed
from shiftbook.verify.lineage import WINDOW, Sample


def _ordinal(uid: str) -> int | None:
    head, _, member = uid.partition("/")
    return int(head) if head.isdecimal() and len(head) <= 20 and member.isdecimal() else None


class ExactlyOnce(Invariant):
    """I10: in the effective lineage a sample is consumed once (``epochs_per_batch`` times, or at
    most that often where the plan declares ``sample_reuse`` as at_most: a replay buffer).

    What an attempt consumed after the bundle from which the next attempt goes on is not in the
    policy, so consuming it again is legal.
    """

    id = "I10"
    title = "each sample consumed exactly once in the lineage"
    needs = "BatchConsumed with its rows (uid), SamplesDrawn before it"
    sees = (BatchConsumed,)

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, BatchConsumed):
            return
        if step.rows is None or step.rows.problem:
            self.missing("rows of BatchConsumed cannot be read")
            return
        epochs = step.plan.update.epochs_per_batch if step.plan else 1
        most = "at most " if step.plan and step.plan.update.sample_reuse == "at_most" else ""
        seen: set[str] = set()
        faults: dict[str, list[tuple[str, int | None]]] = {}
        for uid in step.rows["uid"]:
            fault, proof = self._judge(step, uid, epochs, uid in seen)
            seen.add(uid)
            if fault:
                faults.setdefault(fault, []).append((uid, proof))
        self.passed(len(step.rows))
        for fault, uids in faults.items():
            self.flag(
                step.at,
                expected=f"every consumed sample drawn, and consumed {most}{epochs} time(s)",
                found=f"{listed(uid for uid, _ in uids)}: {fault}",
                cause="a request was answered twice, a batch replayed, or a uid made up",
                action="Consume by uid: keep the set of consumed uids with the trainer's state.",
                others=(uids[0][1],),
            )

    def _judge(
        self, step: Step, uid: str, epochs: int, twice: bool
    ) -> tuple[str | None, int | None]:
        if twice:
            return "twice in one batch", None
        sample = step.track.samples.get(uid)
        if sample is None:
            ordinal = _ordinal(uid)
            cursor = step.track.cursor
            if ordinal is None or uid.partition("/")[0] != f"{ordinal:06d}":
                return "no uid of the form 000123/5 (draw ordinal/member)", None
            if cursor is not None and ordinal >= cursor:
                return "never drawn", None
            run = step.track.find_closed(ordinal)
            if run is None and cursor is None:
                self.missing("the attempt's bundle was not saved in this ledger")
                return None, None
            return "closed before: consumed, dropped or too stale", run.consumed if run else None
        if sample.dropped is not None:
            return "dropped before", sample.dropped
        if len(sample.consumed) >= epochs:
            return "consumed before", sample.consumed[-1]
        return None, None


class NoLoss(Invariant):
    """I10b: drawn times group members equals consumed plus dropped with a declared reason.

    Looked at when an iteration completes, when the job finishes, and when a bundle is saved: what
    lies before its cursor and is not yet consumed would be gone after a restore, unless the
    bundle's manifest holds it in flight. Under a staleness bound a sample may wait, for its request
    or in a buffer, so there a bundle or the end of the job shows what was lost.
    """

    id = "I10b"
    title = "no drawn sample is lost"
    needs = (
        "SamplesDrawn, BatchConsumed with rows, SamplesDropped with a reason, IterationCompleted"
    )
    sees = (
        IterationCompleted,
        UpdateApplied,
        SamplesDropped,
        CheckpointSaved,
        JobClosed,
    )

    def begin(self) -> None:
        self._reported: OrderedDict[str, None] = OrderedDict()
        """Samples reported as lost; a restore may bring them up again."""

    def feed(self, step: Step) -> None:
        event = step.event
        match event:
            case IterationCompleted():
                self._due(step.track.past(event.iteration, step.plan), step.plan, step.at)
            case UpdateApplied():
                self._due(step.track.past(event.iteration - 1, step.plan), step.plan, step.at)
            case SamplesDropped():
                self._dropped(step, event)
            case CheckpointSaved():
                self._saved(step, event)
            case JobClosed() if event.outcome == "finished":
                self._finished(step)
            case _:
                pass

    def _finished(self, step: Step) -> None:
        """Nothing may be left over when a job finishes; one that fails owes nothing."""
        self._due(list(step.track.samples.values()), step.plan, step.at)

    def _due(self, due: list[Sample], plan: Plan | None, at: int) -> None:
        known = [s for s in due if s.unknown is None]
        if len(known) < len(due):
            self.missing("rows of consumed samples cannot be read")
        lost = [s for s in known if s.owed(plan) and s.uid not in self._reported]
        self.passed(len(known))
        if not lost:
            return
        self._reported.update((s.uid, None) for s in lost)
        while len(self._reported) > WINDOW:
            self._reported.popitem(last=False)
        cause = "answers were thrown away in a move, a crash or a filter, without a record"
        if any(s.consumed for s in lost):
            cause = "fewer passes over the batch than the plan declares"
        self.flag(
            at,
            expected=f"{len(due)} samples of iteration {due[0].iteration} consumed or dropped",
            found=f"{len(lost)} neither: {listed(s.uid for s in lost)}",
            cause=cause,
            action="Consume them, or write SamplesDropped with a reason that the plan declares.",
            others=(lost[0].drawn, lost[0].generated),
        )

    def _dropped(self, step: Step, event: SamplesDropped) -> None:
        rules = step.plan.drop_rules if step.plan else ()
        rule = event.reason.partition(":")[0]
        self.expect(
            rule in rules,
            step.at,
            expected=f"a drop rule of the plan ({listed(rules) or 'it declares none'})",
            found=f"dropped for {event.reason!r}",
            cause="samples are filtered by a rule that nobody declared",
            action="Declare the rule in the plan's drop_rules; write the reason as 'rule: detail'.",
        )
        for uid in event.uids:
            sample = step.track.samples.get(uid)
            used = sample.consumed[-1] if sample is not None and sample.consumed else None
            self.expect(
                sample is not None and used is None,
                step.at,
                expected=f"{uid} drawn, and not consumed",
                found="never drawn or closed before" if sample is None else "consumed before",
                cause="the drop names the wrong sample",
                action="Drop by the uid of the request that ended.",
                others=(used,),
            )

    def _saved(self, step: Step, event: CheckpointSaved) -> None:
        waiting = step.track.outstanding(step.plan)
        open_ones = [s for s in waiting if s.ordinal < event.cursor and s.unknown is None]
        if not open_ones:
            self.passed()
            return
        if event.in_flight is not None:
            held = set(event.in_flight)
        else:
            try:
                held = set(load_manifest(Path(event.path)).in_flight_uids or ())
            except BundleError:
                self.missing("the manifest of a bundle saved with open samples cannot be read")
                return
        lost = [s for s in open_ones if s.uid not in held]
        self.expect(
            not lost,
            step.at,
            expected="samples before the bundle's cursor consumed, dropped or held in its manifest",
            found=f"{len(lost)} are none of these: {listed(s.uid for s in lost)}",
            cause="the cursor was saved ahead of the buffer: a restore would lose these samples",
            action="Save the uids in flight with the cursor, from one moment.",
            others=(lost[0].drawn if lost else None,),
        )
