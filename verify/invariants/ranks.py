"""Copies of the policy: I20, all ranks hold the same; I22, the model is its masters, cast."""

from __future__ import annotations

from typing import ClassVar

from shiftbook.ledger.events.training import RankState, UpdateApplied
from shiftbook.verify.invariants import model_parallel
from shiftbook.verify.invariants.base import End, Invariant, Step, listed, short


class RanksEqual(Invariant):
    """I20: after an update each data-parallel rank has the same parameters and loss scale.

    Roots are of logical tensors, so ranks that hold shards report the whole that they belong to.
    ``gradient``: each applied the same reduced gradient. ``copies``: what the ranks of a
    model-parallel group each hold whole is the same on all of them, which the roots of logical
    tensors, made of one rank's copy, cannot show.
    """

    id = "I20"
    title = "replicas of the trainer equal"
    needs = "UpdateApplied.ranks: parameters of each rank"
    sees = (UpdateApplied,)
    aspects: ClassVar = {
        "gradient": (
            "replicas applied the same gradient",
            "the reduced gradient in UpdateApplied.ranks",
        ),
        "copies": (
            "ranks of a model-parallel group hold the same copies",
            "copies of the members in UpdateApplied.model_parallel",
        ),
    }

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, UpdateApplied):
            return
        model_parallel.compare(self, step, event, model_parallel.COPIES)
        if not event.ranks:
            self.missing("updates carry no state by rank")
            return
        lead = event.ranks[0]
        silent = {micro.rank for micro in event.micro_batches or ()}
        if silent - {rank.rank for rank in event.ranks}:
            self.missing("a rank that computed a micro batch reports no state")
        for what, values, aspect in (
            ("parameters", [(r.rank, r.params) for r in event.ranks], None),
            ("gradient", [(r.rank, r.gradient) for r in event.ranks], "gradient"),
            ("loss scale", [(r.rank, r.scale) for r in event.ranks], None),
        ):
            if all(value is None for _, value in values):
                if aspect is not None and not event.skipped:
                    self.missing("ranks report no gradient", aspect)
                continue  # without a scaler there is no scale
            wrong = [(rank, value) for rank, value in values if value != values[0][1]]
            rank, found = wrong[0] if wrong else (lead.rank, "")
            self.expect(
                not wrong,
                step.at,
                expected=f"{what} {short(values[0][1])} on all ranks, as on rank {lead.rank}",
                found=f"{short(found)} on rank {rank} (differing: {listed(r for r, _ in wrong)})",
                cause="gradients were not reduced over all ranks, or a rank missed a step",
                action="Reduce over the whole group; broadcast from one rank after each restore.",
                others=(step.track.chain.position if step.track.chain else None,),
                aspect=aspect,
            )
        self._numbers(step, event.ranks)

    def _numbers(self, step: Step, ranks: tuple[RankState, ...]) -> None:
        numbers = [rank.rank for rank in ranks]
        self.expect(
            len(set(numbers)) == len(numbers),
            step.at,
            expected="each rank once",
            found=f"ranks {listed(numbers, 8)}",
            cause="a rank reported for another",
            action="Report by the rank's number in the data-parallel group.",
        )

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        return model_parallel.idle_because(end) if aspect == "copies" else None


class CastEqual(Invariant):
    """I22: the model that computes equals its fp32 masters cast to its dtype, around the update."""

    id = "I22"
    title = "model equals its cast masters"
    needs = "UpdateApplied.cast_before and .cast_after: roots of the masters in the model's dtype"
    sees = (UpdateApplied,)

    def feed(self, step: Step) -> None:
        event = step.event
        if not isinstance(event, UpdateApplied):
            return
        if event.cast_before is None or event.cast_after is None:
            self.missing("updates carry no root of the cast masters")
            return
        for moment, cast, model in (
            ("before", event.cast_before, event.params_before),
            ("after", event.cast_after, event.params_after),
        ):
            self.expect(
                cast == model,
                step.at,
                expected=f"model {short(cast)} {moment} the update, its masters in its dtype",
                found=f"model {short(model)}",
                cause="weights were loaded and masters not refreshed, or not copied back",
                action="Refresh masters after each load, and copy them to the model each step.",
                others=(step.track.chain.position if step.track.chain else None,),
            )
