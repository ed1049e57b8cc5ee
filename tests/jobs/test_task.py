"""Goal: questions are well-formed, a turn's end is read strictly, and an episode absorbs each
delivery exactly once.

Method: thousands of seeded questions are checked against Python's own arithmetic; episodes are
walked by hand, written out and read back at every point.
"""

from __future__ import annotations

import json
import pickle
import re

import pytest

from shiftbook.jobs import tokenizer
from shiftbook.jobs.engine import TurnResult
from shiftbook.jobs.errors import EpisodeError, TaskError
from shiftbook.jobs.keyed_rng import format_uid, parse_uid, uniform
from shiftbook.jobs.questions import MAX_CALLS, operands
from shiftbook.jobs.task import (
    EpisodeState,
    Question,
    new_episode,
    parse_turn,
    question,
    result_tokens,
    reward,
)
from shiftbook.jobs.tokenizer import ANSWER, CALL, END, ERROR, RESULT, encode

SEED = 3


def turn(kind: int, text: str) -> list[int]:
    return [kind, *encode(text), END]


def said(episode: EpisodeState, tokens: list[int], reason: str = "end") -> TurnResult:
    logps = [-0.125 * (index + 1) for index in range(len(tokens))]
    return TurnResult(episode.uid, episode.turn, tokens, logps, [4] * len(tokens), reason)


def test_vocabulary_has_24_symbols_and_round_trips() -> None:
    assert tokenizer.VOCABULARY_SIZE == 24 == len(set(tokenizer.SYMBOLS))
    assert tokenizer.decode(encode("12+(3-4)*5/6=")) == "12+(3-4)*5/6="
    with pytest.raises(TaskError, match="expected characters"):
        encode("12x")
    with pytest.raises(TaskError, match="expected token ids"):
        tokenizer.decode([24])


def test_questions_follow_the_declared_form() -> None:
    print("seed", SEED)
    counts = {}
    for index in range(3000):
        asked = question(SEED, index)
        assert asked == question(SEED, index)
        assert asked.tokens[0] == tokenizer.BOS
        assert re.fullmatch(r"\d\d([+-]\d\d){2,5}=", asked.text), asked.text
        numbers, signs = operands(SEED, index)
        value = numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            value += number if sign == "+" else -number
            assert 0 <= value <= 999
        assert asked.answer == value == eval(asked.text[:-1])
        counts[len(signs)] = counts.get(len(signs), 0) + 1
    assert sorted(counts) == [2, 3, 4, 5]
    assert min(counts.values()) > 350, counts
    assert question(SEED, 0).tokens != question(SEED + 1, 0).tokens


@pytest.mark.parametrize(
    ("tokens", "reason", "kind", "text"),
    [
        (turn(CALL, "37+58"), "end", "call", "37+58"),
        (turn(ANSWER, "083"), "end", "answer", "083"),
        (turn(CALL, "9**9"), "end", "malformed", ""),
        (turn(CALL, "1=1"), "end", "malformed", ""),
        (turn(CALL, ""), "end", "malformed", ""),
        ([CALL, *encode("1"), CALL, END], "end", "malformed", ""),
        ([*encode("083"), END], "end", "malformed", ""),
        ([RESULT, *encode("083"), END], "end", "malformed", ""),
        ([ANSWER, *encode("083")], "budget", "budget", ""),
        ([ANSWER, *encode("083")], "end", "budget", ""),
        ([], "context", "budget", ""),
    ],
)
def test_ends_of_turns(tokens: list[int], reason: str, kind: str, text: str) -> None:
    end = parse_turn(tokens, reason)
    assert (end.kind, end.text) == (kind, text)


def test_reward_is_one_for_exactly_the_right_answer() -> None:
    asked = Question(0, (1, *encode("10+20+53=")), 83)
    assert reward(asked, turn(ANSWER, "083")) == 1.0
    for wrong in (turn(ANSWER, "83"), turn(ANSWER, "084"), turn(CALL, "083"), [ANSWER], []):
        assert reward(asked, wrong) == 0.0


def test_tool_results_have_three_digits_or_are_an_error() -> None:
    assert result_tokens("7") == [RESULT, *encode("007")]
    for value in (None, "-1", "1000", "", "1e3"):
        assert result_tokens(value) == [RESULT, ERROR]


def right_path(asked: Question) -> list[str]:
    """The expressions of the right chain, computed with Python's integers."""
    parts = re.findall(r"[+-]?\d\d", asked.text)
    value, expressions = int(parts[0]), []
    left = parts[0]
    for part in parts[1:]:
        expressions.append(f"{left}{part}")
        value += int(part)
        left = f"{value:03d}"
    return expressions


