"""Goal: every token is stamped with weights that its engine held while it can have made it.

Method: small loops are recorded by the public Recorder, in the orders that synchronous,
asynchronous and partial rollouts have; the judge is silent on what can have happened, and names
what cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shiftbook.checkpoint.recorder import Generated, Recorder, uid
from shiftbook.checkpoint.recorder_samples import generated_rows
from shiftbook.ledger.evidence import read_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, UpdatePlan
from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import Run

Judge = Callable[[Run], Verdict]
ENGINES = ("a", "b")
TEN = list(range(10))


class Loop:
    """What a loop does, in its order; the verdict on it."""

    def __init__(self, folder: Path, *, bound: int = 3, partial: bool = False) -> None:
        self.url = f"sqlite:///{folder}/l.db"
        self.plan = Plan(
            seed=0,
            iterations=9,
            data=DataPlan(
                dataset_digest="d",
                tokenizer_digest="t",
                dataset_size=100,
                sampler_rule="sequential-v1",
                seed=0,
            ),
            sampling=SamplingPlan(staleness_bound=bound, partial_rollouts=partial),
            update=UpdatePlan(
                prompts_per_update=1, group_size=1, virtual_ranks=1, learning_rate=1e-3
            ),
        )
        self.record = Recorder.open(self.url, "job", self.plan, policy=policy(0))
        self.next = 0
        self.version = 0
        for engine in ENGINES:
            self.record.started("rollout", engine, f"{engine}#0")

    def draw(self) -> str:
        """Draw the next prompt; the uid of its sample."""
        self.record.drawn(self.next, start=self.next, indices=[self.next], epoch=0)
        self.next += 1
        return uid(self.next - 1)

    def update(self) -> None:
        """Make the next version."""
        before, after = policy(self.version), policy(self.version + 1)
        states = iter(
            [dict.fromkeys(("model", "masters", "optimizer"), r) for r in (before, after)]
        )
        with self.record.update(self.next, lambda: next(states)) as update:
            update.applied(
                version=self.version + 1,
                optimizer_step=self.version + 1,
                learning_rate=1e-3,
                loss=0.0,
                grad_norm=1.0,
                tokens=1,
                divisor=1.0,
            )
        self.version += 1

    def sync(self, *engines: str) -> None:
        """Deliver the present version."""
        engines = engines or ENGINES
        with self.record.sync(self.version, policy(self.version), engines) as sync:
            for engine in engines:
                sync.delivered(
                    engine, f"{engine}#0", policy(self.version), caches_flushed=["prefix"]
                )

    def made(
        self, name: str, versions: int | Sequence[int], engine: str = "a", **more: Any
    ) -> None:
        """A sample of ten tokens is recorded."""
        sample = Generated(name, TEN, None, versions, engine, f"{engine}#0", **more)
        self.record.generated(int(name[:6]), [sample], version=self.version)

    def found(self) -> list[tuple[str, str]]:
        """Invariant and text of each finding that is about versions of engines."""
        self.record.close()
        findings = verify(self.url).findings
        return [(f.invariant, f.found) for f in findings if f.invariant in ("I6", "I8")]


def policy(version: int) -> str:
    """Root of a policy."""
    return f"{version + 1:032x}"


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    """Without partial rollouts, three updates behind at most."""
    return Loop(tmp_path)


@pytest.fixture
def partial(tmp_path: Path) -> Loop:
    """With partial rollouts."""
    return Loop(tmp_path, partial=True)


# -- what can have happened ------------------------------------------------------------------------


def test_a_synchronous_loop(loop: Loop) -> None:
    for version in range(3):
        loop.sync()
        name, begun = loop.draw(), loop.record.moment()
        loop.made(name, version, begun=begun, ended=loop.record.moment())
        loop.update()
    assert loop.found() == []


def test_samples_that_waited_in_a_queue_while_weights_came(loop: Loop) -> None:
    """Drawn and made before two syncs, recorded after them."""
    loop.sync()
    name, begun = loop.draw(), loop.record.moment()
    ended = loop.record.moment()
    for _ in range(2):
        loop.update()
        loop.sync()
    loop.made(name, 0, begun=begun, ended=ended)
    assert loop.found() == []


def test_a_queue_without_recorded_moments(loop: Loop) -> None:
    loop.sync()
    name = loop.draw()
    loop.update()
    loop.sync()
    loop.made(name, 0)
    assert loop.found() == []


def test_an_engine_that_keeps_old_weights_within_the_bound(loop: Loop) -> None:
    """Its sync comes every second version; the other engine has every one."""
    loop.sync()
    loop.update()
    loop.sync("a")
    for engine, version in (("a", 1), ("b", 0)):
        loop.made(loop.draw(), version, engine, begun=loop.record.moment())
    assert loop.found() == []


def test_weights_that_came_between_two_turns(partial: Loop) -> None:
    partial.sync()
    name, begun = partial.draw(), partial.record.moment()
    for _ in range(2):
        partial.update()
        partial.sync()
    partial.made(name, [0] * 3 + [1] * 4 + [2] * 3, begun=begun, ended=partial.record.moment())
    assert partial.found() == []


def test_weights_that_came_as_tokens_were_made_inside_the_sync(partial: Loop) -> None:
    """The request began while the sync was under way, on the engine that had not its turn yet."""
    partial.sync()
    partial.update()
    with partial.record.sync(1, policy(1), ENGINES) as sync:
        sync.delivered("a", "a#0", policy(1), caches_flushed=["prefix"])
        name, begun = partial.draw(), partial.record.moment()
        sync.delivered("b", "b#0", policy(1), caches_flushed=["prefix"])
    partial.made(name, [0] * 3 + [1] * 7, "b", begun=begun, ended=begun)
    assert partial.found() == []


@pytest.mark.parametrize("told", [False, True])
def test_a_rollout_that_another_engine_resumed(partial: Loop, told: bool) -> None:
    """Engine b never held version 0, which made the first tokens; a never held version 1."""
    partial.sync("a")
    name, begun = partial.draw(), partial.record.moment()
    partial.update()
    partial.sync("b")
    by = {"incarnations": ["a#0"] * 4 + ["b#0"] * 6} if told else {}
    partial.made(name, [0] * 4 + [1] * 6, "b", begun=begun, **by)
    assert partial.found() == []


def test_a_rollout_that_an_engine_with_older_weights_resumed(partial: Loop) -> None:
    partial.sync()
    partial.update()
    partial.sync("a")
    by = ["a#0"] * 4 + ["b#0"] * 6
    partial.made(partial.draw(), [1] * 4 + [0] * 6, "b", incarnations=by)
    assert partial.found() == []


def test_a_rollout_that_was_replayed_token_by_token(partial: Loop) -> None:
    """Its engine is gone; another computes its tokens again, under its own weights, and goes on."""
    partial.sync()
    name = partial.draw()
    partial.update()
    partial.sync("b")
    partial.record.lost("rollout", "a", "a#0", "preempted")
    partial.made(name, 1, "b", incarnations=["b#0"] * 10)
    assert partial.found() == []


def test_one_version_by_two_engines(loop: Loop) -> None:
    loop.sync()
    loop.made(loop.draw(), 0, "b", incarnations=["a#0"] * 5 + ["b#0"] * 5)
    assert loop.found() == []


def test_an_older_version_that_came_back(partial: Loop) -> None:
    """A version is rolled back on an engine: tokens of 0, 1 and 0 again."""
    partial.sync()
    name = partial.draw()
    partial.update()
    partial.sync()
    partial.version = 0
    partial.sync()
    partial.made(name, [0] * 3 + [0] * 3 + [0] * 4)
    assert partial.found() == []


def test_a_sample_without_sampled_tokens(loop: Loop) -> None:
    loop.sync()
    loop.update()
    loop.sync()
    loop.made(loop.draw(), [1] * 10, sampled=[False] * 10)
    assert loop.found() == []


def test_a_new_attempt_counts_its_moments_anew(tmp_path: Path) -> None:
    first = Loop(tmp_path)
    for _ in range(3):
        first.sync()
    first.record.close()
    second = Loop(tmp_path)
    second.sync()
    second.made(second.draw(), 0, begun=second.record.moment())
    assert second.found() == []


# -- what cannot -----------------------------------------------------------------------------------


def test_stamps_of_the_version_before_on_an_engine_that_has_the_newer_one(loop: Loop) -> None:
    """Two iterations, within the bound; drawn after the newer weights had come."""
    loop.sync()
    for version in (1, 2):
        loop.update()
        loop.sync()
        loop.made(loop.draw(), version - 1)
    (first, second) = loop.found()
    assert first[0] == second[0] == "I8"
    assert "1 samples at version 0 (000000/0)" in first[1]
    assert "1 samples at version 1 (000001/0)" in second[1]


def test_the_same_of_prompts_that_were_drawn_long_before(loop: Loop) -> None:
    """The recorder was told when the request began."""
    loop.sync()
    name = loop.draw()
    loop.update()
    loop.sync()
    loop.made(name, 0, begun=loop.record.moment())
    ((invariant, found),) = loop.found()
    assert invariant == "I8"
    assert "did not hold between the begin and the end" in found


def test_a_stamp_of_weights_that_came_after_the_request(loop: Loop) -> None:
    loop.sync()
    name, ended = loop.draw(), loop.record.moment()
    loop.update()
    loop.sync()
    loop.made(name, 1, ended=ended)
    assert [invariant for invariant, _ in loop.found()] == ["I8"]


def test_stamps_in_an_order_that_no_engine_had(partial: Loop) -> None:
    partial.sync()
    name = partial.draw()
    partial.update()
    partial.sync()
    partial.made(name, [1] * 5 + [0] * 5, incarnations=["a#0"] * 10)
    assert [invariant for invariant, _ in partial.found()] == ["I8"]


@pytest.mark.parametrize("told", [False, True])
def test_a_version_inside_that_was_never_delivered(partial: Loop, told: bool) -> None:
    """Versions 0 and 2 were; 1 was made and never sent."""
    partial.sync()
    name = partial.draw()
    partial.update()
    partial.update()
    partial.sync()
    by = {"incarnations": ["a#0"] * 10} if told else {}
    partial.made(name, [0] * 3 + [1] * 4 + [2] * 3, **by)
    ((invariant, found),) = partial.found()
    assert invariant == "I6"
    assert "version 1" in found


def test_a_version_inside_that_another_engine_had(partial: Loop) -> None:
    """Engine a made all tokens and never held version 1."""
    partial.sync()
    name = partial.draw()
    partial.update()
    partial.sync("b")
    partial.update()
    partial.sync()
    partial.made(name, [0] * 3 + [1] * 4 + [2] * 3, incarnations=["a#0"] * 10)
    assert [invariant for invariant, _ in partial.found()] == ["I6"]


# -- rows ------------------------------------------------------------------------------------------


def test_spans_are_recorded_for_samples_of_several_versions_alone(tmp_path: Path) -> None:
    sampled = [False, True, True, True, True]
    samples = [
        Generated(uid(0), TEN[:5], None, [9, 1, 1, 3, 2], "a", "a#0", sampled),
        Generated(uid(1), TEN[:5], None, 4, "a", "a#0", sampled),
        Generated(
            uid(2), TEN[:2], None, [4, 5], "a", "a#0", incarnations=("b#0", "a#0"), begun=3, ended=4
        ),
    ]
    rows, _ = generated_rows(samples)
    assert rows["span_versions"] == [[1, 3, 2], None, [4, 5]]
    assert rows["span_tokens"] == [[2, 1, 1], None, [1, 1]]
    assert rows["span_incarnations"] == [None, None, ["b#0", "a#0"]]
    assert (rows["begun"], rows["ended"]) == ([None, None, 3], [None, None, 4])
    assert (rows["version_min"], rows["version_max"]) == ([1, 4, 4], [3, 4, 5])
    plain, _ = generated_rows(samples[1:2])
    assert (
        not {"span_versions", "span_tokens", "span_incarnations", "begun", "ended"} & plain.keys()
    )
    loop = Loop(tmp_path)
    loop.record.generated(0, samples, version=5)
    loop.record.flush()
    with Ledger.open(loop.url, read_only=True) as ledger:
        (stored,) = ledger.read(types={"SamplesGenerated"})
        read = read_segment(ledger, stored.parsed().segment).to_pydict()  # type: ignore[attr-defined]
    loop.record.close()
    assert {name: read[name] for name in rows} == rows


def test_an_old_ledger_without_spans_is_judged_by_its_ends(judge: Judge, run: Run) -> None:
    """The honest run has no such columns: least and greatest version stand for all of them."""
    rows = run.get("SamplesGenerated", 1).rows
    assert rows is not None
    assert "span_versions" not in rows
    rows["version_max"][3] = 9
    assert "I6" in {finding.invariant for finding in judge(run).findings}
