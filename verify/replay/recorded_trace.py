"""Reads the trace that a ledger holds: samples, rewards, updates, and the states of its bundles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.errors import CheckpointError
from shiftbook.checkpoint.manifest import load_manifest, tensor_place
from shiftbook.ledger.envelope import StoredEvent
from shiftbook.ledger.errors import InvalidInput, UnknownJob
from shiftbook.ledger.events.job import JobOpened
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.events.training import SamplesGenerated, SamplesRewarded, UpdateApplied
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
NUMBERS = ("learning_rate", "loss", "kl", "grad_norm", "tokens")


@dataclass
class _Iteration:
    """What a ledger holds of one iteration; what was computed again replaces it."""

    generated: tuple[int, SamplesGenerated] | None = None
    rewarded: tuple[int, SamplesRewarded] | None = None
    updated: tuple[int, UpdateApplied] | None = None
    saved: tuple[int, CheckpointSaved] | None = None


@dataclass
class Recorded:
    """A job as a ledger recorded it."""

    url: str
    name: str
    opened: JobOpened
    iterations: dict[int, _Iteration] = field(default_factory=dict)
    closed: bool = False


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
        lines = tuple(_lines(recorded, rows))
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


def _collect(events: Iterator[StoredEvent], url: str) -> dict[str, Recorded]:
    jobs: dict[str, Recorded] = {}
    for stored in events:
        if stored.type not in READ:
            continue
        body = stored.parsed()
        if isinstance(body, JobOpened):
            jobs[stored.job] = Recorded(url, stored.job, body)
        found = jobs.get(stored.job)
        if found is None:
            continue
        at = stored.position
        if isinstance(body, SamplesGenerated):
            found.iterations[body.iteration] = _Iteration(generated=(at, body))
        elif isinstance(body, SamplesRewarded):
            found.iterations.setdefault(body.iteration, _Iteration()).rewarded = (at, body)
        elif isinstance(body, UpdateApplied):
            found.iterations.setdefault(body.iteration, _Iteration()).updated = (at, body)
        elif isinstance(body, CheckpointSaved) and body.iteration > 0:
            of = found.iterations.setdefault(body.iteration - 1, _Iteration())
            of.saved = (at, body)
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


def _lines(recorded: Recorded, rows: RowSource) -> Iterator[Line]:
    for number in sorted(recorded.iterations):
        one = recorded.iterations[number]
        if one.updated is None:
            break  # the run ended in the middle of it
        if one.generated is not None:
            yield from _samples(number, one, rows)
        at, update = one.updated
        for name in NUMBERS:
            value = {"value": repr(float(getattr(update, name)))}
            yield Line(number, "trainer", "number", name, value, event=at)
        yield from _tensors(number, one)
        for part, attribute in PARTS.items():
            root = {"root": str(getattr(update, attribute))}
            yield Line(number, "trainer", "root", part, root, event=at)


def _samples(number: int, one: _Iteration, rows: RowSource) -> Iterator[Line]:
    assert one.generated is not None
    at, generated = one.generated
    table = rows("SamplesGenerated", generated.segment)
    rewards: dict[Any, Any] = {}
    if one.rewarded is not None:
        scored = rows("SamplesRewarded", one.rewarded[1].segment)
        if not scored.problem:
            rewards = dict(zip(scored["uid"], scored["reward"], strict=True))
    if table.problem:
        return  # a lost segment was a finding of the first pass already
    seen = zip(table["uid"], table["token_digest"], table["logp_digest"], strict=True)
    for uid, tokens, logps in sorted(seen):
        fields = {"tokens": str(tokens), "logps": str(logps)}
        if uid in rewards:
            fields["reward"] = repr(float(rewards[uid]))
        yield Line(number, "rollout", "sample", label(str(uid)), fields, event=at)


def _tensors(number: int, one: _Iteration) -> Iterator[Line]:
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
