"""Makes small ledgers of jobs that moved their devices, with a clock that only counts up."""

from __future__ import annotations

import atexit
import hashlib
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import lease, life, observation, reallocation, safety, sync, training
from shiftbook.ledger.events import state as state_events
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.evidence import write_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, MovePlan, Plan, SamplingPlan, SyncPlan, UpdatePlan
from shiftbook.ledger.topology import Device, Topology

START_NS = 1_700_000_000_000_000_000
DEVICES = ("n/0", "n/1")
SPLIT = Topology.of({"inference": ["n/1"], "rollout": ["n/0"], "tool": [], "trainer": ["n/1"]})
ROLL = Topology.of({"inference": [], "rollout": ["n/0", "n/1"], "tool": [], "trainer": []})
TRAIN = Topology.of({"inference": ["n/0"], "rollout": [], "tool": [], "trainer": ["n/0", "n/1"]})


def hex128(text: str) -> str:
    """A made-up fingerprint."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def sha(text: str) -> str:
    """A made-up SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def sample_plan(*, mode: str = "act", iterations: int = 8, syncs: SyncPlan | None = None) -> Plan:
    """A plan as the reference job declares it."""
    return Plan(
        seed=7,
        iterations=iterations,
        data=DataPlan(
            dataset_digest=sha("data"),
            tokenizer_digest=sha("tokenizer"),
            dataset_size=4096,
            sampler_rule="permutation",
            seed=7,
        ),
        sampling=SamplingPlan(),
        update=UpdatePlan(prompts_per_update=4, group_size=2, virtual_ranks=4, learning_rate=1e-4),
        moves=MovePlan(mode=mode),  # type: ignore[arg-type]
        syncs=syncs or SyncPlan(),
    )


COST_S = 0.08
"""Predicted cost of every move."""


class Clock:
    """Nanoseconds that move only when they are told to."""

    def __init__(self) -> None:
        self.ns = START_NS

    def __call__(self) -> int:
        self.ns += 1_000
        return self.ns

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.ns += int(seconds * 1e9)


