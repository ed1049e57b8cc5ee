"""Goal: the log-probability gap that a loop records is the one of its tokens, whatever it hands in.

Method: gaps of known size go through an update's record into a ledger and are read back, over
several micro batches, kinds of arrays and values that are no numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder import Recorder
from shiftbook.checkpoint.recorder_update import UpdateRecord
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.evidence import EvidenceFolder
from shiftbook.verify.replay.recorded_trace import recorded_job, recorded_lines
from shiftbook.verify.verdict import verify
from tests.checkpoint.test_recorder import plan

STATE = {"model": {"w": 1.0}, "masters": {"w": 1.0}, "optimizer": {"step": 0}}
Batch = tuple[Any, Any, Any]
"""Log-probabilities of the trainer and of the engine, and which tokens are trained."""


def applied(update: UpdateRecord, number: int = 1) -> None:
    """The step that a gap belongs to."""
    update.applied(
        version=number,
        optimizer_step=number,
        learning_rate=1.0,
        loss=0.0,
        grad_norm=1.0,
        tokens=1,
        divisor=1.0,
    )


def recorded(folder: Path, *batches: Batch) -> tuple[Any, list[str]]:
    """The gap as it stands in the ledger, and the numbers that a shadow would compare."""
    url = f"sqlite:///{folder}/l.db"
    with Recorder.open(url, "job", plan(), policy="0" * 32) as record:
        with record.update(0, STATE) as update:
            for trainer, engine, trained in batches:
                update.gap(trainer, engine, trained)
            applied(update)
        record.flush()
    with Ledger.open(url, read_only=True) as ledger:
        job = recorded_job(ledger, "job")
        lines = list(recorded_lines(job, EvidenceFolder(ledger)))
        updated = job.iterations[0].updated
        assert updated is not None
        return updated[1].logp_gap, [line.name for line in lines if line.kind == "number"]


def test_the_gap_is_the_mean_over_trained_tokens_of_all_micro_batches(tmp_path: Path) -> None:
    first = (
        torch.tensor([[-1.0, -2.0, -9.0]], requires_grad=True),
        torch.tensor([[-1.5, -1.75, 0.0]]),
        torch.tensor([[True, True, False]]),
    )
    second = ([[-1.0, 7.0]], np.array([[-4.0, 0.0]], np.float32), [[1, 0]])
    gap, numbers = recorded(tmp_path, first, second)
    assert gap == pytest.approx((0.5 + 0.25 + 3.0) / 3)  # not the mean of two means
    assert "logp_gap" in numbers


def test_a_loop_that_hands_in_nothing_has_no_gap(tmp_path: Path) -> None:
    gap, numbers = recorded(tmp_path, ([-1.0], [-2.0], [False]))
    assert gap is None
    assert "logp_gap" not in numbers
    assert "kl" in numbers


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_counts_where_a_token_is_trained(tmp_path: Path, value: float) -> None:
    padded, _ = recorded(tmp_path, ([-1.0, value], [-2.0, value], [True, False]))
    assert padded == pytest.approx(1.0)
    (tmp_path / "trained").mkdir()
    trained, _ = recorded(tmp_path / "trained", ([-1.0, value], [-2.0, value], [True, True]))
    assert math.isnan(trained)


def test_values_of_other_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecorderMisuse, match=r"found \(2,\), \(1,\) and \(2,\); cut all three"):
        recorded(tmp_path, ([-1.0, -1.0], [-1.0], [True, True]))


@pytest.mark.parametrize(
    ("gap", "plan_says", "finds"),
    [
        (1e-6, {}, False),
        (0.019, {}, False),  # as far apart as a bfloat16 trainer and its engine may be
        (0.3, {}, True),
        (math.nan, {}, True),
        (0.3, {"I16": 0.5}, False),
        (1e-3, {"I16": 1e-4}, True),
        (0.04, {"I16.calibration": 0.05}, False),
    ],
)
def test_the_judge_holds_the_loss_against_the_engine(
    tmp_path: Path, gap: float, plan_says: dict[str, float], finds: bool
) -> None:
    """A forward that is another function than the engine's (labels, temperature, positions)."""
    url = f"sqlite:///{tmp_path}/l.db"
    made = plan(objective="rl", tolerances=plan_says)
    with (
        Recorder.open(url, "job", made, policy="0" * 32) as record,
        record.update(0, STATE) as update,
    ):
        update.gap([-1.0 - gap], [-1.0], [True])
        applied(update)
    verdict = verify(url)
    assert ("I16" in {finding.invariant for finding in verdict.findings}) == finds
    assert verdict.coverage.row("I16.loss").status == ("broken" if finds else "checked")


def test_with_dropout_the_loss_is_not_held_against_the_engine(tmp_path: Path) -> None:
    """It leaves elements out, and the engine does not: an honest gap of any size."""
    url = f"sqlite:///{tmp_path}/l.db"
    update = plan().update.model_copy(update={"dropout": 0.1})
    made = plan(objective="rl", update=update)
    with (
        Recorder.open(url, "job", made, policy="0" * 32) as record,
        record.update(0, STATE) as step,
    ):
        step.gap([-1.5], [-1.0], [True])
        applied(step)
    verdict = verify(url)
    assert "I16" not in {finding.invariant for finding in verdict.findings}
    assert verdict.coverage.row("I16.loss").status == "nothing to check"


def test_of_several_updates_of_a_batch_the_first_one_is_compared(tmp_path: Path) -> None:
    """Later ones are under weights that nothing was sampled with."""
    url = f"sqlite:///{tmp_path}/l.db"
    with Recorder.open(url, "job", plan(objective="rl"), policy="0" * 32) as record:
        for number, told in enumerate((True, False, True, False)):
            with record.update(number // 2, STATE) as update:
                if told:
                    update.gap([-1.0], [-1.0], [True])
                applied(update, number + 1)
    row = verify(url).coverage.row("I16.loss")
    assert (row.status, row.checks) == ("checked", 2)
