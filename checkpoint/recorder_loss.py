"""Recomputes a clipped policy loss and its gradient from the inputs that the job gave it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder_gap import float64_array
from shiftbook.ledger.events.training import LossTerm, Residual

TOLERANCE = 1e-5
"""Relative, of each token's policy term: a handful of float32 operations against float64."""

KL_TOLERANCE = 1e-6
"""Of 1 + exp(reference - new): what cancels in the KL estimate is rounded at that size."""


def _by_token(advantages: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """An advantage for each token, from one for each token or for each sample of a row."""
    if advantages.shape == shape:
        return advantages
    if len(shape) == 2 and advantages.shape in (shape[:1], (shape[0], 1)):
        return advantages.reshape(-1, 1)
    raise RecorderMisuse(
        f"expected advantages of shape {shape}, one for each token, or {shape[:1]}, one for each "
        f"sample, found {advantages.shape}; give packed rows one for each token"
    )


class PolicyLoss:
    """The declared loss, token by token, and the gradient with respect to the log-probabilities.

    policy: -min(r A, clip(r, 1 - c, 1 + h) A) w, with r = exp(new - old) (arXiv 1707.06347), h = c
    unless ``clip_range_high`` says another (arXiv 2503.14476), and
    w = min(exp(old - engine), truncation), which is held constant; kl: exp(d) - d - 1 with
    d = reference - new, the low-variance estimate of KL(policy, reference). Both are summed over
    trained tokens and divided by the divisor. ``watch`` is called with each micro batch's inputs
    before ``backward``, ``value`` with the loss that the job computed.
    """

    def __init__(
        self,
        *,
        kl_coefficient: float,
        clip_range: float = 0.2,
        clip_range_high: float | None = None,
        truncation: float | None = None,
    ) -> None:
        self.kl_coefficient = kl_coefficient
        self.clip_range = clip_range
        self.clip_range_high = clip_range if clip_range_high is None else clip_range_high
        self.truncation = truncation
        self._values = {"policy": 0.0, "kl": 0.0}
        self._squares = {"policy": 0.0, "kl": 0.0}
        self._loss: list[tuple[float, float, float]] = []
        self._expected: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        """Gradient by token of each micro batch, and what rounding explains."""
        self._found: dict[int, NDArray[np.float64]] = {}

    def watch(
        self,
        *,
        new: Any,
        old: Any,
        engine: Any,
        reference: Any = None,
        advantages: Any,
        trained: Any,
        divisor: float,
        value: Any,
        scale: float = 1.0,
    ) -> None:
        """Take one micro batch's inputs, all of one shape; advantages (samples,) or of that shape.

        The shape is (samples, tokens), or (rows, tokens) or (tokens,) of packed samples, each
        token of which has its sample's advantage. A loss without a KL term needs no ``reference``,
        and one without a truncated weight may give ``old`` as ``engine``. ``new`` takes part in
        autograd; its gradient is caught when ``backward`` runs, on the loss times ``scale``. Raises
        RecorderMisuse where the shapes do not fit, since broadcasting would compare with another
        loss.
        """
        if reference is None:
            if self.kl_coefficient:
                raise RecorderMisuse(
                    f"expected the reference's log-probabilities, since the loss has a KL term of "
                    f"{self.kl_coefficient:g}, found none; hand in what the loss reads"
                )
            reference = new
        inputs = [float64_array(v) for v in (new, old, engine, reference)]
        on = float64_array(trained)
        by_token = _by_token(float64_array(advantages), inputs[0].shape)
        names = ("old", "engine", "reference", "trained")
        for name, given in zip(names, (*inputs[1:], on), strict=True):
            if given.shape != inputs[0].shape:
                raise RecorderMisuse(
                    f"expected {name} of shape {inputs[0].shape}, as new, found {given.shape}; "
                    "hand in what the loss reads, token by token"
                )
        with np.errstate(over="ignore", invalid="ignore"):
            policy, kl, gradients, room = self._terms(
                inputs[0], inputs[1], inputs[2], inputs[3], by_token, on, divisor
            )
        total = policy + self.kl_coefficient * kl
        self._loss.append((float(float64_array(value)), total, float(room.sum())))
        self._values["policy"] += policy
        self._values["kl"] += kl
        with np.errstate(over="ignore"):
            for name, gradient in gradients.items():
                self._squares[name] += float((gradient * gradient).sum())
        number = len(self._expected)
        self._expected.append((gradients["policy"] + gradients["kl"], room))
        if getattr(new, "requires_grad", False):
            new.register_hook(lambda gradient: self._caught(number, gradient, scale))

    def _caught(self, number: int, gradient: Any, scale: float) -> None:
        self._found[number] = self._found.get(number, 0.0) + float64_array(gradient) / scale

    def _terms(
        self,
        new: NDArray[np.float64],
        old: NDArray[np.float64],
        engine: NDArray[np.float64],
        reference: NDArray[np.float64],
        advantages: NDArray[np.float64],
        trained: NDArray[np.float64],
        divisor: float,
    ) -> tuple[float, float, dict[str, NDArray[np.float64]], NDArray[np.float64]]:
        on = trained > 0
        zero = np.zeros_like(new)
        ratio = np.exp(np.where(on, new - old, zero))
        weight = np.exp(np.where(on, old - engine, zero))
        if self.truncation is not None:
            weight = np.minimum(weight, self.truncation)
        else:
            weight = np.ones_like(weight)
        plain = ratio * advantages
        clipped = np.clip(ratio, 1 - self.clip_range, 1 + self.clip_range_high) * advantages
        gap = np.where(on, reference - new, zero)
        policy = np.where(on, -np.minimum(plain, clipped) * weight, zero)
        kl = np.where(on, np.exp(gap) - gap - 1, zero)
        by_policy = np.where(on & (plain <= clipped), -plain * weight, zero) / divisor
        by_kl = np.where(on, self.kl_coefficient * (1 - np.exp(gap)), zero) / divisor
        room = TOLERANCE * np.abs(np.where(on, plain * weight, zero))
        room += KL_TOLERANCE * abs(self.kl_coefficient) * np.where(on, 1 + np.exp(gap), zero)
        return (
            float(policy.sum()) / divisor,
            float(kl.sum()) / divisor,
            {"policy": by_policy, "kl": by_kl},
            room / abs(divisor) + 1e-12,
        )

    def terms(self) -> dict[str, LossTerm]:
        """Value and part of the gradient of each term, over all micro batches so far."""
        coefficients = {"policy": 1.0, "kl": self.kl_coefficient}
        return {
            name: LossTerm(
                coefficient=coefficient,
                value=self._values[name],
                gradient_norm=float(np.sqrt(self._squares[name])),
            )
            for name, coefficient in coefficients.items()
        }

    def residuals(self) -> dict[str, Residual]:
        """How far the job's loss and its gradient lie from the declared ones."""
        found: dict[str, Residual] = {}
        if self._loss:
            gap, room = max(
                ((abs(a - b), size) for a, b, size in self._loss),
                key=lambda pair: pair[0] / pair[1] if np.isfinite(pair[0]) else np.inf,
            )
            found["loss"] = Residual(largest=gap, allowed=room, compared=len(self._loss))
        gap, room, compared = 0.0, 0.0, 0
        for number, (expected, allowed) in enumerate(self._expected):
            gaps = np.abs(self._found.get(number, np.zeros_like(expected)) - expected)
            ratios = np.where(np.isfinite(gaps), gaps / allowed, np.inf)
            at = np.unravel_index(int(ratios.argmax()), ratios.shape)
            if not room or ratios[at] > gap / room:
                gap, room = float(gaps[at]), float(allowed[at])
            compared += expected.size
        if compared:
            found["loss gradient"] = Residual(largest=gap, allowed=room, compared=compared)
        return found
