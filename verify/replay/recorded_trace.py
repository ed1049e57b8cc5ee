"""Reads the trace that a ledger holds: samples, rewards, updates, and the states of its bundles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.errors import CheckpointError
from shiftbook.checkpoint.manifest import load_manifest, tensor_place
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import InvalidInput, UnknownJob
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import JobOpened
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.events.training import SamplesGenerated, SamplesRewarded, UpdateApplied
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.errors import NothingRecorded, ReplayError
from shiftbook.verify.evidence import RowSource
from shiftbook.verify.integrity import Integrity, sound_events
from shiftbook.verify.replay.protocol import Conditions
from shiftbook.verify.replay.trace import Line, Trace, label
from shiftbook.verify.sources import evidence_of, first_position, open_events, shown

SQLITE = "sqlite:///"
PARTS = {"model": "params_after", "masters": "masters_after", "optimizer": "optimizer_after"}
"""Part of the trainer's state to the field of UpdateApplied that has its root."""
READ = frozenset(
    kind.type_()
    for kind in (JobOpened, SamplesGenerated, SamplesRewarded, UpdateApplied, CheckpointSaved)
)
NUMBERS = ("learning_rate", "loss", "kl", "grad_norm", "tokens", "logp_gap")
"""Fields of UpdateApplied that are shown; one that was not recorded is no line."""


@dataclass
class Iteration:
    """What a ledger holds of one iteration; what was computed again replaces it."""

    attempt: str
    generated: list[tuple[int, SamplesGenerated]] = field(default_factory=list)
    """In parts, where samples were recorded as they came."""
    rewarded: list[tuple[int, SamplesRewarded]] = field(default_factory=list)
    updated: tuple[int, UpdateApplied] | None = None
    saved: tuple[int, CheckpointSaved] | None = None


@dataclass
class Recorded:
    """A job as a ledger recorded it."""

    url: str
    name: str
    opened: JobOpened
    iterations: dict[int, Iteration] = field(default_factory=dict)

    def take(self, position: int, body: Event) -> None:
        """Take in the next event of the job; other types change nothing."""
        if isinstance(body, SamplesGenerated):
            known = self.iterations.get(body.iteration)
            if known is None or known.updated is not None or known.attempt != body.attempt:
                self.iterations[body.iteration] = Iteration(body.attempt)
            self.iterations[body.iteration].generated.append((position, body))
        elif isinstance(body, SamplesRewarded):
            self._of(body.iteration, body.attempt).rewarded.append((position, body))
        elif isinstance(body, UpdateApplied):
            self._of(body.iteration, body.attempt).updated = (position, body)
        elif isinstance(body, CheckpointSaved) and body.iteration > 0:
            self._of(body.iteration - 1, body.attempt).saved = (position, body)

    def _of(self, number: int, attempt: str) -> Iteration:
        return self.iterations.setdefault(number, Iteration(attempt))


def recorded_trace(
    url: str, job: str | None = None, *, evidence: str | None = None
) -> tuple[Recorded, Trace]:
    """The job that a ledger or archive recorded, and what it holds of its trace.

    Raises UnreadableStore where it is no ledger, ReplayError where it is damaged, and
    NothingRecorded where it holds no training record.
    """
    if "://" not in url:
        url = f"{SQLITE}{url}"
    with open_events(url) as raw:
        rows = evidence_of(raw, evidence)
        first = first_position(raw)
        if first:
            raise NothingRecorded(
                f"{shown(url)}: expected a ledger from its first event on, found an archive that "
                f"begins at position {first}; export from 0"
            )
        integrity = Integrity(rows, None, 0)
        jobs = _collect(sound_events(raw, integrity, None), shown(url))
        findings = tuple(integrity.finish().findings)
        if findings:
            raise ReplayError(
                f"{shown(url)}: expected sound events to compare with, found damage at position "
                f"{findings[0].position}; see `shiftbook verify`"
            )
        recorded = _one(jobs, job, shown(url))
        lines = tuple(recorded_lines(recorded, rows))
    if not lines:
        raise NothingRecorded(
            f"{shown(url)}: expected iterations that ended with an update, found none of job "
            f"{recorded.name}; replay a job that has trained"
        )
    config = recorded.opened.config
    plan = recorded.opened.plan
    steps = lines[-1].step + 1
    trace = Trace(
        target=recorded.name,
        config=config,
        equality="bits",
        conditions=Conditions(plan.seed, steps, "as-recorded"),
        stack="",
        lines=lines,
        whole=False,
        source=shown(url),
    )
    return recorded, trace


