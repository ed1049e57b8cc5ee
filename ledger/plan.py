"""What a training program declares before it runs: the contract that the verifier holds it to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shiftbook.ledger.errors import InvalidInput

Mode = Literal["observe", "advise", "act"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


MAX_SHARES = 100_000
"""Largest sum of a stage's shares: the draws within which they hold exactly."""


class SourcePlan(_Part):
    """One source of prompts; sources follow one another in the indices of the data set."""

    name: str = Field(min_length=1)
    size: int = Field(ge=1)


class StagePlan(_Part):
    """A stage of the curriculum: from which draw on it holds, and the sources' shares."""

    start: int = Field(ge=0, description="ordinal of its first draw")
    shares: dict[str, int] = Field(description="draws by source, of each sum of them")

    @model_validator(mode="after")
    def _something_is_drawn(self) -> StagePlan:
        if min(self.shares.values(), default=-1) < 0 or not (
            1 <= sum(self.shares.values()) <= MAX_SHARES
        ):
            raise ValueError(
                f"shares must be whole numbers of at least 0 that add up to 1 … {MAX_SHARES}, "
                f"found {self.shares}"
            )
        return self


class MixturePlan(_Part):
    """Sources, and in which shares each stage draws from them."""

    sources: tuple[SourcePlan, ...] = Field(min_length=1)
    stages: tuple[StagePlan, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _stages_follow_and_name_sources(self) -> MixturePlan:
        names = [source.name for source in self.sources]
        starts = [stage.start for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"sources must have names of their own, found {names}")
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"stages must begin at draw 0 and follow one another, found {starts}")
        unknown = sorted({name for stage in self.stages for name in stage.shares} - set(names))
        if unknown:
            raise ValueError(f"shares must be of declared sources, found {unknown}")
        return self


class DataPlan(_Part):
    """Where samples come from and in which order."""

    dataset_digest: str
    tokenizer_digest: str
    dataset_size: int = Field(ge=1)
    sampler_rule: str
    seed: int
    mixture: MixturePlan | None = Field(
        default=None, description="of rule mixture-v1: sources, shares and stages"
    )
    epochs: int = Field(default=1, ge=1)
    rng_keys: tuple[str, ...] = ("job_seed", "uid", "turn", "position")
    first_streams: dict[str, str] = Field(
        default_factory=dict, description="digest of each owner's random state at the start"
    )
    shared_streams: tuple[tuple[str, ...], ...] = Field(
        default=(), description="owners whose random states are equal on purpose, group by group"
    )
    remapped_owners: tuple[str, ...] = Field(
        default=(),
        description="owners, or patterns such as rank/*, whose parts (rng:rank/0) are split or "
        "keyed anew where their number changes",
    )

    @model_validator(mode="after")
    def _the_mixture_is_of_this_data_set(self) -> DataPlan:
        if (self.mixture is not None) != (self.sampler_rule == "mixture-v1"):
            raise ValueError("sampler_rule mixture-v1 and mixture must be declared together")
        if self.mixture is not None:
            sizes = sum(source.size for source in self.mixture.sources)
            if sizes != self.dataset_size:
                raise ValueError(f"sources have {sizes} prompts, dataset_size {self.dataset_size}")
        return self


