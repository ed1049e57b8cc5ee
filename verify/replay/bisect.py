"""Finds where two runs of one seed part, and by experiment what makes them.

Two watched runs give the first operation whose output differs. Then one cause of chance after the
other is taken away (a seed given, a clock frozen, ...), and what makes runs equal is the cause.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiftbook.verify.replay.compare import Divergence, first_divergence
from shiftbook.verify.replay.running import LIMIT_S, Asked, run_apart
from shiftbook.verify.replay.story import headline
from shiftbook.verify.replay.trace import Trace

HASH_ORDER = "hash-order"
CAUSES = {
    HASH_ORDER: "the order of a set, or of what follows the hashes of text",
    "python-random": "Python's random without a seed",
    "numpy-random": "numpy's random without a seed",
    "torch-random": "torch's generator without a seed",
    "deterministic-kernels": "a kernel that is not deterministic",
    "one-thread": "threads: results are added in the order in which they come",
    "clock": "the time of day or a clock enters the result",
    "entropy": "the system's entropy (os.urandom, uuid4, secrets)",
}
"""Interventions in the order in which they are tried without a hint, and what each cures."""
REMEDIES = {
    HASH_ORDER: "sort before you iterate, or start with PYTHONHASHSEED=0",
    "python-random": "draw from random.Random(seed) of the job's own seed",
    "numpy-random": "draw from numpy.random.default_rng(seed) of the job's own seed",
    "torch-random": "pass a torch.Generator with the job's seed, or call torch.manual_seed",
    "deterministic-kernels": "call torch.use_deterministic_algorithms(True)",
    "one-thread": "add in a fixed order, not in that of arrival; see torch.set_num_threads too",
    "clock": "keep times out of what is computed, or pass the time in",
    "entropy": "derive it from the job's seed",
}
TRIES = 3
"""Pairs of runs until two differ."""
CONFIRMATIONS = 3
"""Runs that must agree under an intervention before it counts as a cure."""
NEAR = 200
"""Draws and looks at clocks before the first difference that are told."""


@dataclass(frozen=True)
class Report:
    """Where runs part, and why. ``inputs_equal`` says that the operation itself made the
    difference; where it is false something outside torch did, between the operation and the last
    one that agreed."""

    target: str
    cause: str = ""
    cured_by: tuple[str, ...] = ()
    step: int | None = None
    component: str = ""
    module: str = ""
    operation: str = ""
    source: str = ""
    number: int | None = None
    inputs_equal: bool | None = None
    expected: str = ""
    found: str = ""
    suspects: tuple[str, ...] = ()
    divergence: Divergence | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 where runs did not differ; 1 where they did."""
        return 0 if self.divergence is None and not self.operation else 1

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            "outcome": "diverged" if self.exit_code else "same",
            "exit_code": self.exit_code,
            **fields,
            "cured_by": list(self.cured_by),
            "suspects": list(self.suspects),
            "divergence": None if self.divergence is None else self.divergence.plain(),
            "notes": list(self.notes),
        }


@dataclass
class _Parted:
    """The first operation that differs, with what was drawn before it."""

    one: dict[str, Any]
    two: dict[str, Any]
    number: int
    suspects: list[dict[str, Any]] = field(default_factory=list)


def bisect(target: str, asked: Asked | None = None, *, limit_s: float = LIMIT_S) -> Report:
    """Run a Python target until two runs of one seed differ, and say where and why."""
    asked = asked or Asked()
    with tempfile.TemporaryDirectory(prefix="shiftbook-bisect-") as folder:
        search = _Search(target, asked, Path(folder), limit_s)
        return search.report()


class _Search:
    """The runs that it takes."""

    def __init__(self, target: str, asked: Asked, folder: Path, limit_s: float) -> None:
        self._target, self._asked = target, asked
        self._folder, self._limit_s = folder, limit_s
        self._runs = 0

    def report(self) -> Report:
        """The whole search."""
        for _ in range(TRIES):
            one, ops_one = self._watched()
            two, ops_two = self._watched()
            parted = first_parted(ops_one, ops_two)
            divergence = first_divergence(one, two)
            if divergence is not None:
                break
        else:
            again = first_divergence(self._run(()), self._run(()))
            if again is None:
                note = f"{2 * TRIES + 2} runs of one seed showed the same"
                return Report(self._target, notes=(note,))
            divergence, parted = again, None
        causes = self._cure(_hints(parted))
        return _report(self._target, causes, parted, divergence)

    def _run(self, interventions: Sequence[str], operations: Path | None = None) -> Trace:
        self._runs += 1
        return run_apart(
            self._target,
            self._asked,
            self._folder / f"run-{self._runs}",
            number=self._runs,
            keep=operations is not None,
            limit_s=self._limit_s,
            interventions=[name for name in interventions if name != HASH_ORDER],
            operations=operations,
            hash_seed="0" if HASH_ORDER in interventions else str(self._runs),
        )

    def _watched(self) -> tuple[Trace, Path]:
        path = self._folder / f"operations-{self._runs}.jsonl"
        return self._run((), path), path

    def _agree(self, interventions: Sequence[str]) -> bool:
        first = self._run(interventions)
        return all(
            first_divergence(first, self._run(interventions)) is None
            for _ in range(CONFIRMATIONS - 1)
        )

    def _cure(self, hints: Sequence[str]) -> tuple[str, ...]:
        """The least set of interventions that makes runs agree; empty where none does."""
        others = [name for name in CAUSES if name not in hints]
        needed: list[str] = []
        for likely in (list(hints), [*hints, *others]):
            for name in likely:
                if name not in needed and self._agree((name,)):
                    return (name,)
            if len(likely) > 1 and self._agree(likely):
                return self._least(likely)
            needed = likely  # each of these alone has been tried
        return ()

    def _least(self, causes: Sequence[str]) -> tuple[str, ...]:
        """A set of interventions without those that are not needed."""
        needed = list(causes)
        for name in reversed(causes):
            less = [one for one in needed if one != name]
            if less and self._agree(less):
                needed = less
        return tuple(needed)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open(encoding="utf-8") as stream:
            for text in stream:
                yield json.loads(text)


