"""I6: after a weight sync an engine holds what the trainer sent, and it serves nothing else."""

from __future__ import annotations

from shiftbook.ledger.events.life import ReplicaStarted
from shiftbook.ledger.events.state import StateFirstUsed
from shiftbook.ledger.events.sync import (
    SyncLoss,
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncStarted,
)
from shiftbook.ledger.events.training import SamplesGenerated
from shiftbook.ledger.job_state import SyncState
from shiftbook.ledger.plan import SyncPlan
from shiftbook.verify.invariants.base import Invariant, Step, listed, short
from shiftbook.verify.invariants.lossy import LossyRoots
from shiftbook.verify.invariants.spans import Span, stamped
from shiftbook.verify.lineage import MODEL, WINDOW


class SyncEquality(Invariant):
    """I6: per target, the root that the engine read is the root of the source, which is the policy.

    An incarnation generates only at versions that it was verified to hold: by the delivery of a
    sync, or by a StateFirstUsed event (after a start, a restore or a move) whose ``model`` part is
    the policy of that version. A delivery of an older version takes the newer ones away. Of a
    sample of several versions every span counts, by the incarnation that made it.

    A sync may lose something only where the plan declares it, within the declared bound; a patch
    then leads to the root that the sync states, and an engine that holds it holds the version.
    Where the sync says that whole weights are what its patches lead to, every engine must hold
    just that.
    """

    id = "I6"
    title = "engines hold and use the weights that were sent"
    needs = (
        "WeightSyncStarted.source_root, WeightSyncDelivered.root by incarnation, "
        "rows of SamplesGenerated with incarnation and versions"
    )
    sees = (
        WeightSyncStarted,
        WeightSyncDelivered,
        WeightSyncCommitted,
        ReplicaStarted,
        StateFirstUsed,
        SamplesGenerated,
    )

    def begin(self) -> None:
        self._holds: dict[str, dict[int, int]] = {}
        """Incarnation to versions it was verified to hold, each with the position that says so."""
        self._lossy = LossyRoots()

    def feed(self, step: Step) -> None:
        self._lossy.take(step.event)
        match step.event:
            case WeightSyncStarted():
                self._started(step, step.event)
            case WeightSyncDelivered():
                self._delivered(step, step.event)
            case WeightSyncCommitted():
                self._committed(step, step.event)
            case ReplicaStarted():
                self._holds.setdefault(step.event.incarnation, {})
                if len(self._holds) > WINDOW:
                    self._holds.pop(next(iter(self._holds)))
            case StateFirstUsed():
                self._first_used(step, step.event)
            case SamplesGenerated():
                self._generated(step, step.event)
            case _:
                pass

    def _started(self, step: Step, event: WeightSyncStarted) -> None:
        if event.lossy is not None:
            self._loss_declared(step, event.lossy)
        chain = step.track.chain
        if chain is None or chain.params is None or chain.version != event.version:
            if chain is not None:
                self.expect(
                    event.version <= chain.version,
                    step.at,
                    expected=f"a version that was made, at most {chain.version}",
                    found=f"version {event.version}",
                    cause="the version was raised before the update that makes it",
                    action="Start the sync after UpdateApplied.",
                    others=(chain.position,),
                )
            return
        self.expect(
            event.source_root == chain.params,
            step.at,
            expected=f"source root {short(chain.params)}, the policy of version {chain.version}",
            found=f"source root {short(event.source_root)}",
            cause="other tensors are sent than those that the update made",
            action="Send the published parameters of the last update, all names of them.",
            others=(chain.position,),
        )

    def _loss_declared(self, step: Step, loss: SyncLoss) -> None:
        declared = step.plan.syncs if step.plan is not None else SyncPlan()
        objection = declared.objection(loss.encoding, loss.max_error, loss.largest_error)
        bound = "" if declared.max_error is None else f" within {declared.max_error:g}"
        self.expect(
            objection is None,
            step.at,
            expected=f"a sync that is {declared.encoding}{bound}, as the plan declares",
            found=objection or "",
            cause="weights were sent with a loss that nobody declared, or a larger one",
            action="Send them without loss, or declare it: syncs.encoding and syncs.max_error.",
        )

    def _delivered(self, step: Step, event: WeightSyncDelivered) -> None:
        sync = step.job.syncs.get(step.stored.operation or "")
        if sync is None:
            self.missing("a delivery names no started sync")
            return
        good = event.root in _right_roots(sync, event) and not event.differing
        differing = f"; differing: {listed(event.differing)}" if event.differing else ""
        self.expect(
            good,
            step.at,
            expected=f"{event.target} reads root {short(sync.source_root)} as it was sent",
            found=f"root {short(event.root)} ({event.fingerprint_of}){differing}",
            cause="a tensor was not sent, not written, or written over before its first use",
            action="Take the engine out of service and send a full anchor.",
            others=(sync.started_position,),
        )
        held = self._holds.setdefault(event.incarnation, {})
        for version in [v for v in held if v >= event.version]:
            del held[version]
        if good:
            held[event.version] = step.at
        if len(held) > WINDOW:
            del held[min(held)]

    def _committed(self, step: Step, event: WeightSyncCommitted) -> None:
        sync = step.job.syncs.get(step.stored.operation or "")
        if sync is None:
            self.missing("a committed sync was never started")
            return
        named = {outcome.target for outcome in event.outcomes}
        silent = [o.target for o in event.outcomes if o.outcome == "serving"]
        silent = [target for target in silent if target not in sync.delivered]
        left_out = [target for target in sync.targets if target not in named]
        self.expect(
            not silent and not left_out,
            step.at,
            expected="a delivery for each serving target, and an outcome for each target",
            found=(
                f"no delivery to {listed(silent)}"
                if silent
                else f"no outcome of {listed(left_out)}"
            ),
            cause="a failed delivery was passed over",
            action="An engine without the version does not serve: report its outcome as failed.",
            others=(sync.started_position,),
        )

    def _first_used(self, step: Step, event: StateFirstUsed) -> None:
        chain = step.track.chain
        if MODEL not in event.parts or chain is None or chain.version != event.policy_version:
            return
        good = self.expect(
            event.parts[MODEL] == chain.params or self._lossy.explain(event),
            step.at,
            expected=f"{event.replica} uses {short(chain.params)}, version {chain.version}",
            found=f"{MODEL} {short(event.parts[MODEL])}",
            cause="the weights were overwritten between their arrival and their first use",
            action="Fingerprint at first use, and reload what differs.",
            others=(chain.position,),
        )
        if good:
            self._holds.setdefault(event.incarnation, {})[event.policy_version] = step.at

    def _held(self, span: Span) -> bool:
        """Whether the engine that made a span was verified at its version; any, if unknown."""
        if span.incarnation is None:
            return any(span.version in held for held in self._holds.values())
        return span.version in self._holds.get(span.incarnation, {})

    def _generated(self, step: Step, event: SamplesGenerated) -> None:
        if step.rows is None or step.rows.problem:
            self.missing("rows of SamplesGenerated cannot be read")
            return
        partial = step.plan is not None and step.plan.sampling.partial_rollouts
        faults: dict[tuple[str, str | None, int], list[str]] = {}
        for sample in stamped(step.rows, partial):
            self.passed()
            wrong = next((span for span in sample.spans if not self._held(span)), None)
            if wrong is not None:
                key = (sample.replica, wrong.incarnation, wrong.version)
                faults.setdefault(key, []).append(sample.uid)
        for (replica, incarnation, version), uids in list(faults.items())[:8]:
            held = self._holds.get(incarnation or "", {})
            by = f"{replica} ({incarnation})" if incarnation else "an engine"
            self.flag(
                step.at,
                expected=f"{by} verified at version {version}",
                found=(
                    f"{len(uids)} samples at version {version} ({listed(uids)}); "
                    f"it was verified at {listed(sorted(held)[-3:]) or 'none'}"
                ),
                cause="an engine served before its first verified sync, or stamps a wrong version",
                action="Let an engine serve only after WeightSyncDelivered of its incarnation.",
                others=(max(held.values(), default=None), step.track.attempt_position),
            )


def _right_roots(sync: SyncState, event: WeightSyncDelivered) -> tuple[str, ...]:
    """What a target of this sync may read."""
    if sync.lossy_root is None:
        return (sync.source_root,)
    if sync.lossy_whole:  # one policy for all, however it came
        return (sync.lossy_root,)
    # Weights that were sent whole lose nothing, whatever the sync's patches do.
    whole = event.encoding == "whole"
    return (sync.source_root,) if whole else (sync.source_root, sync.lossy_root)
