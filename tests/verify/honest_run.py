"""A synthetic honest run: the events of a whole small job, made without torch, to be mutated.

Two attempts. The first trains two iterations with weight syncs, bundles, a committed, a rejected,
an abandoned and a rolled-back move and a declared drop, and is killed in its third iteration after
the batch was consumed. The second restores the bundle, computes that iteration again, loses its
trainer once in a move (a restore inside the attempt), and finishes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.sampler import HASH_SORT, expected_draws
from shiftbook.ledger.digests import consumed_digest, generated_digest, rewarded_digest
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import (
    lease,
    life,
    observation,
    probes,
    reallocation,
    safety,
    state,
    sync,
    training,
)
from shiftbook.ledger.events.base import Event, Segment
from shiftbook.ledger.evidence import write_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, MovePlan, Plan, SamplingPlan, ShadowPlan, UpdatePlan
from shiftbook.ledger.topology import Device, Topology
from shiftbook.verify.invariants import INVARIANTS

JOB = "demo"
DEVICES = ("n/0", "n/1", "n/2", "n/3")
DATASET, PROMPTS, GROUP, RANKS, SEED, RATE = 10, 4, 4, 2, 5, 1e-3
DROP_RULE = "tool-doubtful"
PLACES = {"rollout": ["n/0", "n/1"], "inference": ["n/2"], "trainer": ["n/3"]}
MOVED = {"rollout": ["n/0", "n/1", "n/2"], "inference": ["n/2"], "trainer": ["n/3"]}
NO_SEGMENT = Segment(sha256="0" * 64, rows=0, columns=(), bytes=0)


def h128(*parts: object) -> str:
    """32 hex digits that depend on the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def h256(*parts: object) -> str:
    """64 hex digits that depend on the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def policy(version: int) -> str:
    """Fingerprint of the policy of a version."""
    return h128("model", version)


def rng_state(rank: int, version: int) -> str:
    """Digest of a rank's generator at a version."""
    return h128("rng", rank, version)


def prompt(index: int) -> str:
    """Digest of a prompt."""
    return h128("prompt", index)


def coefficient(version: int) -> float:
    """The KL coefficient at a version: half of it is what each update adds."""
    return 0.01 * 1.05**version


def parts(version: int) -> dict[str, str]:
    """Parts of the training state at a version."""
    return {
        "model": policy(version),
        "masters": h128("masters", version),
        "optimizer": h128("optimizer", version),
        "reference": h128("reference"),
        "rng:rank/0": root({"state": rng_state(0, version)}),
        "rng:rank/1": root({"state": rng_state(1, version)}),
    }


def dataset_digest() -> str:
    """Digest of the data set, as the recorder makes it."""
    return hashlib.sha256("\n".join(prompt(i) for i in range(DATASET)).encode()).hexdigest()


def judged() -> list[str]:
    """Every invariant, and every aspect of one that the run has something of."""
    idle = {"I12.rescored", "I16.proximal", "I18.counter"}
    idle |= {"recomputed.average", "recomputed.dropout"}
    aspects = [f"{i.id}.{aspect}" for i in INVARIANTS for aspect in i.aspects]
    return [i.id for i in INVARIANTS] + [name for name in aspects if name not in idle]


def make_plan(**changes: Any) -> Plan:
    """The plan of the run; every judged invariant is required."""
    plan = Plan(
        seed=SEED,
        iterations=4,
        data=DataPlan(
            dataset_digest=dataset_digest(),
            tokenizer_digest="t",
            dataset_size=DATASET,
            sampler_rule=HASH_SORT,
            seed=SEED,
            epochs=4,
        ),
        sampling=SamplingPlan(),
        update=UpdatePlan(
            prompts_per_update=PROMPTS,
            group_size=GROUP,
            virtual_ranks=RANKS,
            learning_rate=RATE,
            loss_terms={"policy": 1.0, "kl": 0.01},
            controllers={
                "kl_coefficient": {
                    "rule": "adaptive-kl",
                    "first": 0.01,
                    "target": 0.005,
                    "gain": 0.25,
                    "limit": 0.2,
                }
            },
        ),
        moves=MovePlan(),
        shadow=ShadowPlan(every_iterations=2),
        required_invariants=(*judged(), "integrity", "evidence"),
        drop_rules=(DROP_RULE,),
    )
    return plan.model_copy(update=changes)


