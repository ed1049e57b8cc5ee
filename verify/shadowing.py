"""Runs the plan's windows of a live run again under the static schedule, compares, and records.

A window's shadow begins at the bundle that the live run saved there, and runs in a process of its
own, as a replay does. Where both sides promise bits, everything that the record holds and the job
shows must be equal; elsewhere the window goes into the sequential test of ``shadow.py``, together
with all windows that were recorded before.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from typing import Any

from shiftbook.checkpoint.errors import CheckpointError
from shiftbook.checkpoint.manifest import MANIFEST_NAME, load_manifest
from shiftbook.ledger.errors import EvidenceError, InvalidInput
from shiftbook.ledger.events.safety import ShadowCompared, ShadowDifference, ShadowMean
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.evidence import read_segment, write_segment
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import Plan
from shiftbook.verify.errors import NotComparable, NotRestorable, ReplayError, TargetNotFound
from shiftbook.verify.replay.compare import Divergence, first_divergence
from shiftbook.verify.replay.outcome import shown_by
from shiftbook.verify.replay.protocol import Conditions
from shiftbook.verify.replay.running import LIMIT_S, Asked, run_apart
from shiftbook.verify.replay.trace import Line, Trace
from shiftbook.verify.shadow import MEASURES, ShadowTest, Window
from shiftbook.verify.shadow_record import LiveRecord, Span

BY = "shadow"
POLL_S = 0.2
MAX_TEXT = 200
"""Characters of a difference that are recorded; an event has a largest size."""
REWARD = "reward"

EXIT_AGREED, EXIT_DISAGREED, EXIT_COULD_NOT = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """What came of one window; ``could_not`` says why there is no comparison."""

    job: str
    window: range
    bundle: str | None = None
    compared: ShadowCompared | None = None
    position: int | None = None
    """Of the event that records it."""
    before: bool = False
    """True where it had been compared before."""
    could_not: str = ""

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        if self.compared is None:
            return "could not tell"
        return "agreed" if self.compared.agreed else "disagreed"

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        found = self.compared
        difference = None if found is None else found.difference
        return {
            "job": self.job,
            "iteration": self.window[0],
            "iterations": len(self.window),
            "outcome": self.word,
            "method": None if found is None else found.method,
            "observations": None if found is None else found.observations,
            "bundle": self.bundle,
            "wall_s": None if found is None else found.wall_s,
            "position": self.position,
            "before": self.before,
            "difference": None if difference is None else difference.model_dump(),
            "log_evidence": None if found is None else found.log_evidence,
            "could_not": self.could_not,
        }


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 where every window agreed; 1 where one did not; 2 where one could not be compared."""
    if any(one.compared is not None and not one.compared.agreed for one in outcomes):
        return EXIT_DISAGREED
    return EXIT_COULD_NOT if any(one.could_not for one in outcomes) else EXIT_AGREED


