"""What a live run has recorded of the windows that its plan gives a shadow, as the record grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shiftbook.ledger.amendment import amended
from shiftbook.ledger.errors import InvalidInput, UnknownJob
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import (
    AttemptStarted,
    ExperimentForked,
    JobClosed,
    JobOpened,
    PlanAmended,
)
from shiftbook.ledger.events.observation import IterationCompleted
from shiftbook.ledger.events.safety import ShadowCompared
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved
from shiftbook.ledger.events.training import (
    SamplesDropped,
    SamplesGenerated,
    SamplesRewarded,
    UpdateApplied,
)
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import Plan
from shiftbook.verify.evidence import EvidenceFolder
from shiftbook.verify.replay.protocol import Start
from shiftbook.verify.replay.recorded_trace import Iteration, Recorded, recorded_lines
from shiftbook.verify.replay.trace import Line

READ = frozenset(
    kind.type_()
    for kind in (
        JobOpened,
        AttemptStarted,
        PlanAmended,
        ExperimentForked,
        JobClosed,
        CheckpointSaved,
        CheckpointRestored,
        SamplesGenerated,
        SamplesRewarded,
        SamplesDropped,
        UpdateApplied,
        IterationCompleted,
        ShadowCompared,
    )
)
HARMLESS = ("moves", "shadow", "required_invariants", "tolerances", "iterations", "drop_rules")
"""Parts of the plan that change nothing of what an iteration computes."""


@dataclass(frozen=True)
class Span:
    """One window of the plan: where it begins, and how far its record is.

    ``last_update`` is the position of the update that ends it, None while the live run has not
    come so far; ``saved`` the bundle that it begins with, None where none was recorded; ``problem``
    says why it cannot be compared, whatever the shadow shows.
    """

    window: range
    saved: CheckpointSaved | None
    last_update: int | None
    problem: str = ""
    compared: tuple[int, ShadowCompared] | None = None

    @property
    def start(self) -> Start:
        """Where its shadow begins."""
        assert self.saved is not None
        saved = self.saved
        return Start(saved.path, saved.bundle, saved.iteration, saved.policy_version, saved.cursor)

    def text(self) -> str:
        """The window, in words."""
        first, last = self.window[0], self.window[-1]
        return f"iteration {first}" if first == last else f"iterations {first} to {last}"


@dataclass
class _Disturbances:
    """What a shadow cannot repeat, by position or iteration."""

    amended: list[tuple[int, str]] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)

    def of(self, window: range, last_update: int | None) -> str:
        """Why a window cannot be compared; empty where it can."""
        for position, what in self.amended:
            if last_update is not None and position < last_update:
                return (
                    f"{what} at position {position}; a shadow runs the configuration that the job "
                    "opened with: open a job with what you amended"
                )
        for number in window:
            if number in self.dropped:
                return (
                    f"samples of iteration {number} were dropped ({self.dropped[number]}), which a "
                    "shadow does not repeat; the next window is compared again"
                )
        return ""


class LiveRecord:
    """The record of one job. Raises UnknownJob where it was never opened."""

    def __init__(self, ledger: Ledger, job: str) -> None:
        self._ledger, self._job = ledger, job
        self.rows = EvidenceFolder(ledger)
        self._after = -1
        self._bundles: dict[int, list[tuple[int, CheckpointSaved]]] = {}
        self._compared: list[tuple[int, ShadowCompared]] = []
        self._disturbed = _Disturbances()
        self._told: set[int] = set()
        """Iterations of which nothing more will be recorded."""
        self.closed = False
        self.completed = 0
        """Iterations that ended with an update, in the effective lineage."""
        self.recorded: Recorded | None = None
        self.plan: Plan | None = None
        self.catch_up()
        if self.recorded is None:
            raise UnknownJob(job, [name for name in ledger.jobs() if name != job])

    @property
    def opened(self) -> JobOpened:
        """How the job declared itself."""
        assert self.recorded is not None
        return self.recorded.opened

    @property
    def comparisons(self) -> list[ShadowCompared]:
        """Every comparison that was recorded, in order."""
        return [compared for _, compared in self._compared]

    def catch_up(self) -> None:
        """Take in what was recorded since the last call."""
        for stored in self._ledger.read(self._after, job=self._job, types=READ):
            self._take(stored.position, stored.parsed())
            self._after = stored.position

    def _take(self, at: int, event: Event) -> None:
        if isinstance(event, JobOpened):
            self.recorded = Recorded(self._ledger.url, self._job, event)
            self.plan = event.plan
        elif isinstance(event, JobClosed):
            self.closed = True
        elif isinstance(event, PlanAmended):
            self._amend(at, event)
        elif isinstance(event, ExperimentForked):
            self._disturbed.amended.append((at, "the experiment was forked"))
        elif isinstance(event, ShadowCompared):
            self._compared.append((at, event))
        elif self.recorded is not None:
            self._take_training(self.recorded, at, event)

    def _take_training(self, recorded: Recorded, at: int, event: Event) -> None:
        recorded.take(at, event)
        if isinstance(event, AttemptStarted | CheckpointRestored):
            self._go_back(recorded, event.iteration)
        elif isinstance(event, CheckpointSaved):
            self._bundles.setdefault(event.iteration, []).append((at, event))
        elif isinstance(event, SamplesDropped):
            self._disturbed.dropped[event.iteration] = event.reason
        elif isinstance(event, UpdateApplied):
            self.completed = event.iteration + 1
        elif isinstance(event, IterationCompleted):
            self._told.add(event.iteration)

    def _amend(self, at: int, event: PlanAmended) -> None:
        if self.plan is None:
            return
        try:
            self.plan = amended(self.plan, event.field, event.after)
        except InvalidInput:
            return  # it changes nothing, and the verifier finds it
        if event.field.split(".")[0] not in HARMLESS:
            self._disturbed.amended.append((at, f"the plan's {event.field} was amended"))

    def _go_back(self, recorded: Recorded, iteration: int) -> None:
        """A restore unwinds the iterations from there on; those that ended are computed again."""
        for number in [n for n in recorded.iterations if n >= iteration]:
            if recorded.iterations[number].updated is not None:
                del recorded.iterations[number]
                self._disturbed.dropped.pop(number, None)
        self._told -= {n for n in self._told if n >= iteration}
        self.completed = min(self.completed, iteration)

    def spans(self) -> Iterator[Span]:
        """Every window of the plan, in order."""
        plan = self.plan
        if plan is None or plan.shadow is None:
            return
        total = self.completed if self.closed else max(plan.iterations, self.completed)
        for window in plan.shadow.windows(total):
            if self._bundles_before(window[0]):
                yield self.span(window)

    def _bundles_before(self, number: int) -> bool:
        """False for a window before the job's first bundle: a shadow has nothing to begin with."""
        update = self._update_of(number)
        firsts = [saved[0][0] for saved in self._bundles.values()]
        return bool(firsts) and (update is None or min(firsts) < update)

    def span(self, window: range) -> Span:
        """How far a window is."""
        first = self._update_of(window[0])
        last = self._update_of(window[-1]) if self._whole(window) else None
        saved = [
            event
            for position, event in self._bundles.get(window[0], ())
            if first is None or position < first
        ]
        bundle = saved[-1] if saved else None
        problem = self._disturbed.of(window, last)
        if bundle is None and first is not None:
            problem = (
                f"no bundle was saved at iteration {window[0]}, where the plan begins a window; "
                "save bundles as often as a shadow shall run"
            )
        return Span(window, bundle, last, problem, self._comparison(window[0], last))

    def _comparison(self, first: int, last_update: int | None) -> tuple[int, ShadowCompared] | None:
        for position, event in reversed(self._compared):
            if event.iteration == first and event.last_update == last_update:
                return position, event
        return None

    def _iteration(self, number: int) -> Iteration | None:
        return None if self.recorded is None else self.recorded.iterations.get(number)

    def _update_of(self, number: int) -> int | None:
        one = self._iteration(number)
        return None if one is None or one.updated is None else one.updated[0]

    def _whole(self, window: range) -> bool:
        """True once each iteration has ended and its samples stand in the record."""
        for number in window:
            one = self._iteration(number)
            if one is None or one.updated is None:
                return False
            # A loop may write samples and updates from two threads.
            more = self.closed or number in self._told or number + 1 < self.completed
            if not one.generated and not more:
                return False
        return True

    def overwritten_at(self, saved: CheckpointSaved) -> int | None:
        """Position of another bundle that was saved to the same place later; None for none."""
        same = [
            (position, event.bundle)
            for of in self._bundles.values()
            for position, event in of
            if event.path == saved.path
        ]
        position, bundle = max(same, default=(-1, saved.bundle))
        return None if bundle == saved.bundle else position

    def lines(self, window: range) -> tuple[Line, ...]:
        """What the record holds of a window."""
        assert self.recorded is not None
        return tuple(recorded_lines(self.recorded, self.rows, window))

    def lost_rows(self, window: range) -> str:
        """What is wrong with the window's evidence; empty where nothing is."""
        for number in window:
            one = self._iteration(number)
            if one is None:
                continue
            bound = [("SamplesGenerated", at, event.segment) for at, event in one.generated]
            bound += [("SamplesRewarded", at, event.segment) for at, event in one.rewarded]
            for type_, at, segment in bound:
                problem = self.rows(type_, segment).problem
                if problem:
                    return f"{type_} at position {at}: {problem}"
        return ""
