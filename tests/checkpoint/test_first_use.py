"""Goal: state that was right when it was restored and is overwritten before it is used is named by
the verifier: which part, or which random stream.

Method: a small elastic trainer is recorded through the public `Recorder` alone, saved as a bundle,
restored in a second attempt; in between runs what real jobs have run there (an optimizer made anew,
weights read again from disk, a late seed). The verdict is read from the ledger afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shiftbook.checkpoint.bundle import restore_bundle, save_bundle
from shiftbook.checkpoint.elastic import VirtualRanks, fp32_masters
from shiftbook.checkpoint.feed import Feed
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.checkpoint.random_streams import RandomStreams
from shiftbook.checkpoint.recorder import Consumed, Recorder, data_digests, dataset_digest, uid
from shiftbook.checkpoint.sampler import Draw, Sampler
from shiftbook.ledger.plan import (
    DataPlan,
    MixturePlan,
    Plan,
    SamplingPlan,
    SourcePlan,
    StagePlan,
    UpdatePlan,
)
from shiftbook.verify.verdict import Verdict, verify

DATA = [[n, n + 1, n + 2, n % 3] for n in range(9)]
GROUPS, RATE, SEED = 4, 0.01, 19
FIRST, LAST = 2, 4
"""Updates before the bundle, and in all."""

PLAN = Plan(
    seed=SEED,
    iterations=LAST,
    objective="sft",
    data=DataPlan(
        dataset_digest=dataset_digest(data_digests(DATA)),
        tokenizer_digest="t",
        dataset_size=len(DATA),
        sampler_rule="mixture-v1",
        seed=SEED,
        mixture=MixturePlan(
            sources=(SourcePlan(name="easy", size=6), SourcePlan(name="hard", size=3)),
            stages=(
                StagePlan(start=0, shares={"easy": 3, "hard": 1}),
                StagePlan(start=6, shares={"easy": 1, "hard": 1}),
            ),
        ),
    ),
    sampling=SamplingPlan(),
    update=UpdatePlan(
        prompts_per_update=GROUPS, group_size=1, virtual_ranks=2, learning_rate=RATE, clip_norm=1.0
    ),
    required_invariants=("I1", "I2", "I3", "I9", "I9b", "I10", "I11", "I17", "I17b", "I18", "I21"),
)


def loss(model: torch.nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(rows.bfloat16()).float().square().sum(), rows.numel()


@dataclass
class Job:
    """All that one attempt holds."""

    trainer: VirtualRanks
    feed: Feed
    streams: RandomStreams

    @classmethod
    def make(cls) -> Job:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        ).bfloat16()
        masters = fp32_masters(model)
        optimizer = torch.optim.AdamW(masters.values(), lr=RATE)
        trainer = VirtualRanks.declared(model, optimizer, loss, PLAN, masters=masters)
        streams = RandomStreams({"augment": torch.Generator()})
        streams.seed(SEED)
        return cls(trainer, Feed(Sampler.declared(PLAN.data)), streams)

    def state(self) -> dict[str, Any]:
        return {"optimizer": {}, **self.trainer.parts()}

    def train(self, record: Recorder, change: Callable[[list[Draw]], list[Draw]]) -> None:
        """One iteration."""
        step = self.trainer.updates
        with record.iteration(step):
            draws = change(self.feed.take(GROUPS))
            rows = [DATA[draw.index] for draw in draws]
            record.drawn(
                step,
                start=draws[0].ordinal,
                epoch=draws[0].epoch,
                indices=[draw.index for draw in draws],
                prompts=rows,
            )
            record.random_states(step, "before", self.streams.values())
            noise = torch.randn(GROUPS, 4, generator=self.streams["augment"])
            record.random_states(step, "after", self.streams.values())
            record.consumed(
                step,
                [
                    Consumed(uid(d.ordinal), row, virtual_rank=n // 2)
                    for n, (d, row) in enumerate(zip(draws, rows, strict=True))
                ],
                version=step,
            )
            with record.update(step, self.state) as update:
                for group, (draw, row) in enumerate(zip(draws, rows, strict=True)):
                    batch = torch.tensor([row]) + 0.01 * noise[group]
                    made = self.trainer.add(group, batch, [uid(draw.ordinal)])
                    update.micro_batch(
                        tokens=made.weight,
                        samples=1,
                        divisor=GROUPS * made.weight,
                        virtual_rank=group // 2,
                        groups=[uid(draw.ordinal)[:6]],
                    )
                report = self.trainer.update(RATE)
                update.applied(
                    version=report.update,
                    optimizer_step=report.update,
                    learning_rate=RATE,
                    loss=report.loss,
                    grad_norm=report.grad_norm,
                    clipped=report.clipped,
                )
            self.feed.consumed(draw.ordinal for draw in draws)


Meddle = Callable[[Job, Path], None]


def run(
    folder: Path,
    meddle: Meddle = lambda job, bundle: None,
    change: Callable[[list[Draw]], list[Draw]] = lambda draws: draws,
) -> tuple[Verdict, dict[str, dict[str, torch.Tensor]]]:
    """Two updates, a bundle, a new attempt from it, ``meddle``, two updates; the verdict."""
    url = f"sqlite:///{folder}/ledger.db"
    job = Job.make()
    with Recorder.open(url, "tune", PLAN, policy=job.trainer.parts()["model"]) as record:
        record.data(data_digests(DATA), tokenizer="t")
        for _ in range(FIRST):
            job.train(record, lambda draws: draws)
        fields = {"job": "tune", "attempt": record.attempt, "iteration": FIRST}
        fields |= {"policy_version": FIRST, "rng": job.streams.states(), **job.feed.bundle_fields()}
        saved = save_bundle(folder / "bundles", fields, job.trainer.parts())
        with record.checkpoint(
            saved.path,
            {**job.state(), **job.streams.parts()},
            iteration=FIRST,
            version=FIRST,
            cursor=job.feed.cursor,
        ) as bundle:
            pass

    manifest, parts = load_manifest(saved.path), restore_bundle(saved.path)
    job = Job.make()
    with Recorder.open(
        url, "tune", PLAN, policy=parts["model"], version=FIRST, iteration=FIRST, bundle=bundle
    ) as record:
        record.data(data_digests(DATA), tokenizer="t")
        job.trainer.load(parts, manifest.policy_version)
        job.streams.restore(manifest.rng)
        job.feed.restore_bundle(manifest.model_dump())
        record.restored(
            bundle,
            {**job.state(), **job.streams.parts()},
            iteration=manifest.iteration,
            version=manifest.policy_version,
            cursor=job.feed.cursor,
        )
        meddle(job, saved.path)
        for _ in range(FIRST, LAST):
            job.train(record, change)
        record.finish(iterations=LAST, version=LAST, policy=job.trainer.parts()["model"])
    return verify(url), job.trainer.parts()


def test_an_undisturbed_resume_is_clean_and_has_the_bits_of_an_unbroken_run(
    tmp_path: Path,
) -> None:
    verdict, parts = run(tmp_path)
    assert verdict.word == "clean", (verdict.findings, verdict.could_not)
    url = f"sqlite:///{tmp_path}/whole.db"
    whole = Job.make()
    with Recorder.open(url, "tune", PLAN, policy=whole.trainer.parts()["model"]) as record:
        for _ in range(LAST):
            whole.train(record, lambda draws: draws)
    for part, tensors in whole.trainer.parts().items():
        for name, tensor in tensors.items():
            assert torch.equal(parts[part][name], tensor), (part, name)


def optimizer_again(job: Job, bundle: Path) -> None:
    """The optimizer is made after the load, as when a framework wraps the model late."""
    trainer = job.trainer
    trainer.optimizer = torch.optim.AdamW(trainer.masters.values(), lr=RATE)


def step_counters_lost(job: Job, bundle: Path) -> None:
    for state in job.trainer.optimizer.state.values():
        state["step"].zero_()


def weights_from_disk(job: Job, bundle: Path) -> None:
    """The base model's weights are read again, into the model that computes."""
    fresh = Job.make().trainer
    with torch.no_grad():
        for name, parameter in job.trainer.parameters.items():
            parameter.copy_(fresh.parameters[name])


