"""Versions: I8, a version is one policy; I13, staleness; I15, versions only go up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import AttemptStarted, ExperimentForked, JobClosed
from shiftbook.ledger.events.observation import IterationCompleted
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved, StateFirstUsed
from shiftbook.ledger.events.sync import (
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncFailed,
    WeightSyncStarted,
)
from shiftbook.ledger.events.training import BatchConsumed, SamplesGenerated, UpdateApplied
from shiftbook.verify.invariants.base import End, Invariant, Step, listed, short
from shiftbook.verify.invariants.lossy import LossyRoots
from shiftbook.verify.invariants.spans import stamped
from shiftbook.verify.invariants.stamps import Stamps
from shiftbook.verify.lineage import MODEL, WINDOW, Track

MOST_FAULTS = 8
"""Findings of stamps in one event; each stands for all samples of one engine and version."""


def _claims(event: Event) -> Iterator[tuple[int, str]]:
    """(version, fingerprint of the policy) as an event states them."""
    match event:
        case AttemptStarted() | JobClosed() | IterationCompleted():
            yield event.policy_version, event.policy_fingerprint
        case UpdateApplied():
            yield event.policy_version, event.params_after
        case WeightSyncStarted():
            yield event.version, event.source_root
        case CheckpointSaved() | CheckpointRestored() | StateFirstUsed():
            if MODEL in event.parts:
                yield event.policy_version, event.parts[MODEL]
        case _:
            pass


class VersionIsPolicy(Invariant):
    """I8: a policy version is one fingerprint, and a fingerprint one version, wherever both stand.

    Two versions may share a fingerprint only where the update between them says that it changed
    nothing. A job that replays in distribution only gives a replayed version a new fingerprint;
    one that declares bits does not. After a fork the versions that come later are made anew, with
    other fingerprints; those that the job goes on from stay what they are.

    A token is stamped with weights that its engine held while it can have made it: not with ones
    that newer weights had replaced before its request began, nor with ones that came after its
    request ended. A request begins after its prompt is drawn, and when the recorder was told
    (``begun``). Where the plan declares partial rollouts, a request may go on that began before
    its prompt was drawn again, and its tokens may be of versions that follow one another.
    """

    id = "I8"
    title = "policy version and fingerprint one to one"
    needs = (
        "policy_version and the policy's fingerprint in UpdateApplied, syncs and bundles; for "
        "stamps the versions in the rows of SamplesGenerated and WeightSyncDelivered"
    )
    sees = (
        ExperimentForked,
        AttemptStarted,
        JobClosed,
        IterationCompleted,
        UpdateApplied,
        WeightSyncStarted,
        WeightSyncDelivered,
        WeightSyncCommitted,
        WeightSyncFailed,
        SamplesGenerated,
        CheckpointSaved,
        CheckpointRestored,
        StateFirstUsed,
    )

    def begin(self) -> None:
        self._stamps = Stamps()
        self._by_version: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._by_print: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._lossy = LossyRoots()
        self._forked = False
        """True from a fork to the first update after it: the lineage may go back before it."""

    def feed(self, step: Step) -> None:
        event = step.event
        if isinstance(event, ExperimentForked):
            self._fork(step, event)
        elif isinstance(event, UpdateApplied):
            self._forked = False
        elif self._forked and isinstance(event, AttemptStarted | CheckpointRestored):
            self._forget_after(event.policy_version)
        self._stamps.take(event, step.at)
        self._lossy.take(event)
        if isinstance(event, SamplesGenerated):
            self._stamped(step)
            return
        bitwise = step.plan is None or step.plan.sampling.batch_composition == "bitwise"
        if isinstance(event, AttemptStarted) and not bitwise:
            self._forget_after(event.policy_version)
        if isinstance(event, CheckpointRestored) and event.kind != "resume":
            self._forget_after(event.policy_version)
        if isinstance(event, CheckpointSaved) and MODEL not in event.parts:
            self.missing(f"a bundle names no part {MODEL}")
        unchanged = isinstance(event, UpdateApplied) and event.params_before == event.params_after
        for version, fingerprint in _claims(event):
            if isinstance(event, StateFirstUsed) and self._lossy.explain(event):
                continue  # as an engine holds it after a lossy sync
            self._judge(step, version, fingerprint, unchanged)

    def _fork(self, step: Step, event: ExperimentForked) -> None:
        """Versions after the present one are another policy's; what is copied is the parent's."""
        self._forked = True
        track = step.track
        if track.chain is not None:
            self._forget_after(track.chain.version)
        bundle = track.attempt.bundle if track.attempt is not None else None
        saved = track.bundle_of(event.parent, bundle) if bundle is not None else None
        if saved is not None and MODEL in saved.parts:
            self._judge(step, saved.policy_version, saved.parts[MODEL], False)

    def _stamped(self, step: Step) -> None:
        """Stamps of the samples of an event, those of an engine's present weights at a glance."""
        if step.rows is None or step.rows.problem:
            self.missing("rows of SamplesGenerated cannot be read")
            return
        partial = step.plan is not None and step.plan.sampling.partial_rollouts
        faults: dict[tuple[str, int], list[tuple[str, int | None]]] = {}
        for sample in stamped(step.rows, partial):
            self.passed()
            only = sample.spans[0]
            now = None if only.incarnation is None else self._stamps.current(only.incarnation)
            if len(sample.spans) == 1 and only.version == now and sample.ended is None:
                continue
            known = step.track.samples.get(sample.uid)
            drawn = None if partial or known is None else known.drawn
            fault = self._stamps.fault(sample, drawn)
            if fault is not None:
                span, after = fault
                by = f"{sample.replica} ({span.incarnation or 'any engine'})"
                at = None if after is None else after.position
                faults.setdefault((by, span.version), []).append((sample.uid, at))
        for (by, version), uids in list(faults.items())[:MOST_FAULTS]:
            self.flag(
                step.at,
                expected=f"{by} stamps tokens with weights that it held while it made them",
                found=(
                    f"{len(uids)} samples at version {version} ({listed(u for u, _ in uids)}), "
                    "which it did not hold between the begin and the end of their requests"
                ),
                cause="the stamp is a counter of its own, or is taken before or after the tokens; "
                "or a draw or a sync was recorded at another time than it happened",
                action="Stamp in the engine, with what its weights were loaded as; record draws "
                "before their requests begin, or say when these began.",
                others=(uids[0][1],),
            )

    def _forget_after(self, version: int) -> None:
        for later in [v for v in self._by_version if v > version]:
            fingerprint, _ = self._by_version.pop(later)
            self._by_print.pop(fingerprint, None)

    def _judge(self, step: Step, version: int, fingerprint: str, unchanged: bool) -> None:
        known = self._by_version.get(version)
        if known is not None:
            self.expect(
                known[0] == fingerprint,
                step.at,
                expected=f"version {version} is policy {short(known[0])}",
                found=f"{step.stored.type} says {short(fingerprint)}",
                cause="a version was counted without an update, or the weights are of another one",
                action="Bind the version to the fingerprint where the update is made.",
                others=(known[1],),
            )
            return
        other = self._by_print.get(fingerprint)
        own = self.expect(
            other is None or unchanged,
            step.at,
            expected=f"a fingerprint of its own for version {version}",
            found=f"{short(fingerprint)}, which is version {other[0] if other else None}",
            cause="the version went up and the weights did not",
            action="See whether the update was applied, and to the published masters.",
            others=(other[1],) if other else (),
        )
        if not own:
            return  # a refuted claim is nothing to hold later ones against
        self._by_version[version] = (fingerprint, step.at)
        self._by_print.setdefault(fingerprint, (version, step.at))
        for table in (self._by_version, self._by_print):
            if len(table) > WINDOW:
                table.popitem(last=False)