class SamplingPlan(_Part):
    """How a token is drawn from the policy's distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    log_probs: Literal["processed", "raw"] = "raw"
    engine: str = "torch"
    engine_dtype: str = "float32"
    batch_composition: Literal["bitwise", "distribution"] = "bitwise"
    staleness_bound: int = Field(default=0, ge=0, description="updates")
    partial_rollouts: bool = False
    cache_policy: Literal["flush", "salt", "keep"] = Field(
        default="flush", description="of values cached under older weights, as weights change"
    )


AdvantageRule = Literal["group", "group-mean", "leave-one-out", "batch-scaled", "batch", "other"]


class UpdatePlan(_Part):
    """What one update consumes and how it is computed."""

    prompts_per_update: int = Field(ge=1)
    group_size: int = Field(ge=1)
    virtual_ranks: int = Field(ge=1)
    optimizer: str = "adam"
    learning_rate: float = Field(gt=0)
    learning_rate_schedule: str = "constant"
    clip_norm: float | None = None
    loss_terms: dict[str, float] = Field(default_factory=dict)
    divisor: Literal["tokens", "samples"] = "tokens"
    advantage: AdvantageRule = Field(
        default="group",
        description="from rewards: less the mean of the group over its deviation (group), less it "
        "alone (group-mean), less that of the others (leave-one-out), over the deviation of the "
        "batch (batch-scaled), both of the batch (batch), or by a rule of its own (other)",
    )
    groups: Literal["whole", "split"] = Field(
        default="whole",
        description="whether a group is consumed by one update and computed by one virtual rank, "
        "or may be split over several",
    )
    dealing: Literal["blocks", "any"] = Field(
        default="any", description="groups to virtual ranks: blocks in order of uid, or freely"
    )
    reduction: Literal["tree", "unordered"] = Field(
        default="tree", description="of gradients: one fixed tree, or as they come, within rounding"
    )
    epochs_per_batch: int = Field(default=1, ge=1)
    sample_reuse: Literal["exactly", "at_most"] = Field(
        default="exactly",
        description="each sample is consumed epochs_per_batch times; or, out of a replay buffer, "
        "at least once and at most that often, within the staleness bound",
    )
    reference_refresh: int | None = Field(default=None, description="updates between refreshes")
    clip_range: float | None = Field(default=None, description="of the importance ratio")
    clip_range_high: float | None = Field(
        default=None, description="the same upwards; None where it is as far as downwards"
    )
    truncation: float | None = Field(default=None, description="of engine-to-trainer weights")
    ema_decay: float | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1, description="share left out")
    recomputation: bool | None = Field(
        default=None, description="of activations in the backward pass; None where nothing is said"
    )
    model_parallel: bool | None = Field(
        default=None,
        description="whether ranks share one model (tensor, sequence, expert or pipeline "
        "parallel); False where each holds all of it, None where nothing is said",
    )
    controllers: dict[str, dict[str, float | str]] = Field(
        default_factory=dict, description="by name: rule and its constants"
    )

    @model_validator(mode="after")
    def _blocks_are_of_whole_groups(self) -> UpdatePlan:
        if self.groups == "split" and self.dealing == "blocks":
            raise ValueError("groups can be split only where dealing is any, found blocks")
        return self

    @model_validator(mode="after")
    def _virtual_ranks_are_a_power_of_two(self) -> UpdatePlan:
        if self.virtual_ranks & (self.virtual_ranks - 1):
            raise ValueError(f"virtual_ranks must be a power of two, found {self.virtual_ranks}")
        return self


class SyncPlan(_Part):
    """How weights may go from the trainer to the engines."""

    encoding: Literal["lossless", "int8-difference"] = Field(
        default="lossless",
        description="whole weights and lossless patches are always allowed; int8-difference allows "
        "patches with a loss as well",
    )
    max_error: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="of a lossy encoding: no element of an engine is further from the trainer's",
    )

    @model_validator(mode="after")
    def _a_loss_has_a_bound(self) -> SyncPlan:
        if (self.encoding == "lossless") != (self.max_error is None):
            raise ValueError(
                "a lossy encoding and its max_error must be declared together, found "
                f"{self.encoding} with {self.max_error}"
            )
        return self

    def objection(self, encoding: str, max_error: float, largest_error: float) -> str | None:
        """What in a lossy sync this does not allow, or None.

        ``max_error`` is the bound that the sync states, ``largest_error`` what its sender measured.
        """
        if self.max_error is None:
            return f"{encoding}, which the plan does not declare: its syncs are {self.encoding}"
        if encoding != self.encoding:
            return f"{encoding}, where the plan declares {self.encoding}"
        if not max_error <= self.max_error:
            return f"a bound of {max_error:g}, above the plan's {self.max_error:g}"
        if not 0 <= largest_error <= max_error:
            return f"an error of {largest_error:g}, outside its bound of {max_error:g}"
        return None


class MovePlan(_Part):
    """Which moves a job allows and what they must promise."""

    mode: Mode = "act"
    cooldown_s: float = Field(default=0.0, ge=0)
    margin_s: float = Field(default=0.0, description="gain must exceed cost by at least this")
    max_losing_moves: int = Field(default=8, ge=1, description="in a row, then safe mode")
    max_missed_predictions: int = Field(
        default=16, ge=1, description="gains outside their interval in a row, then safe mode"
    )
    step_limit_s: float = Field(default=20.0, gt=0, description="time limit of one gate step")
    reboot_limit_s: float = Field(
        default=120.0, gt=0, description="the same where processes start anew and load a bundle"
    )
    allow: tuple[str, ...] = ("pause", "reshard", "reboot")
    rules_may_thaw: tuple[str, ...] = ()

    def limit_s(self, strategy: str) -> float:
        """Time limit of one gate step of a move with this strategy, in seconds."""
        return self.reboot_limit_s if strategy == "reboot" else self.step_limit_s


class ShadowPlan(_Part):
    """Windows of iterations that a static schedule runs again, each from the live run's bundle."""

    every_iterations: int = Field(ge=1, description="from the begin of a window to the next's")
    iterations: int = Field(default=1, ge=1, description="of each window")
    alpha: float = Field(
        default=0.01,
        gt=0,
        lt=1,
        description="bound on false alarms of the test, where bits are not promised",
    )

    @model_validator(mode="after")
    def _windows_do_not_overlap(self) -> ShadowPlan:
        if self.iterations > self.every_iterations:
            raise ValueError(
                f"a window must end before the next begins, found {self.iterations} iterations "
                f"every {self.every_iterations}"
            )
        return self

    def begins_at(self, iteration: int) -> bool:
        """True where a window begins with this iteration."""
        return iteration % self.every_iterations == 0

    def windows(self, iterations: int) -> Iterator[range]:
        """The windows of a job of so many iterations; the last one may be shorter."""
        for first in range(0, iterations, self.every_iterations):
            yield range(first, min(first + self.iterations, iterations))


