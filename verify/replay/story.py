"""Tells how a replay came out, in lines for a person."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shiftbook.verify.replay.compare import Divergence
from shiftbook.verify.replay.outcome import Outcome

FIELD_WORDS = {
    "form": "its dtype or shape",
    "fingerprint": "its bits",
    "root": "the bits of some tensor in it",
    "tensors": "how many tensors it has",
    "tokens": "its tokens",
    "logps": "its log-probabilities",
    "reward": "its reward",
    "value": "its value",
    "state": "the state of the stream",
    "missing": "it is missing",
    "unexpected": "nobody expected it",
    "norm": "its values",
}
KIND_WORDS = {
    "tensor": "tensor",
    "root": "state",
    "sample": "sample",
    "number": "number",
    "random": "random stream",
}


def outcome_lines(outcome: Outcome) -> Iterator[str]:
    """The whole outcome."""
    if outcome.divergence is not None:
        yield from divergence_lines(outcome.divergence)
        yield ""
    if outcome.written:
        yield f"golden trace written to {outcome.written}: review and commit it"
    if outcome.could_not:
        yield f"could not tell: {outcome.could_not}"
    yield from outcome.notes
    yield closing_line(outcome)


def closing_line(outcome: Outcome) -> str:
    """The last line: what was compared with what, and how it came out."""
    what = f"{outcome.target} ({outcome.conditions})"
    size = f"{outcome.observations} observations in {outcome.steps} steps"
    if outcome.could_not:
        return f"could not tell: {what} against {outcome.against}"
    if outcome.divergence is None:
        return f"same: {what} equals {outcome.against}, {size}"
    return f"diverged: {what} against {outcome.against}"


def headline(divergence: Divergence) -> str:
    """The divergence in one line."""
    words = KIND_WORDS[divergence.kind]
    return (
        f"step {divergence.step}, component {divergence.component}: {words} {divergence.name}: "
        f"{FIELD_WORDS.get(divergence.what, divergence.what)}"
        + ("" if divergence.what in ("missing", "unexpected") else " came out otherwise")
    )


def divergence_lines(divergence: Divergence) -> Iterator[str]:
    """Where it begins, what was expected, what came, how far it goes."""
    yield f"first divergence: {headline(divergence)}"
    yield f"  expected: {_short(divergence.expected)}{_event(divergence, 0)}"
    yield f"  found:    {_short(divergence.found)}{_event(divergence, 1)}"
    if divergence.elements is not None and divergence.differing is not None:
        largest = (
            "" if divergence.largest is None else f", by {_number(divergence.largest)} at most"
        )
        part = (
            ""
            if divergence.relative is None
            else f" ({_number(divergence.relative)} of the largest value)"
        )
        yield (f"  elements: {divergence.differing} of {divergence.elements} differ{largest}{part}")
    elif divergence.elements is not None:
        yield (
            f"  elements: {divergence.elements}; how many differ cannot be told from fingerprints"
        )
    elif divergence.largest is not None and divergence.relative is not None:
        yield f"  by:       {_number(divergence.largest)} ({_number(divergence.relative)} of it)"
    if divergence.tolerance is not None:
        yield f"  allowed:  {_number(divergence.tolerance)}, as calibrated"
    yield f"  before:   {divergence.same_before} observations were the same"
    if divergence.others_count:
        more = divergence.others_count - len(divergence.others)
        tail = f" and {more} more" if more else ""
        yield f"  then:     {', '.join(divergence.others)}{tail} in the same step"


def _event(divergence: Divergence, side: int) -> str:
    """Where a side says so; a side that has no event says that, where the other one has one."""
    position = divergence.events[side]
    if position is not None:
        return f"  (event at position {position})"
    there = divergence.what != ("unexpected", "missing")[side]
    return "  (of a run that writes no ledger)" if there and any_event(divergence) else ""


def any_event(divergence: Divergence) -> bool:
    """Whether either side was read from a ledger."""
    return any(position is not None for position in divergence.events)


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _number(value: float) -> str:
    return "an infinite amount" if math.isinf(value) else f"{value:.3g}"
