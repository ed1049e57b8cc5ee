"""Compares two traces and names the first thing that is not the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from shiftbook.checkpoint.errors import CheckpointError
from shiftbook.verify.replay.trace import Line, Trace

MARGIN = 16.0
"""How many times the greatest noise between the runs of a calibration counts as noise."""
CALIBRATION_RUNS = 3
"""Runs of one seed that a tolerance is measured over. With uniform noise in two values the next run
lies beyond MARGIN times the greatest difference with probability 9 / 16**4 at most, that is 1.4e-4;
two runs and a margin of 8 would give 6e-2."""
LISTED = 5
"""Other differences of the same step that are named."""

EXACT = ("form", "tensors")
"""Fields that no tolerance frees."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between what was expected and what came, and how far it goes.

    ``elements``, ``differing``, ``largest`` and ``relative`` describe a tensor whose bits both
    runs kept, and are None elsewhere. ``events`` are the positions in the two ledgers, None for a
    side that is none.
    """

    step: int
    component: str
    kind: str
    name: str
    what: str
    expected: str
    found: str
    events: tuple[int | None, int | None]
    elements: int | None = None
    differing: int | None = None
    largest: float | None = None
    relative: float | None = None
    tolerance: float | None = None
    same_before: int = 0
    """Observations before it that were the same."""
    others: tuple[str, ...] = ()
    """Other differences of the same step, named up to LISTED."""
    others_count: int = 0
    """Other differences of the same step, in all."""

    @property
    def uid(self) -> str | None:
        """The sample's uid, where it is one."""
        return self.name if self.kind == "sample" else None

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {
            "uid": self.uid,
            "others": list(self.others),
            "events": {"expected": self.events[0], "found": self.events[1]},
        }


@dataclass(frozen=True)
class Tolerance:
    """What may differ: by group the greatest relative difference, and fields that are free.

    A group is a component with a number's name or the first part of a tensor's. What was the same
    in both runs of the calibration has the tolerance 0.
    """

    relative: Mapping[str, float] = field(default_factory=dict)
    free: frozenset[str] = frozenset()

    def of(self, line: Line) -> float:
        """Tolerance of a line, 0 where nothing was measured."""
        return self.relative.get(group(line), 0.0)

    def plain(self) -> dict[str, float]:
        """By group; a free field has the tolerance infinity."""
        return dict(self.relative) | dict.fromkeys(sorted(self.free), math.inf)

    @classmethod
    def from_plain(cls, plain: Mapping[str, float]) -> Tolerance:
        """What ``plain`` gave."""
        return cls(
            {name: value for name, value in plain.items() if math.isfinite(value)},
            frozenset(name for name, value in plain.items() if math.isinf(value)),
        )


def group(line: Line, field_name: str = "") -> str:
    """What shares one tolerance with a line."""
    name = line.name.split("/")[0] if line.kind == "tensor" else line.name
    if line.kind in ("sample", "random"):
        name = field_name or "reward"
    return f"{line.component}:{line.kind}:{name}"


def first_divergence(
    expected: Trace, found: Trace, tolerance: Tolerance | None = None
) -> Divergence | None:
    """The first line that differs, in the expected trace's order; None where all agree.

    Where ``expected`` is a part (a ledger, a golden trace) what it leaves out is not asked for.
    """
    same = 0
    first: Divergence | None = None
    others: list[str] = []
    count = 0
    for difference in differences(expected, found, tolerance):
        if difference is None:
            same += first is None
            continue
        if first is None:
            first = difference
        elif difference.step > first.step:
            break
        else:
            count += 1
            if len(others) < LISTED:
                others.append(f"{difference.component} {difference.kind} {difference.name}")
    if first is None:
        return None
    return _with(first, same_before=same, others=tuple(others), others_count=count)


def _with(divergence: Divergence, **values: Any) -> Divergence:
    return replace(divergence, **values)


def differences(
    expected: Trace, found: Trace, tolerance: Tolerance | None = None
) -> Iterator[Divergence | None]:
    """For each line of either trace how it differs, or None; ordered by the expected trace."""
    theirs = {line.key: line for line in found.lines}
    known = {line.key for line in expected.lines}
    extra: dict[int, list[Line]] = {}
    for line in found.lines:
        if line.key not in known:
            extra.setdefault(line.step, []).append(line)
    steps = [line.step for line in expected.lines]
    last = steps[-1] if steps else -1
    for index, line in enumerate(expected.lines):
        other = theirs.get(line.key)
        yield _missing(line) if other is None else _compare(line, other, tolerance)
        if index + 1 == len(steps) or steps[index + 1] != line.step:
            for more in extra.pop(line.step, ()):
                if expected.whole or _asked(expected, more):
                    yield _extra(more)
    for step in sorted(extra):
        if expected.whole and step > last:
            yield from (_extra(line) for line in extra[step])


