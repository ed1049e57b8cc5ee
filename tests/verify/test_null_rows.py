"""Goal: a row without an optional value hides nothing of the rows beside it.

Method: in the honest run one row of an optional column is emptied, alone and beside a row that is
wrong; the wrong row is found, and what was emptied is no finding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shiftbook.checkpoint.recorder_samples import (
    Consumed,
    Generated,
    consumed_event,
    generated_rows,
)
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import Run, h128

Judge = Callable[[Run], Verdict]

COLUMNS = [
    ("SamplesGenerated", "mask_digest", "I11", h128("other"), False),
    ("SamplesGenerated", "prompt_digest", "I4", h128("other"), True),
    ("SamplesGenerated", "stream", "I9", None, True),
    ("SamplesGenerated", "cache_version_min", "I7", 0, True),
    ("BatchConsumed", "mask_digest", "I11", h128("other"), False),
    ("BatchConsumed", "logp_digest", "I16", h128("other"), False),
]
"""Event, column, the invariant that reads it, a wrong value, whether its absence is told."""


@pytest.mark.parametrize(("event", "column", "invariant", "wrong", "told"), COLUMNS)
def test_a_null_is_no_finding(
    judge: Judge, run: Run, event: str, column: str, invariant: str, wrong: object, told: bool
) -> None:
    rows = run.get(event, 1).rows
    assert rows is not None
    rows[column][0] = None
    verdict = judge(run)
    assert [f.invariant for f in verdict.findings] == []
    row = verdict.coverage.row(invariant)
    assert row.checks
    assert bool(row.missing) == told


@pytest.mark.parametrize(("event", "column", "invariant", "wrong", "told"), COLUMNS)
def test_a_wrong_row_beside_a_null_is_found(
    judge: Judge, run: Run, event: str, column: str, invariant: str, wrong: object, told: bool
) -> None:
    rows = run.get(event, 1).rows
    assert rows is not None
    rows[column][0] = None
    rows[column][3] = rows[column][2] if wrong is None else wrong
    verdict = judge(run)
    assert {f.invariant for f in verdict.findings} == {invariant}
    assert all(rows["uid"][0] not in f.expected for f in verdict.findings)


def test_the_recorder_writes_a_null_for_each_row_without_a_value() -> None:
    on = [False, True]
    consumed = [
        Consumed("000000/0", [1, 2], trained=on, logps=[0.0, 1.0]),
        Consumed("000000/1", [1, 2]),
    ]
    _, columns = consumed_event("a", 0, consumed, 0, 0)
    assert [value is None for value in columns["mask_digest"]] == [False, True]
    assert [value is None for value in columns["logp_digest"]] == [False, True]
    made = [
        Generated("000000/0", [1, 2], None, 0, "e", "e#1"),
        Generated("000000/1", [1, 2], None, 0, "e", "e#1", on, [1], "stream", 0),
    ]
    columns, _ = generated_rows(made)
    for name in ("mask_digest", "prompt_digest", "stream", "cache_version_min"):
        assert [value is None for value in columns[name]] == [True, False], name
    assert "mask_digest" not in generated_rows(made[:1])[0]
