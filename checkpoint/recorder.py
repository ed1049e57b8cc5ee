"""Records a training loop of any make into a ledger: a few calls beside the loop's own.

A recorder writes the events that the verifier judges: what was drawn, made, rewarded, dropped and
used, what each update took in and left, which weights engines hold, bundles, restores and random
states. It takes digests of what it is handed at the moment of the call, from the objects that the
loop really uses; it never computes anything for the loop and changes nothing in it.

Events of one iteration are appended together when it ends (or at ``flush``); while the ledger is
out of reach they are spooled to local disk, and the loop goes on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder_samples import (
    Columns,
    Consumed,
    Generated,
    consumed_event,
    drawn_otherwise,
    generated_event,
    rewarded_event,
)
from shiftbook.checkpoint.recorder_state import (
    RNG,
    Part,
    State,
    digest,
    ids_bytes,
    optimizer_part,
    part_root,
    roots,
    uid,
    value_digest,
)
from shiftbook.checkpoint.recorder_sync import SyncRecord
from shiftbook.checkpoint.recorder_update import LiveState, UpdateRecord
from shiftbook.ledger.canonical import encode
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.job import Edge, ExperimentForked, JobClosed, JobOpened
from shiftbook.ledger.events.life import ReplicaLost, ReplicaStarted
from shiftbook.ledger.events.observation import IterationCompleted
from shiftbook.ledger.events.probes import (
    DataBuilt,
    LogProbsReplayed,
    RandomStatesRecorded,
    RewardsRescored,
)
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved, StateFirstUsed
from shiftbook.ledger.events.training import SamplesDrawn, SamplesDropped, Transform
from shiftbook.ledger.evidence import write_segments
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.spool import SpoolingWriter
from shiftbook.ledger.topology import Device, Topology

if TYPE_CHECKING:
    from shiftbook.checkpoint.recorder_loss import PolicyLoss
    from shiftbook.checkpoint.recorder_step import StepProbe

__all__ = [
    "Consumed",
    "Generated",
    "Part",
    "Recorder",
    "State",
    "data_digests",
    "dataset_digest",
    "drawn_otherwise",
    "optimizer_part",
    "uid",
]

MAX_BUFFERED = 256
"""Events that are held back at most before they are appended."""

RETRY_S = 1.0
"""Pause between two tries to append what an outage spooled."""


def data_digests(prompts: Sequence[Any]) -> list[str]:
    """Token digest of each prompt of a data set, in order."""
    return [digest(ids_bytes(prompt)) for prompt in prompts]


def dataset_digest(digests: Sequence[str]) -> str:
    """One digest of a data set from those of its prompts: what a plan declares."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


