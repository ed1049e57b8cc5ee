"""One episode as pure data: what it has said, what it waits for next, and its reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shiftbook.jobs.engine_types import TurnRequest, TurnResult
from shiftbook.jobs.errors import EpisodeError
from shiftbook.jobs.keyed_rng import parse_uid
from shiftbook.jobs.questions import (
    MAX_CALLS,
    Question,
    parse_turn,
    question,
    result_tokens,
    reward,
)

MAX_TURN_TOKENS = 12  # the longest right turn has 8: <call> ddd + dd <end>

__all__ = [
    "MAX_CALLS", "EpisodeState", "Question", "new_episode", "parse_turn", "question",
    "result_tokens", "reward",
]  # fmt: skip

Phase = Literal["generate", "tool", "done"]


@dataclass
class EpisodeState:
    """The state of one sample: plain lists and numbers, small, picklable, no worker inside.

    ``tokens`` is the whole context (question, turns, tool results); ``mask``, ``logps`` and
    ``versions`` run beside it: 1, log-probability and policy version where the policy sampled the
    token, and 0, 0.0 and -1 where it was given. ``streams`` and ``cache_versions`` have what
    engines said of each turn.
    """

    uid: str
    seed: int
    question: Question
    context: int = 104
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    streams: list[int | None] = field(default_factory=list)
    cache_versions: list[int | None] = field(default_factory=list)
    phase: Phase = "generate"
    calls: int = 0
    pending_call: str | None = None
    reward: float = 0.0
    end_reason: str = ""

    def __post_init__(self) -> None:
        parse_uid(self.uid)
        if not self.tokens:
            self._give(list(self.question.tokens))

    @property
    def done(self) -> bool:
        """True once the episode has ended and ``reward`` is final."""
        return self.phase == "done"

    @property
    def turn(self) -> int:
        """Ordinal of the turn that is generated, or whose call runs: turns finished so far."""
        return len(self.turns) - (1 if self.phase == "tool" else 0)

    def next_request(self, priority: int | None = None) -> TurnRequest:
        """The engine request for the next turn; idempotent.

        ``priority``: lower is more urgent; None means minus the completed calls, so that episodes
        near their end go first. Raises ``EpisodeError`` when the policy is not to speak.
        """
        if self.phase != "generate":
            raise EpisodeError(
                f"{self.uid}: expected the policy's turn, found phase {self.phase!r}; "
                "absorb the tool's result first, or leave a finished episode alone"
            )
        return TurnRequest(
            uid=self.uid,
            turn=self.turn,
            context=list(self.tokens),
            partial=[],
            partial_logps=[],
            partial_versions=[],
            max_new=min(MAX_TURN_TOKENS, self.context - len(self.tokens)),
            seed=self.seed,
            priority=-self.calls if priority is None else priority,
        )

    def absorb_turn(self, result: TurnResult) -> None:
        """Take in a finished turn; afterwards the phase is ``tool`` or ``done``.

        Raises ``EpisodeError`` for another sample's or another turn's result (also a second
        delivery of the same one), so that a turn is consumed exactly once.
        """
        if (result.uid, result.turn) != (self.uid, self.turn) or self.phase != "generate":
            raise EpisodeError(
                f"{self.uid}: expected turn {self.turn} in phase 'generate', found turn "
                f"{result.turn} of {result.uid} in phase {self.phase!r}; drop the duplicate"
            )
        self.tokens += result.tokens
        self.mask += [1] * len(result.tokens)
        self.logps += result.logps
        self.versions += result.versions
        self.turns.append(list(result.tokens))
        self.streams.append(result.stream)
        self.cache_versions.append(result.cache_version)
        end = parse_turn(result.tokens, result.finish_reason)
        if end.kind == "call" and self.calls < MAX_CALLS:
            self.phase, self.pending_call = "tool", end.text
            return
        if end.kind == "answer":
            self.reward = reward(self.question, result.tokens)
        self._finish("calls" if end.kind == "call" else end.kind)

    def absorb_tool(self, result_tokens: list[int]) -> None:
        """Take in the tokens of the pending call's result; the next turn follows, or the end
        when the context is full. Raises ``EpisodeError`` when no call is pending."""
        if self.phase != "tool":
            raise EpisodeError(
                f"{self.uid}: expected a pending tool call, found phase {self.phase!r}; "
                "drop the duplicate result"
            )
        self.pending_call = None
        self.calls += 1
        room = self.context - len(self.tokens)
        self._give(result_tokens[:room])
        self.phase = "generate"
        if len(self.tokens) >= self.context:
            self._finish("context")

    def to_dict(self) -> dict[str, Any]:
        """The episode as plain containers, for JSON, pickle or a bundle."""
        plain = dict(vars(self))
        plain["question"] = [self.question.prompt_id, list(self.question.tokens),
                             self.question.answer]  # fmt: skip
        return {
            name: ([list(turn) for turn in value] if name == "turns" else
                   list(value) if isinstance(value, list) else value)
            for name, value in plain.items()
        }  # fmt: skip

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> EpisodeState:
        """The episode that ``to_dict`` wrote."""
        prompt_id, tokens, answer = plain["question"]
        values = dict(plain, question=Question(prompt_id, tuple(tokens), answer))
        return cls(**values)

    def _give(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logps += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def _finish(self, reason: str) -> None:
        self.phase, self.end_reason = "done", reason


def new_episode(
    seed: int, uid: str, prompt_id: int, context: int = 104, task_seed: int | None = None
) -> EpisodeState:
    """A fresh episode of sample ``uid`` on question ``prompt_id`` of the task with ``task_seed``
    (the job's seed where None)."""
    asked = question(seed if task_seed is None else task_seed, prompt_id)
    return EpisodeState(uid=uid, seed=seed, question=asked, context=context)
