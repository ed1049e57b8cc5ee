"""Shadow: windows that the plan asks for were run again by a static schedule, and agreed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.safety import ShadowCompared
from shiftbook.ledger.events.state import CheckpointRestored
from shiftbook.ledger.events.training import UpdateApplied
from shiftbook.ledger.job_door import difference_text
from shiftbook.verify.invariants.base import End, Invariant, Step, short

MOST_WINDOWS = 65_536
"""Windows that are remembered back in time; bounds the memory."""

_NOT_COMPARED = "a window that the plan asks for was not compared by a shadow"


@dataclass(slots=True)
class _Window:
    """One window of the effective lineage: how far its updates are, and whether a shadow agreed
    with the record up to there, or did not."""

    last: int
    reached: int = -1
    position: int = -1
    compared: bool = False

    def ended(self, closed: bool) -> bool:
        """True where nothing more of it will be recorded."""
        return self.reached >= self.last or (closed and self.reached >= 0)


class ShadowAgrees(Invariant):
    """Each window of the plan's field ``shadow`` was compared as the lineage has it, and agreed.

    A window whose iterations were computed again after its comparison is due once more.
    """

    id = "shadow"
    title = "windows run again by a shadow agree with the live run"
    needs = "ShadowCompared of each window that the plan asks for (`shiftbook shadow`)"
    sees = (
        AttemptStarted,
        CheckpointRestored,
        UpdateApplied,
        ShadowCompared,
    )

    def begin(self) -> None:
        self._windows: OrderedDict[int, _Window] = OrderedDict()

    def feed(self, step: Step) -> None:
        event = step.event
        if isinstance(event, AttemptStarted | CheckpointRestored):
            self._go_back(event.iteration)
        elif isinstance(event, UpdateApplied):
            self._updated(step, event.iteration)
        elif isinstance(event, ShadowCompared):
            self._compared(step, event)

    def _updated(self, step: Step, iteration: int) -> None:
        asked = step.plan.shadow if step.plan is not None else None
        # Before its first bundle a job has nothing that a shadow could begin with.
        if asked is not None and asked.begins_at(iteration) and step.job.bundles:
            window = _Window(iteration + asked.iterations - 1)
            self._windows[iteration] = window
            self._windows.move_to_end(iteration)
            if len(self._windows) > MOST_WINDOWS:
                _, oldest = self._windows.popitem(last=False)
                if not oldest.compared:
                    self.missing(_NOT_COMPARED)
        if self._windows:
            window = self._windows[next(reversed(self._windows))]
            if iteration <= window.last:
                window.reached, window.position = iteration, step.at
                window.compared = False

    def _go_back(self, iteration: int) -> None:
        """What was computed from there on is computed again."""
        for first in reversed(self._windows):
            window = self._windows[first]
            if window.reached < iteration:
                break
            window.reached, window.compared = iteration - 1, False
        while self._windows and next(reversed(self._windows)) >= iteration:
            self._windows.popitem()

    def _compared(self, step: Step, event: ShadowCompared) -> None:
        window = self._windows.get(event.iteration)
        if window is not None and window.position == event.last_update:
            window.compared = True
        found = event.difference
        self.expect(
            event.agreed,
            step.at,
            expected=(
                f"iterations {event.iteration} to {event.iteration + event.iterations - 1} as a "
                f"static schedule runs them again from bundle {short(event.bundle)}"
                + ("" if found is None else f": {found.shadow}")
            ),
            found=difference_text(event) + ("" if found is None else f": {found.live}"),
            cause="something that no record names had a part in what the live run computed",
            action="See what was done to the job before that iteration; `shiftbook replay --job` "
            "runs it from the beginning. Thaw the job once you know.",
            others=(event.last_update, None if found is None else found.position),
        )

    def close(self, end: End) -> None:
        for window in self._windows.values():
            if not window.compared and window.ended(end.closed):
                self.missing(_NOT_COMPARED)

    def idle_because(self, end: End) -> str | None:
        plan = end.job.plan
        if plan is None or plan.shadow is None:
            return "the plan asks for no shadow"
        return "no window of the plan has come to its end"
