"""Goal: the planner moves devices where the iteration ends sooner, and never to its harm.

Method: hypothesis over small systems for the properties (a component that owes work keeps a
replica, every candidate conserves devices and ranges, nothing oscillates, the exact enumeration is
complete); a simulation of the reference job that shares no formula with the model for the moves of
an iteration, their order and the time that they save.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.plan import MovePlan, TrainingView
from shiftbook.ledger.topology import Device, Topology
from shiftbook.scheduler.allocation import allocate, margins_of_time
from shiftbook.scheduler.errors import PlanningError
from shiftbook.scheduler.layout import Layout, Roles
from shiftbook.scheduler.makespan import Progress
from shiftbook.scheduler.planner import Decision, Planner, Thresholds
from shiftbook.scheduler.throughput import ThroughputModel
from tests.scheduler import pipeline_simulation as simulation

VIEW = TrainingView(
    virtual_ranks=4, prompts_per_update=32, group_size=8, sampler_rule="r", rng_keys=("uid",),
    engine="torch", engine_dtype="float32", batch_composition="bitwise",
)  # fmt: skip


def make_planner(
    devices: int, model: ThroughputModel | None = None, *, moves: MovePlan | None = None,
    thresholds: Thresholds | None = None, lowest: int = 1,
) -> Planner:  # fmt: skip
    elastic = {
        name: ElasticRange(minimum=lowest, maximum=devices)
        for name in ("rollout", "inference", "trainer")
    }
    return Planner(
        model or ThroughputModel(),
        elastic,
        [Device(name=f"n0/{k}") for k in range(devices)],
        moves or MovePlan(),
        thresholds,
    )


def progress(
    outstanding: int, *, left: int = 32, running: int | None = None, waiting: int = 0,
    incomplete: int | None = None, turns_left: float | None = None, iteration: int = 0,
    more: bool = True,
) -> Progress:  # fmt: skip
    if incomplete is None:
        incomplete = -(-outstanding // 8)
    return Progress(
        iteration=iteration,
        elapsed_s=1.0,
        episodes=256,
        outstanding=outstanding,
        running=min(outstanding, 16) if running is None else running,
        waiting=waiting,
        lanes=8,
        turns_left=turns_left,
        groups_incomplete=incomplete,
        left={"inference": max(left, incomplete), "trainer": max(left, incomplete)},
        more_iterations=more,
    )


START = simulation.topology([0, 1], [1])


# The reference job


@dataclasses.dataclass
class Run:
    walls: list[float]
    moves: list[tuple[int, float, str, Topology]]
    decisions: list[tuple[Decision, float]]
    model: ThroughputModel


KINDS = ("rollout-shrink", "rollout-grow", "trainer-reshard", "combined")


def run_job(
    work: simulation.Workload,
    start: Topology,
    iterations: int,
    *,
    seed: int,
    plan: bool,
    costs_known: bool = False,
) -> Run:
    """Run the simulated job, a window of 50 ms at a time, with or without the planner."""
    job = simulation.Job(work, start, seed)
    planner = make_planner(2)
    model, learned, ticks = planner.model, 0, 0
    for kind in KINDS * 4 if costs_known else ():
        model.observe_move(kind, work.cost_s(kind))
    run = Run(job.walls, job.moves, [], model)
    while job.iteration < iterations:
        job.step()
        ticks += 1
        if ticks % 50:
            continue
        window, now = job.window(0.05), job.progress()
        model.observe(window, simulation.LANES)
        model.observe_progress(now)
        for measured in job.measured[learned:]:
            model.observe_iteration(measured)
        learned = len(job.measured)
        if plan and job.pending is None:
            decision = planner.decide(window, job.topology, now, job.now_s)
            if decision is not None:
                kind, cost_s = job.move(decision.after)
                assert kind == decision.kind
                model.observe_move(kind, cost_s)
                planner.moved(job.now_s)
                run.decisions.append((decision, now.elapsed_s))
    return run


LONG_TAIL = simulation.Workload(
    tool_median_s=0.08,
    infer_s=0.002,
    train_s=0.05,
    pause_s=0.015,
    grow_s=0.02,
    reshard_s=0.025,
    combined_s=0.035,
)
"""Moves are cheap, tools make a long tail, and the trainer's ranks have nearly all of
the work: a rank of its own slot at the tail pays."""


def test_three_moves_an_iteration_in_the_right_order() -> None:
    """Pause at the tail, reshard to all slots when the rollout is done, go back for the next."""
    run = run_job(LONG_TAIL, START, 8, seed=2, plan=True, costs_known=True)
    shapes = {
        (2, 1): "start",
        (1, 1): "paused",
        (1, 2): "resharded",
        (2, 2): "shared",
    }
    by_iteration = {
        number: [
            shapes[len(after.replicas("rollout")), len(after.replicas("trainer"))]
            for _, _, _, after in moves
        ]
        for number, moves in itertools.groupby(run.moves, key=lambda move: move[0])
    }
    print(f"seed 2: {by_iteration}")
    full = [n for n, moves in by_iteration.items() if moves == ["start", "paused", "resharded"]]
    assert len(full) >= 4, "no iteration went through all three moves in order"
    for number, moves in by_iteration.items():
        assert len(moves) <= 3, f"iteration {number} moved {len(moves)} times: {moves}"
        if "paused" in moves and "resharded" in moves:
            assert moves.index("paused") < moves.index("resharded")
    early = [at for decision, at in run.decisions if decision.kind == "rollout-grow"]
    assert early, "the source never got its second slot back"
    assert max(early) < 0.2, "the way back was late"


@pytest.mark.parametrize("tool_s", [0.02, 0.05])
def test_the_dynamic_schedule_beats_the_split_and_keeps_up_with_taking_turns(tool_s: float) -> None:
    work = simulation.Workload(tool_median_s=tool_s)
    split = run_job(work, simulation.topology([0], [1]), 7, seed=3, plan=False)
    turns = run_job(work, simulation.topology([0, 1], [0, 1]), 7, seed=3, plan=False)
    dynamic = run_job(work, START, 7, seed=3, plan=True)
    # The first iteration is the warm-up; the samples of the others are the same in all three.
    medians = [statistics.median(run.walls[1:]) for run in (split, turns, dynamic)]
    print(f"seed 3: split {medians[0]:.3f}, turns {medians[1]:.3f}, dynamic {medians[2]:.3f} s")
    assert medians[0] / medians[2] > 1.2
    assert medians[2] / medians[1] < 1.03


def test_predictions_of_the_whole_iteration_come_true_once_it_has_learned() -> None:
    run = run_job(simulation.Workload(), START, 8, seed=5, plan=True)
    ends = [
        (decision.move, run.walls[number] - at)
        for (decision, at), (number, *_) in zip(run.decisions, run.moves, strict=True)
        if number >= 2 and number < len(run.walls)
    ]
    assert len(ends) >= 5
    for prediction, came_s in ends:
        run.model.score(prediction, came_s)
    errors = [abs(p.mean_s - came_s) for p, came_s in ends]
    print(f"mean error {statistics.mean(errors):.3f} s, within {run.model.calibration:.2f}")
    assert statistics.mean(errors) < 0.3
    assert run.model.calibration is not None
    assert run.model.calibration >= 0.6


# Properties of a decision


def test_a_single_low_window_gives_nothing_away() -> None:
    planner = make_planner(2, thresholds=Thresholds(lasting_s=0.1))
    tail = progress(8, running=5, turns_left=16.0)
    assert planner.decide(None, START, tail, 10.0) is None
    assert planner.last is not None
    assert "rollout" not in planner.last.donors
    full = progress(8, running=16, waiting=3, turns_left=16.0)
    assert "rollout" not in planner.deliberate(None, START, full, 10.05).donors
    assert "rollout" not in planner.deliberate(None, START, tail, 10.1).donors, "it began anew"
    assert "rollout" in planner.deliberate(None, START, tail, 10.25).donors


def test_without_outstanding_episodes_the_trainer_takes_all_slots() -> None:
    planner = make_planner(2)
    decision = planner.decide(
        None, simulation.topology([0], [1]), progress(0, left=26, running=0), 0.0
    )
    assert decision is not None
    assert decision.strategy == "reshard"
    assert decision.kind == "trainer-reshard"
    assert decision.after == simulation.topology([0], [0, 1])
    assert decision.net_gain_s > 0
    assert decision.gain_interval.low <= decision.predicted_gain_s <= decision.gain_interval.high
    chosen = [candidate for candidate in decision.candidates if candidate.chosen]
    assert [candidate.after for candidate in chosen] == [decision.after]
    assert all(c.rejected_because for c in decision.candidates if not c.chosen)
    proposal = decision.proposal(VIEW, window=7)
    assert (proposal.window, proposal.before) == (7, simulation.topology([0], [1]))
    assert proposal.owed == {"rollout": 0, "inference": 26, "trainer": 26}


def test_what_the_plan_forbids_is_rejected_with_the_reason() -> None:
    state = simulation.topology([0], [1])
    now = progress(0, left=26, running=0)
    planner = make_planner(2, moves=MovePlan(allow=("pause",)))
    assert planner.decide(None, state, now, 0.0) is None
    assert planner.last is not None
    reasons = {c.strategy: c.rejected_because for c in planner.last.candidates}
    assert "allows pause" in str(reasons["reshard"])
    planner = make_planner(2, moves=MovePlan(margin_s=60.0))
    assert planner.decide(None, state, now, 0.0) is None
    assert planner.last is not None
    assert "margin is 60.000 s" in str(planner.last.candidates[0].rejected_because)
    planner = make_planner(2, moves=MovePlan(cooldown_s=5.0))
    planner.moved(0.0)
    assert planner.decide(None, state, now, 1.0) is None
    assert planner.decide(None, state, now, 6.0) is not None


def test_the_same_decision_is_not_repeated_while_it_is_carried_out() -> None:
    planner = make_planner(2)
    state, now = simulation.topology([0], [1]), progress(0, left=26, running=0)
    assert planner.decide(None, state, now, 0.0) is not None
    assert planner.decide(None, state, now, 0.3) is None
    assert planner.last is not None
    assert any("not carried out" in str(c.rejected_because) for c in planner.last.candidates)
    assert planner.decide(None, state, now, 1.5) is not None, "after a while it is tried again"


def test_foreign_devices_and_missing_roles_are_named() -> None:
    planner = make_planner(2)
    with pytest.raises(PlanningError, match="none of the 2 devices"):
        planner.decide(None, simulation.topology([0], [7]), progress(8), 0.0)
    with pytest.raises(PlanningError, match="expected a component 'trainer'"):
        planner.decide(None, Topology.of({"rollout": ["n0/0"]}), progress(8), 0.0)


PROGRESSES = st.builds(
    progress,
    st.integers(0, 256),
    left=st.integers(0, 32),
    waiting=st.integers(0, 100),
    iteration=st.integers(0, 1),
    more=st.booleans(),
)


@st.composite
def standing(draw: st.DrawFn, devices: int) -> Topology:
    rollout = draw(st.integers(1, devices))
    trainer = draw(st.sampled_from([1 << k for k in range(devices.bit_length() - 1)]))
    return simulation.topology(list(range(rollout)), list(range(devices - trainer, devices)))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(2, 5), PROGRESSES, st.integers(0, 1))
def test_whoever_owes_or_expects_work_keeps_a_replica_and_no_device_is_lost(
    data: st.DataObject, devices: int, now: Progress, lowest: int
) -> None:
    state = data.draw(standing(devices))
    planner = make_planner(devices, lowest=lowest)
    seen = planner.deliberate(None, state, now, 0.0)
    names = {f"n0/{k}" for k in range(devices)}
    for candidate in seen.candidates:
        for name, owed in now.owed("rollout").items():
            count = len(candidate.after.replicas(name))
            if owed or now.more_iterations:
                assert count >= 1, f"{name} owes {owed} and would stand nowhere"
        assert set(candidate.after.devices()) <= names
        for name in ("rollout", "trainer", "inference"):
            places = candidate.after.placement()[name]
            assert len(set(places)) == len(places)
        assert candidate.after.placement()["inference"] == candidate.after.placement()["trainer"]
        assert candidate.after.replicas("tool") == ()
        assert (
            len(candidate.after.replicas("trainer"))
            & (len(candidate.after.replicas("trainer")) - 1)
            == 0
        )
        assert candidate.chosen == (candidate.rejected_because is None)
    if seen.decision is not None:
        assert seen.decision.net_gain_s > 0
        assert seen.decision.probability >= planner.thresholds.probability


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(2, 4), PROGRESSES)
def test_under_constant_windows_it_comes_to_rest(
    data: st.DataObject, devices: int, now: Progress
) -> None:
    """After a move the same progress leads to no way back, and soon to no move at all."""
    state = data.draw(standing(devices))
    planner, visited = make_planner(devices, thresholds=Thresholds(lasting_s=0.0)), [state]
    for step in range(8):
        decision = planner.decide(None, state, now, 10.0 * step)
        if decision is None:
            break
        state = decision.after
        assert state not in visited, f"back to {state.text()}"
        visited.append(state)
    else:
        pytest.fail(f"8 moves under constant windows: {[t.text() for t in visited]}")
    assert planner.decide(None, state, now, 1_000.0) is None


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 5), PROGRESSES)
def test_small_systems_are_enumerated_completely(devices: int, now: Progress) -> None:
    state = simulation.topology([0], [devices - 1])
    planner = make_planner(devices)
    seen = planner.deliberate(None, state, now, 0.0)
    sizes = [1 << k for k in range(4) if 1 << k <= devices]
    expected = {(r, t) for r in range(1, devices + 1) for t in sizes} - {(1, 1)}
    found = {
        (len(c.after.replicas("rollout")), len(c.after.replicas("trainer")))
        for c in seen.candidates
    }
    assert found == expected


# The parts that carry large systems


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.0, 50.0), min_size=2, max_size=4),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.integers(0, 9),
)
def test_margins_are_exact_for_concave_gains(
    works: list[float], lowest: list[int], budget: int
) -> None:
    """The allocation's total equals the best of all allocations, found by trying them all."""
    lowest = lowest[: len(works)]
    assume(budget >= sum(lowest))
    margins = [margins_of_time(w, low, 8) for w, low in zip(works, lowest, strict=True)]
    found = allocate(margins, lowest, budget)
    assert sum(found) <= budget
    assert all(low <= count for low, count in zip(lowest, found, strict=True))

    def total(counts: Sequence[int]) -> float:
        pairs = zip(counts, lowest, margins, strict=True)
        return sum(float(margin[: count - low].sum()) for count, low, margin in pairs)

    best = max(
        total(counts)
        for counts in itertools.product(*(range(low, 9) for low in lowest))
        if sum(counts) <= budget
    )
    assert total(found) == pytest.approx(best)