@dataclass
class Writer:
    """Writes one job's events, in the order in which a running job would."""

    ledger: Ledger
    clock: Clock
    job: str
    schedule: str
    random: random.Random
    topology: Topology = SPLIT
    attempt: str = "a1"
    version: int = 0
    operations: int = 0
    moves_here: int = 0
    epoch: int = 0
    positions: dict[str, int] = field(default_factory=dict)

    def put(self, event: Event, operation: str | None = None) -> int:
        """Append one event; its position."""
        return self.ledger.append(self.job, Draft(event, operation=operation)).last

    def open(self, *, mode: str = "act", syncs: SyncPlan | None = None) -> None:
        """Open the job and start its first attempt."""
        self.put(
            job_events.JobOpened(
                components=("rollout", "tool", "inference", "trainer"),
                edges=(job_events.Edge(source="rollout", target="trainer"),),
                devices=tuple(Device(name=name) for name in DEVICES),
                topology=self.topology,
                elastic={
                    name: job_events.ElasticRange(minimum=0, maximum=2)
                    for name in ("rollout", "tool", "inference", "trainer")
                },
                plan=sample_plan(mode=mode, syncs=syncs),
                job_path="jobs:reference",
            )
        )
        self.epoch = self.put(lease.LeaseGranted(devices=DEVICES, holder=self.attempt))
        self.put(
            job_events.AttemptStarted(
                attempt=self.attempt,
                iteration=0,
                epoch=self.epoch,
                topology=self.topology,
                policy_version=0,
                policy_fingerprint=hex128("policy 0"),
                pid=4242,
            )
        )
        for component, replica in self.topology.walk():
            self.put(
                life.ReplicaStarted(
                    attempt=self.attempt,
                    component=component,
                    replica=replica.name,
                    incarnation=f"{replica.name}#1",
                    devices=replica.devices,
                    pid=5000 + len(replica.name),
                    node="n",
                )
            )

    def close(self, iterations: int) -> None:
        """Give the devices back and close the job."""
        self.put(
            job_events.JobClosed(
                outcome="finished",
                iterations=iterations,
                policy_version=self.version,
                policy_fingerprint=hex128(f"policy {self.version}"),
            )
        )
        self.put(
            lease.LeaseReleased(devices=DEVICES, holder=self.attempt, reason="the job finished")
        )

    def window(self, iteration: int, window_s: float, remaining: int) -> int:
        """A telemetry window over the present topology."""
        self.clock.pass_s(window_s)
        return self.put(
            observation.WindowObserved(
                attempt=self.attempt,
                iteration=iteration,
                start_ns=self.clock.ns - int(window_s * 1e9),
                window_s=window_s,
                components={
                    name: observation.ComponentWindow(
                        replicas=len(self.topology.replicas(name)),
                        throughput=self.random.uniform(5, 60),
                        queue=remaining if name == "rollout" else max(0, 40 - remaining),
                        running=min(8, remaining),
                        waiting=remaining // 3 if name == "tool" else 0,
                        busy_share=self.random.uniform(0.3, 1.0),
                        remaining=remaining,
                    )
                    for name in ("rollout", "tool", "inference", "trainer")
                },
            )
        )

    def propose(
        self, after: Topology, strategy: str, gain_s: float, window: int | None = None
    ) -> str:
        """A proposal with two candidates; its operation."""
        self.operations += 1
        operation = f"move-{self.job}-{self.operations}"
        candidates = [
            reallocation.Candidate(
                after=after,
                strategy=strategy,  # type: ignore[arg-type]
                predicted_end_s=3.0 - gain_s,
                predicted_gain_s=gain_s,
                predicted_cost_s=COST_S,
                probability=0.93,
                chosen=True,
            ),
            reallocation.Candidate(
                after=self.topology,
                strategy="pause",
                predicted_end_s=3.0,
                predicted_gain_s=0.0,
                predicted_cost_s=0.0,
                probability=0.5,
                rejected_because="staying is slower",
            ),
        ]
        self.put(
            reallocation.ReallocationProposed(
                attempt=self.attempt,
                before=self.topology,
                after=after,
                strategy=strategy,  # type: ignore[arg-type]
                sees=sample_plan().view(),
                candidates=tuple(candidates),
                bottleneck_before="rollout",
                bottleneck_after="trainer",
                predicted_throughput=70.0,
                predicted_gain_s=gain_s,
                gain_interval=reallocation.Interval(low=gain_s - 0.2, high=gain_s + 0.2),
                predicted_cost_s=COST_S,
                horizon_s=3.0,
                model_version=self.operations,
                since_last_move_s=1.5 if self.operations > 1 else None,
                window=window,
            ),
            operation,
        )
        return operation

    def move(
        self,
        after: Topology,
        strategy: str,
        gain_s: float,
        *,
        end: str = "committed",
        moved_bytes: int = 3_200_000,
    ) -> str:
        """A reallocation from proposal to its end: any status of the ``reallocations`` table."""
        operation = self.propose(after, strategy, gain_s)
        bodies: list[tuple[str, Event]] = self._steps(after, strategy, moved_bytes)
        if end in ("rejected", "abandoned"):
            refused: Event = reallocation.ReallocationAbandoned(reason="a weight sync is due")
            if end == "rejected":
                refused = reallocation.ReallocationRejected(
                    by="gate", rule="cooldown", reason="moved 1.5 s ago, cooldown is 2 s"
                )
            self.put(refused, operation)
            return operation
        for status, body in bodies:
            if end == "proposed":
                break
            self.clock.pass_s(0.03)
            self.put(body, operation)
            if status == end:
                break
            if status == "quiesced" and end in ("rolled_back", "poisoned"):
                self._fail(operation, end)
                break
        if end == "committed":
            self.topology, self.moves_here = after, self.moves_here + 1
        return operation

    def _fail(self, operation: str, end: str) -> None:
        cause = "the receiver died: connection reset"
        self.put(
            reallocation.ReallocationRolledBack(cause=cause, restored=self.topology, stall_s=0.4)
            if end == "rolled_back"
            else reallocation.ReallocationPoisoned(devices=("n/1",), cause=cause),
            operation,
        )

    def _steps(self, after: Topology, strategy: str, moved_bytes: int) -> list[tuple[str, Event]]:
        stall_s = self.random.uniform(0.02, 0.12)
        root = {"policy": hex128(f"policy {self.version}")}
        return [
            ("granted", reallocation.ReallocationGranted(devices=DEVICES, step_limit_s=20.0)),
            (
                "quiesced",
                reallocation.ReallocationQuiesced(
                    custody=(
                        reallocation.Custody(
                            replica="rollout-n.1",
                            incarnation="rollout-n.1#1",
                            requests=("12/0#1", "12/1#0"),
                            partial_tokens=31,
                            receiver="queue",
                        ),
                    ),
                    kv_tokens_lost=96,
                    quiesce_s=0.012,
                ),
            ),
            (
                "transferred",
                reallocation.ReallocationTransferred(
                    moved_bytes=moved_bytes,
                    transfer_s=0.031,
                    strategy=strategy,  # type: ignore[arg-type]
                    parts={"weights": moved_bytes},
                ),
            ),
            ("verified", reallocation.ReallocationVerified(before=root, after=root)),
            (
                "committed",
                reallocation.ReallocationCommitted(
                    after=after,
                    moved_bytes=moved_bytes,
                    stall_s=stall_s,
                    kv_tokens_lost=96,
                    stalls={"rollout": stall_s, "trainer": stall_s / 3},
                ),
            ),
        ]

    def realise(self, operation: str, predicted_s: float, adjusted_s: float) -> int:
        """What a committed move brought; both gains are net of costs."""
        return self.put(
            reallocation.GainRealized(
                baseline_window_s=1.0,
                observed_window_s=1.0,
                raw_gain_s=adjusted_s + 0.05,
                counterfactual="the measured rate of the topology before, over the same work",
                counterfactual_end_s=3.0,
                observed_end_s=3.0 - adjusted_s,
                adjusted_gain_s=adjusted_s,
                interval=reallocation.Interval(low=adjusted_s - 0.1, high=adjusted_s + 0.1),
                device_s_before=6.0,
                device_s_after=6.0 - 2 * adjusted_s,
                predicted_gain_s=predicted_s,
            ),
            operation,
        )

    def sync(self, *, fail: bool = False) -> str:
        """A weight sync of the present version."""
        operation = f"sync-{self.job}-{self.version}"
        root = hex128(f"policy {self.version}")
        targets = tuple(replica.name for replica in self.topology.replicas("rollout"))
        self.put(
            sync.WeightSyncStarted(
                attempt=self.attempt,
                version=self.version,
                base_version=self.version - 1,
                source={"w": root},
                source_root=root,
                encoding="full-bf16",
                targets=targets,
                epoch=self.epoch,
            ),
            operation,
        )
        if fail:
            self.put(sync.WeightSyncFailed(version=self.version, reason="no engine"), operation)
            return operation
        for target in targets:
            self.clock.pass_s(0.02)
            self.put(
                sync.WeightSyncDelivered(
                    target=target,
                    incarnation=f"{target}#1",
                    version=self.version,
                    root=root,
                    fingerprint_of="resident",
                    moved_bytes=1_600_000,
                    full_bytes=1_600_000,
                    sync_s=0.02,
                ),
                operation,
            )
        self.put(
            sync.WeightSyncCommitted(
                version=self.version,
                outcomes=tuple(
                    sync.TargetOutcome(target=target, outcome="serving") for target in targets
                ),
                stall_s=0.05,
                caches_flushed=targets,
            ),
            operation,
        )
        return operation

    def record_samples(self, iteration: int) -> None:
        """Samples of an iteration, drawn, generated, rewarded and consumed, in segments."""
        uids = [f"{iteration * 4 + group}/{member}" for group in range(4) for member in range(2)]
        self.put(
            training.SamplesDrawn(
                attempt=self.attempt,
                iteration=iteration,
                rule="permutation",
                seed=7,
                epoch=0,
                start=iteration * 4,
                indices=tuple(range(iteration * 4, iteration * 4 + 4)),
                group_size=2,
            )
        )
        tokens = [60 + self.random.randrange(9) for _ in uids]
        digests = [hex128(f"{self.job} {uid}") for uid in uids]
        rewards = [float(self.random.random() < 0.4 + 0.05 * iteration) for _ in uids]
        self._segment(
            training.SamplesGenerated,
            iteration,
            {
                "uid": uids,
                "group": [int(uid.split("/")[0]) for uid in uids],
                "turns": [3] * len(uids),
                "tokens": tokens,
                "token_digest": digests,
                "logp_digest": digests,
                "version_min": [self.version] * len(uids),
                "version_max": [self.version] * len(uids),
                "replica": ["rollout-n.0"] * len(uids),
                "incarnation": ["rollout-n.0#1"] * len(uids),
            },
            tokens=sum(tokens),
            sampled_tokens=sum(tokens) // 2,
            policy_version=self.version,
        )
        self._segment(
            training.SamplesRewarded,
            iteration,
            {"uid": uids, "token_digest": digests, "reward": rewards, "scorer": ["exact"] * 8},
            reward_mean=sum(rewards) / len(rewards),
        )
        self._segment(
            training.BatchConsumed,
            iteration,
            {
                "uid": uids,
                "token_digest": digests,
                "reward": rewards,
                "advantage": [reward - 0.5 for reward in rewards],
                "group": [int(uid.split("/")[0]) for uid in uids],
                "virtual_rank": [index % 4 for index in range(8)],
                "tokens": tokens,
            },
            tokens=sum(tokens),
            policy_version=self.version,
            version_min=self.version,
        )

    def _segment(
        self,
        model: type[training.SamplesGenerated | training.SamplesRewarded | training.BatchConsumed],
        iteration: int,
        rows: Mapping[str, list[Any]],
        **fields: Any,
    ) -> None:
        segment = write_segment(self.ledger, dict(rows))
        self.put(
            model(
                attempt=self.attempt,
                iteration=iteration,
                count=len(rows["uid"]),
                digest=sha(f"{model.__name__} {iteration}"),
                segment=segment,
                **fields,
            )
        )

    def update(self, iteration: int) -> None:
        """One optimizer step and the bundle after it."""
        before, after = hex128(f"policy {self.version}"), hex128(f"policy {self.version + 1}")
        self.version += 1
        self.put(
            training.UpdateApplied(
                attempt=self.attempt,
                iteration=iteration,
                policy_version=self.version,
                params_before=before,
                params_after=after,
                masters_before=before,
                masters_after=after,
                optimizer_before=before,
                optimizer_after=after,
                optimizer_step=self.version,
                learning_rate=1e-4,
                tokens=500,
                divisor=500.0,
                loss=0.1,
                kl=0.01,
                grad_norm=1.0,
                clipped=False,
                skipped=False,
                virtual_ranks=(),
            )
        )
        self.put(
            state_events.CheckpointSaved(
                attempt=self.attempt,
                bundle=sha(f"bundle {self.job} {self.version}"),
                path=f"bundles/{self.version}",
                iteration=iteration + 1,
                policy_version=self.version,
                parts={"model": after},
                cursor=(iteration + 1) * 4,
                bytes=9_000_000,
                save_s=0.11,
            )
        )

    def iteration(self, number: int, wall_s: float) -> None:
        """An iteration's closing event."""
        self.put(
            observation.IterationCompleted(
                attempt=self.attempt,
                iteration=number,
                wall_s=wall_s,
                components={
                    "rollout": observation.ComponentTime(busy_s=wall_s * 0.7, stall_s=0.1),
                    "trainer": observation.ComponentTime(busy_s=wall_s * 0.25, stall_s=0.05),
                },
                samples_verified=8,
                device_s=wall_s * 2,
                reward_mean=0.35 + 0.05 * number,
                policy_version=self.version,
                policy_fingerprint=hex128(f"policy {self.version}"),
                moves_committed=self.moves_here,
                schedule=self.schedule,
            )
        )
        self.moves_here = 0


