"""What the reference job declares: its configuration, its plan, and how it opens in the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shiftbook.checkpoint.sampler import HASH_SORT
from shiftbook.jobs.engine_types import Caches
from shiftbook.jobs.engines import ENGINES, START_LIMITS_S, EngineName
from shiftbook.ledger import canonical
from shiftbook.ledger.dialect import public_url
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.events.job import Edge, ElasticRange, JobOpened
from shiftbook.ledger.plan import (
    DataPlan,
    MovePlan,
    Plan,
    SamplingPlan,
    ShadowPlan,
    SyncPlan,
    UpdatePlan,
)
from shiftbook.ledger.topology import Device, Topology
from shiftbook.scheduler.fleet import FleetSpec, step_limit_s

COMPONENTS = ("rollout", "tool", "inference", "trainer")
EDGES = (
    ("rollout", "tool"),
    ("tool", "rollout"),
    ("rollout", "inference"),
    ("inference", "trainer"),
    ("trainer", "rollout"),
)
FACTORIES = {
    "rollout": "shiftbook.jobs.components:RolloutWorker",
    "tool": "shiftbook.jobs.components:ToolWorker",
    "inference": "shiftbook.jobs.components:InferenceWorker",
    "trainer": "shiftbook.jobs.trainer:TrainerWorker",
}
REQUIRED_INVARIANTS = (
    "legality",
    "lease",
    "operations",
    "I1",
    "I2",
    "I3",
    "I4",
    "I6",
    "I8",
    "I9",
    "I10",
    "I10b",
    "I11",
    "I11.masks",
    "I12",
    "I12b",
    "I13",
    "I14",
    "I15",
    "I16",
    "I16.used",
    "I17",
    "I17.bundles",
    "I17b",
    "I18",
    "I19",
    "I19.parameters",
    "I20",
    "I20.copies",
    "I20.gradient",
    "I21",
    "I21.micro-batches",
    "I22",
    "I23",
    "I23.parameters",
    "I26",
    "I27",
    "I5",
    "I5.fed",
    "recomputed",
    "recomputed.loss",
    "recomputed.step",
    "move-equality",
    "record",
    "replay",
    "integrity",
    "evidence",
)
GROUP_SIZE = 8
UNORDERED_TOLERANCE = 1e-5
"""Relative difference between the gradient norms of one update whose sums are taken in two orders;
rounding makes some 1e-9."""
DATASET_SIZE = 4096

Schedule = Literal["dynamic", "static", "timeshared"]
SyncEncoding = Literal["full", "patch", "lossy"]

BUNDLE_PARTS = (
    "model",
    "masters",
    "optimizer",
    "reference",
    "sampler",
    "in_flight_uids",
    "scheduler",
    "config_digest",
    "data_digest",
)
"""What a bundle of this job holds: no save leaves one out, or adds one, by accident. All but the
first one also have a parent."""


class JobConfig(BaseModel):
    """Everything that the job's result depends on, and where it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    seed: int = 0
    iterations: int = Field(default=8, ge=0)
    groups: int = Field(default=32, ge=1)
    lanes: int = Field(default=3, ge=1)
    """Lanes of an engine; with 3 of them rollout takes a little more than 70 % of the computing,
    as in real jobs. No bit depends on it."""
    virtual_ranks: int = Field(default=4, ge=1)
    learning_rate: float = 3e-4
    clip_norm: float = 1.0
    reduction: Literal["tree", "unordered"] = "tree"
    """Of gradients: one fixed tree, whose bits depend on nothing, or as they come, which is faster
    and promises no bits: other counts of trainers and other orders of arrival give other ones."""
    schedule: Schedule = "dynamic"
    rollout_slots: int | None = None
    """Slots of rollout in the static split; the trainer has the others."""
    random_moves: int | None = None
    """Seed of moves drawn at random, for tests; None lets the proposer decide."""
    engine: EngineName = "torch"
    """The reference engine gives bits; vLLM gives them up to the last ones."""
    start_limit_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """How long an engine may take to start; None takes what is usual for it. No result depends on
    it, so it is not declared: a job that could not start may be taken up again with another."""
    caches: Caches = "flush"
    """How an engine keeps values of older weights apart: flushed in a sync, or salted by load."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest mean gap between log-probabilities of the engine and of the training side, as
    calibrated; None where the engine gives bits."""
    sync_encoding: SyncEncoding = "full"
    """Whether weight syncs send whole weights, or a lossless patch to engines that the ledger has
    on the version before: no bit depends on that. With ``lossy`` the patch keeps to ``max_error``,
    and all engines hold what it leads to."""
    anchor_every: int = Field(default=16, ge=1)
    """With patches: every so many versions the weights go whole to all engines, without loss."""
    max_error: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """With ``lossy``: no element of an engine's weights is further from the trainer's."""
    proposer: Literal["planner", "operator"] = "planner"
    """Who proposes moves of the dynamic schedule; with ``operator`` only ``shiftbook propose``."""
    shadow_every: int | None = Field(default=None, ge=1)
    """Iterations from the begin of one shadow window to the next; None asks for no shadow."""
    shadow_iterations: int = Field(default=1, ge=1)
    """Iterations of a window."""
    bundles: str
    base_policy: str
    ledger_url: str
    evidence: str | None = None
    """Folder or fsspec URL of the evidence segments; None keeps them beside the ledger."""
    mover: str = "ray"
    """Entry point of ``shiftbook.movers`` that recovery opens."""

    @model_validator(mode="after")
    def _a_loss_has_a_bound(self) -> JobConfig:
        if (self.sync_encoding == "lossy") != (self.max_error is not None):
            raise ValueError(
                "sync_encoding lossy and max_error must be given together, found "
                f"{self.sync_encoding} with {self.max_error}"
            )
        return self

    @property
    def engine_start_s(self) -> float:
        """How long an engine may take to start."""
        return self.start_limit_s or START_LIMITS_S[self.engine]

    def worker_config(self) -> dict[str, Any]:
        """What a worker's component is made from."""
        return {
            "seed": self.seed,
            "groups": self.groups,
            "lanes": self.lanes,
            "engine": self.engine,
            "caches": self.caches,
            "max_error": self.max_error,
            "virtual_ranks": self.virtual_ranks,
            "reduction": self.reduction,
            "base_policy": self.base_policy,
        }