def test_a_gain_that_is_not_concave_and_a_budget_too_small_are_refused() -> None:
    with pytest.raises(PlanningError, match="not concave"):
        allocate([np.array([1.0, 2.0])], [0], 1)
    with pytest.raises(PlanningError, match="at least 3"):
        allocate([np.array([1.0])], [3], 2)


def large(devices: int) -> tuple[Planner, Topology]:
    names = [f"n{k // 8}/{k % 8}" for k in range(devices)]
    quarter = devices // 4
    placement = {
        "rollout": names[:quarter],
        "reward": names[quarter : 2 * quarter],
        "critic": names[2 * quarter : 3 * quarter],
        "inference": names[3 * quarter :],
        "trainer": names[3 * quarter :],
    }
    elastic = {name: ElasticRange(minimum=1, maximum=devices) for name in placement}
    planner = Planner(ThroughputModel(), elastic, [Device(name=n) for n in names], MovePlan())
    return planner, Topology.of(placement)


def test_a_large_system_takes_from_who_has_nothing_to_do_and_stays_inside_the_devices() -> None:
    planner, state = large(64)
    now = Progress(
        iteration=0, elapsed_s=0.0, episodes=2048, outstanding=2048, running=128, waiting=1920,
        lanes=8, groups_incomplete=256,
        left={"inference": 256, "trainer": 256, "reward": 256, "critic": 256},
    )  # fmt: skip
    decision = planner.decide(None, state, now, 0.0)
    assert decision is not None
    assert len(decision.after.replicas("rollout")) > 16
    assert decision.move.mean_s < decision.stay.mean_s
    devices = [d for n, r in decision.after.walk() if n != "inference" for d in r.devices]
    assert set(devices) <= set(planner.layout.names)
    kept = [d for d in decision.after.placement()["reward"] if d in state.placement()["reward"]]
    fewest = min(len(decision.after.replicas("reward")), 16)
    assert len(kept) == fewest, "a component that stays keeps its devices"
    assert len(decision.candidates) <= planner.thresholds.listed


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(0, 8), st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
def test_placing_keeps_what_stays_and_grows_on_its_own_node(
    rollout: int, reward: int, trainer: int, more: int
) -> None:
    roles = Roles()
    names = [f"n{k // 4}/{k % 4}" for k in range(16)]
    layout = Layout([Device(name=n) for n in names], {}, roles)
    before = Topology.of(
        {"rollout": names[:4], "reward": names[4:8], "inference": names[12:], "trainer": names[12:]}
    )
    counts = {"rollout": rollout, "reward": min(reward, 16 - trainer), "trainer": trainer}
    try:
        after = layout.place(before, counts)
    except PlanningError:
        assert max(rollout, trainer) + counts["reward"] > 16
        return
    placed = after.placement()
    for name, count in counts.items():
        assert len(placed[name]) == len(set(placed[name])) == count
        stay = set(before.placement()[name])
        if name == "reward":
            assert len(stay & set(placed[name])) == min(count, 4), "it moved without need"
    assert not set(placed["reward"]) & (set(placed["rollout"]) | set(placed["trainer"]))
    assert layout.place(after, counts) == after


