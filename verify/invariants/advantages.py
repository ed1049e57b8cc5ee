"""Advantages: what rewards are turned into, by the rule that the plan declares (I12b)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from shiftbook.ledger.events.training import BatchConsumed
from shiftbook.ledger.plan import AdvantageRule
from shiftbook.verify.invariants.base import Step
from shiftbook.verify.invariants.linkage import Fault, OverRows, supervised
from shiftbook.verify.lineage import Sample

ADVANTAGE_TOLERANCE = 1e-5
"""Largest |recorded - recomputed| advantage; ``tolerances["I12b"]`` of the plan overrides it.

Recorded ones are float32 of values up to about 3, so rounding alone gives 2e-7."""

ADVANTAGE_FLOOR = 1e-4
"""Added to the standard deviation; ``tolerances["advantage_floor"]`` of the plan overrides it."""

MAX_GROUP = 65_536
"""Members of a group that are looked for; a forged plan cannot make the judge count for ever."""

OWN_RULE = "the plan declares a rule of its own, by which advantages do not follow from rewards"

Row = tuple[str, float, float]
"""Uid, reward and advantage of a sample that was consumed."""


class _Spread:
    """Mean and deviation of some rewards, in float64."""

    def __init__(self, rewards: Sequence[float], correction: float) -> None:
        self.count = len(rewards)
        self.mean = sum(rewards) / len(rewards)
        squares = sum((r - self.mean) * (r - self.mean) for r in rewards)
        self.deviation = math.sqrt(squares / max(1.0, len(rewards) - correction))


Formula = Callable[[float, _Spread, _Spread, float], float]
"""An advantage from a reward, those of its group, those of the batch, and the floor."""


def _leave_one_out(reward: float, group: _Spread, batch: _Spread, floor: float) -> float:
    # reward - (sum - reward) / (n - 1); one alone has no baseline.
    return reward if group.count == 1 else (reward - group.mean) * group.count / (group.count - 1)


FORMULAS: Mapping[AdvantageRule, Formula] = {
    "group": lambda r, group, batch, floor: (r - group.mean) / (group.deviation + floor),
    "group-mean": lambda r, group, batch, floor: r - group.mean,
    "leave-one-out": _leave_one_out,
    "batch-scaled": lambda r, group, batch, floor: (r - group.mean) / (batch.deviation + floor),
    "batch": lambda r, group, batch, floor: (r - batch.mean) / (batch.deviation + floor),
}
"""By the plan's ``update.advantage``.