class Recorder:
    """The record of one attempt of a job; not to be shared between threads.

    ``open`` begins the attempt; use it as a context manager, or call ``close``. Where a job has
    several processes, one of them (rank 0) records, and the others hand it their digests.
    """

    def __init__(
        self,
        ledger: Ledger,
        job: str,
        plan: Plan,
        attempt: str,
        *,
        epoch: int,
        devices: Sequence[str],
        evidence: Path | None,
        spool: Path,
        policy: tuple[int, str],
    ) -> None:
        self.ledger, self.job, self.plan, self.attempt = ledger, job, plan, attempt
        self._epoch = epoch
        self._device = devices[0] if devices else f"{platform.node()}/0"
        self._evidence: Ledger | Path = evidence or ledger
        self._writer = SpoolingWriter(
            ledger.append, spool, writer=f"recorder-{attempt}", retry_s=RETRY_S
        )
        self._pending: list[tuple[Event, str | None, int, Columns | None]] = []
        self._policy = policy
        self._syncs = 0
        self._owned = False
        self._after: Literal["restore", "start"] | None = "start"
        self._versions: dict[str, int] = {}
        self._verified = 0
        self._reward_mean = 0.0

    @classmethod
    def open(
        cls,
        ledger: str | Ledger,
        job: str,
        plan: Plan,
        *,
        policy: Part,
        version: int = 0,
        iteration: int = 0,
        bundle: str | None = None,
        attempt: str | None = None,
        devices: Sequence[str] = (),
        components: Sequence[str] = ("rollout", "trainer"),
        job_path: str = "",
        config: Mapping[str, Any] | None = None,
        replay: str | None = None,
        evidence: Path | None = None,
        spool: Path | None = None,
    ) -> Recorder:
        """Open the job where it is new, and begin an attempt of it.

        ``policy`` is the model as it stands now (tensors by name, or their root) and ``version``
        its version; ``bundle`` names the bundle from which this attempt goes on, absent for one
        that begins at the beginning. ``replay`` is the Python path of a target that
        ``shiftbook replay`` runs with ``config``. ``evidence`` and ``spool`` are folders; by
        default they lie beside a ledger that is a file. Raises LedgerUnreachable where the ledger
        is away: an attempt must be granted. From then on an outage stops nothing.
        """
        owned = isinstance(ledger, str)
        handle = Ledger.open(ledger) if isinstance(ledger, str) else ledger
        beside = handle.path.parent if handle.path is not None else Path.cwd()
        gate = Gate(handle)
        names = tuple(devices)
        gate.open_job(
            job,
            JobOpened(
                components=tuple(components),
                edges=tuple(Edge(source=a, target=b) for a, b in pairwise(components)),
                devices=tuple(Device(name=name) for name in names),
                topology=Topology(),
                elastic={},
                plan=plan,
                job_path=job_path,
                config=dict(config or {}),
                replay=replay,
            ),
        )
        known = handle.state().job(job)
        name = attempt or f"attempt-{len(known.attempts)}-{secrets.token_hex(3)}"
        fingerprint = part_root(policy)
        grant = gate.start_attempt(
            job,
            name,
            parent=known.attempt,
            bundle=bundle,
            iteration=iteration,
            topology=Topology(),
            policy_version=version,
            policy_fingerprint=fingerprint,
            pid=os.getpid(),
        )
        recorder = cls(
            handle,
            job,
            known.plan or plan,
            name,
            epoch=grant.epoch,
            devices=names,
            evidence=evidence,
            spool=spool or beside,
            policy=(version, fingerprint),
        )
        recorder._owned = owned
        return recorder

    # -- data and samples ------------------------------------------------------------------

    def data(self, digests: Sequence[str], *, tokenizer: str) -> None:
        """The data set as it was built for this attempt: ``data_digests`` of its prompts."""
        event = DataBuilt(
            attempt=self.attempt,
            dataset_digest=dataset_digest(digests),
            tokenizer_digest=tokenizer,
            size=len(digests),
        )
        self._add(event, rows={"index": list(range(len(digests))), "digest": list(digests)})

    def drawn(
        self,
        iteration: int,
        *,
        start: int,
        indices: Sequence[int],
        epoch: int,
        prompts: Sequence[Any] | None = None,
        rule: str | None = None,
        seed: int | None = None,
        group_size: int | None = None,
    ) -> None:
        """Prompts were drawn: the ordinal of the first, their data set indices, their tokens.

        Rule, seed and group size are the plan's where the sampler has none of its own to say.
        """
        data, update = self.plan.data, self.plan.update
        self._add(
            SamplesDrawn(
                attempt=self.attempt,
                iteration=iteration,
                rule=data.sampler_rule if rule is None else rule,
                seed=data.seed if seed is None else seed,
                epoch=epoch,
                start=start,
                indices=tuple(int(i) for i in indices),
                group_size=update.group_size if group_size is None else group_size,
                prompt_digests=None if prompts is None else tuple(data_digests(prompts)),
            )
        )

    def generated(
        self,
        iteration: int,
        samples: Sequence[Generated],
        *,
        version: int,
        transform: Transform | None = None,
    ) -> None:
        """Samples as their engines made them; ``transform`` is the one that the engines applied."""
        event, rows = generated_event(self.attempt, iteration, samples, version, transform)
        lows = zip(rows["uid"], rows["version_min"], strict=True)
        self._versions.update(lows)
        self._add(event, rows=rows)

    def rewarded(
        self, iteration: int, rewards: Mapping[str, float], tokens: Mapping[str, Any], *, by: str
    ) -> None:
        """Rewards by uid, with the tokens that scorer ``by`` looked at."""
        event, rows = rewarded_event(self.attempt, iteration, rewards, tokens, by)
        self._verified += len(rewards)
        self._reward_mean = event.reward_mean
        self._add(event, rows=rows)

    def rescored(
        self, iteration: int, used: Mapping[str, float], again: Mapping[str, float]
    ) -> None:
        """Rewards of some samples as they are used, and as each scored by itself gives them.

        For scorers that give the same reward twice; ``again`` names the samples.
        """
        gaps = {uid: abs(float(used.get(uid, float("nan"))) - again[uid]) for uid in again}
        worst = max(gaps, key=lambda uid: (gaps[uid] != gaps[uid], gaps[uid]), default=None)
        self._add(
            RewardsRescored(
                attempt=self.attempt,
                iteration=iteration,
                samples=len(again),
                largest_gap=gaps[worst] if worst is not None else 0.0,
                worst=worst,
            )
        )

    def dropped(self, iteration: int, uids: Sequence[str], reason: str) -> None:
        """Samples that will never be used; the reason begins with a drop rule of the plan."""
        self._add(
            SamplesDropped(
                attempt=self.attempt, iteration=iteration, uids=tuple(uids), reason=reason
            )
        )

    def consumed(self, iteration: int, samples: Sequence[Consumed], *, version: int) -> None:
        """Samples as the next update uses them, by the policy of ``version``."""
        least = min((self._versions.get(s.uid, version) for s in samples), default=version)
        event, rows = consumed_event(self.attempt, iteration, samples, version, least)
        self._add(event, rows=rows)

    # -- updates ---------------------------------------------------------------------------

    @contextmanager
    def update(
        self,
        iteration: int,
        state: LiveState,
        *,
        probe: StepProbe | None = None,
        loss: PolicyLoss | None = None,
    ) -> Iterator[UpdateRecord]:
        """Around one optimizer step; ``state`` gives model, masters and optimizer, read twice.

        ``cast`` (the masters in the model's dtype) and ``ema`` are read where it has them.
        """
        record = UpdateRecord(
            self.attempt,
            iteration,
            state,
            probe=probe,
            loss=loss,
            virtual_ranks=self.plan.update.virtual_ranks,
        )
        if self._after is not None:
            self._first_update(record)
        yield record
        event = record.event(os.getpid(), self._device)
        self._policy = (event.policy_version, event.params_after)
        self._add(event)

    def _first_update(self, record: UpdateRecord) -> None:
        assert self._after is not None
        parts = {name: value for name, value in record.before.items() if name != "cast"}
        self._first_used("trainer", "trainer-0", self.attempt, self._after, "update", parts)
        self._after = None

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Around one iteration; what it recorded is appended when it ends."""
        begun, self._verified = time.perf_counter(), 0
        yield
        self._add(
            IterationCompleted(
                attempt=self.attempt,
                iteration=number,
                policy_version=self._policy[0],
                policy_fingerprint=self._policy[1],
                wall_s=time.perf_counter() - begun,
                components={},
                samples_verified=self._verified,
                device_s=0.0,
                reward_mean=self._reward_mean,
                schedule="as written",
            )
        )
        self.flush()

    # -- engines ---------------------------------------------------------------------------

    def started(self, component: str, replica: str, incarnation: str) -> None:
        """A process serves a replica; a new incarnation serves nothing before its first sync."""
        self._add(
            ReplicaStarted(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=incarnation,
                devices=(),
                pid=os.getpid(),
                node=platform.node(),
            )
        )

    def lost(self, component: str, replica: str, incarnation: str, cause: str) -> None:
        """A replica's process is gone."""
        self._add(
            ReplicaLost(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=incarnation,
                cause=cause,
            )
        )

    @contextmanager
    def sync(
        self, version: int, source: Part, targets: Sequence[str], *, encoding: str = "full"
    ) -> Iterator[SyncRecord]:
        """Around one weight sync of ``version``; call ``delivered`` for each engine."""
        self._syncs += 1
        operation = f"sync-{self.attempt}-{self._syncs}"
        record = SyncRecord(self.attempt, version, source, tuple(targets), encoding, self._epoch)
        self._add(record.started(), operation)
        try:
            yield record
        finally:
            for event in record.ended():
                self._add(event, operation)

    def first_use(
        self,
        component: str,
        replica: str,
        incarnation: str,
        state: State,
        *,
        version: int,
        use: str,
        after: Literal["restore", "sync", "move", "start"] = "sync",
    ) -> None:
        """State as its consumer read it, at its first use after a load; ``model`` is the policy."""
        parts = roots(state)
        self._first_used(component, replica, incarnation, after, use, parts, version)

    def _first_used(
        self,
        component: str,
        replica: str,
        incarnation: str,
        after: Literal["restore", "sync", "move", "start"],
        use: str,
        parts: dict[str, str],
        version: int | None = None,
    ) -> None:
        self._add(
            StateFirstUsed(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=incarnation,
                after=after,
                use=use,
                policy_version=self._policy[0] if version is None else version,
                parts=parts,
            )
        )

    # -- durable state ---------------------------------------------------------------------

    @contextmanager
    def checkpoint(
        self,
        path: str | Path,
        state: State,
        *,
        iteration: int,
        version: int,
        cursor: int,
        in_flight: Sequence[str] = (),
        parent: str | None = None,
        read_back: Callable[[], State] | None = None,
    ) -> Iterator[str]:
        """Around a save: digests are taken from the live state here; gives the bundle's id.

        Write the id into the file. ``iteration`` is the number of iterations completed, ``cursor``
        the ordinal of the next draw, ``in_flight`` uids drawn and held in the bundle. With
        ``read_back`` the file is read again when the block ends, and compared by the verifier.
        """
        parts = roots(state)
        begun = time.perf_counter()
        content = {"job": self.job, "attempt": self.attempt, "iteration": iteration}
        content |= {"version": version, "cursor": cursor, "parts": parts}
        bundle = hashlib.sha256(encode(content)).hexdigest()
        yield bundle
        file = Path(path)
        size = file.stat().st_size if file.is_file() else 0
        self._add(
            CheckpointSaved(
                attempt=self.attempt,
                bundle=bundle,
                parent=parent,
                path=str(path),
                iteration=iteration,
                policy_version=version,
                parts=parts,
                cursor=cursor,
                bytes=size,
                save_s=time.perf_counter() - begun,
                in_flight=tuple(in_flight),
                file_parts=None if read_back is None else roots(read_back()),
            )
        )
        self.flush()

    def restored(
        self,
        bundle: str,
        state: State,
        *,
        iteration: int,
        version: int,
        cursor: int,
        kind: Literal["resume", "warm-start", "transfer"] = "resume",
        file_state: State | None = None,
        restore_s: float = 0.0,
    ) -> None:
        """A bundle was loaded: the live objects as they stand after it.

        ``file_state`` is what the file held, by the same names, before it went into them.
        """
        self._after = "restore"
        parts = roots(state)
        self._policy = (version, parts.get("model", self._policy[1]))
        self._add(
            CheckpointRestored(
                attempt=self.attempt,
                bundle=bundle,
                kind=kind,
                iteration=iteration,
                policy_version=version,
                parts=parts,
                cursor=cursor,
                restore_s=restore_s,
                file_parts=None if file_state is None else roots(file_state),
            )
        )

    # -- random states, probes, declarations -----------------------------------------------

    def random_states(
        self,
        iteration: int,
        moment: Literal["start", "before", "after", "resized"],
        states: Mapping[str, Any],
    ) -> None:
        """States of all generators by owner (tensors, bytes or texts), at one moment."""
        self._add(
            RandomStatesRecorded(
                attempt=self.attempt,
                iteration=iteration,
                moment=moment,
                states={owner: value_digest(state) for owner, state in states.items()},
            )
        )

    def replayed(
        self,
        iteration: int,
        what: Literal["behaviour", "reference", "proximal"],
        used: Any,
        replayed: Any,
        *,
        replica: str,
        version: int,
        samples: int = 1,
        other_tokens: int = 0,
        calibrating: bool = False,
    ) -> None:
        """Log-probabilities as used, and as other code gives them under the stamped version.

        ``other_tokens`` counts tokens that the declared randomness would have drawn otherwise:
        ``drawn_otherwise`` says it for one token.
        """
        import numpy as np

        a, b = (np.asarray(v, dtype=np.float64).reshape(-1) for v in (used, replayed))
        if a.shape != b.shape:
            raise RecorderMisuse(
                f"expected as many replayed log-probabilities as used ones, found {b.size} and "
                f"{a.size}; compare the same tokens"
            )
        gaps = np.abs(a - b)
        self._add(
            LogProbsReplayed(
                attempt=self.attempt,
                iteration=iteration,
                what=what,
                replica=replica,
                version=version,
                samples=samples,
                tokens=a.size,
                mean_gap=float(gaps.mean()) if a.size else 0.0,
                largest_gap=float(gaps.max()) if a.size else 0.0,
                other_tokens=other_tokens,
                calibrating=calibrating,
            )
        )

    def amend(self, field: str, value: object, reason: str) -> None:
        """Declare a change of one field of the plan; needs the ledger in reach."""
        self.flush()
        Gate(self.ledger).amend(self.job, field, value, reason)
        self.plan = self.ledger.state().job(self.job).plan or self.plan

    def fork(self, parent: str, reason: str) -> None:
        """The job leaves its parent's experiment on purpose."""
        self._add(ExperimentForked(parent=parent, reason=reason))

    # -- the book --------------------------------------------------------------------------

    def _add(self, event: Event, operation: str | None = None, rows: Columns | None = None) -> None:
        self._pending.append((event, operation, time.time_ns(), rows))
        if len(self._pending) >= MAX_BUFFERED:
            self.flush()

    def flush(self) -> bool:
        """Append what is held back; False where it was spooled to local disk instead."""
        if not self._pending:
            return self._writer.waiting == 0
        pending, self._pending = self._pending, []
        with_rows = [rows for _, _, _, rows in pending if rows is not None]
        segments = iter(write_segments(self._evidence, with_rows) if with_rows else [])
        drafts = []
        for event, operation, occurred_ns, rows in pending:
            final = event if rows is None else event.model_copy(update={"segment": next(segments)})
            drafts.append(Draft(final, operation=operation, occurred_ns=occurred_ns))
        return self._writer.record(self.job, drafts) is not None

    @property
    def waiting(self) -> int:
        """Records that an outage keeps on local disk."""
        return self._writer.waiting

    def finish(
        self,
        *,
        iterations: int,
        version: int,
        policy: Part,
        outcome: Literal["finished", "failed", "cancelled"] = "finished",
        reason: str | None = None,
    ) -> None:
        """The job has ended; its last policy. Needs the ledger in reach."""
        self.flush()
        self._writer.drain()
        Gate(self.ledger).close_job(
            self.job,
            JobClosed(
                outcome=outcome,
                iterations=iterations,
                policy_version=version,
                policy_fingerprint=part_root(policy),
                reason=reason,
            ),
        )

    def close(self) -> None:
        """Append what is held back and end this handle; the job stays as it is."""
        self.flush()
        if self._writer.waiting:
            self._writer.drain()
        self._writer.close()
        if self._owned:
            self.ledger.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def rng_parts(states: Mapping[str, Any]) -> dict[str, Part]:
    """Parts of a state that hold random generators, one for each owner."""
    return {f"{RNG}{owner}": {"state": state} for owner, state in states.items()}
