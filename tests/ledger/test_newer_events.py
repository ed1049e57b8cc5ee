"""Goal: a gate that cannot read what a newer version decided does not go on as if nothing stood.

Method: events of known types in a schema of the future are appended to real ledgers, about one job
and about what jobs share; every kind of step is then asked of the gate, in the same process, after
opening the ledger again, and from snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shiftbook.ledger import folding
from shiftbook.ledger.errors import IllegalStep
from shiftbook.ledger.events.base import REGISTRY, Event, UnknownEvent
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.state import fold
from tests.ledger.gate_cases import FINGERPRINT, WIDE, open_gate, opened, proposal, running, start

FUTURE = 99
CLOSED = JobClosed(
    outcome="finished", iterations=0, policy_version=0, policy_fingerprint=FINGERPRINT
)


@pytest.fixture
def gate(store_url: str) -> Iterator[Gate]:
    made = open_gate(store_url)
    yield made
    made.ledger.close()


@pytest.fixture
def ledger(gate: Gate) -> Ledger:
    return gate.ledger


@cache
def _later(name: str) -> type[Event]:
    kind = type(
        f"Later{name}",
        (UnknownEvent,),
        {
            "__module__": __name__,
            "__annotations__": {},
            "schema_": FUTURE,
            "type_": classmethod(lambda cls: name),
        },
    )
    del REGISTRY[kind.__name__]
    return kind


def later(name: str) -> Event:
    """An event of a known type in a schema of the future."""
    return _later(name).model_validate({"unheard": "of"})


@pytest.mark.parametrize("name", ["ReallocationGranted", "PlanAmended", "JobClosed"])
def test_a_job_that_a_newer_version_went_on_with_stands_still(
    name: str, gate: Gate, ledger: Ledger
) -> None:
    running(gate)
    (at,) = ledger.append("j", later(name)).positions
    words = f"newer-version: .*{name} at position {at} in schema {FUTURE}; act with the version"
    before = ledger.head().size
    for step in (
        lambda: gate.propose("j", proposal(WIDE)),
        lambda: start(gate, attempt="a2"),
        lambda: gate.close_job("j", CLOSED),
    ):
        with pytest.raises(IllegalStep, match=words):
            step()
    assert ledger.head().size == before, "nothing was written"
    # To stand still is right whatever the newer version meant.
    gate.freeze("j", by="operator", reason="look at it")
    assert ledger.state().job("j").safe_mode == "look at it"
    with pytest.raises(IllegalStep, match=words):
        gate.thaw("j", by="operator", reason="looked")


def test_another_job_goes_on(gate: Gate, ledger: Ledger) -> None:
    gate.open_job("other", opened(devices=("n/0", "n/1")))
    ledger.append("other", later("ReallocationCommitted"))
    running(gate)
    assert gate.propose("j", proposal(WIDE)).startswith("move-")


def test_what_jobs_share_is_not_given_out_any_more(gate: Gate, ledger: Ledger) -> None:
    gate.open_job("other", opened(devices=("n/0", "n/1")))
    ledger.append("other", later("LeaseGranted"))
    with pytest.raises(IllegalStep, match=r"newer-version: .*LeaseGranted"):
        gate.open_job("j", opened())


def test_types_that_change_no_state_do_no_harm(gate: Gate, ledger: Ledger) -> None:
    running(gate)
    ledger.append("j", later("PipelineObserved"))
    assert ledger.state().job("j").newer is None
    gate.close_job("j", CLOSED)


def test_it_is_known_from_snapshots_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "SNAPSHOT_EVENTS", 1)
    monkeypatch.setattr(folding, "SNAPSHOT_SHARE", 10**9)
    monkeypatch.setattr(folding, "SHARED_EVENTS", 1)
    url = f"sqlite:///{tmp_path}/book.db"
    with Ledger.open(url) as ledger:
        ledger.append("j", [later("LeaseGranted"), later("JobClosed")])
        state = ledger.state()
        first = (state.newer, state.job("j").newer)
    for _ in range(2):
        with Ledger.open(url) as ledger:
            state = ledger.state()
            assert (state.newer, state.job("j").newer) == first
            whole = fold(ledger.read())
            assert (whole.newer, whole.job("j").newer) == first
    assert list(tmp_path.glob("*.snapshots/*.snapshot"))
    assert first == (f"LeaseGranted at position 0 in schema {FUTURE}",) * 2
