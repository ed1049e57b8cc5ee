"""Goal: what a shadow showed stands in the ledger once; a disagreement freezes in the same step.

Method: the gate is given comparisons that agree and that do not, twice, from two handles at once,
of closed and of unknown jobs, on each store; events, folded state, log line and SQL are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shiftbook.ledger.amendment import amended
from shiftbook.ledger.errors import IllegalStep, InvalidInput, UnknownJob
from shiftbook.ledger.events.safety import ShadowCompared, ShadowDifference
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.plan import ShadowPlan
from shiftbook.ledger.summary import summary
from tests.ledger.gate_cases import BUNDLE, bundle, plan, proposal, running

DIFFERENCE = ShadowDifference(
    iteration=0,
    component="trainer",
    kind="number",
    name="loss",
    what="value",
    live="0.25",
    shadow="0.5",
    position=3,
)


def compared(agreed: bool = True, **fields: Any) -> ShadowCompared:
    values: dict[str, Any] = {
        "bundle": BUNDLE,
        "iteration": 0,
        "iterations": 2,
        "last_update": 3,
        "method": "bits",
        "agreed": agreed,
        "observations": 40,
        "target": "mine:job",
        "conditions": "seed=7",
        "stack": "python=3.11",
        "wall_s": 1.5,
        "difference": None if agreed else DIFFERENCE,
    }
    return ShadowCompared(**values | fields)


@pytest.fixture
def gate(store_url: str) -> Iterator[Gate]:
    with Ledger.open(store_url) as ledger:
        made = Gate(ledger)
        running(made)
        ledger.append("j", bundle())
        yield made


def types(gate: Gate) -> list[str]:
    return [event.type for event in gate.ledger.read()]


def test_agreement_is_recorded_once_whatever_it_took(gate: Gate) -> None:
    receipt = gate.shadowed("j", compared(), by="shadow")
    assert receipt is not None
    assert gate.shadowed("j", compared(wall_s=9.0), by="shadow") is None
    event = gate.ledger.event(receipt.first)
    assert event.cause == 3
    assert summary(event) == "iterations 0 to 1 agreed (bits, 40 observations)"
    assert gate.ledger.state().job("j").shadows == {0: 3}
    assert gate.ledger.state().job("j").safe_mode is None
    # Computed again after a crash, it is another record.
    assert gate.shadowed("j", compared(last_update=2), by="shadow") is not None


def test_a_disagreement_freezes_the_job_in_the_same_decision(gate: Gate) -> None:
    gate.propose("j", proposal())
    receipt = gate.shadowed("j", compared(agreed=False), by="shadow")
    assert receipt is not None
    assert types(gate)[-3:] == ["ShadowCompared", "ReallocationAbandoned", "SafeModeEntered"]
    assert len(receipt.positions) == 3
    state = gate.ledger.state().job("j")
    assert state.safe_mode == "shadow: iteration 0, component trainer: number loss: value"
    assert summary(gate.ledger.event(receipt.first)) == (
        "iterations 0 to 1 disagreed: iteration 0, trainer: number loss: value"
    )
    assert gate.shadowed("j", compared(agreed=False), by="shadow") is None
    # One that comes while the job is frozen is told, and freezes nothing anew.
    gate.shadowed("j", compared(agreed=False, last_update=2), by="shadow")
    assert types(gate)[-1] == "ShadowCompared"


def test_two_shadows_at_once_make_one_record(gate: Gate, store_url: str) -> None:
    def tell(_: int) -> bool:
        with Ledger.open(store_url, create=False) as ledger:
            return Gate(ledger).shadowed("j", compared(agreed=False), by="shadow") is not None

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(tell, range(4)))
    assert sorted(told) == [False, False, False, True]
    assert types(gate).count("ShadowCompared") == types(gate).count("SafeModeEntered") == 1


def test_comparisons_of_nothing_are_refused(gate: Gate) -> None:
    with pytest.raises(UnknownJob):
        gate.shadowed("nobody", compared(), by="shadow")
    with pytest.raises(IllegalStep, match="a bundle saved at iteration 4"):
        gate.shadowed("j", compared(iteration=4), by="shadow")
    with pytest.raises(IllegalStep, match="one that nobody saved"):
        gate.shadowed("j", compared(bundle="cd" * 32), by="shadow")
    assert "ShadowCompared" not in types(gate)


def test_sql_has_a_row_for_each(gate: Gate) -> None:
    gate.shadowed("j", compared(), by="shadow")
    gate.shadowed("j", compared(agreed=False, last_update=2), by="shadow")
    with Mirror.open(gate.ledger) as mirror:
        rows = mirror.rows("select * from shadows order by position")
    assert [row["agreed"] for row in rows] == [True, False]
    assert (rows[0]["difference"], rows[0]["differs_at"]) == (None, None)
    assert (rows[1]["difference"], rows[1]["live"]) == ("number loss: value", "0.25")
    assert rows[1]["differs_at"] == 0


def test_the_plan_may_be_amended_to_ask_for_shadows() -> None:
    asked = amended(plan(), "shadow", {"every_iterations": 4, "iterations": 2})
    assert asked.shadow == ShadowPlan(every_iterations=4, iterations=2)
    assert list(asked.shadow.windows(9)) == [range(0, 2), range(4, 6), range(8, 9)]
    assert list(asked.shadow.windows(0)) == []
    assert "shadow" not in plan().model_dump(exclude_none=True)
    with pytest.raises(InvalidInput, match="must end before the next begins"):
        amended(plan(), "shadow", {"every_iterations": 1, "iterations": 2})
