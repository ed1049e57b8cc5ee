"""What I5 and I20 compare over the ranks of a model-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shiftbook.ledger.events.training import ModelParallelMember, UpdateApplied
from shiftbook.verify.invariants.base import End, Invariant, Step, listed, short

_NONE = (
    "updates tell no model-parallel group (where each rank holds the whole model, let the plan say "
    "update.model_parallel: false)"
)


@dataclass(frozen=True)
class Comparison:
    """A field of the members that must be equal in each group, and the words of its finding."""

    field: Literal["copies", "fed"]
    what: str
    cause: str
    action: str


COPIES = Comparison(
    "copies",
    "copies of what its ranks hold whole",
    "the gradient of these tensors was not summed over the group, a rank missed a step, or loaded "
    "another copy",
    "Sum their gradients over the group; broadcast them from one rank after each load.",
)
FED = Comparison(
    "fed",
    "tokens computed",
    "the data was dealt out by process rank, where it goes by data-parallel rank",
    "Give every rank of a model-parallel group the rows of its data-parallel rank.",
)


def compare(invariant: Invariant, step: Step, event: UpdateApplied, by: Comparison) -> None:
    """Hold the members of each group against each other, counted in the aspect ``by.field``."""
    groups = event.model_parallel or ()
    about = [group for group in groups if any(getattr(m, by.field) for m in group.members)]
    declared = None if step.plan is None else step.plan.update.model_parallel
    if not about:
        if declared is not False and not event.skipped:
            reason = f"model-parallel groups tell no {by.what}" if groups else _NONE
            invariant.missing(reason, by.field)
        return
    for group in about:
        numbers = [member.rank for member in group.members]
        invariant.expect(
            len(set(numbers)) == len(numbers),
            step.at,
            expected=f"each rank of group {group.name} once",
            found=f"ranks {listed(numbers, 8)}",
            cause="a rank reported for another",
            action="Report by the rank's number in the whole job.",
            aspect=by.field,
        )
        if len(group.members) == 1:
            invariant.missing("one rank alone reports of a model-parallel group", by.field)
        elif not all(getattr(member, by.field) for member in group.members):
            invariant.missing(f"some ranks of a group tell no {by.what}", by.field)
        else:
            _equal(invariant, step, group.name, group.members, by)


def _equal(
    invariant: Invariant,
    step: Step,
    group: str,
    members: Sequence[ModelParallelMember],
    by: Comparison,
) -> None:
    lead = members[0]
    expected: str = getattr(lead, by.field)
    wrong = [member for member in members if getattr(member, by.field) != expected]
    first = wrong[0] if wrong else lead
    names = f": {listed(first.differing)}" if wrong and by.field == "copies" else ""
    invariant.expect(
        not wrong,
        step.at,
        expected=f"{by.what} {short(expected)} on all ranks of group {group}, as on rank "
        f"{lead.rank}",
        found=f"{short(getattr(first, by.field))} on rank {first.rank}{names} (differing: "
        f"{listed(m.rank for m in wrong)})",
        cause=by.cause,
        action=by.action,
        others=(step.track.chain.position if step.track.chain else None,),
        aspect=by.field,
    )


def idle_because(end: End) -> str | None:
    """Why there is no group to compare; None where one should have been recorded."""
    plan = end.job.plan
    if plan is not None and plan.update.model_parallel is False:
        return "the plan says that each rank holds the whole model"
    return None
