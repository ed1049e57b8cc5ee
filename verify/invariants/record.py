"""The record itself: digests and counts in training events are those of their evidence rows."""

from __future__ import annotations

from collections.abc import Iterator

from shiftbook.ledger.digests import consumed_digest, generated_digest, rewarded_digest
from shiftbook.ledger.events.training import BatchConsumed, SamplesGenerated, SamplesRewarded
from shiftbook.verify.evidence import Rows
from shiftbook.verify.invariants.base import Invariant, Step, short

MEAN_TOLERANCE = 1e-6
"""Absolute; a mean of rewards summed in float32 or in another order."""


def _facts(
    event: SamplesGenerated | SamplesRewarded | BatchConsumed, rows: Rows
) -> Iterator[tuple[str, object, object]]:
    """(field, value from the rows, value in the event)."""
    yield "count", len(rows), event.count
    if isinstance(event, SamplesRewarded):
        triples = zip(rows["uid"], rows["token_digest"], rows["reward"], strict=True)
        yield "digest", rewarded_digest(triples), event.digest
        mean = sum(rows["reward"]) / len(rows) if len(rows) else 0.0
        close = abs(mean - event.reward_mean) <= MEAN_TOLERANCE or not len(rows)
        yield "reward_mean", event.reward_mean if close else mean, event.reward_mean
        return
    yield "tokens", sum(rows["tokens"]), event.tokens
    if isinstance(event, SamplesGenerated):
        columns = (rows["uid"], rows["token_digest"], rows["logp_digest"])
        yield "digest", generated_digest(zip(*columns, strict=True)), event.digest
    else:
        pairs = zip(rows["uid"], rows["token_digest"], strict=True)
        yield "digest", consumed_digest(pairs), event.digest


class RecordMatchesRows(Invariant):
    """Counts, sums and digests in a training event recompute from the rows of its segment."""

    id = "record"
    title = "training events agree with their evidence rows"
    needs = "segments of SamplesGenerated, SamplesRewarded and BatchConsumed"
    sees = (
        SamplesGenerated,
        SamplesRewarded,
        BatchConsumed,
    )

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, SamplesGenerated | SamplesRewarded | BatchConsumed):
            return
        if step.rows is None or step.rows.problem:
            self.missing(f"rows of {step.stored.type} cannot be read")
            return
        for name, expected, found in _facts(event, step.rows):
            self.expect(
                expected == found,
                step.at,
                expected=f"{name} {short(expected)}, as the rows give it",
                found=f"{name} {short(found)} in {step.stored.type}",
                cause="the event was filled from another batch than its rows",
                action="Compute the event's fields from the rows that go into the segment.",
            )
