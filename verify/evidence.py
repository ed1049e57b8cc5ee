"""Reads evidence rows for the judge, one segment at a time, with their columns checked by type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shiftbook.ledger import long_fields
from shiftbook.ledger.errors import EvidenceError, EvidenceOutOfReach
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.segment_place import LocalFolder, Place, segment_place

GENERATED: Mapping[str, type] = {
    "uid": str,
    "group": object,
    "turns": int,
    "tokens": int,
    "token_digest": str,
    "logp_digest": str,
    "version_min": int,
    "version_max": int,
    "replica": str,
    "incarnation": str,
}
"""Columns of the segment of SamplesGenerated."""

REWARDED: Mapping[str, type] = {"uid": str, "token_digest": str, "reward": float, "scorer": str}
"""Columns of the segment of SamplesRewarded."""

CONSUMED: Mapping[str, type] = {
    "uid": str,
    "token_digest": str,
    "reward": float,
    "advantage": float,
    "group": object,
    "virtual_rank": int,
    "tokens": int,
}
"""Columns of the segment of BatchConsumed."""

COLUMNS: Mapping[str, Mapping[str, type]] = {
    "SamplesGenerated": GENERATED,
    "SamplesRewarded": REWARDED,
    "BatchConsumed": CONSUMED,
    "DataBuilt": {"index": int, "digest": str},
    **{kind.type_(): long_fields.COLUMNS for kind in long_fields.LONG},
}

OPTIONAL: Mapping[str, Mapping[str, type]] = {
    "SamplesGenerated": {
        "mask_digest": str,
        "prompt_digest": str,
        "stream": str,
        "cache_version_min": int,
        "span_versions": list,
        "span_tokens": list,
        "span_incarnations": list,
        "begun": int,
        "ended": int,
    },
    "BatchConsumed": {"mask_digest": str, "logp_digest": str, "proximal_digest": str},
}
"""Columns that a writer may leave out, and rows without a value there, which have null (None).

An invariant that needs one says so."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one segment, or why there are none."""

    columns: dict[str, list[Any]]
    problem: str | None = None

    def __len__(self) -> int:
        return len(self.columns.get("uid", ()))

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def get(self, column: str) -> list[Any] | None:
        """Values of an optional column; None where the writer left it out."""
        return self.columns.get(column)


RowSource = Callable[[str, Segment], Rows]
"""Gives the rows of the segment of an event of the named type."""


def _typed(name: str, values: list[Any], wanted: type) -> list[Any] | str:
    """Values of a column as the wanted type, or what is wrong with them."""
    if wanted is object:  # a label, number or text
        return [str(v) for v in values]
    if set(map(type, values)) <= {wanted}:  # nearly always, and a tenth of the time
        return values
    if wanted is float:
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            return [float(v) for v in values]
    elif all(isinstance(v, wanted) and not isinstance(v, bool) for v in values):
        return values
    first = next((v for v in values if not isinstance(v, wanted)), None)
    return f"column {name}: expected {wanted.__name__}, found {first!r}"


def check_rows(type_: str, columns: Mapping[str, list[Any]]) -> Rows:
    """Columns of a segment with their types checked against those of the event's type."""
    typed: dict[str, list[Any]] = {}
    for name, wanted in COLUMNS.get(type_, {}).items():
        if name not in columns:
            return Rows({}, f"its segment has no column {name}")
        values = _typed(name, columns[name], wanted)
        if isinstance(values, str):
            return Rows({}, values)
        typed[name] = values
    for name, wanted in OPTIONAL.get(type_, {}).items():
        if name in columns:
            found = _typed(name, [v for v in columns[name] if v is not None], wanted)
            if isinstance(found, str):
                return Rows({}, found)
            typed[name] = columns[name]
    return Rows(typed)


class EvidenceFolder:
    """Rows from the segments of a ledger, wherever they lie; keeps the last segment it read."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._opened = False
        self._last: tuple[str, Segment, Rows] | None = None

    def __call__(self, type_: str, segment: Segment) -> Rows:
        """Read a segment; a missing, altered or malformed one gives Rows with a problem.

        Raises EvidenceOutOfReach where the place of the segments does not answer.
        """
        # Integrity and judgement ask for the same segment one after the other.
        if self._last is None or self._last[:2] != (type_, segment):
            self._last = (type_, segment, self._read(type_, segment))
        return self._last[2]

    def named(self, type_: str, segment: dict[str, Any]) -> Rows | None:
        """Read a segment as it stands in an event's body; None where that names none."""
        try:
            return self._read(type_, Segment.model_validate(segment))
        except ValidationError:
            return None

    def keep(self, type_: str, segment: dict[str, Any], rows: Rows | None) -> Rows | None:
        """Be ready with the rows of a segment as it stands in an event's body, and return them.

        ``rows`` are those that another process has read; without them they are read here. None
        where the body names no segment.
        """
        try:
            named = Segment.model_validate(segment)
        except ValidationError:
            return None
        if rows is not None:
            self._last = (type_, named, rows)
        return self(type_, named)

    @property
    def folder(self) -> Path | None:
        """The folder of this machine in which the segments lie; None where they lie elsewhere."""
        with suppress(EvidenceError):
            place = segment_place(self._place)
            return place.folder if isinstance(place, LocalFolder) else None
        return None

    def _read(self, type_: str, segment: Segment) -> Rows:
        from shiftbook.ledger.evidence import read_segment  # pyarrow: only where rows are read

        try:
            if not self._opened:
                self._place, self._opened = segment_place(self._place), True
            table = read_segment(self._place, segment)
        except EvidenceOutOfReach:
            raise  # not held against the ledger: nothing is known of the segment
        except EvidenceError as error:
            return Rows({}, str(error))
        columns = zip(table.column_names, table.columns, strict=True)
        return check_rows(type_, {name: column.to_pylist() for name, column in columns})