def _asked(expected: Trace, line: Line) -> bool:
    """True where a partial trace holds this kind for this component and step, so that one more
    is a difference: a sample too many, say."""
    if line.detail or line.kind not in ("sample",):
        return False
    return any(
        one.kind == line.kind and one.component == line.component and one.step == line.step
        for one in expected.lines
    )


def _missing(line: Line) -> Divergence:
    return Divergence(
        line.step, line.component, line.kind, line.name, "missing", _shown(line), "nothing",
        (line.event, None),
    )  # fmt: skip


def _extra(line: Line) -> Divergence:
    return Divergence(
        line.step, line.component, line.kind, line.name, "unexpected", "nothing", _shown(line),
        (None, line.event),
    )  # fmt: skip


def _shown(line: Line) -> str:
    return " ".join(f"{name}={value}" for name, value in line.fields.items())


def _compare(line: Line, other: Line, tolerance: Tolerance | None) -> Divergence | None:
    for name, value in line.fields.items():
        if name not in other.fields or other.fields[name] == value:
            continue
        if tolerance is None or name in EXACT:
            return _changed(line, other, name)
        found = _beyond(line, other, name, tolerance)
        if found is not None:
            return found
    return None


def _beyond(line: Line, other: Line, name: str, tolerance: Tolerance) -> Divergence | None:
    """The difference of one field where it exceeds the tolerance."""
    if name in ("norm", "root") or group(line, name) in tolerance.free:
        return None  # a tensor is looked at once, with its fingerprint; roots follow from tensors
    divergence = _changed(line, other, name)
    apart = divergence.relative
    if line.kind == "tensor" and divergence.differing is None:
        apart = relative(line.fields["norm"], other.fields["norm"])
    limit = tolerance.of(line)
    if apart is not None and apart <= limit:
        return None
    return _with(divergence, tolerance=limit, relative=apart)


def relative(left: str, right: str) -> float | None:
    """|left - right| over the greater magnitude; None where they are no numbers."""
    try:
        a, b = float(left), float(right)
    except ValueError:
        return None
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def _changed(line: Line, other: Line, name: str) -> Divergence:
    measured: dict[str, Any] = {}
    if line.kind == "tensor" and line.fields["form"] == other.fields.get("form"):
        measured = _elements(line, other)
    elif line.kind == "number" or name == "reward":
        measured = _numbers(line.fields[name], other.fields[name])
    return Divergence(
        line.step, line.component, line.kind, line.name, name, line.fields[name],
        other.fields[name], (line.event_of(name), other.event_of(name)), **measured,
    )  # fmt: skip


def _numbers(left: str, right: str) -> dict[str, Any]:
    apart = relative(left, right)
    if apart is None:
        return {}
    return {"largest": abs(float(left) - float(right)), "relative": apart}


def _elements(line: Line, other: Line) -> dict[str, Any]:
    form = line.fields["form"]
    dtype, _, shape = form.partition("[")
    size = math.prod(int(n) for n in shape.rstrip("]").split(",") if n)
    if not (line.kept and other.kept):
        return {"elements": size}
    from shiftbook.checkpoint.kept_tensors import compare_kept

    try:
        found = compare_kept(line.kept, other.kept, dtype)
    except CheckpointError:
        return {"elements": size}  # the bundle is gone: its manifest still tells them apart
    return {
        "elements": found.elements,
        "differing": found.differing,
        "largest": found.largest,
        "relative": found.relative,
    }


def calibrated(traces: Sequence[Trace]) -> Tolerance:
    """The tolerance that runs under the same conditions and seed show: MARGIN times the greatest
    relative difference of each group over all steps and pairs of runs. A digest of a sample or of
    a random stream that varied at all is free for its component."""
    noise: dict[str, float] = {}
    free: set[str] = set()
    for one, two in combinations(traces, 2):
        _measure(one, two, noise, free)
    return Tolerance(noise, frozenset(free))


def _measure(one: Trace, two: Trace, noise: dict[str, float], free: set[str]) -> None:
    theirs = {line.key: line for line in two.lines}
    for line in one.lines:
        other = theirs.get(line.key)
        if other is None or other.fields == line.fields:
            continue
        for name, value in line.fields.items():
            found = other.fields.get(name)
            if found is None or found == value or name in ("norm", "root", *EXACT):
                continue
            apart = _noise(line, other, name)
            if apart is None or math.isinf(apart) or line.kind in ("sample", "random"):
                free.add(group(line, name))
            else:
                noise[group(line)] = max(noise.get(group(line), 0.0), MARGIN * apart)


def _noise(line: Line, other: Line, name: str) -> float | None:
    if line.kind != "tensor":
        return relative(line.fields[name], other.fields[name])
    if line.kept and other.kept:
        found: float | None = _elements(line, other)["relative"]
        return found
    return relative(line.fields["norm"], other.fields["norm"])
