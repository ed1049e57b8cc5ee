"""Small jobs for the tests of replay: honest ones, ones that diverge, and ones that are none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shiftbook.ledger.digests import logp_digest, token_digest
from shiftbook.verify.replay.protocol import (
    Conditions,
    Job,
    Numbers,
    Observation,
    RandomState,
    Sample,
    Samples,
    Step,
    Tensors,
    state_bytes,
)
from shiftbook.verify.replay.recorded_trace import recorded_trace
from tests.verify.honest_run import honest_run

Change = Callable[[Conditions, int, dict[str, Any]], None]


def counting(
    change: Change | None = None, *, width: int = 0, **members: Any
) -> Callable[[Mapping[str, Any] | None], Job]:
    """A job that counts: samples, a number, a stream; with ``width`` a tensor as well. ``change``
    may alter what a step shows."""

    def make(config: Mapping[str, Any] | None = None) -> Job:
        values = dict(config or {"scale": 3})

        def run(conditions: Conditions) -> Iterator[Step]:
            generator = np.random.Generator(np.random.PCG64(conditions.seed))
            for number in range(conditions.steps):
                weights = np.arange(max(width, 1), dtype=np.float32) * values["scale"] + number
                seen: dict[str, Any] = {
                    "tokens": [[number, m, conditions.seed] for m in range(3)],
                    "rewards": [float(m) for m in range(3)],
                    "weights": weights,
                    "loss": float(generator.random()),
                }
                if change is not None:
                    change(conditions, number, seen)
                yield Step(number, _shown(number, seen, width, generator))

        fixed = {"schedules": ("plain", "other"), "workers": {"rollout": (1, 2)}, "movable": True}
        return Job(run, config=values, **{**fixed, **members})

    return make


def _shown(
    number: int, seen: dict[str, Any], width: int, generator: np.random.Generator
) -> list[Observation]:
    samples = [
        Sample(f"{number:06d}/{m}", token_digest(tokens), logp_digest([-0.5]), reward)
        for m, (tokens, reward) in enumerate(zip(seen["tokens"], seen["rewards"], strict=True))
    ]
    stream = RandomState("trainer", "dropout/0", state_bytes(generator.bit_generator.state))
    shown: list[Observation] = [Samples("rollout", samples)]
    if width:
        shown.append(Tensors("trainer", "masters", {"head.weight": seen["weights"]}))
    return [*shown, Numbers("trainer", {"loss": seen["loss"]}), stream]


def _second_worker_slips(conditions: Conditions, number: int, seen: dict[str, Any]) -> None:
    if conditions.workers["rollout"] == 2 and number == 1:
        seen["tokens"][1][0] += 1


def _moves_lose_an_element(conditions: Conditions, number: int, seen: dict[str, Any]) -> None:
    if conditions.moves is not None and number == 1:
        seen["weights"][[2, 5]] += np.float32(0.25)


def _noisy(conditions: Conditions, number: int, seen: dict[str, Any]) -> None:
    seen["loss"] = 2.0 + 1e-7 * (int.from_bytes(os.urandom(2), "big") / 65536 + 0.5)
    if conditions.schedule == "other" and number == 1:
        seen["loss"] += 0.01


def _raises(conditions: Conditions, number: int, seen: dict[str, Any]) -> None:
    if number == 1:
        raise ZeroDivisionError("a loss over no tokens")


def _hash_order(conditions: Conditions, number: int, seen: dict[str, Any]) -> None:
    names = {f"name-{n}" for n in range(40)}
    seen["loss"] = float(list(names).index("name-7"))


def _scaled(conditions: Conditions, number: int, seen: dict[str, Any]) -> None:
    seen["loss"] = float(os.environ["SCALE"])


honest = counting()
with_tensor = counting(width=8)
slips_with_workers = counting(_second_worker_slips)
breaks_in_moves = counting(_moves_lose_an_element, width=8)
noisy = counting(_noisy, equality="tolerance")
raises = counting(_raises)
ordered_by_hash = counting(_hash_order)
with_environment = counting(_scaled, environment={"SCALE": "4.5"})
nothing = counting(steps=0)
no_job = object()
finished = honest(None)


def as_honest_run(config: Mapping[str, Any] | None = None, *, events: bool = False) -> Job:
    """What the synthetic honest run shows, for ledgers of it that were changed."""

    def run(conditions: Conditions) -> Iterator[Step]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "honest.db"
            honest_run().write(path)
            lines = recorded_trace(str(path))[1].lines
        for number in range(conditions.steps):
            mine = [line for line in lines if line.step == number]
            samples = [
                Sample(
                    line.name,
                    line.fields["tokens"],
                    line.fields["logps"],
                    float(line.fields["reward"]),
                    line.event if events else None,
                    line.reward_event if events else None,
                )
                for line in mine
                if line.kind == "sample"
            ]
            numbers = {one.name: float(one.fields["value"]) for one in mine if one.kind == "number"}
            at = next(one.event for one in mine if one.kind == "number") if events else None
            yield Step(number, [Samples("rollout", samples), Numbers("trainer", numbers, at)])

    return Job(run, config=dict(config or {}))


def with_a_ledger(config: Mapping[str, Any] | None = None) -> Job:
    """The same by a run that writes a ledger of its own and says where in it."""
    return as_honest_run(config, events=True)
