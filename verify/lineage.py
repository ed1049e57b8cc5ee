"""The effective lineage of a job: what stands after crashes, restores and replays are unwound.

A job is a tree of attempts. A new attempt starts where its bundle stood, so what an earlier attempt
did after that bundle is no longer part of the policy. The track holds the effective path alone:
where the sampler stands, which samples are open, and the state that the last update left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import AttemptStarted, ExperimentForked
from shiftbook.ledger.events.observation import IterationCompleted
from shiftbook.ledger.events.state import (
    CheckpointRegistered,
    CheckpointRestored,
    CheckpointSaved,
)
from shiftbook.ledger.events.training import (
    BatchConsumed,
    SamplesDrawn,
    SamplesDropped,
    SamplesGenerated,
    SamplesRewarded,
    UpdateApplied,
)
from shiftbook.ledger.plan import Plan
from shiftbook.verify.evidence import Rows

MODEL, MASTERS, OPTIMIZER, REFERENCE = "model", "masters", "optimizer", "reference"
EMA = "ema"
"""Names of the parts whose fingerprints an update also records."""

WINDOW = 4096
"""Draws, marks and iterations that are remembered back in time. Bounds the memory."""

MAX_SAMPLES_A_DRAW = 1_000_000
"""Samples that one SamplesDrawn event may open; a forged group size cannot fill the memory."""


_FOLLOWED = frozenset(
    {
        AttemptStarted,
        ExperimentForked,
        CheckpointSaved,
        CheckpointRegistered,
        CheckpointRestored,
        SamplesDrawn,
        SamplesGenerated,
        SamplesRewarded,
        SamplesDropped,
        BatchConsumed,
        UpdateApplied,
        IterationCompleted,
    }
)
"""Types of event that a track takes in."""


@dataclass(slots=True)
class Sample:
    """One drawn and not yet forgotten sample; positions are None until it got there."""

    uid: str
    ordinal: int
    iteration: int
    drawn: int
    generated: int | None = None
    tokens: str | None = None
    mask: str | None = None
    """Digest of which tokens were sampled; None where it was not recorded."""
    logps: str | None = None
    """Digest of the engine's log-probabilities."""
    version_min: int = 0
    version_max: int = 0
    rewarded: int | None = None
    reward: float | None = None
    reward_tokens: str | None = None
    consumed: tuple[int, ...] = ()
    proximal: tuple[int, str | None] | None = None
    """Iteration that last consumed it, and digest of what its first pass took the ratio against."""
    dropped: int | None = None
    unknown: str | None = None
    """Why its record is not known (its rows are missing, or they were let go before a restore)."""

    def owed(self, plan: Plan | None) -> bool:
        """True while it is neither dropped nor consumed as often as the plan demands."""
        replayed = plan is not None and plan.update.sample_reuse == "at_most"
        return self._open(1 if replayed or plan is None else plan.update.epochs_per_batch)

    def usable(self, plan: Plan | None) -> bool:
        """True while the plan lets it be consumed once more."""
        return self._open(plan.update.epochs_per_batch if plan else 1)

    def _open(self, times: int) -> bool:
        return self.dropped is None and len(self.consumed) < times


@dataclass(frozen=True, slots=True)
class Chain:
    """The training state as the last update of the lineage left it; None where not recorded."""

    version: int
    position: int
    params: str | None = None
    masters: str | None = None
    optimizer: str | None = None
    step: int | None = None
    ema: str | None = None
    updates: int | None = None
    """Updates that were applied, none skipped, since the job began; None where not known."""
    controllers: dict[str, float] = field(default_factory=dict)

    def part(self, name: str) -> str | None:
        """Fingerprint by the name that the part has in a bundle."""
        by_name = {
            MODEL: self.params,
            MASTERS: self.masters,
            OPTIMIZER: self.optimizer,
            EMA: self.ema,
        }
        return by_name.get(name)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A run of draw ordinals, remembered after its samples were let go."""

    start: int
    stop: int
    group_size: int
    iteration: int
    position: int
    consumed: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A bundle, and where the lineage stood when it was saved."""

    saved: CheckpointSaved
    position: int
    chain: Chain | None
    samples: tuple[Sample, ...]


MarkOf = Callable[[str, str], Mark | None]
"""The mark of another job's bundle, by job and bundle; None where none is known."""


@dataclass(slots=True)
class Consumed:
    """What was consumed since the last update."""

    tokens: int = 0
    count: int = 0
    positions: list[int] = field(default_factory=list)
    groups_by_rank: dict[int, set[int]] = field(default_factory=dict)
    unknown: str | None = None


