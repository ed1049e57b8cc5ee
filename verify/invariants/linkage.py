"""Linkage: what is trained on is what was generated (I11) and what was rewarded (I12)."""

from __future__ import annotations

import math
import struct
from typing import ClassVar

from shiftbook.ledger.events.probes import RewardsRescored
from shiftbook.ledger.events.training import BatchConsumed, SamplesRewarded
from shiftbook.ledger.plan import Plan
from shiftbook.verify.invariants.base import End, Invariant, Step, short
from shiftbook.verify.lineage import Sample

RESCORING = 1e-6
"""Largest gap of a reward scored again; ``tolerances["I12"]`` of the plan overrides it."""

Fault = tuple[str, str, str, int | None]
"""Uid, expected, found, position of proof."""


def _pairs(step: Step, columns: tuple[str, ...]) -> list[tuple[Sample | None, tuple[object, ...]]]:
    """Rows of the event's segment beside the sample that each belongs to."""
    assert step.rows is not None
    rows = zip(*(step.rows[name] for name in ("uid", *columns)), strict=True)
    return [(step.track.samples.get(row[0]), row) for row in rows]


def supervised(plan: Plan | None) -> bool:
    """True where samples come whole from the data set: nothing is generated or rewarded."""
    return plan is not None and plan.objective == "sft"


class _Rewarded(Invariant):
    """An invariant that has nothing to check in supervised fine-tuning."""

    def idle_because(self, end: End) -> str | None:
        return "supervised fine-tuning has no rewards" if supervised(end.job.plan) else None


class OverRows(_Rewarded):
    """An invariant over the rows of BatchConsumed and SamplesRewarded."""

    def readable(self, step: Step) -> bool:
        """False, and counted, where the rows cannot be read."""
        if step.rows is None or step.rows.problem:
            self.missing(f"rows of {step.stored.type} cannot be read")
            return False
        return True

    def over_rows(
        self,
        step: Step,
        faults: list[Fault],
        checked: int,
        cause: str,
        action: str,
        aspect: str | None = None,
    ) -> None:
        """Report faults (uid, expected, found, position of proof) of one event as one finding."""
        self.passed(checked, aspect)
        if not faults:
            return
        uid, expected, found, proof = faults[0]
        also = f"; {len(faults) - 1} more samples of this event" if len(faults) > 1 else ""
        self.flag(
            step.at,
            expected=f"{uid}: {expected}",
            found=f"{found}{also}",
            cause=cause,
            action=action,
            others=(proof,),
            aspect=aspect,
        )


class TokenIdentity(OverRows):
    """I11: the tokens that were consumed, and rewarded, are the tokens that the engine made.

    ``masks``: the trained tokens are exactly the sampled ones.
    """

    id = "I11"
    title = "consumed tokens are the generated ones"
    needs = "token_digest in the rows of SamplesGenerated, SamplesRewarded and BatchConsumed"
    sees = (
        BatchConsumed,
        SamplesRewarded,
    )
    aspects: ClassVar = {
        "masks": (
            "trained tokens are the sampled ones",
            "mask_digest in the rows of SamplesGenerated and BatchConsumed",
        )
    }

    def feed(self, step: Step) -> None:
        if not isinstance(step.event, BatchConsumed | SamplesRewarded) or not self.readable(step):
            return
        faults: list[Fault] = []
        checked = 0
        for sample, (uid, tokens) in _pairs(step, ("token_digest",)):
            if sample is None:
                continue  # I10's business: not drawn, or closed
            if sample.unknown is not None:
                self.missing(sample.unknown)
                continue
            checked += 1
            if sample.tokens is None:
                faults.append((str(uid), "generated before", "never generated", sample.drawn))
            elif sample.tokens != tokens:
                expected = f"tokens {short(sample.tokens)} as generated"
                faults.append((str(uid), expected, f"tokens {short(tokens)}", sample.generated))
        self.over_rows(step, faults, checked, *_EXCHANGED)
        if isinstance(step.event, BatchConsumed) and not supervised(step.plan):
            self._masks(step)

    def _masks(self, step: Step) -> None:
        assert step.rows is not None
        if step.rows.get("mask_digest") is None:
            self.missing("consumed rows carry no mask of the trained tokens", "masks")
            return
        faults: list[Fault] = []
        checked = 0
        for sample, (uid, tokens, mask) in _pairs(step, ("token_digest", "mask_digest")):
            if sample is None or sample.tokens is None or sample.tokens != tokens:
                continue  # told of the tokens already
            if sample.mask is None:
                self.missing("generated rows carry no mask of the sampled tokens", "masks")
                continue
            if mask is None:
                self.missing("some consumed rows carry no mask of the trained tokens", "masks")
                continue
            checked += 1
            if sample.mask != mask:
                expected = f"trained tokens {short(sample.mask)}, those that were sampled"
                found = f"trained tokens {short(mask)}"
                faults.append((str(uid), expected, found, sample.generated))
        self.over_rows(step, faults, checked, *_EXCHANGED, aspect="masks")

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        samples = "supervised fine-tuning samples no tokens"
        return samples if supervised(end.job.plan) else None


