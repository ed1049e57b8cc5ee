"""Updates: I17 the chain of states, I18 the learning rate, I19 one step, I21 tokens, I23 effect."""

from __future__ import annotations

import math
from typing import ClassVar

from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.events.training import UpdateApplied
from shiftbook.verify.invariants.base import End, Invariant, Step, listed, short
from shiftbook.verify.lineage import EMA, MASTERS, MODEL, OPTIMIZER, Chain

LEARNING_RATE_TOLERANCE = 1e-9
"""Relative; covers a rate that went through decimal text, not one through float32."""


class UpdateChain(Invariant):
    """I17: an update begins with the state that the one before it left, or that was restored.

    Policy, fp32 masters and optimizer state each form a chain, and so does the average where the
    plan declares one. ``bundles``: a bundle holds the state of its place in the chain.
    """

    id = "I17"
    title = "each update starts from the state the last one left"
    needs = "fingerprints before and after in every UpdateApplied"
    sees = (
        UpdateApplied,
        CheckpointSaved,
    )
    aspects: ClassVar = {
        "bundles": (
            "a bundle holds the state that the last update left",
            f"parts {MODEL}, {MASTERS}, {OPTIMIZER} in CheckpointSaved",
        )
    }

    def feed(self, step: Step) -> None:
        event, chain = step.event, step.track.chain
        if isinstance(event, UpdateApplied) and chain is not None:
            self._updated(step, event, chain)
        elif isinstance(event, CheckpointSaved) and chain is not None:
            self._saved(step, event, chain)

    def _updated(self, step: Step, event: UpdateApplied, chain: Chain) -> None:
        for name, found in (
            (MODEL, event.params_before),
            (MASTERS, event.masters_before),
            (OPTIMIZER, event.optimizer_before),
            (EMA, event.ema_before),
        ):
            expected = chain.part(name)
            if expected is None or found is None:
                self._unknown(step, name, found)
                continue
            self.expect(
                found == expected,
                step.at,
                expected=f"{name} {short(expected)} as left at {chain.position}",
                found=f"{name} {short(found)}",
                cause="state changed between two updates: lost in a move, reloaded, or shared",
                action="Restore the last bundle; look at what lies between the positions.",
                others=(chain.position,),
            )

    def _unknown(self, step: Step, name: str, found: str | None) -> None:
        """Count what cannot be compared, but for where the first update of a life begins."""
        averages = step.plan is not None and step.plan.update.ema_decay is not None
        if found is None:
            if averages:
                self.missing("updates carry no root of the declared average")
        elif step.track.resumes:
            self.missing("what the attempt's bundle holds of the training state is not known")

    def _saved(self, step: Step, event: CheckpointSaved, chain: Chain) -> None:
        for name in (MODEL, MASTERS, OPTIMIZER, EMA):
            expected, saved = chain.part(name), event.parts.get(name)
            if expected is None:
                continue
            if saved is None:
                self.missing(f"a bundle names no part {name}", "bundles")
                continue
            self.expect(
                saved == expected,
                step.at,
                expected=f"{name} {short(expected)}, as the last update left it",
                found=f"{name} {short(saved)} in the bundle",
                cause="the bundle holds the state of another moment",
                action="Save under the same lock as the update, and fingerprint at the call.",
                others=(chain.position,),
                aspect="bundles",
            )

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        return None if end.job.bundles else "no bundle was saved"


def scheduled(name: str, updates: int) -> float | None:
    """Share of the declared rate after so many applied updates; None for an unknown schedule."""
    kind, *numbers = name.split(":")
    if not all(n.isdecimal() and len(n) < 19 for n in numbers):
        return None
    counts = [int(n) for n in numbers]
    match kind, counts:
        case "constant", []:
            return 1.0
        case "warmup", [warm]:
            return min(1.0, (updates + 1) / max(1, warm))
        case (("linear" | "cosine"), [warm, total]):
            if updates < warm:
                return (updates + 1) / warm
            left = min(1.0, max(0.0, (total - updates) / max(1, total - warm)))
            return left if kind == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        case _:
            return None