def first_parted(one: Path, two: Path) -> _Parted | None:
    """The first operation that differs between two watched runs; None where none does.

    Draws and looks at clocks whose values differ are suspects: they differ in any run and matter
    only where the result depends on them.
    """
    rest = _events(two)
    theirs: list[dict[str, Any]] = []
    suspects: list[dict[str, Any]] = []
    mine: list[dict[str, Any]] = []
    number = 0
    for event in _events(one):
        if event["kind"] != "operation":
            mine.append(event)
            continue
        other = None
        for candidate in rest:
            if candidate["kind"] == "operation":
                other = candidate
                break
            theirs.append(candidate)
        suspects += _unlike(mine, theirs)
        mine, theirs = [], []
        number += 1
        if other is None:
            return _Parted(event, {"name": "no operation", "outputs": []}, number, suspects)
        if any(event[key] != other[key] for key in ("name", "outputs")):
            return _Parted(event, other, number, suspects)
    theirs += [event for event in rest if event["kind"] != "operation"]
    suspects += _unlike(mine, theirs)
    if suspects:
        # No operation of torch differs: the difference was made outside, after the last draw.
        return _Parted({}, {}, number, suspects)
    return None


def _unlike(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        one
        for one, other in zip(mine, theirs, strict=False)
        if one["kind"] != "cut" and one["name"] == other["name"] and one["value"] != other["value"]
    ]


def _hints(parted: _Parted | None) -> list[str]:
    """Causes in the order in which the watched runs make them likely."""
    if parted is None:
        return []
    hints: list[str] = []
    one, two = parted.one, parted.two
    if one and one.get("inputs") == two.get("inputs") and one.get("name") == two.get("name"):
        if one.get("random"):
            return ["torch-random"]
        if one["inputs"]:
            return ["deterministic-kernels", "one-thread"]
    kinds = [event["kind"] for event in reversed(parted.suspects[-NEAR:])]
    draws = [kind for kind in kinds if kind != "clock"]
    hints += [kind for kind in draws if kind != "entropy"]
    hints += draws
    hints.append(HASH_ORDER)
    hints += kinds
    return list(dict.fromkeys(hints))


def _report(
    target: str, causes: tuple[str, ...], parted: _Parted | None, divergence: Divergence
) -> Report:
    notes = []
    if not causes:
        notes.append(
            "none of these experiments, nor all together, made runs equal: "
            + ", ".join(CAUSES)
            + "; look for memory that was never set, other processes, files, or the network"
        )
    if parted is None:
        notes.append("no torch operation was seen to differ: the difference is made outside torch")
        parted = _Parted({}, {}, 0)
    one, two = parted.one, parted.two
    return Report(
        target=target,
        cause=" and ".join(CAUSES[name] for name in causes),
        cured_by=causes,
        step=one.get("step", divergence.step),
        component=one.get("component") or divergence.component,
        module=one.get("module", ""),
        operation=one.get("name", ""),
        source=one.get("source", ""),
        number=parted.number if one else None,
        inputs_equal=one.get("inputs") == two.get("inputs") if one else None,
        expected=", ".join(one.get("outputs", ())),
        found=", ".join(two.get("outputs", ())),
        suspects=_told(parted.suspects, causes),
        divergence=divergence,
        notes=tuple(notes),
    )


def _told(suspects: list[dict[str, Any]], causes: tuple[str, ...]) -> tuple[str, ...]:
    """Where the cause acted last before the difference; all that drew, where no cause was found."""
    kept = [one for one in suspects[-NEAR:] if not causes or one["kind"] in causes]
    lines = [f"{one['name']} at {one['source'] or 'a library'}" for one in reversed(kept)]
    return tuple(list(dict.fromkeys(lines))[:5])


def report_lines(report: Report) -> Iterator[str]:
    """The report, in lines for a person."""
    if not report.exit_code:
        yield f"same: {report.target}: {report.notes[0]}"
        return
    assert report.divergence is not None
    if report.operation:
        where = f"in {report.module} " if report.module else ""
        yield (
            f"first operation that differs: {report.operation} {where}"
            f"at {report.source or 'an unknown line'}"
        )
        yield (
            f"  step {report.step}, component {report.component or 'not named'}, operation "
            f"{report.number}: {report.expected} and {report.found}"
        )
        yield (
            "  its inputs are equal: it makes the difference itself"
            if report.inputs_equal
            else "  its inputs differ already: the difference came from outside torch before it"
        )
    yield f"cause: {report.cause or 'not found'}"
    for name in report.cured_by:
        yield f"  shown by: runs agree under the intervention {name}"
        yield f"  do:       {REMEDIES[name]}"
    for suspect in report.suspects:
        yield f"  drawn by: {suspect}"
    yield f"first observation that differs: {headline(report.divergence)}"
    yield from report.notes