def test_growth_prefers_the_own_node_and_replicas_of_several_devices_stay_on_one() -> None:
    roles = Roles()
    names = [f"n{k // 4}/{k % 4}" for k in range(16)]
    layout = Layout([Device(name=n) for n in names], {}, roles)
    before = Topology.of(
        {"rollout": names[:4], "reward": ["n2/0"], "inference": ["n3/3"], "trainer": ["n3/3"]}
    )
    after = layout.place(before, {"rollout": 4, "reward": 3, "trainer": 1})
    assert after.placement()["reward"] == ["n2/0", "n2/1", "n2/2"]
    pair = Topology.of({"rollout": [], "inference": ["n3/3"], "trainer": ["n3/3"]})
    wide = pair.components | {
        "rollout": (
            Topology.of({"r": ["n0/0"]})
            .components["r"][0]
            .model_copy(update={"devices": ("n0/0", "n0/1"), "tensor_parallel": 2}),
        )
    }
    grown = layout.place(Topology(components=wide), {"rollout": 3, "trainer": 1})
    assert [r.devices for r in grown.replicas("rollout")] == [
        ("n0/0", "n0/1"), ("n0/2", "n0/3"), ("n1/0", "n1/1"),
    ]  # fmt: skip
    assert grown.replicas("rollout")[1].tensor_parallel == 2


def test_kinds_of_move_have_names_of_their_components() -> None:
    roles = Roles()
    cases = {
        ((0, 1), (1,), (0,), (1,)): "rollout-shrink",
        ((0,), (1,), (0, 1), (1,)): "rollout-grow",
        ((0,), (1,), (0,), (0, 1)): "trainer-reshard",
        ((0,), (0, 1), (0, 1), (1,)): "combined",
    }
    for (r, t, r2, t2), kind in cases.items():
        before = simulation.topology(list(r), list(t))
        after = simulation.topology(list(r2), list(t2))
        assert roles.kind_of_move(before, after) == kind
        assert roles.strategy(before, after) == ("pause" if t == t2 else "reshard")
    assert roles.kind_of_move(START, START) is None