class LearningRate(Invariant):
    """I18: the learning rate is the plan's at that number of applied updates.

    Schedules by name: ``constant``; ``warmup:W``, linear over W updates and then constant;
    ``linear:W:T`` and ``cosine:W:T``, after the warm-up down to 0 at T updates. The count is of
    updates that were applied since the job began, over all attempts of the lineage. ``counter``:
    the schedule's own count is that one.
    """

    id = "I18"
    title = "learning rate follows the declared schedule"
    needs = "UpdateApplied.learning_rate and a schedule that this build knows"
    sees = (UpdateApplied,)
    aspects: ClassVar = {
        "counter": ("the schedule counts applied updates", "UpdateApplied.scheduler_step")
    }

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, UpdateApplied):
            return
        if step.plan is None:
            self.missing("the job declared no plan")
            return
        chain = step.track.chain
        applied = chain.updates if chain is not None else None
        if applied is None and event.scheduler_step is not None:
            # The first update after a warm start says where the schedule begins.
            applied = max(0, event.scheduler_step - (0 if event.skipped else 1))
        if event.scheduler_step is None:
            if step.plan.update.learning_rate_schedule != "constant":
                self.missing("updates carry no count of the schedule", "counter")
        elif applied is not None:
            counted = applied + (0 if event.skipped else 1)
            self.expect(
                event.scheduler_step == counted,
                step.at,
                expected=f"a schedule at {counted}, the updates that were applied",
                found=f"at {event.scheduler_step}",
                cause="the scheduler was not restored, or counts micro batches or skipped steps",
                action="Step the scheduler once for each applied update, and save its counter.",
                others=(chain.position if chain else None,),
                aspect="counter",
            )
        schedule = step.plan.update.learning_rate_schedule
        if schedule != "constant" and applied is None:
            self.missing("the updates before the attempt's bundle are not in this ledger")
            return
        share = scheduled(schedule, applied or 0)
        if share is None:
            self.missing("this build does not know the declared learning-rate schedule")
            return
        expected = step.plan.update.learning_rate * share
        self.expect(
            math.isclose(event.learning_rate, expected, rel_tol=LEARNING_RATE_TOLERANCE),
            step.at,
            expected=f"learning rate {expected:g}",
            found=f"{event.learning_rate:g}",
            cause="the scheduler was not restored, or stepped where it should not",
            action="Derive the rate from the number of applied updates, or amend the plan.",
        )

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        plan = end.job.plan
        constant = plan is not None and plan.update.learning_rate_schedule == "constant"
        return "a constant rate has no schedule that counts" if constant else None


class OneStep(Invariant):
    """I19: the optimizer's counter moves by one at each update, by none where it is skipped.

    ``parameters``: every parameter on every rank has the same counter.
    """

    id = "I19"
    title = "optimizer counter moves by one"
    needs = "UpdateApplied.optimizer_step"
    sees = (UpdateApplied,)
    aspects: ClassVar = {
        "parameters": (
            "counters of all parameters equal",
            "UpdateApplied.optimizer_step_least and .optimizer_step_most",
        )
    }

    def feed(self, step: Step) -> None:
        event, chain = step.event, step.track.chain
        if not isinstance(event, UpdateApplied):
            return
        least, most = event.optimizer_step_least, event.optimizer_step_most
        if least is None or most is None:
            self.missing("updates carry no counters by parameter", "parameters")
        else:
            self.expect(
                least == most == event.optimizer_step,
                step.at,
                expected=f"counter {event.optimizer_step} of every parameter on every rank",
                found=f"counters from {least} to {most}",
                cause="some parameters or ranks missed a step, or were restored without counters",
                action="Restore the optimizer by parameter name, its counters included.",
                aspect="parameters",
            )
        if chain is None or chain.step is None:
            self.passed()  # the first update of a life says where the counter begins
            return
        expected = chain.step + (0 if event.skipped else 1)
        self.expect(
            event.optimizer_step == expected,
            step.at,
            expected=f"optimizer step {expected}",
            found=f"step {event.optimizer_step}",
            cause="optimizer state was made anew, or an update was applied twice or not at all",
            action="Restore the optimizer by parameter name, its counters included.",
            others=(chain.position,),
        )