def test_an_episode_walks_the_right_path_to_reward_one() -> None:
    for index in range(40):
        episode = new_episode(SEED, format_uid(index, 2), index)
        for expression in right_path(episode.question):
            request = episode.next_request()
            assert request == episode.next_request()
            assert (request.turn, request.priority) == (episode.calls, -episode.calls)
            assert request.context == episode.tokens
            episode.absorb_turn(said(episode, turn(CALL, expression)))
            assert episode.pending_call == expression
            assert episode.phase == "tool"
            episode.absorb_tool(result_tokens(str(eval(re.sub(r"\b0+(?=\d)", "", expression)))))
        episode.absorb_turn(said(episode, turn(ANSWER, f"{episode.question.answer:03d}")))
        assert episode.done
        assert episode.reward == 1.0
        assert episode.end_reason == "answer"
        assert len(episode.tokens) == len(episode.mask) == len(episode.logps) <= 104
        assert sum(episode.mask) == sum(len(tokens) for tokens in episode.turns)
        assert all((v == 4) == bool(m) for v, m in zip(episode.versions, episode.mask, strict=True))


def test_an_episode_can_be_written_and_read_at_every_point() -> None:
    episode = new_episode(SEED, format_uid(9, 0), 9)
    for expression in right_path(episode.question):
        for step in ("turn", "tool"):
            plain = json.loads(json.dumps(episode.to_dict()))
            assert EpisodeState.from_dict(plain) == episode
            assert pickle.loads(pickle.dumps(episode)) == episode
            assert len(pickle.dumps(episode)) < 4096
            if step == "turn":
                episode.absorb_turn(said(episode, turn(CALL, expression)))
            else:
                episode.absorb_tool(result_tokens("5"))
    copy = EpisodeState.from_dict(episode.to_dict())
    copy.absorb_turn(said(copy, turn(ANSWER, "000")))
    assert not episode.done
    assert copy.done
    assert len(copy.turns) == len(episode.turns) + 1


def test_each_delivery_is_absorbed_once() -> None:
    episode = new_episode(SEED, format_uid(1, 0), 1)
    first = said(episode, turn(CALL, "10+20"))
    episode.absorb_turn(first)
    with pytest.raises(EpisodeError, match="drop the duplicate"):
        episode.absorb_turn(first)
    with pytest.raises(EpisodeError, match="absorb the tool's result first"):
        episode.next_request()
    episode.absorb_tool(result_tokens("30"))
    with pytest.raises(EpisodeError, match="pending tool call"):
        episode.absorb_tool(result_tokens("30"))
    with pytest.raises(EpisodeError, match="expected turn 1"):
        episode.absorb_turn(first)


@pytest.mark.parametrize(
    ("tokens", "reason", "end_reason"),
    [(turn(CALL, "="), "end", "malformed"), ([CALL, 7, 7], "budget", "budget")],
)
def test_what_cannot_be_served_ends_the_episode(
    tokens: list[int], reason: str, end_reason: str
) -> None:
    episode = new_episode(SEED, format_uid(1, 0), 1)
    episode.absorb_turn(said(episode, tokens, reason))
    assert episode.done
    assert episode.reward == 0.0
    assert episode.end_reason == end_reason


def test_calls_and_context_are_bounded() -> None:
    episode = new_episode(SEED, format_uid(1, 0), 1, context=400)
    while not episode.done:
        episode.absorb_turn(said(episode, turn(CALL, "1+1")))
        if not episode.done:
            episode.absorb_tool(result_tokens("2"))
    assert (episode.calls, episode.end_reason) == (MAX_CALLS, "calls")
    short = new_episode(SEED, format_uid(1, 0), 1, context=26)
    while not short.done:
        assert short.next_request().max_new <= 26 - len(short.tokens)
        short.absorb_turn(said(short, turn(CALL, "1+1")))
        short.absorb_tool(result_tokens("2"))
    assert short.end_reason == "context"
    assert len(short.tokens) == 26


def test_uids_and_keyed_numbers() -> None:
    assert format_uid(123, 5) == "000123/5"
    assert parse_uid("000123/5") == (123, 5)
    for bad in ("123", "a/1", "1/", "1/-2"):
        with pytest.raises(EpisodeError, match="draw/member"):
            parse_uid(bad)
    drawn = {
        uniform(seed, format_uid(draw, member), number, position)
        for seed in range(3)
        for draw in range(10)
        for member in range(8)
        for number in range(4)
        for position in range(12)
    }
    assert len(drawn) == 3 * 10 * 8 * 4 * 12
    assert all(0.0 <= value < 1.0 for value in drawn)
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.01