class Track:
    """Follows one job's effective lineage. ``apply`` comes after the invariants saw the event."""

    def __init__(self, mark_of: MarkOf | None = None) -> None:
        self._mark_of = mark_of
        self.parent: str | None = None
        """The job from whose bundles this one may begin, since it was forked from it."""
        self.attempt: AttemptStarted | None = None
        self.attempt_position = -1
        self.mark: Mark | None = None
        """The bundle from which the lineage last went on."""
        self.restored: tuple[CheckpointRestored, int] | None = None
        self.cursor: int | None = None
        """Ordinal of the next draw; None while it is not known."""
        self.redraw: int | None = None
        """A second place from which draws may go on: the cursor of a restore within an attempt."""
        self.samples: OrderedDict[str, Sample] = OrderedDict()
        self.closed: deque[Drawn] = deque(maxlen=WINDOW)
        self.draws: deque[Drawn] = deque(maxlen=WINDOW)
        self.chain: Chain | None = None
        self.pending = Consumed()
        self.marks: OrderedDict[str, Mark] = OrderedDict()
        self.registered: OrderedDict[str, tuple[CheckpointRegistered, int]] = OrderedDict()
        """States of other programs by bundle, with the position that says so."""

    def apply(
        self, stored: StoredEvent, event: Event, plan: Plan | None, rows: Rows | None
    ) -> None:
        """Take in the next event of the job."""
        if type(event) not in _FOLLOWED:
            return
        at = stored.position
        match event:
            case AttemptStarted():
                self._start(event, at)
            case ExperimentForked():
                self._fork(event)
            case CheckpointSaved():
                self._save(event, at, plan)
            case CheckpointRegistered():
                self.registered[event.bundle] = (event, at)
                if len(self.registered) > WINDOW:
                    self.registered.popitem(last=False)
            case CheckpointRestored():
                self._restore(event, at)
            case SamplesDrawn():
                self._draw(event, at, plan)
            case SamplesGenerated():
                self._generated(event, at, rows)
            case SamplesRewarded():
                self._rewarded(event, at, rows)
            case SamplesDropped():
                for uid in event.uids:
                    if uid in self.samples:
                        self.samples[uid].dropped = at
            case BatchConsumed():
                self._consumed(event, at, rows)
            case UpdateApplied():
                self.chain = self._after(event, at)
                self.pending = Consumed()
                self._let_go(event.iteration - 1, plan)
            case IterationCompleted():
                self._let_go(event.iteration, plan)
            case _:
                pass

    def origin(self, bundle: str) -> tuple[CheckpointSaved | CheckpointRegistered, int] | None:
        """How a bundle came to be, saved by the job or registered, and where that stands."""
        mark = self.find_mark(bundle)
        return self.registered.get(bundle) if mark is None else (mark.saved, mark.position)

    def find_mark(self, bundle: str) -> Mark | None:
        """Where the lineage stood at a bundle of this job, or of the one it was forked from."""
        mark = self.marks.get(bundle)
        if mark is None and self.parent is not None and self._mark_of is not None:
            mark = self._mark_of(self.parent, bundle)
        return mark

    def bundle_of(self, job: str, bundle: str) -> CheckpointSaved | None:
        """A bundle that another job of the ledger saved."""
        mark = self._mark_of(job, bundle) if self._mark_of is not None else None
        return mark.saved if mark is not None else None

    @property
    def resumes(self) -> bool:
        """True where the present life goes on with all of a bundle: no part of it begins anew."""
        restored = self.restored[0] if self.restored is not None else None
        bundle = self.attempt is not None and self.attempt.bundle is not None
        return restored.kind == "resume" if restored is not None else bundle

    def find_closed(self, ordinal: int) -> Drawn | None:
        """The closed run of draws that an ordinal belongs to, as far back as is remembered."""
        return next((d for d in self.closed if d.start <= ordinal < d.stop), None)

    def outstanding(self, plan: Plan | None) -> list[Sample]:
        """Samples that were drawn and neither consumed nor dropped."""
        return [s for s in self.samples.values() if s.owed(plan)]

    def past(self, iteration: int, plan: Plan | None) -> list[Sample]:
        """Samples that no update after this iteration may consume.

        Where the plan bounds the staleness by several updates, a prompt may wait for its request,
        and an iteration may pass without an update: what counts then are the versions of the
        tokens, and a sample that is owed is open until it is consumed or dropped.
        """
        bound = plan.sampling.staleness_bound if plan else 0
        old = [s for s in self.samples.values() if s.iteration <= iteration - bound]
        if plan is None or not bound or plan.objective == "sft" or self.chain is None:
            return old
        least = self.chain.version - bound
        return [
            s
            for s in old
            if s.unknown is not None
            or s.dropped is not None
            or (s.version_min < least and not s.owed(plan))
        ]

    def _after(self, event: UpdateApplied, at: int) -> Chain:
        """The state that an update leaves."""
        last = self.chain
        known = last.updates if last is not None else None
        controllers = dict(last.controllers) if last is not None else {}
        controllers.update((n, c.after) for n, c in (event.controllers or {}).items())
        return Chain(
            event.policy_version,
            at,
            event.params_after,
            event.masters_after,
            event.optimizer_after,
            event.optimizer_step,
            event.ema_after,
            event.scheduler_step if known is None else known + (0 if event.skipped else 1),
            controllers,
        )

    def _start(self, event: AttemptStarted, at: int) -> None:
        self.attempt, self.attempt_position = event, at
        self.restored, self.redraw, self.pending = None, None, Consumed()
        self.mark = self.find_mark(event.bundle) if event.bundle else None
        updates = 0 if event.bundle is None else None
        start = Chain(event.policy_version, at, params=event.policy_fingerprint, updates=updates)
        if self.mark is not None:
            self.cursor = self.mark.saved.cursor
            self.chain = _chain_of(self.mark, start)
            self.samples = OrderedDict((s.uid, replace(s)) for s in self.mark.samples)
        else:
            # Without a bundle a life begins at the beginning; an unknown bundle says nothing.
            self.cursor = 0 if event.bundle is None else None
            self.chain = start
            self.samples = OrderedDict()
        first = self.cursor if self.cursor is not None else 0
        self.closed = deque((d for d in self.closed if d.stop <= first), maxlen=WINDOW)
        self.draws = deque((d for d in self.draws if d.stop <= first), maxlen=WINDOW)

    def _fork(self, event: ExperimentForked) -> None:
        """Know the parent's bundles; go on from one where the attempt begins with it."""
        self.parent = event.parent
        began = self.attempt
        if began is not None and began.bundle and self.mark is None and self.cursor is None:
            self._start(began, self.attempt_position)

    def _save(self, event: CheckpointSaved, at: int, plan: Plan | None) -> None:
        # A replay buffer goes on after the restore: what it may use again is remembered too.
        open_samples = tuple(replace(s) for s in self.samples.values() if s.usable(plan))
        self.marks[event.bundle] = Mark(event, at, self.chain, open_samples)
        self.marks.move_to_end(event.bundle)
        if len(self.marks) > WINDOW:
            self.marks.popitem(last=False)

    def _restore(self, event: CheckpointRestored, at: int) -> None:
        self.restored = (event, at)
        mark = self.find_mark(event.bundle)
        base = Chain(event.policy_version, at, params=event.parts.get(MODEL))
        if mark is None:
            self.chain = _with_parts(base, event.parts)
            self.cursor = event.cursor if self.cursor is None else self.cursor
            return
        self.mark = mark
        self.chain = _chain_of(mark, base)
        if event.kind != "resume":
            # A warm start goes on with what it kept; its first update says where counters begin.
            known = mark.chain.controllers if mark.chain is not None else {}
            kept = dict(known) if "controllers" in event.parts else {}
            self.chain = _with_parts(replace(base, controllers=kept), event.parts)
        self.pending = Consumed()
        # Updates after the bundle are undone, so what they consumed is owed again; what was drawn
        # stays drawn, and drawing it again is as good.
        self.redraw = mark.saved.cursor
        for sample in self.samples.values():
            sample.consumed = tuple(p for p in sample.consumed if p < mark.position)
        for sample in mark.samples:
            self.samples.setdefault(sample.uid, replace(sample))
        again = [d for d in self.draws if d.stop > mark.saved.cursor]
        for run in again:
            self._open(run, unknown="let go before a restore within the attempt")
        self.closed = deque((d for d in self.closed if d.stop <= mark.saved.cursor), maxlen=WINDOW)

    def _open(self, run: Drawn, unknown: str | None = None) -> None:
        most = max(1, MAX_SAMPLES_A_DRAW // max(1, run.stop - run.start))
        for ordinal in range(run.start, run.stop):
            for member in range(min(run.group_size, most)):
                uid = f"{ordinal:06d}/{member}"
                if uid not in self.samples:
                    self.samples[uid] = Sample(
                        uid, ordinal, run.iteration, run.position, unknown=unknown
                    )

    def _draw(self, event: SamplesDrawn, at: int, plan: Plan | None) -> None:
        stop = event.start + len(event.indices)
        run = Drawn(event.start, stop, event.group_size, event.iteration, at)
        for uid in [u for u, s in self.samples.items() if event.start <= s.ordinal < stop]:
            del self.samples[uid]
        if self.draws and self.draws[-1].stop > event.start:  # drawn again
            self.draws = deque((d for d in self.draws if d.stop <= event.start), maxlen=WINDOW)
        self.draws.append(run)
        self._open(run)
        if plan is not None and plan.objective == "sft":
            # A training sequence is whole when it is drawn; no engine adds to it.
            for place, digest in enumerate(event.prompt_digests or ()):
                sample = self.samples.get(f"{event.start + place:06d}/0")
                if sample is not None:
                    sample.generated, sample.tokens = at, digest
        self.cursor = stop
        if self.redraw is not None and event.start <= self.redraw:
            self.redraw = None

    def _generated(self, event: SamplesGenerated, at: int, rows: Rows | None) -> None:
        if rows is None or rows.problem:
            self._blind(event.iteration, "rows of SamplesGenerated cannot be read")
            return
        masks = rows.get("mask_digest") or [None] * len(rows)
        columns = (rows["uid"], rows["token_digest"], rows["version_min"], rows["version_max"])
        for uid, tokens, low, high, mask, logps in zip(
            *columns, masks, rows["logp_digest"], strict=True
        ):
            sample = self.samples.get(uid)
            if sample is not None:
                sample.mask, sample.logps = mask, logps
                sample.generated, sample.tokens, sample.unknown = at, tokens, None
                sample.version_min, sample.version_max = low, high

    def _rewarded(self, event: SamplesRewarded, at: int, rows: Rows | None) -> None:
        if rows is None or rows.problem:
            self._blind(event.iteration, "rows of SamplesRewarded cannot be read")
            return
        columns = (rows["uid"], rows["token_digest"], rows["reward"])
        for uid, tokens, reward in zip(*columns, strict=True):
            sample = self.samples.get(uid)
            if sample is not None:
                sample.rewarded, sample.reward, sample.reward_tokens = at, reward, tokens

    def _consumed(self, event: BatchConsumed, at: int, rows: Rows | None) -> None:
        self.pending.tokens += event.tokens
        self.pending.count += event.count
        self.pending.positions.append(at)
        if rows is None or rows.problem:
            self._blind(event.iteration, "rows of BatchConsumed cannot be read")
            self.pending.unknown = "rows of BatchConsumed cannot be read"
            return
        proximal = rows.get("proximal_digest") or [None] * len(rows)
        for uid, against in zip(rows["uid"], proximal, strict=True):
            sample = self.samples.get(uid)
            if sample is not None:
                known = sample.proximal if sample.consumed else None
                if known is None or known[0] != event.iteration:
                    sample.proximal = (event.iteration, against)
                sample.consumed = (*sample.consumed, at)
        for rank, group in zip(rows["virtual_rank"], rows["group"], strict=True):
            self.pending.groups_by_rank.setdefault(rank, set()).add(group)

    def _blind(self, iteration: int, why: str) -> None:
        for sample in self.samples.values():
            if sample.iteration <= iteration:
                sample.unknown = why

    def _let_go(self, iteration: int, plan: Plan | None) -> None:
        """Forget samples that no later update may consume."""
        old = self.past(iteration, plan)
        if not old:
            return
        last_consumed: dict[int, int | None] = {}
        for sample in old:
            del self.samples[sample.uid]
            if sample.consumed or sample.drawn not in last_consumed:
                last_consumed[sample.drawn] = sample.consumed[-1] if sample.consumed else None
        # What closes was drawn lately, so the search begins at the end.
        for run in reversed(self.draws):
            if not last_consumed:
                break
            if run.position in last_consumed:
                self.closed.append(replace(run, consumed=last_consumed.pop(run.position)))


def mark_of_save(saved: CheckpointSaved) -> Mark:
    """The mark of a bundle of which the save alone is known: its open samples have no record."""
    held = saved.in_flight
    if held is None:
        try:
            held = load_manifest(Path(saved.path)).in_flight_uids or ()
        except BundleError:
            held = ()
    why = "the job that the bundle is of was not judged with this one"
    samples = [
        Sample(uid, int(uid.partition("/")[0]), saved.iteration, -1, unknown=why)
        for uid in held
        if uid.partition("/")[0].isdecimal()
    ]
    return Mark(saved, -1, None, tuple(samples))


def _chain_of(mark: Mark, fallback: Chain) -> Chain:
    """State that a bundle holds: what the update before it left, checked against its parts."""
    base = mark.chain if mark.chain is not None else fallback
    return _with_parts(replace(base, version=mark.saved.policy_version), mark.saved.parts)


def _with_parts(chain: Chain, parts: dict[str, str]) -> Chain:
    return replace(
        chain,
        params=parts.get(MODEL, chain.params),
        masters=parts.get(MASTERS, chain.masters),
        optimizer=parts.get(OPTIMIZER, chain.optimizer),
        ema=parts.get(EMA, chain.ema),
    )