def base_policy() -> Path:
    """The base policy that comes with the package."""
    from shiftbook.jobs.policy_file import BASE_POLICY

    return BASE_POLICY


def plan_of(config: JobConfig) -> Plan:
    """The contract that the verifier holds the job to."""
    from shiftbook.checkpoint.recorder_data import dataset_digest
    from shiftbook.jobs.questions import question_digests

    return Plan(
        seed=config.seed,
        iterations=config.iterations,
        data=DataPlan(
            dataset_digest=dataset_digest(question_digests(config.seed, DATASET_SIZE)),
            tokenizer_digest=tokenizer_digest(),
            dataset_size=DATASET_SIZE,
            sampler_rule=HASH_SORT,
            seed=config.seed,
            epochs=1,
        ),
        sampling=sampling_of(config),
        update=UpdatePlan(
            prompts_per_update=config.groups,
            group_size=GROUP_SIZE,
            virtual_ranks=config.virtual_ranks,
            learning_rate=config.learning_rate,
            clip_norm=config.clip_norm,
            reduction=config.reduction,
            loss_terms={"policy": 1.0, "kl": 0.01},
            clip_range=0.2,
            model_parallel=False,
        ),
        moves=moves_of(config),
        shadow=shadow_of(config),
        syncs=syncs_of(config),
        required_invariants=(
            *REQUIRED_INVARIANTS,
            # Which version wrote a block of its cache vLLM does not say.
            *(("I7",) if config.engine == "torch" else ()),
            *(("shadow",) if config.shadow_every is not None else ()),
        ),
        tolerances={
            **({} if config.tolerance is None else {"I16": config.tolerance}),
            **({} if config.reduction == "tree" else {"replay": UNORDERED_TOLERANCE}),
        },
    )


def moves_of(config: JobConfig) -> MovePlan:
    """Whether anything moves, how long a step of a move may take, in which an engine loads and is
    probed, and how long a reboot may take: its engines start anew."""
    start_s = START_LIMITS_S[config.engine]
    usual_s = MovePlan.model_fields["reboot_limit_s"].default
    return MovePlan(
        mode="act" if config.schedule == "dynamic" else "observe",
        step_limit_s=step_limit_s(start_s),
        reboot_limit_s=max(usual_s, usual_s / 2 + start_s),
    )


def syncs_of(config: JobConfig) -> SyncPlan:
    """What weight syncs may lose."""
    if config.max_error is None:
        return SyncPlan()
    return SyncPlan(encoding="int8-difference", max_error=config.max_error)


def bundle_digests(config: JobConfig) -> dict[str, str]:
    """The fields of a bundle that say which plan and which data its state belongs to."""
    plan = plan_of(config)
    text = canonical.encode(plan.model_dump(mode="json"))
    return {
        "config_digest": hashlib.sha256(text).hexdigest(),
        "data_digest": plan.data.dataset_digest,
    }


def gives_bits(config: JobConfig) -> bool:
    """Whether another run of the job, however it is placed, comes to the same bits."""
    return config.engine == "torch" and config.reduction == "tree"