class TrainingView(_Part):
    """What the training sees of where it runs: the boundary of correctness of a move."""

    virtual_ranks: int
    prompts_per_update: int
    group_size: int
    sampler_rule: str
    rng_keys: tuple[str, ...]
    engine: str
    engine_dtype: str
    batch_composition: str
    reduction: str = "tree"

    def differences(self, other: TrainingView) -> dict[str, tuple[object, object]]:
        """Fields in which another view differs: ``{field: (here, there)}``."""
        mine, theirs = self.model_dump(), other.model_dump()
        return {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}


class Plan(_Part):
    """The contract between a training program and its verifier."""

    schema_version: int = 1
    seed: int
    iterations: int = Field(ge=0)
    objective: Literal["rl", "sft"] = "rl"
    data: DataPlan
    sampling: SamplingPlan
    update: UpdatePlan
    syncs: SyncPlan = SyncPlan()
    moves: MovePlan = MovePlan()
    shadow: ShadowPlan | None = Field(
        default=None, description="None where no shadow runs beside the job"
    )
    required_invariants: tuple[str, ...] = ()
    tolerances: dict[str, float] = Field(default_factory=dict)
    drop_rules: tuple[str, ...] = ()

    def view(self) -> TrainingView:
        """The part of the plan that a move must not change."""
        return TrainingView(
            virtual_ranks=self.update.virtual_ranks,
            prompts_per_update=self.update.prompts_per_update,
            group_size=self.update.group_size,
            sampler_rule=self.data.sampler_rule,
            rng_keys=self.data.rng_keys,
            engine=self.sampling.engine,
            engine_dtype=self.sampling.engine_dtype,
            batch_composition=self.sampling.batch_composition,
            reduction=self.update.reduction,
        )

    def save(self, path: Path) -> None:
        """Write the plan as an indented JSON file."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan file; raise InvalidInput naming the first field that is wrong."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise InvalidInput(f"expected a plan file at {path}, found none ({error})") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise InvalidInput(
                f"{path} is no valid plan: {where}: {first['msg']}; correct that field"
            ) from error
