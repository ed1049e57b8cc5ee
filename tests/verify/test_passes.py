"""Goal: every pass over a batch takes its ratio against what the first pass did, where it should.

Method: a small policy is trained by a real clipped loss, several passes over each batch, with the
proximal log-probabilities kept, computed anew between two passes, or of one sample alone; in one
life, or killed between two passes and restored. The judge is silent on what a plan allows, and on a
pass that a crash undid and that is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from shiftbook.checkpoint.recorder import (
    Consumed,
    Generated,
    Recorder,
    data_digests,
    optimizer_part,
    uid,
)
from shiftbook.checkpoint.recorder_loss import PolicyLoss
from shiftbook.ledger.plan import Plan, SamplingPlan, UpdatePlan
from shiftbook.verify.coverage import Row
from shiftbook.verify.verdict import Verdict, verify
from tests.checkpoint.test_recorder import DATA, plan

PROMPTS, GROUP, RATE, CLIP = 2, 2, 0.1, 0.2
TOKENS = {uid(d, m): [*DATA[d], 1 + d + m] for d in range(PROMPTS) for m in range(GROUP)}
REWARDS = {name: float(member % 2) for member, name in enumerate(TOKENS)}
ADVANTAGES = {name: (reward - 0.5) / (0.5 + 1e-4) for name, reward in REWARDS.items()}
ON = [False] * len(DATA[0]) + [True]

Proximal = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""From the pass, the values of the first one and those of the present policy."""


