"""Lifts the bodies of older event schemas to the present ones, when they are read.

Stored bytes never change: what is lifted is a copy, and proofs and the verifier see the bytes. A
schema is frozen once a released version has written it; a later one comes with a function here
that takes a body of the schema before and gives one of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Body = dict[str, Any]
Upcaster = Callable[[Body], Body]


def _severity_not_said(body: Body) -> Body:
    """Schema 1 did not say how grave a finding is; the graver is assumed."""
    return {**body, "severity": "stop"}


def _types_not_said(body: Body) -> Body:
    """Schema 1 bound a segment's column names without their types; the field stays absent."""
    return body


UPCASTERS: Mapping[tuple[str, int], Upcaster] = {
    ("DivergenceFlagged", 1): _severity_not_said,
    ("SamplesGenerated", 1): _types_not_said,
    ("SamplesRewarded", 1): _types_not_said,
    ("BatchConsumed", 1): _types_not_said,
}
"""What lifts a body of a type from a schema to the next one."""


def lift(type_: str, schema: int, body: Body, to: int) -> Body:
    """A body of ``schema`` as one of schema ``to``; KeyError where a step is missing."""
    for step in range(schema, to):
        body = UPCASTERS[type_, step](body)
    return body