``group``: GRPO (arXiv 2402.03300). ``group-mean``: Dr. GRPO (arXiv 2503.20783). ``leave-one-out``:
RLOO (arXiv 2402.14740). ``batch-scaled``: the mean of the group, the deviation of the batch.
``batch``: both of the batch, as in REINFORCE++ (arXiv 2501.03262).
"""


class AdvantageRecomputes(OverRows):
    """I12b: advantages follow from rewards by the declared rule.

    Deviations are the population's, or those of a sample where the plan's
    ``tolerances["advantage_correction"]`` is 1. A group is whole: all its members that were not
    dropped are consumed together, and its baseline is theirs. Where the plan lets updates split
    groups, the baseline is of all rewarded members that were not dropped. The batch of a rule is
    what one update consumes, or all that was rewarded of what one iteration drew, of which updates
    then consume a part each.
    """

    id = "I12b"
    title = "advantages recompute from the rewards of the group"
    needs = "rows of BatchConsumed with group, reward and advantage"
    sees = (BatchConsumed,)

    def feed(self, step: Step) -> None:
        if not isinstance(step.event, BatchConsumed) or supervised(step.plan):
            return
        if not self.readable(step):
            return
        assert step.rows is not None
        split = step.plan is not None and step.plan.update.groups == "split"
        groups: dict[str, list[Row]] = {}
        names = ("uid", "group", "reward", "advantage")
        for uid, group, reward, advantage in zip(*(step.rows[n] for n in names), strict=True):
            groups.setdefault(group, []).append((uid, reward, advantage))
        faults: list[Fault] = []
        for group, members in groups.items():
            faults += self._one_draw(group, members)
            if not split:
                faults += self._whole(step, group, members)
        rule = step.plan.update.advantage if step.plan else "group"
        checked = len(step.rows)
        if rule == "other":
            self.missing(OWN_RULE)
            checked = 0
        else:
            faults += self._recomputed(step, FORMULAS[rule], groups, split)
        self.over_rows(
            step,
            faults,
            checked,
            "samples stand in the wrong group, the baseline is of other samples, or the rule is "
            "another than the plan declares",
            "Group by the draw ordinal in the uid, and compute the baseline over whole groups; or "
            "declare update.advantage.",
        )

    def _recomputed(
        self, step: Step, formula: Formula, groups: Mapping[str, list[Row]], split: bool
    ) -> list[Fault]:
        declared = step.plan.tolerances if step.plan else {}
        tolerance = declared.get("I12b", ADVANTAGE_TOLERANCE)
        floor = declared.get("advantage_floor", ADVANTAGE_FLOOR)
        correction = declared.get("advantage_correction", 0.0)
        samples = step.track.samples.values()
        batches = [_Spread([r for rows in groups.values() for _, r, _ in rows], correction)]
        if step.plan is not None and step.plan.update.advantage in ("batch", "batch-scaled"):
            drawn = {self._iteration(step, rows[0][0]) for rows in groups.values()}
            whole = _rewards(s for s in samples if s.iteration in drawn)
            if whole:
                batches.append(_Spread(list(whole.values()), correction))
        by_draw = self._by_draw(step, groups) if split else {}
        faults: list[Fault] = []
        for group, members in groups.items():
            rewards = {uid: reward for uid, reward, _ in members}
            if split:
                # Of what the judge knows; what it does not know, this event says itself.
                rewards = {**by_draw.get(_draw(members[0][0]), {}), **rewards}
            spread = _Spread(list(rewards.values()), correction)
            for uid, reward, advantage in members:
                expected = [formula(reward, spread, batch, floor) for batch in batches]
                if not any(abs(value - advantage) <= tolerance for value in expected):
                    found = f"{advantage:.6g} (mean {spread.mean:.6g} of {spread.count} in group "
                    found += f"{group})"
                    told = f"advantage {expected[-1]:.6g} ± {tolerance:g}"
                    faults.append((uid, told, found, None))
        return faults

    def _iteration(self, step: Step, uid: str) -> int | None:
        sample = step.track.samples.get(uid)
        return None if sample is None else sample.iteration

    def _by_draw(self, step: Step, groups: Mapping[str, list[Row]]) -> dict[str, dict[str, float]]:
        """Rewards of all members of the draws that have a part in a batch."""
        wanted = {_draw(rows[0][0]) for rows in groups.values()}
        found: dict[str, dict[str, float]] = {}
        size = step.plan.update.group_size if step.plan else 0
        for draw in wanted:
            members = (f"{draw}/{member}" for member in range(min(size, MAX_GROUP)))
            known = (step.track.samples.get(uid) for uid in members)
            found[draw] = _rewards(sample for sample in known if sample is not None)
        return found

    def _one_draw(self, group: str, members: Sequence[Row]) -> list[Fault]:
        draw = _draw(members[0][0])
        other = next((uid for uid, _, _ in members if _draw(uid) != draw), None)
        if other is None:
            return []
        return [
            (
                other,
                "one group for each draw",
                f"{members[0][0]} and {other} in group {group}",
                None,
            )
        ]

    def _whole(self, step: Step, group: str, members: Sequence[Row]) -> list[Fault]:
        kept = {uid for uid, _, _ in members}
        draw = _draw(members[0][0])
        if any(_draw(uid) != draw for uid in kept):
            return []  # said already
        size = step.plan.update.group_size if step.plan else len(members)
        for member in range(min(size, MAX_GROUP)):
            uid = f"{draw}/{member}"
            sample = step.track.samples.get(uid)
            if sample is not None and sample.dropped is None and uid not in kept:
                return [(uid, f"consumed with its group {group}", "left out", sample.generated)]
        return []


def _draw(uid: str) -> str:
    return uid.partition("/")[0]


def _rewards(samples: Iterable[Sample]) -> dict[str, float]:
    """Rewards by uid, of samples that have one and were not dropped."""
    return {s.uid: s.reward for s in samples if s.reward is not None and s.dropped is None}