def recorded_job(ledger: Ledger, job: str) -> Recorded:
    """One job of an open ledger, as it was recorded; raises UnknownJob."""
    jobs = _collect(ledger.read(job=job, types=READ), ledger.url)
    return _one(jobs, job, ledger.url)


def _collect(events: Iterator[StoredEvent], url: str) -> dict[str, Recorded]:
    jobs: dict[str, Recorded] = {}
    for stored in events:
        if stored.type not in READ:
            continue
        body = stored.parsed()
        if isinstance(body, JobOpened):
            jobs[stored.job] = Recorded(url, stored.job, body)
        found = jobs.get(stored.job)
        if found is not None:
            found.take(stored.position, body)
    return jobs


def _one(jobs: Mapping[str, Recorded], job: str | None, url: str) -> Recorded:
    if job is not None:
        if job not in jobs:
            raise UnknownJob(job, list(jobs))
        return jobs[job]
    if not jobs:
        raise NothingRecorded(f"{url}: expected a job that was opened, found none; run a job first")
    if len(jobs) > 1:
        raise InvalidInput(f"this ledger has {len(jobs)} jobs; name one with --job: "
                           f"{', '.join(sorted(jobs))}")  # fmt: skip
    return next(iter(jobs.values()))


def recorded_lines(
    recorded: Recorded, rows: RowSource, numbers: Iterable[int] | None = None
) -> Iterator[Line]:
    """The lines of a job's iterations, all of them by default, up to one without an update."""
    for number in sorted(recorded.iterations) if numbers is None else numbers:
        one = recorded.iterations[number]
        if one.updated is None:
            break  # the run ended in the middle of it
        yield from _samples(number, one, rows)
        at, update = one.updated
        for name in NUMBERS:
            recorded_value = getattr(update, name)
            if recorded_value is not None:
                value = {"value": repr(float(recorded_value))}
                yield Line(number, "trainer", "number", name, value, event=at)
        yield from _tensors(number, one)
        for part, attribute in PARTS.items():
            root = {"root": str(getattr(update, attribute))}
            yield Line(number, "trainer", "root", part, root, event=at)


def _samples(number: int, one: Iteration, rows: RowSource) -> Iterator[Line]:
    # A lost segment was a finding of the first pass already.
    rewards: dict[Any, tuple[Any, int]] = {}
    for at, rewarded in one.rewarded:
        scored = rows("SamplesRewarded", rewarded.segment)
        if not scored.problem:
            for uid, reward in zip(scored["uid"], scored["reward"], strict=True):
                rewards[uid] = (reward, at)
    seen: dict[Any, tuple[Any, Any, int]] = {}
    for at, generated in one.generated:
        table = rows("SamplesGenerated", generated.segment)
        if not table.problem:
            for uid, *digests in zip(
                table["uid"], table["token_digest"], table["logp_digest"], strict=True
            ):
                seen[uid] = (*digests, at)
    for uid, (tokens, logps, at) in sorted(seen.items()):
        fields = {"tokens": str(tokens), "logps": str(logps)}
        rewarded_at = None
        if uid in rewards:
            reward, rewarded_at = rewards[uid]
            fields["reward"] = repr(float(reward))
        yield Line(
            number, "rollout", "sample", label(str(uid)), fields,
            event=at, reward_event=rewarded_at,
        )  # fmt: skip


def _tensors(number: int, one: Iteration) -> Iterator[Line]:
    """Tensors of the bundle that was saved after the update, where it is still there."""
    if one.saved is None:
        return
    at, saved = one.saved
    try:
        manifest = load_manifest(Path(saved.path))
    except CheckpointError:
        return
    for part in PARTS:
        if part not in manifest.parts or saved.parts.get(part) is None:
            continue
        for name, tensor in manifest.parts[part].tensors.items():
            shape = ",".join(str(n) for n in tensor.shape)
            fields = {"form": f"{tensor.dtype}[{shape}]", "fingerprint": tensor.fingerprint}
            kept = tensor_place(saved.path, part, name)
            yield Line(number, "trainer", "tensor", label(f"{part}/{name}"), fields,
                       detail=True, kept=kept, event=at)  # fmt: skip
