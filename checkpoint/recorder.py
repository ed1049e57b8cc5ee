"""Records a training loop of any make into a ledger: a few calls beside the loop's own.

A recorder writes the events that the verifier judges: what was drawn, made, rewarded, dropped and
used, what each update took in and left, which weights engines hold, bundles, restores and random
states. It takes digests of what it is handed at the moment of the call, from the objects that the
loop really uses; it never computes anything for the loop and changes nothing in it.

Events of one iteration are appended together when it ends (or at ``flush``); while the ledger is
out of reach they are spooled to local disk, and the loop goes on.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder_data import DataRecords, data_digests, dataset_digest
from shiftbook.checkpoint.recorder_declared import require_declared
from shiftbook.checkpoint.recorder_durable import DurableRecords, rng_parts
from shiftbook.checkpoint.recorder_engines import EngineRecords
from shiftbook.checkpoint.recorder_groups import fed_digest
from shiftbook.checkpoint.recorder_leftovers import append_leftovers
from shiftbook.checkpoint.recorder_samples import Consumed, Generated, drawn_otherwise
from shiftbook.checkpoint.recorder_saving import append_save
from shiftbook.checkpoint.recorder_state import (
    Part,
    State,
    optimizer_part,
    part_root,
    uid,
    value_digest,
)
from shiftbook.checkpoint.recorder_update import LiveState, UpdateRecord
from shiftbook.ledger.events.job import Edge, ExperimentForked, JobClosed, JobOpened
from shiftbook.ledger.events.observation import IterationCompleted
from shiftbook.ledger.evidence import writable_place
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.segment_spool import refuse_wrong_place
from shiftbook.ledger.topology import Device, Topology

if TYPE_CHECKING:
    from shiftbook.checkpoint.recorder_loss import PolicyLoss
    from shiftbook.checkpoint.recorder_loss_supervised import SupervisedLoss
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
    "fed_digest",
    "optimizer_part",
    "rng_parts",
    "uid",
    "value_digest",
]


def _other_plan(job: str, held: Plan, given: Plan) -> str:
    """What to say where a job that is open is offered another plan; names the first field."""

    def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, Mapping):
            yield name, value
            return
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)

    ours, theirs = (dict(leaves(plan.model_dump(), "")) for plan in (held, given))
    names = [n for n in ours | theirs if ours.get(n) != theirs.get(n)]
    first = names[0] if names else "the plan"
    more = f", and {len(names) - 1} more fields" if len(names) > 1 else ""
    return (
        f"expected the plan that job {job} was opened with, found {first} {theirs.get(first)!r} "
        f"where it has {ours.get(first)!r}{more}; open it with its own plan and declare the change "
        "with amend(), or give the new experiment a job of its own"
    )


class Recorder(DataRecords, EngineRecords, DurableRecords):
    """The record of one attempt of a job; not to be shared between threads.

    ``open`` begins the attempt; use it as a context manager, or call ``close``. Where a job has
    several processes, one of them (rank 0) records, and the others hand it their digests.
    """

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
        evidence: Path | str | None = None,
        spool: Path | None = None,
    ) -> Recorder:
        """Open the job where it is new, and begin an attempt of it.

        ``policy`` is the model as it stands now (tensors by name, or their root) and ``version``
        its version; ``bundle`` names the bundle from which this attempt goes on, absent for one
        that begins at the beginning. An open job's plan is the one it was opened with, or as
        amended; RecorderMisuse names the first field that is another. ``replay`` is the Python
        path of a target that ``shiftbook replay`` runs with ``config``. ``evidence`` is a folder or
        its URL and ``spool`` a folder; by default they lie beside a ledger that is a file.

        What an earlier attempt left spooled in that folder is appended first. Raises
        LedgerUnreachable where the ledger is away, since an attempt must be granted, or where
        records of an earlier attempt cannot be appended now, and EvidenceOutOfReach where the
        store of evidence refuses us. From then on an outage of either stops nothing.
        """
        owned = isinstance(ledger, str)
        handle = Ledger.open(ledger) if isinstance(ledger, str) else ledger
        with ExitStack() as failing:
            if owned:
                failing.callback(handle.close)
            folder = spool or handle.beside(".spool")
            gate = Gate(handle)
            names = tuple(devices)
            held = handle.state().job(job)
            if held.opened is not None and held.plan is not None:
                # Whoever amended the plan may give it as it stood, or as it stands.
                if plan not in (held.plan, held.opened.plan):
                    raise RecorderMisuse(_other_plan(job, held.plan, plan))
                plan = held.opened.plan or plan
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
            place = writable_place(evidence or handle)
            refuse_wrong_place(place)
            append_leftovers(handle, place, folder, handle.state().job(job).attempts)
            append_save(handle, job, folder, place, bundle)
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
                spool=folder,
                policy=(version, fingerprint),
            )
            failing.pop_all()
        recorder._owned = owned
        return recorder

    @contextmanager
    def update(
        self,
        iteration: int,
        state: LiveState,
        *,
        probe: StepProbe | None = None,
        loss: PolicyLoss | SupervisedLoss | None = None,
    ) -> Iterator[UpdateRecord]:
        """Around one optimizer step; ``state`` gives model, masters and optimizer, read twice.

        ``cast`` (the masters in the model's dtype) and ``ema`` are read where it has them. Raises
        RecorderMisuse where a probe computes with other constants than the plan declares.
        """
        require_declared(self.plan.update, probe, loss)
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
        self._forget(iteration)

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
        self._forget(number + 1)
        self.flush()

    def amend(self, field: str, value: object, reason: str) -> None:
        """Declare a change of one field of the plan.

        Needs ledger and evidence in reach: raises LedgerUnreachable while records wait."""
        self._drained()
        Gate(self.ledger).amend(self.job, field, value, reason)
        self.plan = self.ledger.state().job(self.job).plan or self.plan

    def fork(self, parent: str, reason: str) -> None:
        """The job leaves its parent's experiment on purpose."""
        self._add(ExperimentForked(parent=parent, reason=reason))

    def finish(
        self,
        *,
        iterations: int,
        version: int,
        policy: Part,
        outcome: Literal["finished", "failed", "cancelled"] = "finished",
        reason: str | None = None,
    ) -> None:
        """The job has ended; its last policy.

        Needs ledger and evidence in reach: raises LedgerUnreachable while records wait."""
        self._drained()
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
