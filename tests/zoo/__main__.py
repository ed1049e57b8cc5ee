"""``python -m tests.zoo``: put every fault into the job, judge each run, print what was found.

The quick form takes one seed and one trigger; ``--full`` takes five seeds and every trigger. Exit
code 1 where a goal is missed: every named fault caught, 95 % of the counted mutations, no
legitimate run flagged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache

from tests.zoo import mutations
from tests.zoo.faults import load_all
from tests.zoo.job import Shape
from tests.zoo.legitimate import VARIANTS
from tests.zoo.run import Result, run
from tests.zoo.table import Row, lines, why_void

SEEDS = (0, 1, 2, 3, 4)
MUTATIONS = 520
"""Drawn in the quick form; some leave the final state as it is and do not count."""
HONEST = tuple(range(10))
"""Seeds whose rewards give the range that a person would expect."""
GOAL = 0.95
QUICK_S = 180
"""Most that the quick form may take on two idle cores."""
QUICK_RUNS = 750
"""Most runs of the quick form: at about 0.5 s of CPU time each, they keep to it."""

Task = tuple[str, str, int, int]
"""(kind, name, seed, trigger)."""


@lru_cache
def plain_final(seed: int) -> str | None:
    """Final state of the plain honest run."""
    return run(Shape(seed=seed)).final


def work(task: Task) -> tuple[Task, Result]:
    """One run, in a process of the pool."""
    kind, name, seed, trigger = task
    if kind == "fault":
        fault = load_all()[name]
        return task, run(fault.shape(seed, trigger), lambda p: fault.put_in(p, trigger))
    if kind == "mutation":
        put_in = mutations.draw(int(name)).put_in
        return task, run(Shape(seed=seed), put_in, uncounted=plain_final(seed))
    if kind == "variant":
        variant = VARIANTS[name]
        return task, run(variant.shape(seed), variant.put_in)
    raise ValueError(f"expected a fault, mutation or variant, found {kind}")


def tasks(full: bool) -> Iterator[Task]:
    """All runs that the form asks for."""
    seeds = SEEDS if full else SEEDS[:1]
    for name in VARIANTS:
        for seed in HONEST if name == "plain" else seeds:
            yield "variant", name, seed, 0
    for name, fault in load_all().items():
        for seed in seeds:
            for trigger in fault.triggers() if full else fault.triggers()[:1]:
                yield "fault", name, seed, trigger
    for number in range(MUTATIONS):
        for seed in seeds:
            yield "mutation", str(number), seed, 0


class Report:
    """Takes in results and says whether the goals are met."""

    def __init__(self) -> None:
        self.honest: dict[tuple[str, int], Result] = {}
        """Runs of the variants by name and seed: what a fault's run is compared with."""
        self.faults: dict[str, Row] = {}
        self.mutants: dict[str, Row] = {}
        self.variants: dict[str, Row] = {}

    def range(self) -> list[tuple[float, float]]:
        """Least and largest mean reward of honest runs, by iteration."""
        curves = [r.rewards for (name, _), r in self.honest.items() if name == "plain"]
        return [(min(c), max(c)) for c in zip(*curves, strict=True)]

    def shown(self, result: Result) -> bool:
        """True where the rewards leave the range of honest runs: a person could have seen it."""
        return any(
            not low <= reward <= high
            for reward, (low, high) in zip(result.rewards, self.range(), strict=False)
        )

    def baseline(self, task: Task) -> Result:
        """The honest run of the same shape and seed."""
        kind, name, seed, trigger = task
        base = load_all()[name].base(trigger).name if kind == "fault" else "plain"
        return self.honest[base, seed]

    def add(self, task: Task, result: Result) -> None:
        """Take in one run; honest ones come first."""
        kind, name, seed, trigger = task
        label = f"seed {seed}"
        if kind == "fault":
            fault = load_all()[name]
            label += f", {fault.label(trigger)}"
            row = self.faults.setdefault(name, Row(name, fault.row, fault.says))
            # A fault without an effect (no prompt came again, say) is no fault: it is not counted.
            void = result.final == self.baseline(task).final and not result.caught
            if void:
                row.void.append(f"{label}: {why_void(result)}")
            row.add(result, label, counts=not void, shown=self.shown(result))
        elif kind == "mutation":
            row = self.mutants.setdefault(name, Row(str(mutations.draw(int(name))), "-", ""))
            changed = result.final is not None and result.final != self.baseline(task).final
            row.add(result, label, counts=changed, shown=self.shown(result))
        else:
            self.honest[name, seed] = result
            row = self.variants.setdefault(name, Row(name, "-", VARIANTS[name].says))
            row.add(result, label, counts=True, shown=False)
            if result.caught or result.error:
                row.notes.append(
                    "; ".join([*result.told, *result.could_not[:2], result.error]) or "?"
                )

    def print(self) -> bool:
        """The tables and the goals; True where all are met."""
        for line in lines(list(self.faults.values())):
            print(line)
        missed = [r for r in self.faults.values() if r.caught < r.counted or not r.counted]
        void = sum(len(row.void) for row in self.faults.values())
        counted = sum(row.counted for row in self.mutants.values())
        caught = sum(row.caught for row in self.mutants.values())
        stopped = sum(row.stopped for row in self.mutants.values())
        runs = sum(row.runs for row in self.mutants.values())
        flagged = {n: row for n, row in self.variants.items() if row.caught or row.stopped}
        judged = sum(row.runs for row in self.variants.values())
        print(f"\nmissed mutations ({counted - caught} of {counted} counted):")
        for number, row in self.mutants.items():
            if row.caught < row.counted:
                seen = f", the reward curve shows {row.shown}" if row.shown else ""
                print(f"  {number}: {row.name}: {row.counted - row.caught} of {row.counted}{seen}")
        print(f"\nfaults without an effect ({void} runs, not counted):")
        for row in self.faults.values():
            for run_and_reason in row.void:
                print(f"  {row.row} {row.name}, {run_and_reason}")
        for row in missed:
            print(f"missed fault {row.row} {row.name}: {'; '.join(row.notes[:5])}")
        for name, row in flagged.items():
            print(f"flagged honest run {name}: {row.notes[-1][:400] if row.notes else ''}")
        runs_of_faults = sum(row.runs for row in self.faults.values())
        shown = sum(row.shown for row in self.faults.values())
        share = caught / counted if counted else 1.0
        print(
            f"\nnamed faults: {len(self.faults) - len(missed)} of {len(self.faults)} caught in "
            f"every one of {runs_of_faults - void} runs with an effect ({void} had none); the "
            f"reward curve shows {shown} of them"
        )
        print(
            f"mutations: {caught} of {counted} caught ({share:.1%}); {runs} runs, of which "
            f"{stopped} stopped with an error and {runs - counted - stopped} changed nothing"
        )
        print(f"honest runs: {len(self.variants)} variants, {judged} runs, {len(flagged)} flagged")
        return not missed and share >= GOAL and not flagged


def cpu_s() -> float:
    """CPU time of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def results(chosen: Iterable[Task], jobs: int) -> Iterator[tuple[Task, Result]]:
    """Run tasks in processes of their own; in order."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(work, chosen, chunksize=4)


def main(argv: list[str] | None = None) -> int:
    """The command; 0 where every goal is met."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--full", action="store_true", help="five seeds and every trigger")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    chosen = parser.parse_args(argv)
    begun, cpu_before_s, report, done = time.perf_counter(), cpu_s(), Report(), 0
    for task, result in results(list(tasks(chosen.full)), chosen.jobs):
        report.add(task, result)
        done += 1
        if done % 50 == 0 and sys.stderr.isatty():
            print(f"{done} runs", file=sys.stderr)
    met = report.print()
    took_s, used_s = time.perf_counter() - begun, cpu_s() - cpu_before_s
    bound = "" if chosen.full else f" (at most {2 * QUICK_S} s, so {QUICK_S} s on 2 idle cores)"
    print(
        f"{done} runs in {took_s:.0f} s with {used_s:.0f} s of CPU time{bound}; "
        f"goals {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
