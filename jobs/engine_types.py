"""What a rollout engine is, and what goes into and comes out of it: plain data, without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from shiftbook.jobs.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Caches = Literal["flush", "salt"]
"""How values that were cached under older weights are kept apart: emptied, or told by a salt that
is new with each load."""


@dataclass
class TurnRequest:
    """One turn to generate.

    ``context`` holds all tokens before the turn; ``partial`` those of this turn that another
    engine has already sampled, with their log-probabilities and policy versions. ``max_new``
    bounds the whole turn, ``partial`` included. Lower ``priority`` is more urgent. ``version`` is
    the policy version that the training expects; None where any verified one will do.
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
    version: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        """(uid, turn): what one request is known by."""
        return self.uid, self.turn


@dataclass
class TurnResult:
    """One finished turn; ``logps`` are natural logarithms (float64), one per token.

    ``finish_reason`` is ``end`` (the policy wrote ``<end>``), ``budget`` (``max_new`` reached) or
    ``context`` (the model's context is full). ``versions`` is the policy version of each token.
    ``stream`` is the key that the engine drew the turn's tokens with; ``cache_version`` the oldest
    policy version whose cached values the turn was computed from, None where it cannot be told.
    """

    uid: str
    turn: int
    tokens: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: str
    stream: int | None = None
    cache_version: int | None = None


class Engine(Protocol):
    """A rollout engine, whichever code computes; one thread calls it at a time.

    ``jobs/engine.py`` (the reference) and ``jobs/vllm_engine.py`` are the two that there are. It is
    served through ``jobs/serving.py``, which takes a version as one operation and lets nothing out
    before that version was verified.
    """

    beside: bool
    """True where a second engine can be built beside this one in one process."""
    lanes: int
    """Turns that are decoded at once."""
    version: int
    """Policy version of the weights; -1 without weights."""
    steps: int
    lane_steps: int
    sampled_tokens: int
    replayed_tokens: int

    @property
    def running(self) -> int:
        """Turns that are being decoded."""

    @property
    def waiting(self) -> int:
        """Turns that wait for a free lane."""

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take bfloat16 ``weights`` in declared names and order; caches are not touched by it.

        Raises a ``JobError`` where they do not fit; what the engine holds then is in doubt.
        """

    def unload(self) -> None:
        """Hold no policy any more; raises ``EngineError`` while the engine owes requests."""

    def flush(self) -> tuple[str, ...]:
        """Make every value that was cached under older weights unreachable; names of the caches.

        Raises ``EngineError`` where the engine did not do it.
        """

    def resident(self) -> dict[str, Tensor] | None:
        """The weights as the engine's arithmetic reads them (bfloat16, declared names and order),
        or None where they cannot be read."""

    def resident_bytes(self) -> int:
        """Bytes of weights, caches and buffers in use; 0 without a policy."""

    def probe(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probabilities float64 [P, V] of the next token after each prompt, through the same
        kernels and caches as generation; called while the engine holds no requests."""

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn; raises ``EngineError`` for one that is held already or malformed."""

    def step(self) -> list[TurnResult]:
        """Decode one token on every lane; the turns that ended in it."""

    def drain(self) -> list[TurnRequest]:
        """Hand over all turns, running ones with their partial tokens, in urgency order."""


def check_request(request: TurnRequest, held: Collection[tuple[str, int]], context: int) -> None:
    """Raise ``EngineError`` for a turn that is held already or does not fit ``context`` tokens."""
    known = len(request.context) + len(request.partial)
    partial = len(request.partial)
    if request.key in held:
        raise EngineError(
            f"turn {request.turn} of {request.uid} is held already; "
            "submit a turn to one engine, once"
        )
    if not request.context or known >= context or partial >= request.max_new:
        raise EngineError(
            f"turn {request.turn} of {request.uid}: expected a context of 1 to "
            f"{context - 1} tokens and room for one more, found "
            f"{len(request.context)} with {partial} of {request.max_new} sampled"
        )
    if len(request.partial_logps) != partial or len(request.partial_versions) != partial:
        raise EngineError(
            f"turn {request.turn} of {request.uid}: expected {partial} partial "
            f"log-probabilities and versions, found {len(request.partial_logps)} and "
            f"{len(request.partial_versions)}; hand over what drain returned"
        )
