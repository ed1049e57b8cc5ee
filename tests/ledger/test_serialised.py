"""Goal: the quick way of writing an event gives the bytes that the slow one gives, for every event.

Method: random events of every type go both ways; models with serializers, cached values and free
fields, which ours have none of, are offered to the quick way and must be left to the slow one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ConfigDict, field_serializer

from shiftbook.ledger.canonical import encode, encode_quickly
from shiftbook.ledger.envelope import serialise
from shiftbook.ledger.events.base import Event, Part, UnknownEvent, shallow_part
from tests.strategies import events

QUICK: list[bool] = []


@settings(max_examples=600, deadline=None)
@given(event=events())
def test_both_ways_give_the_same_bytes(event: Event) -> None:
    wanted = encode({"body": event.plain(), "z": 1})
    found = encode_quickly({"body": event.shallow(), "z": 1}, shallow_part)
    QUICK.append(found is not None)
    assert found in (None, wanted)
    if len(wanted) < 50_000:
        data = serialise(event, None, None, None, 3, "job", 2, 1, "w", 0, "a", None)
        assert wanted[1:-7] in data


def test_most_events_go_the_quick_way() -> None:
    if not QUICK:
        test_both_ways_give_the_same_bytes()
    assert sum(QUICK) > len(QUICK) / 2


def test_an_event_of_unknown_type_is_written_as_it_stands() -> None:
    event = UnknownEvent.model_validate({"b": None, "a": {"c": [1, None]}})
    assert b'{"a":{"c":[1,null]},"b":null}' in serialise(
        event, None, None, None, 3, "job", 2, 1, "w", 0, "a", None
    )


class Loose(Part):
    """What a package of somebody else may define."""

    model_config = ConfigDict(extra="allow")


class Counted(Part):
    a: int | None = None

    @field_serializer("a")
    def doubled(self, value: int) -> int:
        return value * 2


class Kept(Part):
    a: int = 1

    @cached_property
    def b(self) -> int:
        return 7


class Ours(Part):
    a: int | None = None
    b: tuple[Any, ...] = ()


@pytest.mark.parametrize(
    ("part", "plain"),
    [
        (Ours(b=(Ours(a=3), 4)), {"b": [{"a": 3, "b": []}, 4]}),
        (Loose.model_validate({"x": 1}), {"x": 1}),
        (Counted(a=4), {"a": 8}),
        (Kept(), {"a": 1}),
        (Ours(b=(Counted(a=4),)), {"b": [{"a": 8}]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_held_as_it_is_written_goes_the_slow_way(
    part: BaseModel, plain: dict[str, Any]
) -> None:
    if isinstance(part, Kept):
        assert part.b == 7  # now it stands beside the fields
    quick = encode_quickly({"body": part}, shallow_part)
    assert (quick is not None) == (plain == {"b": [{"a": 3, "b": []}, 4]})
    assert quick in (None, encode({"body": plain}))
