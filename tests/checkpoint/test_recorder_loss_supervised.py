"""Goal: the supervised loss that a loop takes is the declared one, or it is found.

Method: torch's own cross-entropy on random logits, with padding and packing, in float32 and bf16,
over several micro batches, right and with one thing changed that public reports tell of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder import Recorder
from shiftbook.checkpoint.recorder_loss_supervised import SupervisedLoss
from shiftbook.verify.verdict import verify
from tests.checkpoint.test_recorder import RATE, plan

ROWS, TOKENS, VOCABULARY = 3, 7, 11
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def right(
    logits: torch.Tensor, ids: torch.Tensor, on: torch.Tensor, divisor: float
) -> torch.Tensor:
    """As Hugging Face's models take it: shifted, -100 where nothing is trained, divided once."""
    labels = ids[:, 1:].masked_fill(~on[:, 1:], -100)
    flat = logits[:, :-1].float().reshape(-1, VOCABULARY)
    return torch.nn.functional.cross_entropy(flat, labels.reshape(-1), reduction="sum") / divisor


def unshifted(
    logits: torch.Tensor, ids: torch.Tensor, on: torch.Tensor, divisor: float
) -> torch.Tensor:
    return right(torch.cat([logits[:, 1:], logits[:, :1]], 1), ids, on, divisor)


def padding_counts(
    logits: torch.Tensor, ids: torch.Tensor, on: torch.Tensor, divisor: float
) -> torch.Tensor:
    return right(logits, ids, torch.ones_like(on), divisor)


def mean_of_means(
    logits: torch.Tensor, ids: torch.Tensor, on: torch.Tensor, divisor: float
) -> torch.Tensor:
    return right(logits, ids, on, 2.0 * float(on[:, 1:].sum()))


def without_backward(
    logits: torch.Tensor, ids: torch.Tensor, on: torch.Tensor, divisor: float
) -> torch.Tensor:
    return right(logits.detach(), ids, on, divisor) + 0.0 * logits.sum()


def temperature(
    logits: torch.Tensor, ids: torch.Tensor, on: torch.Tensor, divisor: float
) -> torch.Tensor:
    return right(logits / 0.9, ids, on, divisor)


def residuals(loss: Loss, dtype: torch.dtype, scale: float = 1.0, steps: bool = True) -> set[str]:
    """What does not agree over two micro batches of unlike sizes."""
    generator = torch.Generator().manual_seed(3)
    probe = SupervisedLoss()
    masks = [torch.rand(ROWS, TOKENS, generator=generator) > share for share in (0.3, 0.6)]
    divisor = float(sum(int(mask[:, 1:].sum()) for mask in masks))
    for on in masks:
        leaf = torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator).to(dtype)
        logits = leaf.requires_grad_(True) * 1.0
        ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
        value = loss(logits, ids, on, divisor)
        probe.watch(
            logits=logits,
            tokens=ids,
            trained=on,
            divisor=divisor,
            value=value.detach(),
            scale=scale,
        )
        if steps:
            (scale * value).backward()
    assert probe.terms()["supervised"].value > 0
    return {n for n, r in probe.residuals().items() if not r.largest <= r.allowed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_declared_loss_agrees(dtype: torch.dtype, scale: float) -> None:
    assert residuals(right, dtype, scale) == set()


@pytest.mark.parametrize(
    "loss", [unshifted, padding_counts, mean_of_means, temperature], ids=lambda f: f.__name__
)
def test_another_loss_is_found(loss: Loss) -> None:
    assert residuals(loss, torch.float32) == {"loss", "loss gradient"}


def test_a_loss_that_nothing_flows_back_from_is_found() -> None:
    assert residuals(without_backward, torch.float32) == {"loss gradient"}
    assert residuals(right, torch.float32, steps=False) == {"loss gradient"}


def test_what_is_no_number_is_found() -> None:
    assert residuals(lambda *a: right(*a) * math.nan, torch.float32) == {"loss", "loss gradient"}


@pytest.mark.parametrize("skipped", [False, True])
def test_a_loss_that_is_no_number_may_be_skipped(tmp_path: Path, skipped: bool) -> None:
    """A guard against NaN skips the step: nothing was trained, so there is nothing to hold."""
    url = f"sqlite:///{tmp_path}/l.db"
    state = {"model": {"w": 1.0}, "masters": {"w": 1.0}, "optimizer": {"step": 0}}
    with (
        Recorder.open(url, "job", plan(), policy=state["model"]) as record,
        record.update(0, state, loss=SupervisedLoss()) as update,
    ):
        assert isinstance(update.loss, SupervisedLoss)
        logits = torch.zeros(1, 4, 5, requires_grad=True) * math.nan
        ids = torch.ones(1, 4, dtype=torch.long)
        update.loss.watch(logits=logits, tokens=ids, trained=ids, divisor=3, value=math.nan)
        logits.sum().backward()
        update.micro_batch(tokens=3, samples=1, divisor=3)
        update.applied(
            version=1,
            optimizer_step=0 if skipped else 1,
            learning_rate=RATE,
            loss=math.nan,
            grad_norm=math.nan,
            skipped=skipped,
        )
    verdict = verify(url)
    assert ("recomputed" in {f.invariant for f in verdict.findings}) != skipped
    row = verdict.coverage.row("recomputed")
    assert not row.missing, row.reason


def test_cut_logits_are_refused() -> None:
    with pytest.raises(RecorderMisuse, match="hand in the logits uncut"):
        SupervisedLoss().watch(
            logits=torch.zeros(1, 3, 5),
            tokens=torch.zeros(1, 4),
            trained=torch.ones(1, 4),
            divisor=1.0,
            value=0.0,
        )
