"""Recomputes an optimizer step on sampled elements: gradient summed, clipped, and applied."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.ledger.events.training import Residual

EPSILON_32 = 2.0**-23
NORM_TOLERANCE = 1e-5
"""Relative; a norm summed in float32, and the 1e-6 that torch adds to it before it divides."""

ROUNDINGS = 64
"""Roundings of float32 that a chain of additions, a clip and a step may add up to."""


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW (arXiv 1711.05101) as torch computes it; weight decay is decoupled."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


class StepProbe:
    """Watches one update at ``elements`` places of each parameter (None: at all of them).

    ``begin`` reads masters and moments before the step, ``contribution`` each micro batch's own
    gradient, ``reduced`` the gradient as the optimizer gets it, ``residuals`` the masters after
    the step. Arithmetic is float64; what float32 rounding explains is allowed.
    """

    def __init__(self, rule: Adam, *, clip_norm: float | None = None, elements: int | None = 32):
        self.rule = rule
        self.clip_norm = clip_norm
        self.elements = elements
        self._places: dict[str, NDArray[np.int64] | slice] = {}
        self._before: dict[str, dict[str, NDArray[np.float64]]] = {}
        self._sum: dict[str, NDArray[np.float64]] = {}
        self._size: dict[str, NDArray[np.float64]] = {}
        self._live: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]] | None = None
        self._ema: tuple[Mapping[str, Any], float, dict[str, NDArray[np.float64]]] | None = None
        self._reduced: dict[str, NDArray[np.float64]] = {}
        self._norm: float | None = None
        self._clipped = 0.0
        self._contributions = 0

    def begin(
        self,
        masters: Mapping[str, Any],
        first: Mapping[str, Any],
        second: Mapping[str, Any],
        *,
        ema: Mapping[str, Any] | None = None,
        ema_decay: float = 0.0,
    ) -> None:
        """Read masters and both moments before the step; the same objects are read after it."""
        self._live = (masters, first, second)
        for name, tensor in masters.items():
            self._places[name] = self._choose(name, int(np.prod(tuple(tensor.shape))))
            self._before[name] = {
                "master": self._at(name, tensor),
                "first": self._at(name, first[name]),
                "second": self._at(name, second[name]),
            }
        self._sum, self._size, self._contributions = {}, {}, 0
        self._reduced, self._norm = {}, None
        if ema is not None:
            self._ema = (ema, ema_decay, {name: self._at(name, t) for name, t in ema.items()})

    def contribution(self, gradient: Mapping[str, Any]) -> None:
        """Add one micro batch's own gradient."""
        self._contributions += 1
        for name, tensor in gradient.items():
            value = self._at(name, tensor)
            self._sum[name] = self._sum.get(name, 0.0) + value
            self._size[name] = self._size.get(name, 0.0) + np.abs(value)

    def reduced(self, gradient: Mapping[str, Any], norm: float) -> None:
        """The gradient that the optimizer is given, clipped, and its norm before the clip."""
        self._reduced = {name: self._at(name, tensor) for name, tensor in gradient.items()}
        self._norm = norm
        self._clipped = math.sqrt(sum(_squares(tensor) for tensor in gradient.values()))

    def residuals(self, learning_rate: float, step: int) -> dict[str, Residual]:
        """Compare what came out with what the declared rule gives, element by element."""
        if self._live is None or self._norm is None:
            raise RecorderMisuse(
                "expected begin() and reduced() of the step probe before applied(), found one of "
                "them missing; or make the update without a probe"
            )
        found: dict[str, Residual] = {}
        if self._contributions:
            found["gradient"] = self._gradient()
        # Numbers that are no numbers are what a fault looks like; they end as a residual of NaN.
        with np.errstate(all="ignore"):
            found.update(self._step(learning_rate, step))
            if self._ema is not None:
                found["ema"] = self._average()
        expected = self._norm if self.clip_norm is None else min(self._norm, self.clip_norm)
        found["norm"] = Residual(
            largest=abs(self._clipped - expected),
            allowed=NORM_TOLERANCE * (self._clipped + expected) + 1e-12,
            compared=1,
        )
        return found

    def _gradient(self) -> Residual:
        assert self._norm is not None
        scale = 1.0
        if self.clip_norm is not None and self._norm > self.clip_norm:
            scale = self.clip_norm / (self._norm + 1e-6)
        gap, room, compared = 0.0, 0.0, 0
        for name, reduced in self._reduced.items():
            expected = self._sum.get(name, np.zeros_like(reduced)) * scale
            size = self._size.get(name, np.zeros_like(reduced)) * scale
            gap, room = _worse(
                gap, room, np.abs(reduced - expected), ROUNDINGS * EPSILON_32 * size + 1e-12
            )
            compared += reduced.size
        return Residual(largest=gap, allowed=room, compared=compared)

    def _step(self, learning_rate: float, step: int) -> dict[str, Residual]:
        assert self._live is not None
        rule, (masters, first, second) = self.rule, self._live
        results: dict[str, Residual] = {}
        if step < 1:
            none = Residual(largest=math.nan, allowed=0.0, compared=0)
            return {"step": none, "moments": none}
        worst = {"step": (0.0, 0.0), "moments": (0.0, 0.0)}
        compared = 0
        for name, before in self._before.items():
            g = self._reduced.get(name)
            if g is None:
                continue
            m = rule.beta_1 * before["first"] + (1 - rule.beta_1) * g
            v = rule.beta_2 * before["second"] + (1 - rule.beta_2) * g * g
            top = m / (1 - rule.beta_1**step)
            move = learning_rate * top / (np.sqrt(v / (1 - rule.beta_2**step)) + rule.epsilon)
            expected = before["master"] * (1 - learning_rate * rule.weight_decay) - move
            room = ROUNDINGS * EPSILON_32 * (np.abs(before["master"]) + np.abs(move))
            gap = np.abs(self._at(name, masters[name]) - expected)
            worst["step"] = _worse(worst["step"][0], worst["step"][1], gap, room + 1e-12)
            for mine, live in ((m, first[name]), (v, second[name])):
                size = ROUNDINGS * EPSILON_32 * (np.abs(mine) + np.abs(g) * 0.1) + 1e-15
                gap = np.abs(self._at(name, live) - mine)
                known = worst["moments"]
                worst["moments"] = _worse(known[0], known[1], gap, size)
            compared += g.size
        for what, (gap_s, room_s) in worst.items():
            results[what] = Residual(largest=gap_s, allowed=room_s, compared=compared)
        return results

    def _average(self) -> Residual:
        assert self._ema is not None
        assert self._live is not None
        live, decay, before = self._ema
        gap, room, compared = 0.0, 0.0, 0
        for name, old in before.items():
            new = self._at(name, self._live[0][name])
            expected = decay * old + (1 - decay) * new
            size = ROUNDINGS * EPSILON_32 * (np.abs(old) + np.abs(new)) + 1e-12
            gap, room = _worse(gap, room, np.abs(self._at(name, live[name]) - expected), size)
            compared += old.size
        return Residual(largest=gap, allowed=room, compared=compared)

    def _choose(self, name: str, size: int) -> NDArray[np.int64] | slice:
        if self.elements is None or size <= self.elements:
            return slice(None)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        chosen = np.random.default_rng(seed).choice(size, self.elements, replace=False)
        return np.sort(chosen).astype(np.int64)

    def _at(self, name: str, tensor: Any) -> NDArray[np.float64]:
        detached = tensor.detach() if hasattr(tensor, "detach") else tensor
        places = self._places[name]
        flat = detached.reshape(-1)[places]
        if hasattr(flat, "double"):
            flat = flat.double().cpu().numpy()
        return np.array(flat, dtype=np.float64)


def _squares(tensor: Any) -> float:
    """Sum of squares of a whole tensor, in float64."""
    if hasattr(tensor, "double"):
        return float(tensor.detach().double().square().sum())
    return float(np.square(np.asarray(tensor, dtype=np.float64)).sum())


def _worse(
    gap: float, room: float, gaps: NDArray[np.float64], rooms: NDArray[np.float64]
) -> tuple[float, float]:
    """The worst pair so far: that whose gap is largest against the room it has."""
    if not gaps.size:
        return gap, room
    ratios = np.where(np.isfinite(gaps), gaps / rooms, np.inf)
    at = int(ratios.argmax())
    if room and gap / room >= ratios[at]:
        return gap, room
    return float(gaps[at]), float(rooms[at])