@dataclass
class Entry:
    """An event on its way, with its evidence rows; its fields are filled from the rows."""

    event: Event
    operation: str | None = None
    rows: dict[str, list[Any]] | None = None
    filled: bool = True
    job: str = JOB

    @property
    def name(self) -> str:
        """Type of the event."""
        return self.event.type_()

    def change(self, **fields: Any) -> None:
        """Replace fields of the event, unchecked as a faulty writer would."""
        self.event = self.event.model_copy(update=fields)

    def row(self, uid: str) -> int:
        """Index of a sample's row."""
        assert self.rows is not None
        return int(self.rows["uid"].index(uid))


@dataclass
class Run:
    """The events of a run, in order; positions are indices."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, event: Event, operation: str | None = None, **rest: Any) -> int:
        """Append an event; its position."""
        self.entries.append(Entry(event, operation, **rest))
        return len(self.entries) - 1

    def at(self, name: str, number: int = 0) -> int:
        """Position of the n-th event of a type; negative counts from the end."""
        found = [i for i, entry in enumerate(self.entries) if entry.name == name]
        return found[number]

    def get(self, name: str, number: int = 0) -> Entry:
        """The n-th event of a type."""
        return self.entries[self.at(name, number)]

    def where(self, name: str, **fields: Any) -> int:
        """Position of the first event of a type whose fields are these."""
        return next(
            i
            for i, e in enumerate(self.entries)
            if e.name == name and all(getattr(e.event, k) == v for k, v in fields.items())
        )

    def write(self, path: Path) -> str:
        """Write the events through a real ledger; its URL."""
        url = f"sqlite:///{path}"
        with Ledger.open(url, writer="writer-1", actor="tester", now_ns=_Clock()) as ledger:
            self._point_at_updates(ledger.head().size)
            for job, batch in _batches(self.entries):
                ledger.append(job, [Draft(_final(e, ledger), e.operation) for e in batch])
        return url

    def _point_at_updates(self, first: int) -> None:
        """Comparisons of shadows name the update before them, wherever it stands by now."""
        updates: dict[int, int] = {}
        for at, entry in enumerate(self.entries, first):
            event = entry.event
            if isinstance(event, training.UpdateApplied):
                updates[event.iteration] = at
            elif isinstance(event, safety.ShadowCompared) and entry.filled:
                last = event.iteration + event.iterations - 1
                entry.change(last_update=updates.get(last, event.last_update))


class _Clock:
    """A clock that ticks a millisecond at each look."""

    def __init__(self) -> None:
        self._now = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self._now += 1_000_000
        return self._now


def _batches(entries: list[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    batch: list[Entry] = []
    for entry in entries:
        if batch and (entry.job != batch[0].job or len(batch) >= 100):
            yield batch[0].job, batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch[0].job, batch


def _final(entry: Entry, ledger: Ledger) -> Event:
    """The event with its segment written and, where ``filled``, its fields made from the rows."""
    rows = entry.rows
    if rows is None:
        return entry.event
    fields: dict[str, Any] = {"segment": write_segment(ledger, rows)}
    if entry.filled and "uid" in rows:
        fields["count"] = len(rows["uid"])
        if entry.name == "SamplesRewarded":
            scored = zip(rows["uid"], rows["token_digest"], rows["reward"], strict=True)
            fields["digest"] = rewarded_digest(scored)
            fields["reward_mean"] = sum(rows["reward"]) / max(1, len(rows["uid"]))
        else:
            fields["tokens"] = sum(rows["tokens"])
            pairs = zip(rows["uid"], rows["token_digest"], strict=True)
            fields["digest"] = consumed_digest(pairs)
            if entry.name == "SamplesGenerated":
                columns = (rows["uid"], rows["token_digest"], rows["logp_digest"])
                fields["digest"] = generated_digest(zip(*columns, strict=True))
    return entry.event.model_copy(update=fields)


class Maker:
    """Writes the run, one piece after the other."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run = Run()
        self.attempt, self.epoch, self.version, self.cursor = "", -1, 0, 0
        self.bundle: str | None = None
        self.incarnations: dict[str, str] = {}
        self.operations = 0

    # -- life ------------------------------------------------------------------------------

    def open(self) -> None:
        """JobOpened."""
        self.run.add(
            job_events.JobOpened(
                components=("rollout", "inference", "trainer"),
                edges=(job_events.Edge(source="rollout", target="trainer"),),
                devices=tuple(Device(name=d) for d in DEVICES),
                topology=Topology.of(PLACES),
                elastic={},
                plan=self.plan,
                job_path="tests.verify:none",
            )
        )

    def start(self, attempt: str, iteration: int, places: dict[str, list[str]]) -> None:
        """Lease, attempt and replicas, with a restore where there is a bundle."""
        parent = self.attempt or None
        self.epoch = self.run.add(lease.LeaseGranted(devices=DEVICES, holder=attempt))
        topology = Topology.of(places)
        self.run.add(
            job_events.AttemptStarted(
                attempt=attempt,
                parent=parent,
                bundle=self.bundle,
                iteration=iteration,
                epoch=self.epoch,
                topology=topology,
                policy_version=self.version,
                policy_fingerprint=policy(self.version),
                pid=100,
            )
        )
        self.attempt = attempt
        for component, replica in topology.walk():
            self.replica(component, replica.name, replica.devices)
        self.data()
        self.random(iteration, "start")
        if self.bundle is not None:
            self.restore(iteration)
            self.first_use("trainer", "trainer-n.3", "restore", parts(self.version))
        self.sync()

    def data(self) -> None:
        """DataBuilt with its rows."""
        self.run.add(
            probes.DataBuilt(
                attempt=self.attempt,
                dataset_digest=dataset_digest(),
                tokenizer_digest="t",
                size=DATASET,
                segment=NO_SEGMENT,
            ),
            rows={"index": list(range(DATASET)), "digest": [prompt(i) for i in range(DATASET)]},
        )

    def random(self, iteration: int, moment: str) -> None:
        """RandomStatesRecorded at the present version."""
        self.run.add(
            probes.RandomStatesRecorded(
                attempt=self.attempt,
                iteration=iteration,
                moment=moment,  # type: ignore[arg-type]
                states={f"rank/{rank}": rng_state(rank, self.version) for rank in range(2)},
            )
        )

    def replayed(self, iteration: int) -> None:
        """LogProbsReplayed of one sample."""
        self.run.add(
            probes.LogProbsReplayed(
                attempt=self.attempt,
                iteration=iteration,
                what="behaviour",
                replica="rollout-n.0",
                version=self.version,
                samples=1,
                tokens=7,
                mean_gap=1e-7,
                largest_gap=3e-7,
            )
        )

    def replica(self, component: str, name: str, devices: tuple[str, ...]) -> None:
        """A process of a replica."""
        self.incarnations[name] = f"{name}#{self.attempt}"
        self.run.add(
            life.ReplicaStarted(
                attempt=self.attempt,
                component=component,
                replica=name,
                incarnation=self.incarnations[name],
                devices=devices,
                pid=200,
                node="n",
            )
        )

    def first_use(self, component: str, replica: str, after: str, found: dict[str, str]) -> int:
        """StateFirstUsed."""
        return self.run.add(
            state.StateFirstUsed(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=self.incarnations[replica],
                after=after,  # type: ignore[arg-type]
                use="first",
                policy_version=self.version,
                parts=found,
            )
        )

    def close(self, outcome: str = "finished") -> None:
        """JobClosed and the lease given back."""
        self.run.add(
            job_events.JobClosed(
                outcome=outcome,
                iterations=4,
                policy_version=self.version,
                policy_fingerprint=policy(self.version),
            )
        )
        self.run.add(lease.LeaseReleased(devices=DEVICES, holder=self.attempt, reason="done"))

    # -- weights and bundles ---------------------------------------------------------------

    def rollouts(self) -> list[str]:
        """Rollout replicas that run."""
        return [name for name in self.incarnations if name.startswith("rollout")]

    def sync(self) -> None:
        """One weight sync of the present version to all rollout replicas."""
        self.operations += 1
        operation = f"sync-{self.operations}"
        targets = self.rollouts()
        self.run.add(
            sync.WeightSyncStarted(
                attempt=self.attempt,
                version=self.version,
                source={"w": policy(self.version)},
                source_root=policy(self.version),
                encoding="full",
                targets=tuple(targets),
                epoch=self.epoch,
            ),
            operation,
        )
        for target in targets:
            self.run.add(
                sync.WeightSyncDelivered(
                    target=target,
                    incarnation=self.incarnations[target],
                    version=self.version,
                    root=policy(self.version),
                    fingerprint_of="resident",
                    moved_bytes=10,
                    full_bytes=10,
                    sync_s=0.1,
                ),
                operation,
            )
        self.run.add(
            sync.WeightSyncCommitted(
                version=self.version,
                outcomes=tuple(sync.TargetOutcome(target=t, outcome="serving") for t in targets),
                stall_s=0.1,
                caches_flushed=("kv",),
            ),
            operation,
        )

    def save(self, iteration: int) -> None:
        """CheckpointSaved after an iteration."""
        parent, self.bundle = self.bundle, h256("bundle", iteration)
        self.run.add(
            state.CheckpointSaved(
                attempt=self.attempt,
                bundle=self.bundle,
                parent=parent,
                path=f"/nowhere/bundle-{iteration}",
                iteration=iteration,
                policy_version=self.version,
                parts=parts(self.version),
                cursor=self.cursor,
                bytes=100,
                save_s=0.1,
                file_parts=parts(self.version),
            )
        )

    def restore(self, iteration: int) -> int:
        """CheckpointRestored of the last bundle."""
        assert self.bundle is not None
        return self.run.add(
            state.CheckpointRestored(
                attempt=self.attempt,
                bundle=self.bundle,
                kind="resume",
                iteration=iteration,
                policy_version=self.version,
                parts=parts(self.version),
                cursor=self.cursor,
                restore_s=0.1,
            )
        )

    def shadow(self, iteration: int) -> None:
        """A shadow ran the iteration that was recorded last again, and agreed."""
        self.run.add(
            safety.ShadowCompared(
                bundle=h256("bundle", iteration),
                iteration=iteration,
                iterations=1,
                last_update=self.run.at("UpdateApplied", -1),
                method="bits",
                agreed=True,
                observations=24,
                target="tests.verify:none",
                conditions="seed=5 steps=1 schedule=phases workers=as-written moves=none from=2",
                stack="python=3.11",
                wall_s=1.0,
            )
        )

    # -- training --------------------------------------------------------------------------

    def draw(self, iteration: int) -> None:
        """SamplesDrawn."""
        draws = expected_draws(HASH_SORT, SEED, DATASET, self.cursor, PROMPTS)
        self.run.add(
            training.SamplesDrawn(
                attempt=self.attempt,
                iteration=iteration,
                rule=HASH_SORT,
                seed=SEED,
                epoch=draws[0].epoch,
                start=self.cursor,
                indices=tuple(d.index for d in draws),
                group_size=GROUP,
                prompt_digests=tuple(prompt(d.index) for d in draws),
            )
        )

    def uids(self) -> list[str]:
        """Uids of the iteration that starts at the cursor."""
        return [f"{self.cursor + p:06d}/{m}" for p in range(PROMPTS) for m in range(GROUP)]

    def generate(self, iteration: int, dropped: tuple[str, ...] = ()) -> None:
        """SamplesGenerated, SamplesRewarded and, where some end doubtfully, SamplesDropped."""
        uids = [uid for uid in self.uids() if uid not in dropped]
        replicas = self.rollouts()
        owner = [replicas[i % len(replicas)] for i in range(len(uids))]
        rows = {
            "uid": uids,
            "group": [int(uid[:6]) - self.cursor for uid in uids],
            "turns": [2] * len(uids),
            "tokens": [20 + i for i in range(len(uids))],
            "token_digest": [h128("tokens", uid) for uid in uids],
            "logp_digest": [h128("logps", uid) for uid in uids],
            "version_min": [self.version] * len(uids),
            "version_max": [self.version] * len(uids),
            "replica": owner,
            "incarnation": [self.incarnations[name] for name in owner],
            "mask_digest": [h128("mask", uid) for uid in uids],
            "prompt_digest": [prompt(index_of(int(uid[:6]))) for uid in uids],
            "stream": [h128("stream", uid) for uid in uids],
            "cache_version_min": [self.version] * len(uids),
        }
        self.run.add(
            training.SamplesGenerated(
                attempt=self.attempt,
                iteration=iteration,
                count=0,
                tokens=0,
                sampled_tokens=0,
                policy_version=self.version,
                digest="0" * 64,
                segment=NO_SEGMENT,
                transform=training.Transform(temperature=1.0, top_p=1.0, log_probs="raw"),
            ),
            rows=rows,
        )
        rewards = {
            "uid": list(uids),
            "token_digest": list(rows["token_digest"]),
            "reward": [reward_of(uid) for uid in uids],
            "scorer": ["exact"] * len(uids),
        }
        self.run.add(
            training.SamplesRewarded(
                attempt=self.attempt,
                iteration=iteration,
                count=0,
                reward_mean=0.0,
                digest="0" * 64,
                segment=NO_SEGMENT,
            ),
            rows=rewards,
        )
        if dropped:
            self.run.add(
                training.SamplesDropped(
                    attempt=self.attempt,
                    iteration=iteration,
                    uids=dropped,
                    reason=f"{DROP_RULE}: the call may have run",
                )
            )

    def consume(self, iteration: int, dropped: tuple[str, ...] = ()) -> int:
        """BatchConsumed; its tokens."""
        uids = [uid for uid in self.uids() if uid not in dropped]
        groups = [int(uid[:6]) - self.cursor for uid in uids]
        rows = {
            "uid": uids,
            "token_digest": [h128("tokens", uid) for uid in uids],
            "reward": [reward_of(uid) for uid in uids],
            "advantage": advantages(uids),
            "group": groups,
            "virtual_rank": [group * RANKS // PROMPTS for group in groups],
            "tokens": [7] * len(uids),
            "mask_digest": [h128("mask", uid) for uid in uids],
            "logp_digest": [h128("logps", uid) for uid in uids],
        }
        self.run.add(
            training.BatchConsumed(
                attempt=self.attempt,
                iteration=iteration,
                count=0,
                tokens=0,
                policy_version=self.version,
                version_min=self.version,
                digest="0" * 64,
                segment=NO_SEGMENT,
            ),
            rows=rows,
        )
        return sum(rows["tokens"])

    def update(self, iteration: int, tokens: int) -> None:
        """UpdateApplied, which makes the next version."""
        before, after = parts(self.version), parts(self.version + 1)
        self.replayed(iteration)
        self.random(iteration, "before")
        samples = self.run.get("BatchConsumed", -1).rows
        assert samples is not None
        count = len(samples["uid"])
        self.version += 1
        self.cursor += PROMPTS
        self.random(iteration, "after")
        self.run.add(
            training.UpdateApplied(
                attempt=self.attempt,
                iteration=iteration,
                policy_version=self.version,
                params_before=before["model"],
                params_after=after["model"],
                masters_before=before["masters"],
                masters_after=after["masters"],
                optimizer_before=before["optimizer"],
                optimizer_after=after["optimizer"],
                optimizer_step=self.version,
                learning_rate=RATE,
                tokens=tokens,
                divisor=float(tokens),
                loss=0.1,
                kl=0.01,
                grad_norm=1.0,
                logp_gap=1e-7,
                clipped=False,
                skipped=False,
                virtual_ranks=tuple(
                    training.VirtualRank(
                        virtual_rank=r, pid=300, device="n/3", groups=PROMPTS // RANKS
                    )
                    for r in range(RANKS)
                ),
                cast_before=before["model"],
                cast_after=after["model"],
                optimizer_step_least=self.version,
                optimizer_step_most=self.version,
                scheduler_step=self.version,
                micro_batches=tuple(
                    training.MicroBatch(
                        rank=rank,
                        samples=share,
                        tokens=7 * share,
                        divisor=float(tokens),
                        first_mask=h128("dropout", rank, self.version),
                        recomputed_mask=h128("dropout", rank, self.version),
                    )
                    for rank, share in enumerate((count // 2, count - count // 2))
                ),
                ranks=tuple(
                    training.RankState(
                        rank=rank,
                        params=after["model"],
                        gradient=h128("gradient", self.version),
                        scale=1.0,
                    )
                    for rank in range(2)
                ),
                model_parallel=tuple(
                    training.ModelParallelGroup(
                        name=f"tp/{group}",
                        members=tuple(
                            training.ModelParallelMember(
                                rank=2 * group + member,
                                copies=h128("copies", self.version),
                                fed=h128("fed", group, self.version),
                            )
                            for member in range(2)
                        ),
                    )
                    for group in range(2)
                ),
                loss_terms={
                    "policy": training.LossTerm(coefficient=1.0, value=0.1, gradient_norm=0.5),
                    "kl": training.LossTerm(
                        coefficient=coefficient(self.version - 1), value=0.01, gradient_norm=0.1
                    ),
                },
                controllers={
                    "kl_coefficient": training.Controller(
                        before=coefficient(self.version - 1),
                        after=coefficient(self.version),
                        inputs={"kl": 0.01},
                    )
                },
                recomputed={
                    what: training.Residual(largest=1e-8, allowed=1e-7, compared=32)
                    for what in ("loss", "gradient", "step")
                },
                unmoved=(),
                moved_frozen=(),
            )
        )

    def complete(self, iteration: int) -> None:
        """IterationCompleted."""
        self.run.add(
            observation.IterationCompleted(
                attempt=self.attempt,
                iteration=iteration,
                wall_s=1.0,
                components={"rollout": observation.ComponentTime(busy_s=0.7, stall_s=0.1)},
                samples_verified=PROMPTS * GROUP,
                device_s=4.0,
                reward_mean=0.5,
                policy_version=self.version,
                policy_fingerprint=policy(self.version),
                schedule="dynamic",
            )
        )

    def iteration(
        self,
        number: int,
        *,
        moves: Callable[[], None] | None = None,
        dropped: tuple[str, ...] = (),
    ) -> None:
        """A whole iteration; ``moves`` happen after the generation."""
        self.draw(number)
        self.generate(number, dropped)
        if moves is not None:
            moves()
        tokens = self.consume(number, dropped)
        self.update(number, tokens)
        self.sync()
        self.save(number + 1)
        self.complete(number)

    # -- moves -----------------------------------------------------------------------------

    def propose(self, before: dict[str, list[str]], after: dict[str, list[str]]) -> str:
        """ReallocationProposed; the operation's id."""
        self.operations += 1
        operation = f"move-{self.operations}"
        self.run.add(
            reallocation.ReallocationProposed(
                attempt=self.attempt,
                before=Topology.of(before),
                after=Topology.of(after),
                strategy="pause",
                sees=self.plan.view(),
                candidates=(),
                bottleneck_before="rollout",
                bottleneck_after="trainer",
                predicted_throughput=1.0,
                predicted_gain_s=2.0,
                gain_interval=reallocation.Interval(low=1.0, high=3.0),
                predicted_cost_s=0.1,
                horizon_s=5.0,
                model_version=1,
            ),
            operation,
        )
        return operation

    def step(self, operation: str, *events: Event) -> None:
        """Steps of an operation."""
        for event in events:
            self.run.add(event, operation)

    def steps(self, count: int, devices: tuple[str, ...] = ("n/2",)) -> list[Event]:
        """First steps of a move after its proposal: granted, quiesced, transferred, verified."""
        print_ = {"rollout": policy(self.version)}
        return [
            reallocation.ReallocationGranted(devices=devices, step_limit_s=20.0),
            reallocation.ReallocationQuiesced(custody=(), kv_tokens_lost=0, quiesce_s=0.1),
            reallocation.ReallocationTransferred(
                moved_bytes=100, transfer_s=0.1, strategy="pause", parts={"weights": 100}
            ),
            reallocation.ReallocationVerified(before=print_, after=print_),
        ][:count]

    def committed_move(self, before: dict[str, list[str]], after: dict[str, list[str]]) -> None:
        """A move that ends in the new topology, with its gain."""
        operation = self.propose(before, after)
        committed = reallocation.ReallocationCommitted(
            after=Topology.of(after), moved_bytes=100, stall_s=0.2, kv_tokens_lost=0
        )
        self.step(operation, *self.steps(4), committed)
        gain = reallocation.GainRealized(
            baseline_window_s=1.0,
            observed_window_s=1.0,
            raw_gain_s=1.0,
            counterfactual="model",
            counterfactual_end_s=5.0,
            observed_end_s=4.0,
            adjusted_gain_s=1.0,
            interval=reallocation.Interval(low=0.5, high=1.5),
            device_s_before=4.0,
            device_s_after=4.0,
            predicted_gain_s=2.0,
        )
        self.step(operation, gain)

    def rolled_back_move(
        self, before: dict[str, list[str]], after: dict[str, list[str]], steps: int = 2
    ) -> None:
        """A move that is undone."""
        operation = self.propose(before, after)
        undone = reallocation.ReallocationRolledBack(
            cause="worker lost", restored=Topology.of(before)
        )
        self.step(operation, *self.steps(steps), undone)


def index_of(ordinal: int) -> int:
    """Data set index of a draw."""
    return expected_draws(HASH_SORT, SEED, DATASET, ordinal, 1)[0].index


def reward_of(uid: str) -> float:
    """Reward of a sample."""
    return float(int(h128("reward", uid), 16) % 4) / 3.0


def advantages(uids: list[str]) -> list[float]:
    """Group-relative advantages of samples, each within its draw."""
    out = []
    for uid in uids:
        group = [reward_of(u) for u in uids if u[:6] == uid[:6]]
        mean = sum(group) / len(group)
        deviation = (sum((r - mean) ** 2 for r in group) / len(group)) ** 0.5
        out.append((reward_of(uid) - mean) / (deviation + 1e-4))
    return out


DROPPED = ("000005/2",)


def honest_run(plan: Plan | None = None) -> Run:
    """The whole run described in the module's docstring."""
    maker = Maker(plan or make_plan())
    maker.open()
    maker.start("a1", 0, PLACES)

    def first_moves() -> None:
        maker.committed_move(PLACES, MOVED)
        maker.replica("rollout", "rollout-n.2", ("n/2",))
        maker.first_use("rollout", "rollout-n.2", "move", {"model": policy(maker.version)})

    def second_moves() -> None:
        refused = maker.propose(MOVED, PLACES)
        maker.step(
            refused,
            reallocation.ReallocationRejected(by="gate", rule="cooldown", reason="too soon"),
        )
        given_up = maker.propose(MOVED, PLACES)
        maker.step(
            given_up, *maker.steps(1), reallocation.ReallocationAbandoned(reason="a sync is due")
        )
        maker.rolled_back_move(MOVED, PLACES)

    maker.iteration(0, moves=first_moves)
    maker.iteration(1, moves=second_moves, dropped=DROPPED)
    # Killed after the third batch was consumed, before its update.
    maker.draw(2)
    maker.generate(2)
    maker.consume(2)
    maker.incarnations.clear()
    maker.start("a2", 2, PLACES)
    maker.iteration(2)
    maker.shadow(2)

    def trainer_lost() -> None:
        maker.consume(3)
        maker.rolled_back_move(PLACES, MOVED, steps=3)
        maker.restore(3)
        maker.first_use("trainer", "trainer-n.3", "restore", parts(maker.version))

    maker.iteration(3, moves=trainer_lost)
    maker.close()
    return maker.run


def copied(run: Run) -> Run:
    """A run that can be changed without changing the other."""
    return Run(
        [
            replace(e, rows=None if e.rows is None else {k: list(v) for k, v in e.rows.items()})
            for e in run.entries
        ]
    )