class Staleness(Invariant):
    """I13: no token is older than the plan's bound when it is trained on.

    The trainer's version at consumption minus the oldest version of the sample's tokens is at most
    the bound, never negative; without partial rollouts a sample is of one version.
    """

    id = "I13"
    title = "staleness within the plan's bound"
    needs = "version_min and version_max in the rows of SamplesGenerated, BatchConsumed with rows"
    sees = (BatchConsumed,)

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, BatchConsumed):
            return
        if step.plan is None:
            self.missing("the job declared no plan")
            return
        if step.rows is None or step.rows.problem:
            self.missing("rows of BatchConsumed cannot be read")
            return
        chain = step.track.chain
        if chain is not None:
            self.expect(
                event.policy_version == chain.version,
                step.at,
                expected=f"consumed by version {chain.version}, the last that was made",
                found=f"policy_version {event.policy_version}",
                cause="the trainer's version counter and its weights went apart",
                action="Stamp the version of the weights that the gradient is taken at.",
                others=(chain.position,),
            )
        if step.plan.objective == "rl":
            self._rows(step, event, step.plan.sampling.staleness_bound)

    def _rows(self, step: Step, event: BatchConsumed, bound: int) -> None:
        assert step.rows is not None
        assert step.plan is not None
        partial = step.plan.sampling.partial_rollouts
        stale: list[tuple[str, str, int | None]] = []
        lows = []
        for uid in step.rows["uid"]:
            sample = step.track.samples.get(uid)
            if sample is None or sample.tokens is None:
                if sample is not None and sample.unknown is not None:
                    self.missing(sample.unknown)
                continue
            self.passed()
            low, high = sample.version_min, sample.version_max
            lows.append(low)
            lag = event.policy_version - low
            if lag > bound or high > event.policy_version or high < low:
                stale.append((uid, f"tokens of versions {low} to {high}", sample.generated))
            elif low != high and not partial:
                stale.append((uid, f"versions {low} to {high} in one sample", sample.generated))
        if stale:
            uid, found, proof = stale[0]
            span = f"versions {max(0, event.policy_version - bound)} to {event.policy_version}"
            alone = "" if partial else ", one version a sample"
            also = f"; {len(stale) - 1} more samples" if len(stale) > 1 else ""
            self.flag(
                step.at,
                expected=f"{uid}: tokens of {span}{alone}",
                found=found + also,
                cause="generation went on under other weights than the plan allows",
                action="Hold requests until their engine has the version, or declare the bound.",
                others=(proof,),
            )
        if lows:
            self.expect(
                event.version_min == min(lows),
                step.at,
                expected=f"version_min {min(lows)}, the oldest of its rows",
                found=f"version_min {event.version_min}",
                cause="the event was filled from a counter, not from the samples",
                action="Take version_min from the consumed rows.",
            )


