"""Recomputes a supervised loss and its gradient from the logits that the job computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.ledger.events.training import LossTerm, Residual

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-5
"""Relative, of the sum of the tokens' losses, and of each element of the gradient that is compared;
the loss of logits that are no float32 is taken as float32."""

PLACES = 32
"""Positions of each micro batch at which the gradient is compared, over the whole vocabulary."""


class SupervisedLoss:
    """Cross-entropy of the next token, summed over trained tokens and divided by the divisor.

    Logits at a place are of the token after it: token t's loss is -log softmax(logits[t-1])[t].
    ``watch`` is called with each micro batch's logits and token ids before ``backward``. The logits
    are read once more for it, on their own device.
    """

    def __init__(self, *, tolerance: float = TOLERANCE) -> None:
        self.tolerance = tolerance
        self._value, self._square = 0.0, 0.0
        self._loss: tuple[float, float] = (0.0, 0.0)
        self._gradient: tuple[float, float] = (0.0, 0.0)
        self._batches, self._compared, self._waiting = 0, 0, 0

    def watch(
        self,
        *,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        trained: torch.Tensor,
        divisor: float,
        value: Any,
        scale: float = 1.0,
    ) -> None:
        """Take one micro batch: logits (rows, tokens, vocabulary); ids and mask (rows, tokens).

        ``trained`` marks the tokens whose loss counts; the first of a row never does, and of packed
        samples each first one is left out. ``value`` is the loss that the job computed; its
        gradient is caught when ``backward`` runs, on the loss times ``scale``. Raises
        RecorderMisuse where the shapes do not fit.
        """
        import torch

        if tuple(logits.shape[:-1]) != tuple(tokens.shape) or trained.shape != tokens.shape:
            raise RecorderMisuse(
                "expected logits of shape (rows, tokens, vocabulary) with token ids and mask of "
                f"(rows, tokens), found {tuple(logits.shape)}, {tuple(tokens.shape)} and "
                f"{tuple(trained.shape)}; hand in the logits uncut, as the model gives them"
            )
        with torch.no_grad():
            on = trained[:, 1:].bool()
            targets = tokens[:, 1:].long()
            found = logits.detach()[:, :-1]
            losses = _losses(found, targets)[on].double()
            total = float(losses.sum()) / divisor
            room = self.tolerance * float(losses.abs().sum()) / abs(divisor) + 1e-12
            self._loss = _worse(self._loss, abs(float(value) - total), room)
            rows, places = torch.nonzero(torch.ones_like(on), as_tuple=True)
            step = max(1, len(rows) // PLACES)
            rows, places = rows[::step], places[::step]
            expected = found[rows, places].double().softmax(-1)
            expected[torch.arange(len(rows)), targets[rows, places]] -= 1
            expected *= (on[rows, places].double() / divisor)[:, None]
        self._value += total
        self._batches += 1
        hooked: Any = logits  # torch's stubs have no types for hooks
        if hooked.requires_grad:
            self._waiting += 1

            def caught(gradient: torch.Tensor) -> None:
                self._caught(gradient.detach(), rows, places, expected, scale, divisor)

            hooked.register_hook(caught)

    def _caught(
        self,
        gradient: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        expected: torch.Tensor,
        scale: float,
        divisor: float,
    ) -> None:
        self._waiting -= 1
        self._square += float(gradient.float().square().sum()) / scale**2
        gaps = (gradient[rows, places].double() / scale - expected).abs()
        worst = float(gaps.max()) if gaps.numel() else 0.0
        # A gradient that is kept in fewer bits than float32 is rounded at its own size.
        rounding = 2.0**-8 if gradient.element_size() < 4 else self.tolerance
        self._gradient = _worse(self._gradient, worst, rounding / abs(divisor))
        self._compared += gaps.numel()

    def terms(self) -> dict[str, LossTerm]:
        """Value of the loss over all micro batches so far, and the norm of its gradient's part."""
        norm = math.sqrt(self._square)
        return {"supervised": LossTerm(coefficient=1.0, value=self._value, gradient_norm=norm)}

    def residuals(self) -> dict[str, Residual]:
        """How far the job's loss and its gradient lie from the declared ones."""
        if not self._batches:
            return {}
        gap, room = self._loss
        found = {"loss": Residual(largest=gap, allowed=room, compared=self._batches)}
        gap, room = self._gradient if not self._waiting else (math.inf, 0.0)
        found["loss gradient"] = Residual(largest=gap, allowed=room, compared=self._compared)
        return found


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log softmax of each target, row by row: the whole in float32 may have no room."""
    import torch

    made = [
        row.float().logsumexp(-1) - row.float().gather(-1, ids[:, None])[:, 0]
        for row, ids in zip(logits, targets, strict=True)
    ]
    return torch.stack(made) if made else targets.float()


def _worse(known: tuple[float, float], gap: float, room: float) -> tuple[float, float]:
    """The pair whose gap is larger against the room it has."""
    if not math.isfinite(gap):
        return math.inf, room
    mine, theirs = gap / room if room else 0.0, known[0] / known[1] if known[1] else -1.0
    return (gap, room) if mine > theirs else known