def _run_iteration(writer: Writer, number: int, base_s: float) -> None:
    """One iteration; the dynamic schedule moves within it."""
    start = writer.clock.ns
    for remaining in (40, 28):
        writer.window(number, base_s * 0.2, remaining)
    realised: tuple[str, float] | None = None
    if writer.schedule == "dynamic":
        gain = writer.random.uniform(0.3, 0.9)
        realised = writer.move(ROLL, "pause", gain), gain
        if number == 2:
            writer.move(TRAIN, "pause", 0.05, end="rejected")
        if number == 3:
            writer.move(TRAIN, "reshard", 0.6, end="rolled_back")
    writer.window(number, base_s * 0.2, 9)
    writer.record_samples(number)
    if writer.schedule == "dynamic":
        writer.move(TRAIN, "reshard", 0.5, moved_bytes=9_600_000)
    writer.window(number, base_s * 0.2, 0)
    writer.update(number)
    if writer.schedule == "dynamic":
        writer.move(SPLIT, "reshard", 0.4, moved_bytes=6_400_000)
    writer.sync()
    wall_s = (writer.clock.ns - start) / 1e9
    writer.iteration(number, wall_s)
    if realised is not None:
        operation, predicted = realised
        net_s = predicted - COST_S
        writer.realise(operation, net_s, net_s + writer.random.gauss(-0.05, 0.15))


