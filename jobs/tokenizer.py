"""The fixed vocabulary of 24 tokens in which questions, tool calls and answers are written."""

from __future__ import annotations

from collections.abc import Sequence

from shiftbook.jobs.errors import TaskError

SYMBOLS: tuple[str, ...] = (
    "<pad>", "<bos>", "<end>", "<call>", "<result>", "<answer>", "<error>",
    *"0123456789",
    *"+-*/()=",
)  # fmt: skip
VOCABULARY_SIZE = len(SYMBOLS)

PAD = 0
BOS = 1
END = 2
CALL = 3
RESULT = 4
ANSWER = 5
ERROR = 6

_ID_OF = {symbol: index for index, symbol in enumerate(SYMBOLS)}


def encode(text: str) -> list[int]:
    """Token ids of plain characters (digits, operators, brackets, ``=``).

    Raises ``TaskError`` for a character outside the vocabulary; control tokens have no character.
    """
    ids = []
    for character in text:
        if character not in _ID_OF:
            raise TaskError(
                f"expected characters among {''.join(SYMBOLS[7:])!r}, found {character!r}; "
                "write the text with digits and operators only"
            )
        ids.append(_ID_OF[character])
    return ids


def decode(tokens: Sequence[int]) -> str:
    """The tokens as readable text, control tokens in angle brackets.

    Raises ``TaskError`` for an id outside ``0..23``.
    """
    for token in tokens:
        if not 0 <= token < VOCABULARY_SIZE:
            raise TaskError(
                f"expected token ids in 0..{VOCABULARY_SIZE - 1}, found {token}; "
                "the tokens come from another vocabulary"
            )
    return "".join(SYMBOLS[token] for token in tokens)


def plain_text(tokens: Sequence[int]) -> str | None:
    """The characters of ``tokens``, or None where a control token stands among them."""
    if any(token <= ERROR for token in tokens):
        return None
    return decode(tokens)