_EXCHANGED = (
    "samples were exchanged, cut, or decoded and encoded again on their way",
    "Carry token ids, never text, from the engine to the trainer, keyed by uid.",
)
"""Cause and action where tokens or masks are others."""


def _float32(value: float) -> float:
    if not math.isfinite(value) or abs(value) > 3e38:
        return value
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _same(a: float, b: float) -> bool:
    """Equal as float64, or as float32 where one side was stored so; NaN equals NaN."""
    return a == b or _float32(a) == _float32(b) or (math.isnan(a) and math.isnan(b))


class RewardLink(OverRows):
    """I12: the reward used for a sample is the one recorded for its uid and its tokens.

    ``rescored``: samples that the job scored again, each by itself, give that reward (attested).
    """

    id = "I12"
    title = "reward used is the reward recorded"
    needs = "rows of SamplesRewarded (uid, token_digest, reward) and of BatchConsumed (reward)"
    sees = (
        RewardsRescored,
        BatchConsumed,
    )
    aspects: ClassVar = {
        "rescored": ("samples scored again give the recorded reward", "RewardsRescored")
    }

    def feed(self, step: Step) -> None:
        if isinstance(step.event, RewardsRescored):
            self._rescored(step, step.event)
        if not isinstance(step.event, BatchConsumed) or supervised(step.plan):
            return
        if not self.readable(step):
            return
        faults: list[Fault] = []
        checked = 0
        for sample, (uid, tokens, reward) in _pairs(step, ("token_digest", "reward")):
            if sample is None:
                continue
            if sample.unknown is not None:
                self.missing(sample.unknown)
                continue
            checked += 1
            assert isinstance(reward, float)
            if sample.reward is None:
                faults.append((str(uid), "a recorded reward", "none recorded", sample.generated))
            elif sample.reward_tokens != tokens or not _same(sample.reward, reward):
                expected = f"reward {sample.reward:g} of tokens {short(sample.reward_tokens)}"
                found = f"reward {reward:g} of tokens {short(tokens)}"
                faults.append((str(uid), expected, found, sample.rewarded))
        self.over_rows(
            step,
            faults,
            checked,
            "rewards were matched by place, not by uid, and the order changed between",
            "Join rewards to samples by uid and token digest.",
        )

    def _rescored(self, step: Step, event: RewardsRescored) -> None:
        allowed = step.plan.tolerances.get("I12", RESCORING) if step.plan else RESCORING
        sample = step.track.samples.get(event.worst or "")
        self.expect(
            event.largest_gap <= allowed,
            step.at,
            expected=f"{event.samples} samples scored again within {allowed:g}",
            found=f"{event.worst} lies {event.largest_gap:.4g} off",
            cause="the scorer saw another sample's tokens, or its answers came in another order",
            action="Score by uid; or declare tolerances I12 where the scorer is not deterministic.",
            others=(sample.rewarded if sample else None,),
            aspect="rescored",
        )