def open_sample(place: Path | str, clock: Clock | None = None) -> Ledger:
    """An empty ledger with a clock of its own, in a file or at a URL."""
    return Ledger.open(_url(place), now_ns=clock or Clock(), actor="sample")


def _url(place: Path | str) -> str:
    return place if isinstance(place, str) else f"sqlite:///{place}"


def write_sample(
    place: Path | str,
    *,
    schedules: tuple[str, ...] = ("dynamic", "static", "timeshared"),
    iterations: int = 5,
    seed: int = 11,
) -> Ledger:
    """A ledger with one job for each schedule, in a file or at a URL; the caller closes it.

    Hundreds of durable appends take a second, so a sample is written once in a process and copied
    from then on. The copy's clock goes on where the sample's stood.
    """
    template, clock = _template(schedules, iterations, seed)
    url = _url(place)
    if url.startswith("sqlite:///"):
        shutil.copyfile(template, url.removeprefix("sqlite:///"))
    ledger = open_sample(url, clock)
    if ledger.path is None:
        with Ledger.open(_url(template), read_only=True) as source:
            ledger.restore(list(source.read()))
    shutil.copytree(
        template.with_name(template.name + ".evidence"),
        ledger.beside(".evidence"),
        dirs_exist_ok=True,
    )
    return ledger


