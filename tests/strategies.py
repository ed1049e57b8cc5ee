"""Hypothesis strategies for every event type, made from the pydantic models themselves."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

from hypothesis import strategies as st
from pydantic import BaseModel, StringConstraints
from pydantic.fields import FieldInfo

from shiftbook.ledger.events.base import REGISTRY, Event, UnknownEvent

LARGEST_INT = 2**64 - 1
SMALLEST_INT = -(2**63)

TEXTS = st.one_of(
    st.sampled_from(["", "a", "héé", "数据", "🦉", "\u202e", "\x00", '"\\\n', "NaN", "2⁶³"]),
    st.text(max_size=12),
)
FLOATS = st.one_of(
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1.7e308, 1e16]),
    st.floats(),
)
WHOLE_EDGES = (0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, LARGEST_INT, -1, SMALLEST_INT)
PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(SMALLEST_INT, LARGEST_INT), TEXTS, st.floats(-10, 10)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
"""Whatever JSON can say; for fields of type Any."""

FIELDS: Mapping[tuple[str, str], st.SearchStrategy[Any]] = {
    ("UpdatePlan", "virtual_ranks"): st.sampled_from([1, 2, 4, 2**62]),
    ("UpdatePlan", "dealing"): st.just("any"),
    ("DataPlan", "mixture"): st.none(),
    ("ShadowPlan", "every_iterations"): st.integers(8, LARGEST_INT),
    ("ShadowPlan", "iterations"): st.integers(1, 8),
    ("SyncPlan", "encoding"): st.just("int8-difference"),
    ("SyncPlan", "max_error"): st.floats(0, exclude_min=True, allow_infinity=False),
}
"""Fields whose validator says more than their type."""


def events() -> st.SearchStrategy[Event]:
    """Any event of any known type."""
    return st.one_of([models(model) for model in known_types().values()])


def known_types() -> dict[str, type[Event]]:
    """Every registered type but the one that stands for unknown ones."""
    return {name: model for name, model in REGISTRY.items() if model is not UnknownEvent}


def models(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Instances of a model with every optional field absent or present."""
    fields = {
        name: FIELDS[key] if (key := (model.__name__, name)) in FIELDS else _field(info)
        for name, info in model.model_fields.items()
    }
    return st.fixed_dictionaries(fields).map(model.model_validate)


def _field(info: FieldInfo) -> st.SearchStrategy[Any]:
    return of_type(info.annotation, info.metadata)


def of_type(annotation: Any, metadata: typing.Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of an annotation, within its constraints."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return of_type(args[0], [*metadata, *args[1:]])
    if origin in (Union, types.UnionType):
        return st.one_of([st.none() if a is type(None) else of_type(a, metadata) for a in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(of_type(args[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(of_type(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(args[0]), of_type(args[1]), max_size=3)
    if annotation is Any:
        return PLAIN
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return _whole(metadata)
    if annotation is float:
        return _real(metadata)
    if annotation is str:
        patterns = [m.pattern for m in metadata if isinstance(m, StringConstraints) and m.pattern]
        patterns += [m.pattern for m in metadata if getattr(m, "pattern", None)]
        return st.from_regex(patterns[0], fullmatch=True) if patterns else TEXTS
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return models(annotation)
    raise TypeError(f"no strategy for {annotation!r}; add one here")


def _bounds(metadata: typing.Sequence[Any]) -> dict[str, Any]:
    flat = [part for item in metadata for part in getattr(item, "metadata", [item])]
    return {
        name: getattr(item, name)
        for item in flat
        for name in ("ge", "gt", "le", "lt")
        if getattr(item, name, None) is not None
    }


def _whole(metadata: typing.Sequence[Any]) -> st.SearchStrategy[int]:
    bounds = _bounds(metadata)
    low = max(SMALLEST_INT, bounds.get("ge", bounds.get("gt", SMALLEST_INT - 1) + 1))
    high = min(LARGEST_INT, bounds.get("le", bounds.get("lt", LARGEST_INT + 1) - 1))
    edges = [edge for edge in WHOLE_EDGES if low <= edge <= high]
    return st.one_of(st.sampled_from(edges), st.integers(low, high))


def _real(metadata: typing.Sequence[Any]) -> st.SearchStrategy[float]:
    bounds = _bounds(metadata)
    if not bounds:
        return FLOATS
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
