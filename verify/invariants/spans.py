"""Which weights made which tokens of a sample: the spans that rows of SamplesGenerated record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shiftbook.verify.evidence import Rows


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens that follow one another and are of one version, made by one engine process.

    ``incarnation`` is None where it was not recorded which of several processes made them.
    """

    version: int
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class Stamped:
    """One sample: its spans in order of its tokens, and when its first request began and ended.

    ``begun`` and ``ended`` count the begins and ends of weight syncs that the attempt had recorded
    by then; None where they were not recorded.
    """

    uid: str
    replica: str
    spans: tuple[Span, ...]
    begun: int | None
    ended: int | None


def stamped(rows: Rows, partial: bool) -> Iterator[Stamped]:
    """The samples of an event.

    Of a sample of several versions without spans its least and greatest version stand for them.
    With ``partial`` rollouts the last engine of a sample, which its row names, made its last span;
    an earlier one may have made the others.
    """
    none = [None] * len(rows)
    versions, makers, begun, ended = (
        rows.get(name) or none for name in ("span_versions", "span_incarnations", "begun", "ended")
    )
    columns = ("uid", "replica", "incarnation", "version_min", "version_max")
    for uid, replica, last, low, high, several, made_by, start, stop in zip(
        *(rows[name] for name in columns), versions, makers, begun, ended, strict=True
    ):
        if not several:
            spans = tuple(Span(v, last) for v in dict.fromkeys((low, high)))
        elif made_by and len(made_by) == len(several):
            spans = tuple(map(Span, several, made_by))
        else:
            earlier = None if partial else last
            spans = (*(Span(v, earlier) for v in several[:-1]), Span(several[-1], last))
        yield Stamped(uid, replica, spans, start, stop)