def shadow_of(config: JobConfig) -> ShadowPlan | None:
    """Which windows `shiftbook shadow` shall run again; None for none."""
    if config.shadow_every is None:
        return None
    if config.shadow_iterations > config.shadow_every:
        raise InvalidInput(
            f"expected windows that end before the next begins, found {config.shadow_iterations} "
            f"iterations every {config.shadow_every}; make them shorter or rarer"
        )
    return ShadowPlan(every_iterations=config.shadow_every, iterations=config.shadow_iterations)


def sampling_of(config: JobConfig) -> SamplingPlan:
    """How the job's engine draws. The last bits of vLLM depend on what else is in a batch, so a
    job on it promises the distribution, within the plan's tolerance, and no bits."""
    if config.engine == "vllm":
        return SamplingPlan(
            engine="shiftbook.jobs.vllm_engine",
            engine_dtype="float32",
            batch_composition="distribution",
            cache_policy=config.caches,
        )
    return SamplingPlan(
        engine="shiftbook.jobs.engine", engine_dtype="float32", cache_policy=config.caches
    )


def tokenizer_digest() -> str:
    """SHA-256 over the vocabulary, hex."""
    from shiftbook.jobs import tokenizer

    return hashlib.sha256("\n".join(tokenizer.SYMBOLS).encode()).hexdigest()


def split(devices: tuple[str, ...], rollout: int, trainer: int, inference: int = 1) -> Topology:
    """Rollout on the first slots, trainer and inference on the last ones. They may overlap:
    components of one job share a slot in turns."""
    if not (1 <= rollout <= len(devices) and 1 <= trainer <= len(devices)):
        raise InvalidInput(
            f"expected 1 to {len(devices)} slots for rollout and for the trainer, "
            f"found {rollout} and {trainer}"
        )
    return Topology.of(
        {
            "rollout": list(devices[:rollout]),
            "tool": [],
            "inference": list(devices[len(devices) - inference :]),
            "trainer": list(devices[len(devices) - trainer :]),
        }
    )


def start_topology(config: JobConfig, devices: tuple[str, ...]) -> Topology:
    """Where the job stands when an attempt starts, by its schedule."""
    count = len(devices)
    if count < 2 and config.schedule == "static":
        raise InvalidInput(f"a static split needs at least 2 slots, found {count}")
    widest = max_trainers(config, count)
    if config.schedule == "static":
        rollout = config.rollout_slots or count - 1
        room = count - rollout
        trainer = max(w for w in (1, 2, 4, 8) if w <= max(1, min(room, config.virtual_ranks)))
        return split(devices, rollout, trainer)
    if config.schedule == "timeshared":
        return split(devices, count, widest, count)
    return split(devices, count, 1)


def max_trainers(config: JobConfig, slots: int) -> int:
    """Most physical ranks: a power of two, at most the virtual ranks and the slots."""
    return max(w for w in (1, 2, 4, 8) if w <= min(config.virtual_ranks, slots))


def opened(config: JobConfig, devices: tuple[str, ...]) -> JobOpened:
    """How the job declares itself."""
    count = len(devices)
    return JobOpened(
        components=COMPONENTS,
        edges=tuple(Edge(source=a, target=b) for a, b in EDGES),
        devices=tuple(Device(name=name, kind="core") for name in devices),
        topology=start_topology(config, devices),
        elastic={
            "rollout": ElasticRange(minimum=1, maximum=count),
            "inference": ElasticRange(minimum=1, maximum=count),
            "trainer": ElasticRange(minimum=1, maximum=max_trainers(config, count)),
            "tool": ElasticRange(minimum=0, maximum=0),
        },
        plan=plan_of(config),
        job_path="shiftbook.jobs.loop:TrainingLoop",
        # What the ledger keeps says where it stands, and not who may come in.
        config=config.model_dump(mode="json", exclude={"start_limit_s"})
        | {"ledger_url": public_url(config.ledger_url)},
        # What vLLM draws depends on what shares a batch, and an unordered sum on what came first:
        # no other run gives the same bits.
        replay="shiftbook.jobs.replay:reference_job" if gives_bits(config) else None,
    )


def fleet_spec(
    devices: tuple[str, ...], config: JobConfig | Mapping[str, Any] | None = None
) -> FleetSpec:
    """Processes of the job: every component but the tool may stand on every slot.

    Which engine a rollout process runs is said when it is given to a job: ``config``, or what the
    ledger has of it, says how long that may take to start. Without it nobody waits for an engine.
    """
    start_limit_s = {}
    if isinstance(config, JobConfig):
        start_limit_s["rollout"] = config.engine_start_s
    elif config is not None and config.get("engine") in ENGINES:
        start_limit_s["rollout"] = START_LIMITS_S[config["engine"]]
    return FleetSpec(
        factories=FACTORIES,
        devices={"rollout": devices, "inference": devices, "trainer": devices},
        without_device={"tool": 1},
        start_limit_s=start_limit_s,
    )
