"""I27: what is trained is a fair part of what was offered, by length, unless a rule declares it."""

from __future__ import annotations

import math
from itertools import islice

from shiftbook.ledger.events.training import BatchConsumed, SamplesDropped, SamplesGenerated
from shiftbook.verify.invariants.base import Invariant, Step
from shiftbook.verify.lineage import WINDOW

LIKELIHOOD = 1e-6
"""Chance below which long and short samples are no longer dropped alike: one false alarm in a
million looks of an honest run whose drops do not depend on length."""

MOST_SAMPLES = 64 * WINDOW
"""Samples whose length is remembered."""

LEAST_DROPS = 8
"""Drops from which on there is something to judge."""

LENGTH_RULES = ("length", "overlong", "too-long", "truncated", "timeout")
"""Names of drop rules that say themselves that they select by length."""

REWARD_RULES = ("zero-variance", "zero-advantage", "reward", "dynamic-sampling")
"""Names of drop rules that select by reward, which may well go with length: declared as that."""


class SelectionAudit(Invariant):
    """I27: drops do not fall on long samples (or short ones) more than chance explains.

    Offered samples are split at their median length; the share dropped is compared by Fisher's
    exact test, one-sided, at each end. A drop rule whose name says length, or reward, is declared
    selection.
    """

    id = "I27"
    title = "selection audit: offered against trained, by length"
    needs = "tokens in the rows of SamplesGenerated, SamplesDropped, BatchConsumed with rows"
    sees = (
        SamplesGenerated,
        SamplesDropped,
        BatchConsumed,
    )

    def begin(self) -> None:
        self._tokens: dict[str, int] = {}
        """Tokens of each sample, by its uid, oldest first."""
        self._trained: list[int] = []
        self._dropped: list[int] = []
        self._told = False

    def feed(self, step: Step) -> None:
        event = step.event
        if isinstance(event, SamplesDropped):
            if event.reason.partition(":")[0] not in LENGTH_RULES + REWARD_RULES:
                lengths = [self._tokens[u] for u in event.uids if u in self._tokens]
                self._dropped = [*self._dropped, *lengths][-WINDOW:]
                self._judge(step.at)
        elif not isinstance(event, SamplesGenerated | BatchConsumed):
            return
        elif step.rows is None or step.rows.problem:
            self.missing(f"rows of {step.stored.type} cannot be read")
        elif isinstance(event, SamplesGenerated):
            self._tokens.update(zip(step.rows["uid"], step.rows["tokens"], strict=True))
            for uid in list(islice(self._tokens, max(0, len(self._tokens) - MOST_SAMPLES))):
                del self._tokens[uid]
        else:
            lengths = [self._tokens[u] for u in step.rows["uid"] if u in self._tokens]
            self._trained = [*self._trained, *lengths][-WINDOW:]
            self.passed()

    def _judge(self, at: int) -> None:
        if len(self._dropped) < LEAST_DROPS or not self._trained or self._told:
            return
        every = sorted([*self._dropped, *self._trained])
        low, high = every[(len(every) - 1) // 2], every[len(every) // 2]
        for name, dropped, trained in (
            ("long", _above(self._dropped, low), _above(self._trained, low)),
            ("short", _below(self._dropped, high), _below(self._trained, high)),
        ):
            chance = fisher(
                dropped, len(self._dropped) - dropped, trained, len(self._trained) - trained
            )
            fair = self.expect(
                chance >= LIKELIHOOD,
                at,
                expected=f"{name} samples dropped as often as others (chance {LIKELIHOOD:g})",
                found=f"{dropped} of {len(self._dropped)} drops and {trained} of "
                f"{len(self._trained)} trained are {name}, chance {chance:.2g}",
                cause="a time limit, an abort or a filter selects by length",
                action="Requeue what was aborted, or declare a drop rule that says length.",
            )
            self._told = self._told or not fair


def _above(lengths: list[int], middle: int) -> int:
    return sum(length > middle for length in lengths)


def _below(lengths: list[int], middle: int) -> int:
    return sum(length < middle for length in lengths)


def fisher(a: int, b: int, c: int, d: int) -> float:
    """One-sided Fisher's exact test: chance of at least ``a`` in the table ((a, b), (c, d))."""
    n, row, column = a + b + c + d, a + b, a + c

    def log_choose(m: int, k: int) -> float:
        return math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1)

    total = log_choose(n, row)
    top = min(row, column)
    return min(
        1.0,
        sum(
            math.exp(log_choose(column, k) + log_choose(n - column, row - k) - total)
            for k in range(a, top + 1)
        ),
    )
