"""Arithmetic questions that need a calculator: the questions, the turns' grammar and the reward.

A question is a chain of 3 to 6 two-digit numbers joined by ``+`` and ``-``, to be evaluated from
left to right, such as ``37+58-12=``; every intermediate result lies in 0..999. The calculator takes
two operands, so a right answer takes 2 to 5 calls. A turn ends with ``<end>``::

    <call> 3 7 + 5 8 <end>      the calculator answers    <result> 0 9 5
    <call> 0 9 5 - 1 2 <end>    the calculator answers    <result> 0 8 3
    <answer> 0 8 3 <end>

Results and answers have three digits. The reward is 1 for exactly the right answer and 0 else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shiftbook.jobs import tokenizer
from shiftbook.jobs.errors import TaskError
from shiftbook.jobs.keyed_rng import hash64, uniform_at
from shiftbook.ledger.digests import token_digest

# Operands of a question and how often; longer chains weigh more, as tools do in agents' episodes.
OPERAND_SHARES = {3: 0.15, 4: 0.20, 5: 0.30, 6: 0.35}
MAX_OPERANDS = max(OPERAND_SHARES)
MAX_CALLS = 6  # one more than the longest right chain; the seventh call ends the episode
LARGEST_RESULT = 999
_QUESTION_STREAM = 0x5155  # keeps questions apart from everything else that a seed keys
# Powers (``**``) are no part of the task: what the policy writes is cheap to evaluate, always.
_CALL_EXPRESSION = re.compile(r"(?!.*\*\*)[0-9+\-*/()]+")


@dataclass(frozen=True)
class Question:
    """One prompt: its token ids (``<bos>`` first, ``=`` last) and the right answer."""

    prompt_id: int
    tokens: tuple[int, ...]
    answer: int

    @property
    def text(self) -> str:
        """The question as characters, such as ``37+58-12=``."""
        return tokenizer.decode(self.tokens[1:])


@dataclass(frozen=True)
class TurnEnd:
    """What a finished turn asks for: a tool call, an answer, or nothing that can be served."""

    kind: Literal["call", "answer", "malformed", "budget"]
    text: str = ""


def operands(seed: int, index: int) -> tuple[list[int], list[str]]:
    """The numbers and the operators between them of question ``index`` under ``seed``."""
    key = hash64(seed, _QUESTION_STREAM, index)
    draws = iter(uniform_at(key, position) for position in range(3 * MAX_OPERANDS))
    count = _operand_count(next(draws))
    numbers = [10 + int(next(draws) * 90)]
    signs: list[str] = []
    value = numbers[0]
    for _ in range(count - 1):
        number = 10 + int(next(draws) * 90)
        sign = "-" if next(draws) < 0.5 and number <= value else "+"
        value = value + number if sign == "+" else value - number
        numbers.append(number)
        signs.append(sign)
    return numbers, signs


def _operand_count(point: float) -> int:
    """The operand count that the uniform number ``point`` selects."""
    for count, share in OPERAND_SHARES.items():
        if point < share:
            return count
        point -= share
    return MAX_OPERANDS


def question(seed: int, index: int) -> Question:
    """Question ``index`` of the endless, seeded list; raises ``TaskError`` below index 0."""
    if index < 0:
        raise TaskError(f"expected a question index of at least 0, found {index}")
    numbers, signs = operands(seed, index)
    value = numbers[0]
    text = str(numbers[0])
    for sign, number in zip(signs, numbers[1:], strict=True):
        value = value + number if sign == "+" else value - number
        text += f"{sign}{number}"
    return Question(index, (tokenizer.BOS, *tokenizer.encode(text + "=")), value)


@lru_cache(maxsize=4)
def question_digests(seed: int, size: int) -> tuple[str, ...]:
    """Token digest of each of the first ``size`` questions: what a ledger knows of the data set."""
    return tuple(token_digest(question(seed, index).tokens) for index in range(size))


def parse_turn(tokens: Sequence[int], finish_reason: str) -> TurnEnd:
    """What the tokens of one finished turn ask for.

    ``finish_reason`` is the engine's: only a turn that ended with ``<end>`` can be a call or an
    answer; one cut off by the token budget or the context length is ``budget``.
    """
    if finish_reason != "end" or not tokens or tokens[-1] != tokenizer.END:
        return TurnEnd("budget")
    text = tokenizer.plain_text(tokens[1:-1])
    if text is None or not text:
        return TurnEnd("malformed")
    if tokens[0] == tokenizer.CALL and _CALL_EXPRESSION.fullmatch(text):
        return TurnEnd("call", text)
    if tokens[0] == tokenizer.ANSWER:
        return TurnEnd("answer", text)
    return TurnEnd("malformed")


def result_tokens(value: str | None) -> list[int]:
    """The tokens in which the calculator's value enters the context: ``<result>`` and 3 digits.

    ``value`` is decimal text; None (the call failed) and values outside 0..999 are ``<error>``.
    """
    if value is None or not value.isdecimal() or int(value) > LARGEST_RESULT:
        return [tokenizer.RESULT, tokenizer.ERROR]
    return [tokenizer.RESULT, *tokenizer.encode(f"{int(value):03d}")]


def reward(asked: Question, answer_tokens: Sequence[int]) -> float:
    """1.0 when ``answer_tokens`` (the last turn, ``<answer>`` to ``<end>``) are right, else 0.0."""
    end = parse_turn(answer_tokens, "end")
    return float(end.kind == "answer" and end.text == f"{asked.answer:03d}")