class GradientTokens(Invariant):
    """I21: the tokens inside the applied gradient are those of the batch, and so is the divisor.

    ``micro-batches``: they add up to the batch, and each was divided by the divisor of the whole.
    """

    id = "I21"
    title = "tokens in the gradient are those of the batch"
    needs = "BatchConsumed.tokens before UpdateApplied.tokens and .divisor"
    sees = (UpdateApplied,)
    aspects: ClassVar = {
        "micro-batches": ("micro batches add up to the batch", "UpdateApplied.micro_batches")
    }

    def feed(self, step: Step) -> None:
        event, pending = step.event, step.track.pending
        if not isinstance(event, UpdateApplied):
            return
        if not pending.positions:
            self.flag(
                step.at,
                expected="a BatchConsumed since the last update",
                found="none",
                cause="the update was applied to samples that nobody recorded",
                action="Record what an update consumes before it is applied.",
                others=(step.track.chain.position,) if step.track.chain else (),
            )
            return
        self.expect(
            event.tokens == pending.tokens,
            step.at,
            expected=f"{pending.tokens} tokens, as consumed",
            found=f"{event.tokens} tokens in the gradient",
            cause="a micro batch or a rank's part was left out, or counted twice",
            action="Count tokens where gradients are accumulated, and reduce both together.",
            others=pending.positions,
        )
        divides = step.plan.update.divisor if step.plan else "tokens"
        divisor = float(pending.tokens if divides == "tokens" else pending.count)
        self.expect(
            event.divisor == divisor,
            step.at,
            expected=f"divisor {divisor:g} ({divides} of the whole batch)",
            found=f"divisor {event.divisor:g}",
            cause="the loss was divided by a local count, or twice",
            action="Sum the loss, and divide once at the update by the global count.",
            others=pending.positions,
        )
        self._micro_batches(step, event, divisor)

    def _micro_batches(self, step: Step, event: UpdateApplied, divisor: float) -> None:
        if event.micro_batches is None:
            if not event.skipped:
                self.missing("updates carry no micro batches", "micro-batches")
            return
        pending = step.track.pending
        for number, micro in enumerate(event.micro_batches):
            self.expect(
                micro.divisor == divisor,
                step.at,
                expected=f"micro batch {number} divided by {divisor:g}, like all of them",
                found=f"by {micro.divisor:g}",
                cause="a mean of means: each micro batch was divided by its own count",
                action="Sum the loss, and divide by the global count.",
                others=pending.positions,
                aspect="micro-batches",
            )
        if event.skipped:
            return
        samples = sum(micro.samples for micro in event.micro_batches)
        tokens = sum(micro.tokens for micro in event.micro_batches)
        self.expect(
            samples == pending.count and tokens == event.tokens,
            step.at,
            expected=f"{pending.count} samples and {event.tokens} tokens in the micro batches",
            found=f"{samples} samples and {tokens} tokens",
            cause="a micro batch was left out, or taken twice",
            action="Take each micro batch once, and step after the last.",
            others=pending.positions,
            aspect="micro-batches",
        )


class Effect(Invariant):
    """I23: an update of a gradient that is not zero changes the masters; a skipped one nothing.

    ``parameters``: each parameter with a gradient moved, and none without one.
    """

    id = "I23"
    title = "updates have the effect they claim"
    needs = "UpdateApplied with grad_norm, skipped and the masters' fingerprints"
    sees = (UpdateApplied,)
    aspects: ClassVar = {
        "parameters": (
            "each parameter moved, or stayed, as its gradient says",
            "UpdateApplied.unmoved and .moved_frozen",
        )
    }

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, UpdateApplied):
            return
        changed = event.masters_before != event.masters_after
        if event.skipped:
            same = not changed and event.params_before == event.params_after
            holds, expected = same, "a skipped update to leave masters and policy as they were"
        elif not math.isfinite(event.grad_norm):
            holds, expected = False, f"an update of gradient norm {event.grad_norm} to be skipped"
        elif event.grad_norm > 0 and event.learning_rate > 0:
            holds, expected = changed, f"masters changed by a gradient of norm {event.grad_norm:g}"
        else:
            self.passed()
            return
        self.expect(
            holds,
            step.at,
            expected=expected,
            found="masters changed" if changed else "masters have the same fingerprint",
            cause="the step went to a copy, was rounded away, or was applied in spite of the skip",
            action="Keep fp32 masters, and update the tensors that are published.",
        )
        if not event.skipped:
            self._parameters(step, event)

    def _parameters(self, step: Step, event: UpdateApplied) -> None:
        for what, names, why in (
            ("moved", event.unmoved, "updates do not name parameters that stood still"),
            ("kept", event.moved_frozen, "updates do not name frozen parameters that moved"),
        ):
            if names is None:
                self.missing(why, "parameters")
                continue
            self.expect(
                not names,
                step.at,
                expected=f"every parameter {what} that should be",
                found=f"not so: {listed(names)}",
                cause="a parameter is missing from the optimizer, or its step is rounded away",
                action="Give the optimizer all trained parameters, as fp32 masters.",
                aspect="parameters",
            )
