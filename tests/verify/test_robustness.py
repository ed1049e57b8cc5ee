"""Goal: no stream of readable events, however wrong, stops the judge; its memory stays bounded.

Method: the honest run is mangled by seed (events dropped, doubled, exchanged, moved to another job,
fields set to other values of their type or to extremes, rows dropped, doubled or set to extremes),
sealed without a store and fed to the judge, with missing evidence too. A long honest run shows that
what the lineage holds does not grow with the run.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.ledger.digests import consumed_digest, generated_digest, rewarded_digest
from shiftbook.ledger.envelope import Draft, StoredEvent, seal, unseal
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events.base import Segment
from shiftbook.verify.evidence import Rows, check_rows
from shiftbook.verify.judge import Judge
from tests.verify.honest_run import PLACES, Entry, Maker, Run, copied, honest_run, make_plan

EXTREMES: dict[type, list[Any]] = {
    int: [0, 1, -1, 2**63 - 1, 2**64 - 1],
    float: [0.0, -1.0, 1e308, float("nan"), float("inf")],
    str: ["", "x", "0" * 32, "f" * 64, "000001/1", "é"],
    bool: [True, False],
}


class Memory:
    """Segments kept in memory instead of in files."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, list[Any]]] = {}

    def put(self, columns: dict[str, list[Any]]) -> Segment:
        name = f"{len(self.tables):064x}"
        self.tables[name] = columns
        size = len(next(iter(columns.values()), []))
        return Segment(sha256=name, rows=size, columns=tuple(columns), bytes=1)

    def __call__(self, type_: str, segment: Segment) -> Rows:
        columns = self.tables.get(segment.sha256)
        return Rows({}, "no such segment") if columns is None else check_rows(type_, columns)


def sealed(run: Run, memory: Memory) -> list[StoredEvent]:
    """Events with their places, without a store; those that no writer could write are left out."""
    out: list[StoredEvent] = []
    versions: dict[str, int] = {}
    for entry in run.entries:
        event = entry.event
        if entry.rows is not None:
            event = event.model_copy(update={"segment": memory.put(entry.rows)})
        version = versions.get(entry.job, -1) + 1
        try:
            stored = seal(
                Draft(event, entry.operation),
                position=len(out),
                job=entry.job,
                version=version,
                recorded_ns=len(out),
                writer="w",
                sequence=len(out),
                actor="a",
                key=None,
            )
        except InvalidEvent:
            continue
        versions[entry.job] = version
        out.append(unseal(stored.data))
    return out


def mangle(run: Run, chance: random.Random) -> None:
    """One random change."""
    at = chance.randrange(len(run.entries))
    entry = run.entries[at]
    kind = chance.choice(["drop", "double", "swap", "job", "operation", "field", "field", "rows"])
    if kind == "drop" and len(run.entries) > 1:
        del run.entries[at]
    elif kind == "double":
        run.entries.insert(chance.randrange(len(run.entries)), entry)
    elif kind == "swap":
        other = chance.randrange(len(run.entries))
        run.entries[at], run.entries[other] = run.entries[other], entry
    elif kind in ("job", "operation"):
        changed = {"job": "other"} if kind == "job" else {"operation": chance.choice([None, "x"])}
        merged = {"job": entry.job, "operation": entry.operation, **changed}
        run.entries[at] = Entry(entry.event, rows=entry.rows, **merged)
    elif kind == "field":
        name = chance.choice(sorted(type(entry.event).model_fields))
        value = getattr(entry.event, name)
        others = EXTREMES.get(type(value))
        if others is None:
            others = [type(value)()] if isinstance(value, tuple | dict) else [None]
        run.entries[at] = Entry(
            entry.event.model_copy(update={name: chance.choice(others)}),
            entry.operation,
            entry.rows,
            job=entry.job,
        )
    elif entry.rows:
        column = chance.choice(sorted(entry.rows))
        values = entry.rows[column]
        if chance.random() < 0.2:
            del entry.rows[column]
        elif values:
            row = chance.randrange(len(values))
            if chance.random() < 0.3:
                for name in entry.rows:
                    entry.rows[name] = entry.rows[name] + [entry.rows[name][row]]
            else:
                values[row] = chance.choice(EXTREMES[type(values[row])])


HONEST = honest_run()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), changes=st.integers(1, 6), lost=st.booleans())
def test_no_stream_of_events_stops_the_judge(seed: int, changes: int, lost: bool) -> None:
    chance = random.Random(seed)
    run = copied(HONEST)
    for _ in range(changes):
        mangle(run, chance)
    memory = Memory()
    events = sealed(run, memory)
    if lost:
        for name in chance.sample(sorted(memory.tables), k=len(memory.tables) // 2):
            del memory.tables[name]
    judge = Judge(memory)
    for stored in events:
        judge.feed(stored)
    coverage = judge.close()
    assert judge.state.position == len(events) - 1
    for finding in judge.findings:
        assert 0 <= finding.position < max(1, len(events))
        assert finding.expected or finding.found
    assert len(coverage.rows) >= len(judge.benches)


def test_the_generator_of_mangled_runs_starts_from_a_clean_one() -> None:
    run, memory = copied(HONEST), Memory()
    for entry in run.entries:
        rows = entry.rows
        if rows is None or "uid" not in rows:
            continue
        pairs = zip(rows["uid"], rows["token_digest"], strict=True)
        fields: dict[str, Any] = {"count": len(rows["uid"]), "digest": consumed_digest(pairs)}
        if entry.name == "SamplesRewarded":
            scored = zip(rows["uid"], rows["token_digest"], rows["reward"], strict=True)
            fields["digest"] = rewarded_digest(scored)
            fields["reward_mean"] = sum(rows["reward"]) / len(rows["reward"])
        else:
            fields["tokens"] = sum(rows["tokens"])
        if entry.name == "SamplesGenerated":
            columns = (rows["uid"], rows["token_digest"], rows["logp_digest"])
            fields["digest"] = generated_digest(zip(*columns, strict=True))
        entry.change(**fields)
    judge = Judge(memory)
    for stored in sealed(run, memory):
        judge.feed(stored)
    assert list(judge.findings) == []
    assert {row.status for row in judge.close().rows if row.required} <= {"checked"}


def test_many_findings_of_one_kind_are_counted_and_not_all_kept() -> None:
    run, memory = copied(HONEST), Memory()
    one = run.get("UpdateApplied", 0)
    run.entries = run.entries[:3] + [Entry(one.event) for _ in range(500)]
    judge = Judge(memory)
    for stored in sealed(run, memory):
        judge.feed(stored)
    kept = [f for f in judge.findings if f.invariant == "I15"]
    assert len(kept) == 100
    assert judge.findings.left_off >= 399
    row = judge.close().row("I15")
    assert row.findings == 499


@pytest.mark.parametrize("iterations", [40, 160])
def test_what_the_lineage_holds_does_not_grow_with_the_run(iterations: int) -> None:
    maker = Maker(make_plan(iterations=iterations))
    maker.open()
    maker.start("a1", 0, PLACES)
    memory = Memory()
    judge = Judge(memory)
    fed = 0
    for iteration in range(iterations):
        maker.iteration(iteration)
    for stored in sealed(maker.run, memory):
        judge.feed(stored)
        fed += 1
        track = judge.benches["demo"].track
        assert len(track.samples) <= 16
        assert sum(len(mark.samples) for mark in track.marks.values()) == 0
    assert fed > iterations * 10
