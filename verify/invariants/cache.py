"""I7: no token is computed from cached values of older weights than the plan allows."""

from __future__ import annotations

from shiftbook.ledger.events.sync import WeightSyncCommitted
from shiftbook.ledger.events.training import SamplesGenerated
from shiftbook.verify.invariants.base import Invariant, Step, listed


class CacheFreshness(Invariant):
    """I7: the oldest cached values in a sample are of the version that its tokens are stamped with.

    With ``cache_policy: keep`` they may be as old as the staleness bound.
    """

    id = "I7"
    title = "caches as fresh as the weights"
    needs = "cache_version_min in the rows of SamplesGenerated: oldest weights of any cached value"
    sees = (
        WeightSyncCommitted,
        SamplesGenerated,
    )

    def feed(self, step: Step) -> None:
        if isinstance(step.event, WeightSyncCommitted):
            self._committed(step, step.event)
        if not isinstance(step.event, SamplesGenerated):
            return
        if step.rows is None or step.rows.problem:
            self.missing("rows of SamplesGenerated cannot be read")
            return
        ages = step.rows.get("cache_version_min")
        if ages is None:
            self.missing("generated rows carry no version of the cached values they used")
            return
        sampling = step.plan.sampling if step.plan else None
        keep = sampling is not None and sampling.cache_policy == "keep"
        bound = sampling.staleness_bound if sampling is not None and keep else 0
        old = [
            (uid, cached, version)
            for uid, cached, version in zip(
                step.rows["uid"], ages, step.rows["version_min"], strict=True
            )
            if cached is not None and cached < version - bound
        ]
        known = sum(cached is not None for cached in ages)
        self.passed(known)
        if known < len(ages):
            self.missing("some generated rows carry no version of the cached values they used")
        if old:
            uid, cached, version = old[0]
            self.flag(
                step.at,
                expected=f"{uid}: cached values of version {version - bound} or newer",
                found=f"values of version {cached} under weights {version} ({len(old)} samples)",
                cause="a prefix, encoder or other cache was not emptied when the weights changed",
                action="Flush every cache in the sync, before the engine serves.",
                others=(step.track.chain.position if step.track.chain else None,),
            )

    def _committed(self, step: Step, event: WeightSyncCommitted) -> None:
        if step.plan is None or step.plan.sampling.cache_policy == "keep":
            return
        serving = [o.target for o in event.outcomes if o.outcome == "serving"]
        self.expect(
            bool(event.caches_flushed) or not serving,
            step.at,
            expected=(
                f"the plan's cache policy: {step.plan.sampling.cache_policy}, by every engine that "
                "took the version"
            ),
            found=f"no cache flushed or salted ({listed(serving)} serve)",
            cause="the call that empties the caches was left out, or fails silently",
            action="Flush in the sync and record which caches, or declare cache_policy keep.",
        )