def kept(number: int, first: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    return first


def anew(number: int, first: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    return now


def of_one_sample(number: int, first: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    return torch.cat([now[:1], first[1:]])


class Loop:
    """A table of logits by last prompt token; one update for each pass over the same batch."""

    def __init__(self, folder: Path, made: Plan) -> None:
        self.url, self.made = f"sqlite:///{folder}/l.db", made
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16).sin())
        self.names = {"w": self.weight}
        self.optimizer = torch.optim.SGD(self.names.values(), lr=RATE)
        self.steps = 0
        self.first: torch.Tensor | None = None
        self.bundle: str | None = None

    def state(self) -> dict[str, object]:
        moments = optimizer_part(self.optimizer, self.names)
        moments = {**moments, "step": self.steps}
        return {"model": self.names, "masters": self.names, "optimizer": moments}

    def scores(self) -> torch.Tensor:
        logps = torch.log_softmax(self.weight, -1)
        return torch.stack([logps[t[-2] % 16, t[-1]] for t in TOKENS.values()])

    def life(self, passes: range, proximal: Proximal, give: bool) -> Iterator[Recorder]:
        """One process life, paused before its last pass is followed by another life."""
        with Recorder.open(
            self.url, "job", self.made, policy=self.names, version=self.steps, bundle=self.bundle
        ) as record:
            record.data(data_digests(DATA), tokenizer="t")
            record.started("rollout", "engine", "engine#1")
            if self.bundle is None:
                self.make(record)
            else:
                place = {"iteration": 0, "version": self.steps, "cursor": PROMPTS}
                record.restored(self.bundle, self.state(), **place)  # type: ignore[arg-type]
            for number in passes:
                self.one_pass(record, number, proximal, give)
            yield record

    def make(self, record: Recorder) -> None:
        with record.sync(0, self.names, ["engine"]) as sync:
            sync.delivered("engine", "engine#1", self.names, caches_flushed=["none"])
        record.drawn(0, start=0, indices=range(PROMPTS), epoch=0, prompts=DATA[:PROMPTS])
        record.generated(
            0,
            [
                Generated(
                    name, t, None, 0, "engine", "engine#1", sampled=ON, prompt=DATA[int(name[:6])]
                )
                for name, t in TOKENS.items()
            ],
            version=0,
        )
        record.rewarded(0, REWARDS, TOKENS, by="one")

    def one_pass(self, record: Recorder, number: int, proximal: Proximal, give: bool) -> None:
        now = self.scores().detach()
        self.first = now if self.first is None else self.first
        old = proximal(number, self.first, now)
        rows = [
            Consumed(
                name,
                t,
                REWARDS[name],
                ADVANTAGES[name],
                trained=ON,
                old=[0.0] * len(DATA[0]) + [float(value)] if give else None,
                version_min=0,
            )
            for (name, t), value in zip(TOKENS.items(), old, strict=True)
        ]
        record.consumed(0, rows, version=self.steps)
        loss = PolicyLoss(kl_coefficient=0.0, clip_range=CLIP)
        with record.update(0, self.state, loss=loss) as update:
            new, gains = self.scores(), torch.tensor(list(ADVANTAGES.values()))
            ratio = torch.exp(new - old)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            value = -torch.minimum(ratio * gains, clipped * gains).sum() / len(rows)
            on = torch.ones(len(rows))
            loss.watch(
                new=new, old=old, engine=old, advantages=gains, trained=on, divisor=4, value=value
            )
            self.optimizer.zero_grad()
            value.backward()
            self.optimizer.step()
            self.steps += 1
            update.micro_batch(tokens=4, samples=4, divisor=4, groups=PROMPTS)
            update.applied(
                version=self.steps,
                optimizer_step=self.steps,
                learning_rate=RATE,
                loss=float(value.detach()),
                grad_norm=float(self.weight.grad.norm()),  # type: ignore[union-attr]
            )


def run(
    folder: Path,
    proximal: Proximal,
    *,
    passes: int = 3,
    reuse: Literal["exactly", "at_most"] = "exactly",
    give: bool = True,
    killed_after: int | None = None,
    lost: bool = False,
    restored: Proximal | None = None,
) -> tuple[Verdict, torch.Tensor]:
    """The verdict on one batch that is passed over so often, and the weights that come out.

    With ``lost`` the first life makes one more pass after its bundle, which is lost; ``restored``
    is what the second life does, where it is another.
    """
    made = plan(
        objective="rl",
        iterations=1,
        sampling=SamplingPlan(staleness_bound=passes),
        update=UpdatePlan(
            prompts_per_update=PROMPTS,
            group_size=GROUP,
            virtual_ranks=1,
            learning_rate=RATE,
            clip_range=CLIP,
            epochs_per_batch=passes,
            sample_reuse=reuse,
        ),
        required_invariants=("I10", "I12b", "I17", "recomputed.loss"),
    )
    loop = Loop(folder, made)
    begun = range(passes) if killed_after is None else range(killed_after)
    for record in loop.life(begun, proximal, give):
        if killed_after is not None:
            file = folder / "bundle"
            place = {"iteration": 0, "version": loop.steps, "cursor": PROMPTS}
            names = list(TOKENS)
            with record.checkpoint(file, loop.state(), in_flight=names, **place) as bundle:  # type: ignore[arg-type]
                file.write_text(bundle)
            loop.bundle = bundle
            held, steps = loop.weight.detach().clone(), loop.steps
            if lost:
                loop.one_pass(record, killed_after, proximal, give)
                record.flush()
                loop.weight.data.copy_(held)
                loop.steps = steps
        else:
            record.finish(iterations=1, version=loop.steps, policy=loop.names)
    if killed_after is not None:
        for record in loop.life(range(killed_after, passes), restored or proximal, give):
            record.finish(iterations=1, version=loop.steps, policy=loop.names)
    return verify(loop.url), loop.weight.detach()


def row_of(verdict: Verdict) -> Row:
    return next(row for row in verdict.coverage.rows if row.invariant == "I16.proximal")


@pytest.mark.parametrize("killed_after", [None, 1, 2])
def test_values_that_are_kept_are_clean(killed_after: int | None, tmp_path: Path) -> None:
    verdict, _ = run(tmp_path, kept, killed_after=killed_after)
    assert not verdict.findings
    assert row_of(verdict).status == "checked"
    assert row_of(verdict).checks == 2 * len(TOKENS)  # of the two later passes


@pytest.mark.parametrize("proximal", [anew, of_one_sample])
@pytest.mark.parametrize("killed_after", [None, 1, 2])
def test_values_that_are_made_anew_are_found(
    proximal: Proximal, killed_after: int | None, tmp_path: Path
) -> None:
    """The loss recomputes from what it is given, so nothing else in the record tells."""
    honest = tmp_path / "honest"
    honest.mkdir()
    verdict, weights = run(tmp_path, proximal, killed_after=killed_after)
    assert not torch.equal(weights, run(honest, kept)[1])
    assert {f.invariant for f in verdict.findings} == {"I16"}, [f.found for f in verdict.findings]
    assert row_of(verdict).status == "broken"
    assert len(verdict.findings[0].positions) == 2


@pytest.mark.parametrize("killed_after", [1, 2])
def test_a_pass_that_was_lost_is_made_again(killed_after: int, tmp_path: Path) -> None:
    """A bundle within an iteration: the pass after it is the next one, not the first again."""
    again, other = tmp_path / "again", tmp_path / "other"
    again.mkdir()
    other.mkdir()
    verdict, _ = run(again, kept, killed_after=killed_after, lost=True)
    assert not verdict.findings
    replay = next(row for row in verdict.coverage.rows if row.invariant == "replay")
    assert replay.status == "checked"
    verdict, _ = run(other, kept, killed_after=killed_after, lost=True, restored=anew)
    assert {f.invariant for f in verdict.findings} == {"I8", "I16", "replay"}


def test_what_is_not_handed_in_is_not_checked(tmp_path: Path) -> None:
    verdict, _ = run(tmp_path, anew, give=False)
    assert not verdict.findings
    assert row_of(verdict).status == "not checked"


def test_a_replay_buffer_may_score_its_samples_anew(tmp_path: Path) -> None:
    verdict, _ = run(tmp_path, anew, reuse="at_most")
    assert not verdict.findings
    assert row_of(verdict).status == "nothing to check"


def test_of_a_single_pass_there_is_nothing_to_check(tmp_path: Path) -> None:
    verdict, _ = run(tmp_path, anew, passes=1)
    assert not verdict.findings
    assert row_of(verdict).status == "nothing to check"
