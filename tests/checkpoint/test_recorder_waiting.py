"""Goal: an asynchronous loop within its staleness bound is clean, however long a prompt waited.

Method: a loop draws far ahead, leaves iterations without an update, and drops what became too stale
only when it looks at it again; then one sample vanishes, and must be found at the next bundle or
at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shiftbook.checkpoint.recorder import Consumed, Generated, Recorder, data_digests, uid
from shiftbook.ledger.plan import SamplingPlan, UpdatePlan
from shiftbook.verify.verdict import Verdict, verify
from tests.checkpoint.test_recorder import DATA, RATE, plan

BOUND = 2
REQUIRED = ("I2", "I3", "I4", "I10", "I10b", "I11", "I12", "I13", "I15", "I17", "I21")

Loop = list[tuple[str, tuple[int, ...]]]
"""What each iteration does, and to which draws."""

HONEST: Loop = [
    ("make", (0, 1)),
    ("nothing", ()),  # iterations pass, and no version
    ("nothing", ()),
    ("nothing", ()),
    ("nothing", ()),
    ("use", (0,)),
    ("use", (1,)),
    ("make", (2, 3)),  # drawn seven iterations ago, made by the present weights
    ("use", (2,)),
    ("make", (4, 5)),
    ("use", (4,)),
    ("use", (5,)),  # now the one that was made seven iterations ago, 3, is too stale
    ("nothing", ()),
    ("drop", (3,)),
]


def run(folder: Path, steps: Loop, *, save_at: int | None = None) -> Verdict:
    """One draw of everything in the first iteration, then what each iteration does."""
    url, weights, version = f"sqlite:///{folder}/l.db", {"w": 0.0}, 0
    made = plan(
        objective="rl",
        iterations=len(steps),
        sampling=SamplingPlan(staleness_bound=BOUND),
        update=UpdatePlan(prompts_per_update=1, group_size=1, virtual_ranks=1, learning_rate=RATE),
        drop_rules=("stale",),
        required_invariants=REQUIRED,
    )

    def state() -> dict[str, Any]:
        return {"model": weights, "masters": weights, "optimizer": {"step": version}}

    with Recorder.open(url, "job", made, policy=weights) as record:
        record.data(data_digests(DATA), tokenizer="t")
        record.started("rollout", "engine", "engine#1")
        for step, (act, draws) in enumerate(steps):
            with record.iteration(step):
                with record.sync(version, weights, ["engine"]) as sync:
                    sync.delivered("engine", "engine#1", weights, caches_flushed=["none"])
                if step == 0:
                    record.drawn(0, start=0, indices=range(6), epoch=0, prompts=DATA)
                names = [uid(draw) for draw in draws]
                tokens = {name: DATA[draw] for name, draw in zip(names, draws, strict=True)}
                if act == "make":
                    samples = [
                        Generated(
                            name, tokens[name], None, version, "engine", "engine#1", prompt=DATA[d]
                        )
                        for name, d in zip(names, draws, strict=True)
                    ]
                    record.generated(step, samples, version=version)
                    record.rewarded(step, dict.fromkeys(names, 1.0), tokens, by="one")
                elif act == "drop":
                    record.dropped(step, names, "stale: older than the bound")
                elif act == "use":
                    used = [Consumed(name, tokens[name], 1.0) for name in names]
                    record.consumed(step, used, version=version)
                    with record.update(step, state) as update:
                        weights, version = {"w": weights["w"] + RATE}, version + 1
                        update.micro_batch(tokens=3, samples=1, divisor=3, groups=[names[0][:6]])
                        update.applied(
                            version=version,
                            optimizer_step=version,
                            learning_rate=RATE,
                            loss=0.0,
                            grad_norm=1.0,
                        )
            if step == save_at:
                held = [uid(draw) for _, later in steps[step + 1 :] for draw in later]
                with record.checkpoint(
                    folder / "file",
                    state(),
                    iteration=step + 1,
                    version=version,
                    cursor=6,
                    in_flight=sorted(set(held)),
                ):
                    pass
        record.finish(iterations=len(steps), version=version, policy=weights)
    return verify(url)


@pytest.mark.parametrize("save_at", [None, 0, 4, 6, 11, 13])
def test_waiting_within_the_bound_is_clean(tmp_path: Path, save_at: int | None) -> None:
    verdict = run(tmp_path, HONEST, save_at=save_at)
    assert verdict.word == "clean", (verdict.findings, verdict.could_not)


@pytest.mark.parametrize("save_at", [None, 12])
@pytest.mark.parametrize("gone", ["made", "never made"])
def test_what_vanishes_is_found(tmp_path: Path, gone: str, save_at: int | None) -> None:
    steps = [*HONEST[:-1], ("nothing", ())]
    if gone == "never made":
        steps[7] = ("make", (2,))
    verdict = run(tmp_path, steps, save_at=save_at)
    assert {finding.invariant for finding in verdict.findings} == {"I10b"}
    assert uid(3) in verdict.findings[0].found


def test_a_sample_beyond_the_bound_is_found(tmp_path: Path) -> None:
    verdict = run(tmp_path, [*HONEST[:-1], ("use", (3,))])
    assert "I13" in {finding.invariant for finding in verdict.findings}


def test_a_sample_that_is_used_again_long_after_is_found(tmp_path: Path) -> None:
    verdict = run(tmp_path, [*HONEST, ("use", (0,))])
    assert "I10" in {finding.invariant for finding in verdict.findings}
