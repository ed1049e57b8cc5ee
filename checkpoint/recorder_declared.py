"""Holds what a loop gives its probes against the plan: they would prove another program right."""

from __future__ import annotations

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder_loss import PolicyLoss
from shiftbook.checkpoint.recorder_step import StepProbe
from shiftbook.ledger.plan import UpdatePlan


def require_declared(update: UpdatePlan, probe: StepProbe | None, loss: object) -> None:
    """Raise RecorderMisuse where a probe computes with another constant than the plan declares.

    A probe recomputes what it was told to. Told what the loop does and not what was declared, it
    finds that the loop does what it does. What the plan leaves open (None) may be anything.
    """
    given: dict[str, float | None] = {}
    if isinstance(loss, PolicyLoss):
        given |= {
            "clip_range": loss.clip_range,
            "clip_range_high": loss.clip_range_high,
            "truncation": loss.truncation,
        }
    if probe is not None:
        given["clip_norm"] = probe.clip_norm
    for field, found in given.items():
        declared = getattr(update, field)
        if field == "clip_range_high" and declared is None:
            declared = update.clip_range
        if declared is not None and found != declared:
            raise RecorderMisuse(
                f"expected {field} {declared:g}, as the plan's update declares, found "
                f"{'none' if found is None else format(found, 'g')}; compute as declared, or amend "
                f"the plan: record.amend('update.{field}', ..., reason)"
            )
