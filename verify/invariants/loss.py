"""The loss: I24 controllers, I25 recomputed masks, I26 live terms, and what was computed again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from shiftbook.ledger.events.training import Controller, MicroBatch, Residual, UpdateApplied
from shiftbook.verify.invariants.base import End, Invariant, Step, short

SIGMAS = 6.5
"""Standard deviations of a binomial count; a false alarm in 10^10 masks."""

RELATIVE = 1e-9
"""Float64 arithmetic of a controller, done in another order."""


def _expected(rule: Mapping[str, float | str], value: Controller) -> float | str | None:
    """Value after the update by the declared rule; text says what is missing.

    adaptive-kl (arXiv 1909.08593): before * (1 + gain * clip(kl / target - 1, -limit, limit)).
    """

    def constant(name: str) -> float:
        return float(rule.get(name, math.nan))

    match rule.get("rule"):
        case "constant":
            return value.before
        case "count":
            return value.before + value.inputs["added"] if "added" in value.inputs else "added"
        case "adaptive-kl":
            if "kl" not in value.inputs:
                return "kl"
            limit = constant("limit")
            error = min(max(value.inputs["kl"] / constant("target") - 1, -limit), limit)
            return value.before * (1 + constant("gain") * error)
        case _:
            return None


class Controllers(Invariant):
    """I24: a controlled value begins as declared, goes on where it stood, and follows its rule.

    Rules that are known: constant, count, adaptive-kl, with the constants that the plan gives.
    """

    id = "I24"
    title = "controllers follow their recurrence"
    needs = "UpdateApplied.controllers with inputs, and plan.update.controllers"
    sees = (UpdateApplied,)

    def feed(self, step: Step) -> None:
        event = step.event
        declared = step.plan.update.controllers if step.plan else {}
        if not isinstance(event, UpdateApplied) or not declared:
            return
        chain = step.track.chain
        for name, rule in declared.items():
            value = (event.controllers or {}).get(name)
            if value is None:
                self.missing("an update carries no value of a declared controller")
                continue
            known = chain.controllers.get(name) if chain is not None else None
            if known is None and chain is not None and chain.updates == 0 and "first" in rule:
                known = float(rule["first"])
            if known is None and not self._after_warm_start(step):
                self.missing("where a declared controller began is not known")
            self._compare(step, f"{name} before the update", known, value.before)
            if event.skipped:
                continue
            expected = _expected(rule, value)
            if expected is None:
                self.missing("this build does not know the declared rule of a controller")
            elif isinstance(expected, str):
                self.missing(f"an update carries no {expected} that the rule reads")
            else:
                after = f"{name} after it, by {rule.get('rule')}"
                self._compare(step, after, expected, value.after)
        self._inputs(step, event)

    @staticmethod
    def _after_warm_start(step: Step) -> bool:
        """True where controllers may have begun anew: the update says where."""
        restored = step.track.restored
        return restored is not None and restored[0].kind != "resume"

    def _inputs(self, step: Step, event: UpdateApplied) -> None:
        for name, value in (event.controllers or {}).items():
            if "kl" in value.inputs and not event.skipped:
                self._compare(step, f"kl that {name} read", event.kl, value.inputs["kl"])
            if "added" in value.inputs and step.track.pending.positions:
                count = float(step.track.pending.count)
                self._compare(step, f"samples that {name} counted", count, value.inputs["added"])

    def _compare(self, step: Step, what: str, expected: float | None, found: float) -> None:
        if expected is None:
            return
        self.expect(
            math.isclose(expected, found, rel_tol=RELATIVE, abs_tol=1e-12),
            step.at,
            expected=f"{what}: {expected:.9g}",
            found=f"{found:.9g}",
            cause="the controller was not restored, moved twice, or fed another value",
            action="Save it with the optimizer's state, and move it once for each update.",
            others=(step.track.chain.position if step.track.chain else None,),
        )

    def idle_because(self, end: End) -> str | None:
        declared = end.job.plan.update.controllers if end.job.plan else {"": {}}
        return None if declared else "the plan declares no controllers"


class RecomputedMasks(Invariant):
    """I25: a forward that is computed again for the backward draws the same dropout masks.

    Where the plan declares the rate, masks leave out that share, within SIGMAS standard deviations.
    A plan that says that nothing is recomputed (``update.recomputation``) has its share alone
    judged; one that says nothing of it and declares dropout needs both masks.
    """

    id = "I25"
    title = "recomputed forward draws the same mask"
    needs = "first_mask and recomputed_mask in UpdateApplied.micro_batches"
    sees = (UpdateApplied,)

    def begin(self) -> None:
        self._updates = 0

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, UpdateApplied):
            return
        self._updates += 1
        update = step.plan.update if step.plan else None
        rate = update.dropout if update else None
        recomputes = update is None or update.recomputation is not False
        if rate and event.micro_batches is None:
            self.missing("updates carry no micro batches, whose masks dropout drew")
        for number, micro in enumerate(event.micro_batches or ()):
            if rate is not None:
                self._share(step, number, micro, rate)
            if micro.first_mask is not None and micro.recomputed_mask is not None:
                self._again(step, number, micro)
            elif recomputes and (rate or micro.first_mask or micro.recomputed_mask):
                self.missing("micro batches carry no mask of the first forward and the recomputed")

    def _again(self, step: Step, number: int, micro: MicroBatch) -> None:
        self.expect(
            micro.first_mask == micro.recomputed_mask,
            step.at,
            expected=f"micro batch {number} of rank {micro.rank}: mask "
            f"{short(micro.first_mask)} again",
            found=short(micro.recomputed_mask),
            cause="activation checkpointing without the random state, or a draw in between",
            action="Keep the random state of the first forward (preserve_rng_state=True).",
        )

    def _share(self, step: Step, number: int, micro: MicroBatch, rate: float) -> None:
        if micro.mask_size is None or micro.masked is None:
            self.missing("micro batches carry no count of what dropout left out")
            return
        room = SIGMAS * math.sqrt(micro.mask_size * rate * (1 - rate)) + 1
        self.expect(
            abs(micro.masked - rate * micro.mask_size) <= room,
            step.at,
            expected=f"micro batch {number}: {rate:g} of {micro.mask_size} elements left out, "
            f"give or take {room:.0f}",
            found=f"{micro.masked} left out",
            cause="the model was in evaluation mode while training, or the rate is another",
            action="Call train() before the update; pass the declared rate.",
        )

    def idle_because(self, end: End) -> str | None:
        if not self._updates:
            return None
        if end.job.plan is not None and end.job.plan.update.recomputation is False:
            return "the plan says that no forward is recomputed"
        return "the plan declares no dropout"


class LiveTerms(Invariant):
    """I26: each declared term of the loss has its coefficient and takes part in the gradient.

    A term whose value is not zero in its inputs but whose gradient is, is not in the loss. A
    coefficient that a controller moves is compared with the controller's value.
    """

    id = "I26"
    title = "declared loss terms are live"
    needs = "UpdateApplied.loss_terms: coefficient, value, norm of its gradient"
    sees = (UpdateApplied,)

    def feed(self, step: Step) -> None:
        event = step.event
        declared = step.plan.update.loss_terms if step.plan else {}
        if not isinstance(event, UpdateApplied) or not declared or event.skipped:
            return
        if event.loss_terms is None:
            self.missing("updates carry no loss terms")
            return
        moved = {name: c.before for name, c in (event.controllers or {}).items()}
        for name, coefficient in declared.items():
            term = event.loss_terms.get(name)
            if term is None:
                self._speak(step, False, f"a term {name} in the loss", "none recorded")
                continue
            expected = moved.get(f"{name}_coefficient", coefficient)
            self._speak(
                step,
                math.isclose(term.coefficient, expected, rel_tol=RELATIVE),
                f"coefficient {expected:.9g} of {name}",
                f"{term.coefficient:.9g}",
            )
            dead = term.gradient_norm == 0 and expected != 0 and abs(term.value) > 1e-12
            self._speak(
                step,
                not dead,
                f"{name} (value {term.value:.3g}) to have a part in the gradient",
                "a part of norm 0",
            )

    def _speak(self, step: Step, holds: bool, expected: str, found: str) -> None:
        self.expect(
            holds,
            step.at,
            expected=expected,
            found=found,
            cause="the term is detached, multiplied by 0, or its coefficient not passed on",
            action="Sum all declared terms with their coefficients before the backward.",
        )

    def idle_because(self, end: End) -> str | None:
        declared = end.job.plan.update.loss_terms if end.job.plan else {"": 0.0}
        return None if declared else "the plan declares no loss terms"


class Recomputed(Invariant):
    """What the job attests that other code computed again from recorded inputs agrees with it.

    Each comes with the gap that rounding explains: ``loss`` and its gradient, the ``gradient`` as
    the sum of the micro batches' after the clip, the optimizer's ``step`` and moments, the
    ``average`` of the masters, the masks of ``dropout``.
    """

    id = "recomputed"
    title = "loss, gradient, step and average recompute"
    needs = "UpdateApplied.recomputed (StepProbe and PolicyLoss of the recorder)"
    sees = (UpdateApplied,)
    aspects: ClassVar = {
        "loss": (
            "loss and its gradient recompute",
            "PolicyLoss or SupervisedLoss given to Recorder.update",
        ),
        "gradient": (
            "the gradient is the sum of its micro batches",
            "StepProbe given to Recorder.update, with gradient in its micro batches",
        ),
        "step": ("the optimizer's step recomputes", "StepProbe given to Recorder.update"),
        "average": ("the average of the masters recomputes", "StepProbe.begin with ema"),
        "dropout": ("masks of dropout recompute", "UpdateRecord.recomputed('dropout mask', …)"),
    }

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, UpdateApplied):
            return
        if event.recomputed is None:
            if not event.skipped:  # of a step that was not taken there is nothing to compute
                self.missing("updates carry nothing that was computed again")
            return
        for what, residual in event.recomputed.items():
            aspect = _ASPECTS.get(what)
            if aspect is not None:
                self.passed()  # an aspect counts its comparisons itself
            self.expect(
                residual.largest <= residual.allowed,
                step.at,
                expected=f"{what} as declared, within {residual.allowed:.3g} (rounding)",
                found=f"{residual.largest:.3g} off ({residual.compared} values compared)",
                cause=_CAUSES.get(what, "the computation is not the declared one"),
                action="Compare the declared rule with what the loop calls, term by term.",
                others=(step.track.chain.position if step.track.chain else None,),
                aspect=aspect,
            )
        if not event.skipped:
            for aspect, why in self._absent(step, event.recomputed):
                self.missing(why, aspect)

    @staticmethod
    def _absent(step: Step, found: Mapping[str, Residual]) -> Iterator[tuple[str, str]]:
        """Aspects that the update has nothing of, and why they are missed."""
        update = step.plan.update if step.plan else None
        for what, aspect, due in (
            ("loss", "loss", True),
            ("gradient", "gradient", True),
            ("step", "step", True),
            ("ema", "average", update is not None and update.ema_decay is not None),
            ("dropout mask", "dropout", update is not None and bool(update.dropout)),
        ):
            if due and what not in found:
                yield aspect, _NOT_AGAIN[aspect]

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        update = end.job.plan.update if end.job.plan else None
        if aspect == "average" and update is not None and update.ema_decay is None:
            return "the plan declares no average"
        if aspect == "dropout" and update is not None and not update.dropout:
            return "the plan declares no dropout"
        return None


_ASPECTS = {
    "loss": "loss",
    "loss gradient": "loss",
    "gradient": "gradient",
    "norm": "step",
    "step": "step",
    "moments": "step",
    "ema": "average",
    "dropout mask": "dropout",
}
"""Aspect that a computation belongs to; of the invariant alone where it is none of these."""

_NOT_AGAIN = {
    "loss": "the loss was not computed again",
    "gradient": "the sum of the micro batches' gradients was not computed again",
    "step": "the optimizer's step was not computed again",
    "average": "the average of the masters was not computed again",
    "dropout": "the masks of dropout were not computed again",
}

_CAUSES = {
    "loss": "terms, signs, masks or divisor of the loss are not the declared ones",
    "loss gradient": "a detached or scaled term, a mask, or a backward that was left out",
    "gradient": "micro batches left out or left over, a rank not reduced, a clip twice or never",
    "norm": "a norm of other gradients, stale or of one rank, or a clip by another bound",
    "dropout mask": "another stream, another rate, or draws in between",
    "step": "another rate, decay or rule than declared, or a step on other tensors",
    "moments": "moments of another parameter or moment, or updated twice",
    "ema": "another decay, updated twice or not at all",
}
