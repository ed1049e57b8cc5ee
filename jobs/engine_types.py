"""What goes into and comes out of a rollout engine: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TurnRequest:
    """One turn to generate.

    ``context`` holds all tokens before the turn; ``partial`` those of this turn that another
    engine has already sampled, with their log-probabilities and policy versions. ``max_new``
    bounds the whole turn, ``partial`` included. Lower ``priority`` is more urgent.
    """

    uid: str
    turn: int
    context: list[int]
    partial: list[int] = field(default_factory=list)
    partial_logps: list[float] = field(default_factory=list)
    partial_versions: list[int] = field(default_factory=list)
    max_new: int = 12
    seed: int = 0
    priority: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """(uid, turn): what one request is known by."""
        return self.uid, self.turn


@dataclass
class TurnResult:
    """One finished turn; ``logps`` are natural logarithms (float64), one per token.

    ``finish_reason`` is ``end`` (the policy wrote ``<end>``), ``budget`` (``max_new`` reached) or
    ``context`` (the model's context is full). ``versions`` is the policy version of each token.
    """

    uid: str
    turn: int
    tokens: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: str