def masters_from_the_model(job: Job, bundle: Path) -> None:
    """Masters are built again from the bf16 weights."""
    parts = restore_bundle(bundle, ["model"])
    for name, master in job.trainer.masters.items():
        master.copy_(parts["model"][name].float())


def reseeded(job: Job, bundle: Path) -> None:
    job.streams.seed(SEED)


def drawn_by_another(job: Job, bundle: Path) -> None:
    torch.rand(1, generator=job.streams["augment"])


@pytest.mark.parametrize(
    ("meddle", "invariant", "named"),
    [
        (optimizer_again, "I17b", "optimizer"),
        (step_counters_lost, "I17b", "optimizer"),
        (weights_from_disk, "I17b", "model"),
        (masters_from_the_model, "I17b", "masters"),
        (reseeded, "I9b", "augment"),
        (drawn_by_another, "I9b", "augment"),
    ],
)
def test_what_was_overwritten_before_its_first_use_is_named(
    tmp_path: Path, meddle: Meddle, invariant: str, named: str
) -> None:
    verdict, _ = run(tmp_path, meddle)
    found = [finding for finding in verdict.findings if finding.invariant == invariant]
    assert found, verdict.findings
    assert f"differing: {named}" in found[0].found
    if invariant == "I17b":
        assert named in found[0].expected
        assert "first use" in found[0].expected


def test_the_bundle_without_meddling_differs_from_each(tmp_path: Path) -> None:
    """None of the faults is an accident of the numbers: each changes the policy that comes out."""
    _, wanted = run(tmp_path)
    for number, meddle in enumerate((optimizer_again, weights_from_disk, reseeded)):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, parts = run(folder, meddle)
        assert any(
            not torch.equal(tensor, wanted["masters"][name])
            for name, tensor in parts["masters"].items()
        )


def test_a_draw_that_leaves_the_declared_mixture_is_found(tmp_path: Path) -> None:
    """The verifier recomputes the mixture from the plan: another index is I3."""

    def change(draws: list[Draw]) -> list[Draw]:
        first = draws[0]
        return [Draw(first.ordinal, first.epoch, (first.index + 1) % 9, ""), *draws[1:]]

    verdict, _ = run(tmp_path, change=change)
    assert "I3" in {finding.invariant for finding in verdict.findings}