@cache
def _template(schedules: tuple[str, ...], iterations: int, seed: int) -> tuple[Path, Clock]:
    folder = Path(tempfile.mkdtemp(prefix="sample-ledger-"))
    atexit.register(shutil.rmtree, folder)
    clock = Clock()
    ledger = open_sample(folder / "ledger.db", clock)
    base_s = {"dynamic": 3.6, "static": 5.4, "timeshared": 4.3}
    for schedule in schedules:
        writer = Writer(ledger, clock, f"demo-{schedule}", schedule, random.Random(seed))
        writer.open()
        for number in range(iterations):
            _run_iteration(writer, number, base_s[schedule] * writer.random.uniform(0.95, 1.05))
        writer.close(iterations)
    ledger.close()
    # What is still in the log is copied into the file, so that the file alone is the ledger.
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return folder / "ledger.db", clock


def write_every_status(place: Path | str) -> Ledger:
    """A ledger in which a reallocation stands in every status that there is."""
    clock = Clock()
    ledger = open_sample(place, clock)
    for end in (
        "proposed",
        "rejected",
        "abandoned",
        "granted",
        "quiesced",
        "transferred",
        "verified",
        "committed",
        "rolled_back",
        "poisoned",
    ):
        writer = Writer(ledger, clock, f"job-{end}", "dynamic", random.Random(3))
        writer.open()
        writer.move(ROLL, "pause", 0.5, end=end)
    last = Writer(ledger, clock, "job-proposed", "dynamic", random.Random(3))
    last.put(safety.SafeModeEntered(reason="asked for", by="operator", topology=SPLIT))
    last.put(
        safety.DivergenceFlagged(
            invariant="sampling-order",
            severity="stop",
            at=3,
            expected="draw 4 after draw 3",
            found="draw 5",
            positions=(3, 5),
        )
    )
    return ledger
