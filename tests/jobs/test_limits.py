"""Goal: whoever waits for an engine waits as long as that engine may take, wherever it waits.

Method: the configuration of each engine, and what the ledger has of it, against the limits of the
processes (start, step, silence) and of the plan (a step of a move, a reboot), which the gate keeps.
"""

from __future__ import annotations

from typing import Any

import pytest

from shiftbook.jobs.config import JobConfig, fleet_spec, moves_of, opened
from shiftbook.jobs.engines import ENGINES, START_LIMITS_S
from shiftbook.scheduler.fleet import STATUS_LIMIT_S, STEP_LIMIT_S, FleetSpec

DEVICES = ("node0/0", "node0/1")


def config(**values: Any) -> JobConfig:
    place = {"job": "j", "bundles": "b", "base_policy": "p", "ledger_url": "sqlite:///l.db"}
    return JobConfig(**place, **values)


def limits(spec: FleetSpec, component: str) -> tuple[float | None, float, float]:
    return (
        spec.start_limit_s.get(component),
        spec.step_limit_s(component),
        spec.status_limit_s(component),
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (60.0, 20.0, 3.0)),
        ({"engine": "vllm", "tolerance": 1e-4}, (900.0, 300.0, 45.0)),
        ({"start_limit_s": 600.0}, (600.0, 200.0, 30.0)),
        # A start that may take less makes no step shorter: it was found too slow in nothing.
        ({"start_limit_s": 5.0}, (5.0, 20.0, 3.0)),
    ],
)
def test_steps_and_answers_may_take_what_the_start_allows(
    values: dict[str, Any], expected: tuple[float, float, float]
) -> None:
    spec = fleet_spec(DEVICES, config(**values))
    assert limits(spec, "rollout") == expected
    for other in ("trainer", "inference", "tool"):
        assert limits(spec, other) == (None, STEP_LIMIT_S, STATUS_LIMIT_S)


@pytest.mark.parametrize("engine", ENGINES)
def test_whoever_reads_the_ledger_waits_for_its_engine(engine: Any) -> None:
    """The controller and recovery know the job by what it opened with."""
    tolerance = {"tolerance": 1e-4} if engine == "vllm" else {}
    made = config(engine=engine, **tolerance)
    spec = fleet_spec(DEVICES, opened(made, DEVICES).config)
    assert limits(spec, "rollout") == limits(fleet_spec(DEVICES, made), "rollout")
    assert spec.start_limit_s == {"rollout": START_LIMITS_S[engine]}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gate_gives_a_step_what_the_engine_may_take(engine: Any) -> None:
    """And the plan says the same whatever limit of a start one attempt was given."""
    made = [config(engine=engine, start_limit_s=limit) for limit in (None, 7.0, 5000.0)]
    plans = [moves_of(one) for one in made]
    assert plans[1:] == plans[:-1]
    spec = fleet_spec(DEVICES, made[0])
    assert plans[0].step_limit_s == spec.step_limit_s("rollout")
    assert plans[0].reboot_limit_s > START_LIMITS_S[engine]
