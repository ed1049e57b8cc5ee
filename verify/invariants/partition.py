"""I5: the batch is split over virtual ranks as declared: disjoint, whole, groups in one piece."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from shiftbook.ledger.events.training import BatchConsumed, UpdateApplied
from shiftbook.verify.invariants import model_parallel
from shiftbook.verify.invariants.base import End, Invariant, Step, listed


class Partition(Invariant):
    """I5: each group is computed by one virtual rank, and every declared virtual rank takes part.

    The update names where each virtual rank ran and how many groups it added; they are the groups
    of the consumed rows. Where it ran (pid, device) may change at any time: that is no finding.
    ``fed``: the ranks of a model-parallel group computed the same tokens in the same order.
    """

    id = "I5"
    title = "batch split over virtual ranks, whole and disjoint"
    needs = "virtual_rank and group in the rows of BatchConsumed; UpdateApplied.virtual_ranks"
    sees = (
        BatchConsumed,
        UpdateApplied,
    )

    aspects: ClassVar = {
        "fed": (
            "ranks of a model-parallel group are fed the same",
            "what the members in UpdateApplied.model_parallel were fed",
        )
    }

    def feed(self, step: Step) -> None:
        if isinstance(step.event, BatchConsumed):
            self._consumed(step)
        elif isinstance(step.event, UpdateApplied):
            model_parallel.compare(self, step, step.event, model_parallel.FED)
            self._updated(step, step.event)

    def aspect_idle_because(self, aspect: str, end: End) -> str | None:
        return model_parallel.idle_because(end)

    def _consumed(self, step: Step) -> None:
        if step.rows is None or step.rows.problem:
            self.missing("rows of BatchConsumed cannot be read")
            return
        if step.plan is not None and step.plan.update.groups == "split":
            self.passed()  # nothing is promised of where the samples of a group are computed
            return
        owner: dict[str, int] = {}
        split = []
        for group, rank in zip(step.rows["group"], step.rows["virtual_rank"], strict=True):
            if owner.setdefault(group, rank) != rank:
                split.append(f"group {group} by {owner[group]} and {rank}")
        self.expect(
            not split,
            step.at,
            expected="each group computed by one virtual rank",
            found=listed(dict.fromkeys(split)),
            cause="samples were dealt out by position, or a group was computed twice",
            action="Deal out whole groups in the declared order.",
        )

        if step.plan is not None and step.plan.update.dealing == "blocks":
            self._blocks(step, owner, step.plan.update.virtual_ranks)

    def _blocks(self, step: Step, owner: dict[str, int], ranks: int) -> None:
        assert step.rows is not None
        uids = step.rows["uid"]
        late = next((b for a, b in pairwise(uids) if b < a), None)
        self.expect(
            late is None,
            step.at,
            expected="rows in order of uid, as the plan's blocks say",
            found=f"{late} after a later one",
            cause="samples stand in the order in which they were answered or filtered",
            action="Sort by uid before the batch is made, or declare dealing any.",
        )
        groups = sorted(owner, key=lambda name: (len(name), name))
        expected = {name: n * ranks // len(groups) for n, name in enumerate(groups)}
        wrong = [name for name in groups if owner[name] != expected[name]]
        first = wrong[0] if wrong else ""
        self.expect(
            not wrong,
            step.at,
            expected=f"group {first} on virtual rank {expected.get(first)}, in aligned blocks",
            found=f"on {owner.get(first)} ({len(wrong)} groups elsewhere)",
            cause="groups were dealt out by another rule than declared, or by who was free",
            action="Deal out in blocks by draw ordinal, or declare dealing any.",
        )

    def _updated(self, step: Step, event: UpdateApplied) -> None:
        pending = step.track.pending
        ranks = [entry.virtual_rank for entry in event.virtual_ranks]
        declared = step.plan.update.virtual_ranks if step.plan else len(ranks)
        self.expect(
            len(ranks) == declared and len(set(ranks)) == len(ranks),
            step.at,
            expected=f"{declared} virtual ranks, each once",
            found=f"virtual ranks {listed(sorted(ranks), 8) or 'none'}",
            cause="a resize changed what the training sees",
            action="Keep the virtual ranks; move them between processes.",
        )
        if pending.unknown is not None or not pending.positions:
            if pending.unknown is not None:
                self.missing(pending.unknown)
            return
        for entry in event.virtual_ranks:
            groups = len(pending.groups_by_rank.get(entry.virtual_rank, ()))
            self.expect(
                entry.groups == groups,
                step.at,
                expected=f"virtual rank {entry.virtual_rank} added its {groups} consumed groups",
                found=f"{entry.groups} groups",
                cause="a rank's groups were lost or counted twice in a move",
                action="Carry the uids accumulated with the live snapshot.",
                others=pending.positions,
            )
