"""Computes the loss of each group and its gradient again, and carries what came of it in sums.

A group's gradient is added wherever its virtual rank stands, and may move on from there with the
half-done update. What the watch finds is therefore kept as statistics, which go the same way and
are summed in the same tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from shiftbook.checkpoint.recorder_loss import PolicyLoss
from shiftbook.ledger.events.training import LossTerm, Residual

TERMS = ("policy", "kl")
WHAT = ("loss", "loss gradient")
KINDS = ("gap", "allowed", "beyond")


def watch(
    stats: dict[str, float],
    *,
    logps: Tensor,
    behaviour: np.ndarray,
    reference: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    total: Tensor,
    kl_coefficient: float,
    clip_epsilon: float,
) -> None:
    """Add to ``stats`` what other code makes of one group: arrays [G, T], advantages [G].

    ``logps`` takes part in autograd: its gradient is compared when ``total`` is differentiated, and
    ``stats`` are whole only then. Without a backward they are no numbers.
    """
    loss = PolicyLoss(kl_coefficient=kl_coefficient, clip_range=clip_epsilon)
    loss.watch(
        new=logps,
        old=behaviour,
        engine=behaviour,
        reference=reference,
        advantages=advantages,
        trained=mask,
        divisor=1.0,
        value=total,
    )
    for name, term in loss.terms().items():
        stats[f"watch {name} value"] = term.value
        stats[f"watch {name} square"] = term.gradient_norm**2
    for what in WHAT:
        stats |= {f"watch {what} {kind}": math.nan for kind in KINDS}
    stats["watch groups"], stats["watch tokens"] = 1.0, float(mask.size)

    def look(_: Tensor) -> None:
        # The loss's own hook was there first and has caught the gradient.
        for what, residual in loss.residuals().items():
            stats[f"watch {what} gap"] = residual.largest
            stats[f"watch {what} allowed"] = residual.allowed
            beyond = residual.largest - residual.allowed
            stats[f"watch {what} beyond"] = 0.0 if beyond <= 0.0 else beyond

    if logps.requires_grad:
        logps.register_hook(look)  # type: ignore[no-untyped-call]


def live_terms(
    stats: Mapping[str, float], weight: int, kl_coefficient: float
) -> dict[str, LossTerm]:
    """Each term of an update's loss: its mean over ``weight`` tokens, and its part of the gradient
    with respect to their log-probabilities."""
    coefficients = dict(zip(TERMS, (1.0, kl_coefficient), strict=True))
    return {
        name: LossTerm(
            coefficient=coefficient,
            value=stats[f"watch {name} value"] / weight,
            gradient_norm=math.sqrt(stats[f"watch {name} square"]) / weight,
        )
        for name, coefficient in coefficients.items()
    }


def residuals(stats: Mapping[str, float]) -> dict[str, Residual]:
    """How far loss and gradient of an update's groups lie from the declared ones.

    The mean over groups where each lies within what its rounding explains; else what rounding
    explains in the mean, and all that lies beyond it in any group.
    """
    groups = stats["watch groups"]
    found = {}
    for what in WHAT:
        gap, allowed, beyond = (stats[f"watch {what} {kind}"] for kind in KINDS)
        found[what] = Residual(
            largest=gap / groups if beyond == 0.0 else allowed / groups + beyond,
            allowed=allowed / groups,
            compared=int(groups if what == "loss" else stats["watch tokens"]),
        )
    return found