class VersionsMonotone(Invariant):
    """I15: each update makes the next version; an attempt begins at its bundle's version."""

    id = "I15"
    title = "versions go up by one along the lineage"
    needs = "UpdateApplied.policy_version, AttemptStarted.policy_version, CheckpointSaved"
    sees = (
        UpdateApplied,
        AttemptStarted,
        CheckpointRestored,
        CheckpointSaved,
    )

    def begin(self) -> None:
        self._unknown: tuple[AttemptStarted, int] | None = None
        """An attempt whose bundle was not known as it began; a fork may say which job's it is."""

    def feed(self, step: Step) -> None:
        event, track = step.event, step.track
        if self._unknown is not None:
            began, at = self._unknown
            self._unknown = None
            self._begins(began, at, track)
        if isinstance(event, UpdateApplied) and track.chain is not None:
            self.expect(
                event.policy_version == track.chain.version + 1,
                step.at,
                expected=f"version {track.chain.version + 1}",
                found=f"version {event.policy_version}",
                cause="the version counter was not restored, or counts something else",
                action="Restore the counter with the weights; count updates and nothing else.",
                others=(track.chain.position,),
            )
        elif isinstance(event, AttemptStarted | CheckpointRestored) and event.bundle:
            if isinstance(event, AttemptStarted) and track.origin(event.bundle) is None:
                self._unknown = (event, step.at)
            else:
                self._begins(event, step.at, track)
        elif isinstance(event, CheckpointSaved) and track.chain is not None:
            self.expect(
                event.policy_version == track.chain.version,
                step.at,
                expected=f"a bundle of version {track.chain.version}",
                found=f"version {event.policy_version}",
                cause="the bundle's fields were read from a live counter, too late",
                action="Take version and tensors from one moment, at the save call.",
                others=(track.chain.position,),
            )

    def _begins(self, event: AttemptStarted | CheckpointRestored, at: int, track: Track) -> None:
        """An attempt, or a restore, has the version of its bundle."""
        origin = track.origin(event.bundle or "")
        if origin is None:
            self.missing("the attempt's bundle was neither saved nor registered in this ledger")
            return
        bundle, position = origin
        self.expect(
            event.policy_version == bundle.policy_version,
            at,
            expected=f"version {bundle.policy_version} of the bundle",
            found=f"version {event.policy_version}",
            cause="the version counter was not restored with the weights",
            action="Take the version from the bundle's manifest.",
            others=(position,),
        )

    def close(self, end: End) -> None:
        if self._unknown is not None:
            self._begins(*self._unknown, end.track)
