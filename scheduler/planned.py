"""The planner at work on a live job: windows in, proposals out, and what each move brought."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from shiftbook.ledger.errors import LedgerError, Rejected
from shiftbook.ledger.events.job import JobOpened
from shiftbook.ledger.events.reallocation import ReallocationProposed
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.proposal import Proposal
from shiftbook.scheduler.gain import Outcome, RatesMeasured, realized
from shiftbook.scheduler.graph import PipelineGraph
from shiftbook.scheduler.makespan import Progress
from shiftbook.scheduler.moves import Report
from shiftbook.scheduler.planner import Decision, Planner
from shiftbook.scheduler.telemetry import Counters, WindowAggregator
from shiftbook.scheduler.throughput import IterationMeasured, ThroughputModel

FOLLOWERS = ("inference", "trainer")
CALM_AFTER_S = 0.3
CALM_LANES = 8
"""Outstanding episodes by lanes of an engine above which the tail is not near."""
STAY_WINDOW_S = 0.4
"""Least time between two recorded windows that led to no move."""
PROGRESS_OF = {"inference": "referenced", "trainer": "trained"}


@dataclass
class _Made:
    """A committed move whose gain is not known yet."""

    operation: str
    proposed: ReallocationProposed
    at_move: Progress
    proposed_s: float
    devices_before: int
    devices_after: int


@dataclass
class _Seen:
    """What was noticed of the present iteration."""

    number: int
    tail_from_s: float | None = None
    tail_episodes: int | None = None
    generated_s: float | None = None
    trained_s: float | None = None


class PlannedMoves:
    """Feeds the model and the planner from telemetry, and closes the books of each iteration."""

    def __init__(self, opened: JobOpened, gate: Gate, job: str, lanes: int) -> None:
        self._gate, self._job, self._lanes = gate, job, lanes
        self._sees = opened.plan.view()
        self._episodes = opened.plan.update.prompts_per_update * opened.plan.update.group_size
        self._model = ThroughputModel()
        self._planner = Planner(
            self._model,
            opened.elastic,
            opened.devices,
            opened.plan.moves,
            largest_trainer=opened.elastic["trainer"].maximum,
        )
        self._graph = PipelineGraph(opened.components, opened.edges)
        self._graph_told = False
        self._windows: WindowAggregator | None = None
        self._seen = _Seen(-1)
        self._decision: tuple[Decision, Progress, float] | None = None
        self._made: list[_Made] = []
        self._last_wall_s: float | None = None
        self._told_s = 0.0

    def propose(self, telemetry: dict[str, Any], job: JobState) -> Proposal | None:
        """The move that is worth it now, or None."""
        if not telemetry["progress"] or job.attempt is None:
            return None
        now_s = telemetry["now_s"]
        if telemetry["iteration"] != self._seen.number:
            self._close_iteration(telemetry)
        progress = self._progress(telemetry)
        self._notice(progress, telemetry)
        self._observe(telemetry, job, progress)
        if telemetry["updating"] or telemetry["moving"] or not progress.update_due:
            return None
        if self._pipeline_stale(telemetry, job):
            return None
        assert self._windows is not None
        window = self._windows.latest
        if window is None:
            return None
        decision = self._planner.decide(window, job.topology, progress, now_s)
        if decision is None:
            # To stay is a decision too; its windows are recorded now and then.
            if now_s - self._told_s >= STAY_WINDOW_S:
                self._told_s = now_s
                self._gate.ledger.append(self._job, window)
            return None
        self._told_s = now_s
        receipt = self._gate.ledger.append(self._job, window)
        self._decision = (decision, progress, now_s)
        return decision.proposal(self._sees, window=receipt.first)

    def calm(self, telemetry: dict[str, Any]) -> bool:
        """True in the middle of a rollout, where more episodes are outstanding than lanes, and
        when a rollout has ended for a while."""
        progress = telemetry["progress"]
        if not progress or self._seen.number != telemetry["iteration"]:
            return False
        ended_s = self._seen.generated_s
        if ended_s is not None:
            return bool(telemetry["now_s"] - ended_s > CALM_AFTER_S)
        began = telemetry["now_s"] - telemetry["iteration_began_s"] > CALM_AFTER_S
        return bool(began and progress["outstanding"] > CALM_LANES * self._lanes)

    def refused(self, error: Rejected) -> None:
        """The planner does not decide the same again at once."""
        self._decision = None

    def failed(self, operation: str) -> None:
        """The planner does not decide the same again at once."""
        self._decision = None

    def moved(self, report: Report, telemetry: dict[str, Any] | None) -> None:
        """Learn the cost; the gain is told when the iteration has ended."""
        made, self._decision = self._decision, None
        self._planner.moved(time.monotonic())
        if made is None:
            return  # an operator's move: nobody predicted it
        decision, progress, proposed_s = made
        self._model.observe_move(decision.kind, report.cost_s)
        known = self._gate.ledger.state().job(self._job).operations[report.operation]
        proposed = self._gate.ledger.event(known.proposed_position).parsed()
        assert isinstance(proposed, ReallocationProposed)
        self._made.append(
            _Made(
                report.operation,
                proposed,
                progress,
                proposed_s,
                len(decision.before.devices()),
                len(decision.after.devices()),
            )
        )

    def finish(self, telemetry: dict[str, Any]) -> None:
        """The job has ended: tell the gains of its last iteration."""
        self._close_iteration(telemetry)

    def _progress(self, telemetry: dict[str, Any]) -> Progress:
        progress, channels = telemetry["progress"], telemetry["channels"]
        rollout = channels["rollout"]
        running = int(sum(f.get("running", 0) for f in self._figures(telemetry, "rollout")))
        running = min(running, rollout["in_hand"], progress["outstanding"])
        groups = progress["groups"]
        return Progress(
            iteration=telemetry["iteration"],
            elapsed_s=telemetry["now_s"] - telemetry["iteration_began_s"],
            episodes=progress["samples"],
            outstanding=progress["outstanding"],
            running=running,
            waiting=rollout["depth"] + max(0, rollout["in_hand"] - running),
            lanes=self._lanes,
            turns_done=progress["turns_done"],
            groups_incomplete=groups - progress["completed"],
            left={name: groups - progress[PROGRESS_OF[name]] for name in FOLLOWERS},
            update_due=progress["trained"] < groups,
            more_iterations=progress["more"],
        )

    @staticmethod
    def _figures(telemetry: dict[str, Any], component: str) -> list[dict[str, Any]]:
        return [
            figures
            for replica, figures in telemetry["figures"].items()
            if replica.startswith(f"{component}-")
        ]

    def _observe(self, telemetry: dict[str, Any], job: JobState, progress: Progress) -> None:
        if self._windows is None or self._windows.attempt != job.attempt:
            assert job.attempt is not None
            self._windows = WindowAggregator(job.attempt)
        counters = {}
        for component in job.topology.components:
            channel = telemetry["channels"][component]
            figures = self._figures(telemetry, component)
            counters[component] = Counters(
                replicas=len(job.topology.replicas(component)),
                units=channel["answered"],
                busy_s=sum(f["busy_s"] for f in figures),
                queue=channel["depth"],
                running=int(sum(f.get("running", 0) for f in figures if f["active"])),
                waiting=int(sum(f.get("waiting", 0) for f in figures if f["active"])),
                remaining=progress.left.get(component),
            )
        window = self._windows.add(
            telemetry["now_s"], telemetry["now_ns"], telemetry["iteration"], counters
        )
        if window is not None:
            self._model.observe(window, self._lanes)
        self._model.observe_progress(progress)

    def _pipeline_stale(self, telemetry: dict[str, Any], job: JobState) -> bool:
        edges = {
            (source, target): count
            for name, count in telemetry["edges"].items()
            for source, target in [name.split(">")]
        }
        self._graph.observe(edges, telemetry["now_s"])
        event = self._graph.event()
        if (
            not self._graph_told
            and event.matches_declared
            and len(event.edges) >= len(self._graph.declared)
        ):
            self._gate.ledger.append(self._job, event)
            self._graph_told = True
        if self._graph.stale and job.safe_mode is None:
            self._gate.ledger.append(self._job, event)
            self._gate.freeze(
                self._job, by="controller", reason=f"stale pipeline: {self._graph.difference()}"
            )
        return self._graph.stale

    def _notice(self, progress: Progress, telemetry: dict[str, Any]) -> None:
        seen, now_s = self._seen, telemetry["now_s"]
        if seen.tail_from_s is None and 0 < progress.outstanding <= self._lanes:
            seen.tail_from_s, seen.tail_episodes = now_s, progress.outstanding
        if seen.generated_s is None and progress.outstanding == 0:
            seen.generated_s = now_s
        if seen.trained_s is None and progress.left["trainer"] == 0:
            seen.trained_s = now_s

    def _close_iteration(self, telemetry: dict[str, Any]) -> None:
        """An iteration has ended: learn from it, and tell what its moves brought."""
        seen = self._seen
        self._seen = _Seen(telemetry["iteration"])
        done = {entry["iteration"]: entry for entry in telemetry["iterations"]}
        entry = done.get(seen.number)
        made, self._made = self._made, []
        if entry is None:
            return
        ended_s = entry["began_s"] + entry["wall_s"]
        tail_s = None
        if seen.tail_from_s is not None and seen.generated_s is not None:
            tail_s = seen.generated_s - seen.tail_from_s
        update_s = None if seen.trained_s is None else max(0.0, ended_s - seen.trained_s)
        self._model.observe_iteration(
            IterationMeasured(
                episodes=self._episodes,
                turns=entry["turns"],
                update_s=update_s,
                tail_s=tail_s,
                tail_episodes=seen.tail_episodes if tail_s is not None else None,
            )
        )
        rates = RatesMeasured(
            turn_s=self._model.seconds_per_unit("rollout").mean,
            seconds_per_unit={n: self._model.seconds_per_unit(n).mean for n in FOLLOWERS},
            tail_s=tail_s,
            tail_episodes=seen.tail_episodes,
            update_s=update_s,
        )
        for move in made:
            self._tell_gain(move, entry, ended_s, rates)
        self._last_wall_s = entry["wall_s"]

    def _tell_gain(
        self, move: _Made, entry: dict[str, Any], ended_s: float, rates: RatesMeasured
    ) -> None:
        at_move = _with_turns_left(move.at_move, entry["turns"])
        outcome = Outcome(
            at_move=at_move,
            observed_end_s=ended_s - move.proposed_s,
            iteration_s=entry["wall_s"],
            iteration_before_s=self._last_wall_s or entry["wall_s"],
            devices_before=move.devices_before,
            devices_after=move.devices_after,
            rates=rates,
        )
        event = realized(self._model, move.proposed, outcome)
        try:
            self._gate.gain_realized(self._job, move.operation, event)
        except LedgerError:
            # Out of reach now: the gain is an observation, and the next iteration's are told.
            return


def _with_turns_left(progress: Progress, turns: int) -> Progress:
    return replace(progress, turns_left=float(max(0, turns - progress.turns_done)))
