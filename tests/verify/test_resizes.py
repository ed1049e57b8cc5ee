"""Goal: a resume on another number of ranks is legal where the plan says whose state it remaps.

Method: four ranks save a part of random state and one of the loader each; two restore them, split
or keyed anew, as declared or not. Parts of owners that the plan does not name, and those of named
ones where their number stays, must be what was saved.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shiftbook.checkpoint.compare import root
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import PLACES, Maker, Run, h128, make_plan

Judge = Callable[[Run], Verdict]


def states(ranks: int, version: int, key: str = "rng") -> dict[str, str]:
    return {f"rank/{rank}": h128(key, ranks, rank, version) for rank in range(ranks)}


def owned(ranks: int, version: int, key: str = "rng") -> dict[str, str]:
    """Parts of a state on so many ranks."""
    found = {f"rng:{o}": root({"state": s}) for o, s in states(ranks, version, key).items()}
    loader = {f"loader:{o}": h128("loader", s) for o, s in states(ranks, version, key).items()}
    return {**found, **loader, "rng:evaluation": root({"state": h128("evaluation")})}


def on_ranks(run: Run, since: int, ranks: int, key: str = "rng") -> None:
    """From an entry on, the job runs on so many ranks."""
    for entry in run.entries[since:]:
        event = entry.event
        if "rng:rank/0" in (getattr(event, "parts", None) or {}):
            kept = {k: v for k, v in event.parts.items() if ":" not in k}
            kept |= owned(ranks, event.policy_version, key)
            both = {"parts": kept}
            if getattr(event, "file_parts", None) is not None:
                both["file_parts"] = kept
            entry.change(**both)
        elif entry.name == "RandomStatesRecorded":
            version = event.iteration + (event.moment == "after")
            entry.change(states={**states(ranks, version, key), "evaluation": h128("evaluation")})


def resized(
    owners: tuple[str, ...], ranks: int = 2, key: str = "rng", moment: str = "resized"
) -> Run:
    """Two iterations on four ranks, a resume on others, two more iterations."""
    base = make_plan()
    data = base.data.model_copy(update={"remapped_owners": owners})
    maker = Maker(make_plan(data=data))
    maker.open()
    maker.start("a1", 0, PLACES)
    maker.iteration(0)
    maker.iteration(1)
    since = len(maker.run.entries)
    maker.incarnations.clear()
    maker.start("a2", 2, PLACES)
    # The generators are made for the new ranks after the load.
    starts = maker.run.at("RandomStatesRecorded", -1)
    restored = maker.run.at("CheckpointRestored")
    maker.run.entries.insert(restored, maker.run.entries.pop(starts))
    maker.run.get("RandomStatesRecorded", -1).change(moment=moment)
    maker.iteration(2)
    maker.iteration(3)
    maker.close()
    on_ranks(maker.run, 0, 4)
    on_ranks(maker.run, since, ranks, key)
    return maker.run


def told(verdict: Verdict) -> list[tuple[str, str]]:
    return [(f.invariant, f.found) for f in verdict.findings]


@pytest.mark.parametrize("owners", [("rank/*",), tuple(f"rank/{n}" for n in range(4))])
def test_a_declared_remap_is_legal(owners: tuple[str, ...], judge: Judge) -> None:
    verdict = judge(resized(owners))
    assert told(verdict) == []
    for name in ("I1", "I9", "I9b"):
        assert verdict.coverage.row(name).status == "checked", name


def test_an_undeclared_one_is_found(judge: Judge) -> None:
    assert [name for name, _ in told(judge(resized(())))] == ["I1"]


def test_owners_that_are_not_named_are_compared(judge: Judge) -> None:
    ((name, found),) = told(judge(resized(("rank/0", "rank/1"))))
    assert name == "I1"
    assert "differing: loader:rank/2, loader:rank/3, rng:rank/2 and 1 more" in found


def test_a_part_without_an_owner_is_compared_at_a_resize(judge: Judge) -> None:
    run = resized(("*",))
    restored = run.get("CheckpointRestored")
    restored.change(parts={**restored.event.parts, "optimizer": h128("fresh")})
    assert ("I1") in {name for name, _ in told(judge(run))}


def test_a_stream_that_is_not_named_goes_on_at_a_resize(judge: Judge) -> None:
    run = resized(("rank/*",))
    for entry in run.entries[run.at("CheckpointRestored") :]:
        if entry.name == "RandomStatesRecorded":
            entry.change(states={**entry.event.states, "evaluation": h128("another")})
    assert "I9b" in {name for name, _ in told(judge(run))}


def test_ranks_whose_number_stays_are_compared(judge: Judge) -> None:
    assert "I1" in {name for name, _ in told(judge(resized(("rank/*",), ranks=4, key="other")))}


def test_ranks_whose_number_stays_may_go_on(judge: Judge) -> None:
    assert told(judge(resized(("rank/*",), ranks=4, moment="start"))) == []
