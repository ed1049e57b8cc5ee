"""I16: log-probabilities replay, and they are those of the declared sampling transform."""

from __future__ import annotations

from typing import ClassVar

from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.probes import LogProbsReplayed
from shiftbook.ledger.events.training import BatchConsumed, SamplesGenerated, UpdateApplied
from shiftbook.ledger.plan import Plan
from shiftbook.verify.invariants.base import End, Invariant, Step, short
from shiftbook.verify.invariants.linkage import supervised

FACTOR = 8.0
"""Allowed gap over the one that was measured when calibrating; below it nothing is flagged."""

FLOOR = 2e-5
"""Allowed mean gap where nothing was calibrated: float32 sums of a few dozen terms in two orders.
An engine of another precision calibrates, or declares ``tolerances["I16"]``."""

SPREAD = 10.0
"""Allowed largest gap over the allowed mean one."""

MOST_NOISE = 0.02
"""Largest mean gap that a calibration may show: twice the 0.01 that a bfloat16 trainer and its
engine are reported to have (TRL issue 4772). ``tolerances["I16.calibration"]`` declares another."""


class LogProbsReplay(Invariant):
    """I16: what the loss used as log-probabilities is what the stamped version gives.

    The engine's, the trainer's and the reference's are computed again by other code, on a few
    samples; attested by the job. The tolerance is declared, or FACTOR times the gap that the same
    stack showed when it was calibrated: before an attempt's first update, where nothing that
    training does can have widened it, and within MOST_NOISE. A calibration is no check. ``used``:
    the loss uses the engine's own values, bit for bit. ``loss``: where the loss is taken under the
    weights that sampled, its own log-probabilities lie as near to the engine's; where nothing was
    declared or calibrated, within MOST_NOISE. ``proximal``: where an iteration passes over a batch
    several times, every pass takes its ratio against the values of the first one, bit for bit; a
    later iteration, and a replay buffer, may score a sample anew.
    """

    id = "I16"
    title = "log-probabilities replay under the stamped version"
    needs = "LogProbsReplayed; SamplesGenerated.transform"
    sees = (
        AttemptStarted,
        UpdateApplied,
        LogProbsReplayed,
        SamplesGenerated,
        BatchConsumed,
    )
    aspects: ClassVar = {
        "used": (
            "the loss uses the engine's own log-probabilities",
            "logp_digest in the rows of BatchConsumed",
        ),
        "loss": (
            "log-probabilities inside the loss lie near the engine's",
            "UpdateApplied.logp_gap (update.gap)",
        ),
        "proximal": (
            "each pass over a batch takes its ratio against the same log-probabilities",
            "proximal_digest in the rows of BatchConsumed (Consumed.old)",
        ),
    }

    def begin(self) -> None:
        self._noise: dict[str, tuple[float, int]] = {}
        self._replays = 0
        self._generated = False
        self._updated: int | None = None
        """Position of the first update of the attempt."""
        self._compared: int | None = None
        """Iteration whose loss was last compared with the engine."""

    def feed(self, step: Step) -> None:
        match step.event:
            case AttemptStarted():
                self._updated = None
            case UpdateApplied():
                self._in_the_loss(step, step.event)
                self._updated = step.at if self._updated is None else self._updated
            case LogProbsReplayed():
                self._replayed(step, step.event)
            case SamplesGenerated():
                self._transform(step, step.event)
            case BatchConsumed():
                self._used(step)
                self._proximal(step)
            case _:
                pass

    def _replayed(self, step: Step, event: LogProbsReplayed) -> None:
        if event.calibrating:
            self._calibrated(step, event)
            return
        self._replays += 1
        declared = step.plan.tolerances.get("I16") if step.plan else None
        noise, at = self._noise.get(event.what, (0.0, -1))
        allowed = declared if declared is not None else max(FLOOR, FACTOR * noise)
        how = "declared" if declared is not None else f"{FACTOR:g} x the calibrated {noise:.2g}"
        if declared is None and at < 0:
            how = "rounding of float32; nothing was calibrated"
        self.expect(
            event.mean_gap <= allowed and event.largest_gap <= SPREAD * allowed,
            step.at,
            expected=f"{event.what} log-probabilities within {allowed:.2g} ({how})",
            found=f"mean gap {event.mean_gap:.3g}, largest {event.largest_gap:.3g}",
            cause="other weights, another temperature or mask, a shifted index, a stale cache",
            action="Compare the two forwards on this sample, token by token.",
            others=(at,),
        )
        share = step.plan.tolerances.get("I16.tokens", 0.0) if step.plan else 0.0
        self.expect(
            event.other_tokens <= share * event.tokens,
            step.at,
            expected=f"{event.tokens} tokens drawn as the declared randomness and transform say",
            found=f"{event.other_tokens} drawn otherwise",
            cause="sampled with another temperature, top-p, seed or key than declared",
            action="Draw with the declared transform; key by job seed, uid, turn and token.",
        )

    def _in_the_loss(self, step: Step, event: UpdateApplied) -> None:
        if event.skipped or supervised(step.plan):
            return
        if step.plan is not None and step.plan.update.dropout:
            return  # the loss computes another function than the engine, and is meant to
        if event.logp_gap is None:
            # Of several updates of a batch the first alone is taken under the weights that sampled.
            if event.iteration != self._compared:
                self.missing("updates carry no gap of the loss's log-probabilities", "loss")
            return
        self._compared = event.iteration
        tolerances = step.plan.tolerances if step.plan else {}
        noise, at = self._noise.get("behaviour", (0.0, -1))
        allowed, how = tolerances.get("I16"), "declared"
        if allowed is None and at >= 0:
            allowed, how = max(FLOOR, FACTOR * noise), f"{FACTOR:g} x the calibrated {noise:.2g}"
        if allowed is None:
            allowed, how = tolerances.get("I16.calibration", MOST_NOISE), "nothing was calibrated"
        self.expect(
            event.logp_gap <= allowed,
            step.at,
            expected=f"the loss's log-probabilities within {allowed:.2g} of the engine's ({how})",
            found=f"mean gap {event.logp_gap:.3g}",
            cause="labels shifted by one, another temperature, packed samples that see each other, "
            "positions that go on, dropout where none is declared, or other weights than sampled",
            action="Compare the loss's forward with the engine's on one sample, token by token; "
            "where the stack itself is that far apart, calibrate it or declare tolerances I16.",
            others=(at,),
            aspect="loss",
        )

    def _calibrated(self, step: Step, event: LogProbsReplayed) -> None:
        """Take in the noise of the stack; what cannot be that is a finding."""
        declared = step.plan.tolerances if step.plan else {}
        most = declared.get("I16.calibration", MOST_NOISE)
        if self._updated is not None:
            self.flag(
                step.at,
                expected="calibration before the first update of the attempt",
                found=f"a calibration of {event.what} after it, mean gap {event.mean_gap:.3g}",
                cause="a gap that training made is passed off as noise of the stack",
                action="Calibrate before training; replay without calibrating from then on.",
                others=(self._updated,),
            )
        elif not (event.mean_gap <= most and event.largest_gap <= SPREAD * most):
            self.flag(
                step.at,
                expected=f"noise of the stack within {most:g}, and {SPREAD * most:g} at most",
                found=f"calibrated with mean gap {event.mean_gap:.3g}, "
                f"largest {event.largest_gap:.3g}",
                cause="engine and trainer did not compute the same function to begin with",
                action="Compare the two forwards token by token; a stack that is that noisy "
                "declares tolerances I16 or I16.calibration.",
            )
        else:
            noise, at = self._noise.get(event.what, (0.0, step.at))
            self._noise[event.what] = (max(noise, event.mean_gap), at)

    def _transform(self, step: Step, event: SamplesGenerated) -> None:
        self._generated = True
        if event.transform is None:
            self.missing("generated samples carry no sampling transform")
            return
        if step.plan is None:
            return
        plan = step.plan.sampling
        for name, expected, found in (
            ("temperature", plan.temperature, event.transform.temperature),
            ("top-p", plan.top_p, event.transform.top_p),
            ("log-probabilities", plan.log_probs, event.transform.log_probs),
        ):
            self.expect(
                expected == found,
                step.at,
                expected=f"{name} {expected}, as the plan declares",
                found=f"{name} {found}",
                cause="the engine's defaults or a request's options took over",
                action="Set the transform from the plan in every request.",
            )

    def _used(self, step: Step) -> None:
        if supervised(step.plan):
            return
        if step.rows is None or step.rows.problem:
            self.missing("rows of BatchConsumed cannot be read", "used")
            return
        used = step.rows.get("logp_digest")
        if used is None:
            self.missing("consumed rows carry no log-probabilities that the loss used", "used")
            return
        wrong = []
        for uid, digest in zip(step.rows["uid"], used, strict=True):
            sample = step.track.samples.get(uid)
            if sample is None:
                continue  # I10's business: not drawn, or closed
            if sample.logps is None:
                why = "the samples' generation was not recorded"
                self.missing(sample.unknown or why, "used")
                continue
            if digest is None:
                why = "some consumed rows carry no log-probabilities that the loss used"
                self.missing(why, "used")
                continue
            self.passed(1, "used")
            if sample.logps != digest:
                wrong.append((uid, sample.logps, digest, sample.generated))
        if wrong:
            uid, expected, digest, at = wrong[0]
            self.flag(
                step.at,
                expected=f"{uid}: log-probabilities {short(expected)}, the engine's own",
                found=f"{short(digest)} ({len(wrong)} samples)",
                cause="behaviour log-probabilities recomputed, shifted, or of another sample",
                action="Carry them from the engine to the loss, keyed by uid.",
                others=(at,),
                aspect="used",
            )

    def _proximal(self, step: Step) -> None:
        """Hold what a later pass takes its ratio against to what the first pass did."""
        if not isinstance(step.event, BatchConsumed) or _one_pass(step.plan) is not None:
            return
        if step.rows is None or step.rows.problem:
            self.missing("rows of BatchConsumed cannot be read", "proximal")
            return
        against = step.rows.get("proximal_digest") or [None] * len(step.rows)
        wrong = []
        for uid, digest in zip(step.rows["uid"], against, strict=True):
            sample = step.track.samples.get(uid)
            if sample is None or not sample.consumed or sample.proximal is None:
                continue  # the first pass says what it is; what was not drawn is I10's business
            iteration, first = sample.proximal
            if iteration != step.event.iteration:
                continue  # a later batch may score it anew
            if digest is None or first is None:
                why = "consumed rows carry no log-probabilities that the ratio is taken against"
                self.missing(sample.unknown or why, "proximal")
                continue
            self.passed(1, "proximal")
            if digest != first:
                wrong.append((uid, first, digest, sample.consumed[-1]))
        if wrong:
            uid, expected, digest, at = wrong[0]
            self.flag(
                step.at,
                expected=f"{uid}: a ratio against {short(expected)}, as in the first pass",
                found=f"against {short(digest)} ({len(wrong)} samples)",
                cause="log-probabilities were computed anew between two passes over a batch: the "
                "ratio begins at 1 again, and the clip bounds each pass and not the batch",
                action="Score the batch once, before its first pass, and keep the values.",
                others=(at,),
                aspect="proximal",
            )

    def close(self, end: End) -> None:
        if self._generated and not self._replays:
            self.missing("no log-probabilities were replayed")

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        update = end.job.plan.update if end.job.plan else None
        if aspect == "loss" and update is not None and update.dropout:
            return "with dropout the loss computes another function than the engine"
        if supervised(end.job.plan):
            return "supervised fine-tuning has no engine"
        return _one_pass(end.job.plan) if aspect == "proximal" else None


def _one_pass(plan: Plan | None) -> str | None:
    """Why no ratio of a later pass is bound to the first one's; None where it is."""
    if plan is None or plan.update.epochs_per_batch == 1:
        return "each batch is passed over once"
    if plan.update.sample_reuse == "at_most":
        return "a replay buffer may score its samples anew at each use"
    return None