class Shadow:
    """The shadow of one job. Use as a context manager: the folder with its traces goes at the end.

    ``code`` is the Python path to run instead of the one that JobOpened names. Raises UnknownJob,
    InvalidInput where the plan asks for no shadow, TargetNotFound where nothing can be run.
    """

    def __init__(
        self,
        ledger: Ledger,
        job: str,
        *,
        code: str | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._ledger, self._job, self._limit_s = ledger, job, limit_s
        self._record = LiveRecord(ledger, job)
        if self._plan.shadow is None:
            raise InvalidInput(
                f"expected a plan that asks for shadows, found none in job {job}; declare "
                '"shadow": {"every_iterations": N, "iterations": K} when you open the job, or '
                "amend the plan's field shadow"
            )
        opened = self._record.opened
        target = code or opened.replay
        if target is None:
            raise TargetNotFound(
                f"expected job {job} to name a program that can run again, found none in its "
                f"JobOpened (its program is {opened.job_path or 'not named'}); give one with "
                "--code package.module:attribute"
            )
        self._target = target
        self._gate = Gate(ledger, by=BY)
        self._runs = 0
        self._stale = False
        """True where the record changed while a window was looked at."""
        self._last: tuple[str, int, Trace, float] | None = None
        """The last run: bundle, iterations, what it showed, seconds."""
        self._failed: dict[tuple[str, int], ReplayError] = {}
        """Why a window could not be run; it is not tried again."""
        self._place = tempfile.TemporaryDirectory(prefix="shiftbook-shadow-")

    def __enter__(self) -> Shadow:
        return self

    def __exit__(self, *_: object) -> None:
        self._place.cleanup()

    @property
    def _plan(self) -> Plan:
        assert self._record.plan is not None
        return self._record.plan

    def run(
        self,
        *,
        follow: bool = False,
        once: bool = False,
        stop: Flag | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> list[Outcome]:
        """Compare each window that is due and was not compared; the outcomes of all of them.

        With ``follow`` go on until the job closes: a shadow starts as soon as its bundle is
        recorded, and waits for the live run. With ``once`` end after the first new comparison.
        ``on_outcome`` is told each outcome as it is known.
        """
        stop = stop or Flag()
        seen: dict[tuple[int, int | None], Outcome] = {}
        while True:
            self._record.catch_up()
            last_round = self._record.closed or not follow
            self._stale = False
            for span in self._record.spans():
                key = (span.window[0], span.last_update)
                if key in seen or stop.is_set():
                    continue
                outcome = self._look_at(span, early=follow and not self._record.closed)
                if self._stale:
                    break  # before another window is run: this one's shadow has just ended
                if outcome is None:
                    continue
                seen[key] = outcome
                if on_outcome is not None:
                    on_outcome(outcome)
                if once and not outcome.before:
                    return list(seen.values())
            if stop.is_set() or (last_round and not self._stale):
                return list(seen.values())
            stop.wait(POLL_S)

    def _look_at(self, span: Span, *, early: bool) -> Outcome | None:
        """The outcome of a window; None where the live run has not come to its end."""
        bundle = None if span.saved is None else span.saved.bundle
        if span.compared is not None:
            position, event = span.compared
            return Outcome(self._job, span.window, event.bundle, event, position, before=True)
        if span.problem and span.last_update is not None:
            return Outcome(self._job, span.window, bundle, could_not=span.problem)
        if span.saved is None or (span.last_update is None and not early):
            return None
        try:
            trace, wall_s = self._shadow_of(span)
            if self._record.span(span.window) != span:
                self._stale = True  # the live run went on, or began again, in the meantime
                return None
            if span.last_update is None:
                return None
            lost = self._record.lost_rows(span.window)
            if lost:
                raise NotComparable(f"the live run's evidence cannot be read: {lost}")
            compared = self._compare(span, trace, wall_s)
        except TargetNotFound:
            raise  # no window could be run
        except ReplayError as error:
            if span.last_update is None:
                return None  # told once the live run is through the window
            return Outcome(self._job, span.window, bundle, could_not=str(error))
        receipt = self._gate.shadowed(self._job, compared, by=BY)
        if receipt is None:
            self._stale = True  # another shadow of this job was quicker: its outcome is next
            return None
        return Outcome(self._job, span.window, bundle, compared, receipt.first)

    # ---- the run -------------------------------------------------------------------------

    def _shadow_of(self, span: Span) -> tuple[Trace, float]:
        """What the static schedule shows of a window, and the seconds that it took."""
        saved = span.saved
        assert saved is not None
        key = saved.bundle, len(span.window)
        if key in self._failed:
            raise self._failed[key]
        if self._last is not None and self._last[0] == saved.bundle and self._last[1] >= key[1]:
            return self._last[2:]
        try:
            self._check_bundle(saved)
            # The tensors that the run before kept were compared, or are of no use any more.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._runs += 1
            began_s = time.monotonic()
            trace = run_apart(
                self._target,
                Asked(seed=self._plan.seed, steps=len(span.window), start=span.start),
                self._folder,
                config=self._record.opened.config,
                number=self._runs,
                limit_s=self._limit_s,
            )
            wall_s = time.monotonic() - began_s
            self._check_bundle(saved)  # it was there all the while
        except ReplayError as error:
            self._failed[key] = error
            raise
        self._last = (*key, trace, wall_s)  # one window at a time: those before were told
        return trace, wall_s

    @property
    def _folder(self) -> Path:
        return Path(self._place.name) / f"run-{self._runs}"

    def _check_bundle(self, saved: CheckpointSaved) -> None:
        """Raise NotRestorable where what lies at the bundle's place is not, or no more, it.

        A checkpoint of another form has no manifest here: its job checks it when it restores it.
        """
        self._record.catch_up()
        named = f"expected the bundle {saved.bundle[:16]} at {saved.path}"
        again = self._record.overwritten_at(saved)
        if again is not None:
            raise NotRestorable(
                f"{named}, found the one that was saved there at position {again}; save each "
                "bundle to a place of its own"
            )
        path = Path(saved.path)
        if not path.exists():
            raise NotRestorable(
                f"{named}, found nothing; keep bundles for as long as a shadow needs them "
                "(protect them from retention), or let it follow the job while that runs"
            )
        if not (path / MANIFEST_NAME).is_file():
            return
        try:
            found = load_manifest(path).bundle_id
        except CheckpointError as error:
            raise NotRestorable(f"{named}, found a damaged one: {error}") from error
        if found != saved.bundle:
            raise NotRestorable(
                f"{named}, found {found[:16]}; put back the one that the ledger names"
            )

    # ---- the comparison ------------------------------------------------------------------

    def _compare(self, span: Span, trace: Trace, wall_s: float) -> ShadowCompared:
        bits = trace.equality == "bits" and self._plan.sampling.batch_composition == "bitwise"
        assert span.saved is not None
        assert span.last_update is not None
        shadow = _steps(trace.lines, span.window)
        if not shadow:
            raise NotComparable(
                f"expected steps {span.window[0]} to {span.window[-1]} from the job, found others; "
                "number steps on from conditions.start.iteration"
            )
        live = self._record.lines(span.window)
        fields: dict[str, Any] = {
            "bundle": span.saved.bundle,
            "iteration": span.window[0],
            "iterations": len(span.window),
            "last_update": span.last_update,
            "target": self._target,
            "conditions": trace.conditions.text(),
            "stack": trace.stack,
            "wall_s": wall_s,
        }
        if bits:
            return ShadowCompared(method="bits", **fields, **self._same_bits(live, shadow, trace))
        return ShadowCompared(method="test", **fields, **self._same_law(span, live, shadow))

    def _same_bits(
        self, live: tuple[Line, ...], shadow: tuple[Line, ...], trace: Trace
    ) -> dict[str, Any]:
        record = _part(live, self._job, trace.conditions)
        shared, _ = shown_by(_part(shadow, trace.target, trace.conditions), record)
        if not shared.lines:
            raise NotComparable(
                "expected the job to show what its record holds (samples, losses, states), found "
                "nothing in common; let its steps observe them"
            )
        found = first_divergence(shared, _part(shadow, trace.target, trace.conditions))
        return {
            "agreed": found is None,
            "observations": len(shared.lines),
            "difference": None if found is None else _difference(found),
        }

    def _same_law(
        self, span: Span, live: tuple[Line, ...], shadow: tuple[Line, ...]
    ) -> dict[str, Any]:
        mine, other = _window(live, span.window), _window(shadow, span.window)
        alpha = 0.01 if self._plan.shadow is None else self._plan.shadow.alpha
        fields: dict[str, Any] = {"observations": len(live), "alpha": alpha}
        odd = sorted(mine.rewards.keys() ^ other.rewards.keys())
        if odd and mine.rewards and other.rewards:
            here = odd[0] in mine.rewards
            difference = ShadowDifference(
                iteration=span.window[0],
                component="rollout",
                kind="sample",
                name=odd[0],
                what="missing" if here else "unexpected",
                live="it is there" if here else "no such sample",
                shadow="no such sample" if here else "it is there",
            )
            return {**fields, "agreed": False, "difference": difference}
        before = self._tested()
        shared = [
            name
            for name in MEASURES
            if len(mine.iterations.get(name, ())) == len(other.iterations.get(name, ())) > 0
        ]
        measures = list(before[0][0].iterations) if before else shared
        if not measures or not set(measures) <= set(shared):
            raise NotComparable(
                f"expected {', '.join(measures) or 'a measure'} of every iteration on both sides, "
                f"found {', '.join(shared) or 'none'}; record and observe the same in each window"
            )
        if not (mine.rewards and other.rewards):
            mine, other = Window(mine.iterations), Window(other.iterations)
        test = ShadowTest(alpha, measures)
        for one, two in before:
            test.add(one, two)
        test.add(mine, other)
        return {
            **fields,
            "agreed": not test.alarmed,
            "difference": _alarm(test, span, mine, other) if test.alarmed else None,
            "measures": {
                name: ShadowMean(live=mine.mean(name), shadow=other.mean(name)) for name in measures
            },
            "log_evidence": test.plain()["log_evidence"],
            "segment": self._segment(mine, other),
        }

    def _segment(self, live: Window, shadow: Window) -> Any:
        uids = sorted(live.rewards)
        if not uids:
            return None
        rows = {
            "uid": uids,
            "live": [live.rewards[uid] for uid in uids],
            "shadow": [shadow.rewards[uid] for uid in uids],
        }
        return write_segment(self._ledger, rows)

    def _tested(self) -> list[tuple[Window, Window]]:
        """The windows that the test has taken in since it began, or since its last alarm."""
        kept: list[ShadowCompared] = []
        for event in self._record.comparisons:
            if event.method == "test" and event.measures is not None:
                kept = [*kept, event] if event.agreed else []
        return [self._windows(event) for event in kept]

    def _windows(self, event: ShadowCompared) -> tuple[Window, Window]:
        columns: dict[str, list[Any]] = {"uid": [], "live": [], "shadow": []}
        if event.segment is not None:
            try:
                columns = read_segment(self._ledger, event.segment).to_pydict()
            except EvidenceError as error:
                raise NotComparable(
                    f"the samples that the test took in at iteration {event.iteration} cannot be "
                    f"read: {error}"
                ) from error
        sides = []
        for side in ("live", "shadow"):
            means = {name: [getattr(m, side)] for name, m in (event.measures or {}).items()}
            sides.append(Window(means, dict(zip(columns["uid"], columns[side], strict=True))))
        return sides[0], sides[1]


def _steps(lines: Sequence[Line], window: range) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.step in window)


def _part(lines: tuple[Line, ...], target: str, conditions: Conditions) -> Trace:
    return Trace(target, {}, "bits", conditions, "", lines, whole=False)


def _window(lines: Sequence[Line], window: range) -> Window:
    """The measures of one side, an entry for each iteration, and the first one's rewards."""
    iterations: dict[str, list[float]] = {name: [] for name in MEASURES}
    rewards: dict[int, dict[str, float]] = {number: {} for number in window}
    for line in lines:
        if line.kind == "number" and line.name in MEASURES:
            iterations[line.name].append(float(line.fields["value"]))
        elif line.kind == "sample" and "reward" in line.fields:
            rewards[line.step][line.name] = float(line.fields["reward"])
    if not iterations[REWARD]:
        iterations[REWARD] = [
            sum(of.values()) / len(of) for of in rewards.values() if len(of)
        ]  # fmt: skip
    whole = {name: values for name, values in iterations.items() if len(values) == len(window)}
    return Window(whole, rewards[window[0]])


def _difference(found: Divergence) -> ShadowDifference:
    return ShadowDifference(
        iteration=found.step,
        component=found.component,
        kind=found.kind,
        name=found.name,
        what=found.what,
        live=found.expected[:MAX_TEXT],
        shadow=found.found[:MAX_TEXT],
        position=found.events[0],
    )


def _alarm(test: ShadowTest, span: Span, live: Window, shadow: Window) -> ShadowDifference:
    """The measure that raised the alarm, with what both sides showed of it in this window."""
    name = test.plain()["by"][0]
    sides = []
    for side in (live, shadow):
        rewards = list(side.rewards.values())
        mean = sum(rewards) / len(rewards) if name == "sample reward" else side.mean(name)
        sides.append(f"mean {mean:.6g}")
    return ShadowDifference(
        iteration=span.window[0],
        component="rollout" if name in (REWARD, "sample reward") else "trainer",
        kind="test",
        name=name,
        what="more than chance",
        live=sides[0],
        shadow=sides[1],
    )
