"""An elastic data-parallel trainer around any torch model, optimizer and loss function.

``VirtualRanks`` takes one group of samples at a time, adds its gradient to the virtual rank that
owns it, and makes the update when all groups are in. The parameters that come out do not depend on
how many processes there are, nor on whether that number changes in the middle of an update. A
group's forward and backward draw from the random stream of (seed, update, group), wherever they
run; gradients are summed and not averaged, and divided once, by the weight of all groups together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from shiftbook.checkpoint.named_state import (
    check_optimizer,
    load_hyper_parameters,
    load_optimizer,
    load_tensors,
    optimizer_hyper_parameters,
    optimizer_tensors,
)
from shiftbook.checkpoint.random_streams import keyed_streams
from shiftbook.checkpoint.unordered import UnorderedAccumulator
from shiftbook.checkpoint.virtual_ranks import (
    GradientAccumulator,
    RankSum,
    VirtualRankError,
    VirtualRankPlan,
    all_reduce_tree,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from shiftbook.ledger.plan import Plan

Reduction = Literal["tree", "unordered"]

STREAM = "virtual-rank"
"""Owner of the random streams that groups draw from: ``virtual-rank/NUMBER``."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that train; ``group`` is None for a world of one."""

    rank: int = 0
    world: int = 1
    group: ProcessGroup | None = None


@dataclass(frozen=True)
class GroupLoss:
    """The loss of one group: a scalar, **summed** over what ``weight`` counts (tokens, samples).

    ``stats`` are numbers that are summed in the same tree as the gradients, ``notes`` others that
    only go back to who added the group.
    """

    total: Tensor
    weight: int
    stats: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, float] = field(default_factory=dict)


LossFunction = Callable[[Any, Any], "GroupLoss | tuple[Tensor, int]"]
"""f(model, batch): the summed loss of a group and its weight."""


@dataclass(frozen=True)
class UpdateReport:
    """One update: its number from 1, the weight that it divided by, summed statistics.

    ``grad_norm`` is the norm after the division and before clipping; ``scale`` is what each element
    of the summed gradient was multiplied by.
    """

    update: int
    weight: int
    stats: dict[str, float]
    grad_norm: float
    scale: float
    clipped: bool

    @property
    def loss(self) -> float:
        """Mean loss over what the weight counts."""
        return self.stats["loss_sum"] / self.weight


def fp32_masters(model: nn.Module) -> dict[str, Tensor]:
    """Float32 copies of the trained parameters of a model of another precision, by name."""
    return {
        name: parameter.detach().to(torch.float32, copy=True)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


class VirtualRanks:
    """Trains ``model`` so that the number of processes does not change a bit.

    ``optimizer`` is made from the model's trained parameters, or from ``masters`` where the model
    has a lower precision (see ``fp32_masters``). ``precision`` is what the model is rounded to
    after each update (default: the dtype of its parameters). ``groups`` is the number of groups of
    one update, a multiple of ``virtual_ranks``. ``reduction="unordered"`` gives the bits up for
    speed: sums come out in the order of arrival and of the network.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        virtual_ranks: int = 4,
        groups: int | None = None,
        seed: int = 0,
        clip_norm: float | None = None,
        masters: Mapping[str, Tensor] | None = None,
        precision: torch.dtype | None = None,
        reduction: Reduction = "tree",
        updates: int = 0,
        place: Place | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.plan = VirtualRankPlan(virtual_ranks, groups or virtual_ranks)
        self.seed, self.clip_norm, self.precision = seed, clip_norm, precision
        self.reduction: Reduction = reduction
        self.updates = updates
        """Updates made so far."""
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = dict(self.parameters if masters is None else masters)
        self._check()
        self.place: Place | None = place or Place()
        """None while this process has no part in the training."""
        self.accumulator = self._accumulator(self.place)

    @classmethod
    def declared(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        plan: Plan,
        **options: Any,
    ) -> VirtualRanks:
        """As ``plan`` declares it: seed, virtual ranks, groups, clipping and reduction.

        A group is a prompt of the plan with all its samples.
        """
        return cls(
            model,
            optimizer,
            loss,
            virtual_ranks=plan.update.virtual_ranks,
            groups=plan.update.prompts_per_update,
            seed=plan.seed,
            clip_norm=plan.update.clip_norm,
            reduction=plan.update.reduction,
            **options,
        )

    # -- one update --------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """Groups of this process's virtual ranks that are not in yet, in declared order."""
        return self.accumulator.missing() if self.place is not None else []

    def add(self, group: int, batch: Any, uids: Sequence[str] = ()) -> GroupLoss:
        """Compute the gradient of one group and add it; groups may come in any order.

        Raises VirtualRankError for a group that is in already or belongs elsewhere, before
        anything is computed, and for a forward that changes the model's buffers.
        """
        self._active()
        self.accumulator.expects(group)
        flat, loss = self.gradient(group, batch)
        self.accumulator.add(group, flat, loss.weight, loss.stats, uids)
        return loss

    def gradient(self, group: int, batch: Any) -> tuple[Tensor, GroupLoss]:
        """Flat float32 gradient of a group's summed loss in declared order, and the loss."""
        buffers = [(name, b, b._version) for name, b in self.model.named_buffers()]
        for parameter in self.parameters.values():
            parameter.grad = None
        owner = f"{STREAM}/{self.plan.rank_of(group)}"
        with keyed_streams(self.seed, owner, self.updates, group):
            found = self.loss(self.model, batch)
            loss = found if isinstance(found, GroupLoss) else GroupLoss(*found)
            torch.autograd.backward(loss.total)
        flat = torch.cat([_flat(p.grad, p) for p in self.parameters.values()])
        for parameter in self.parameters.values():
            parameter.grad = None
        for name, buffer, version in buffers:
            if buffer._version != version:
                raise VirtualRankError(
                    f"expected a forward that leaves the buffers as they are, found that it wrote "
                    f"to {name}: what it holds would depend on which process ran which groups; "
                    "freeze it (a BatchNorm in eval mode), or update it once, after the update"
                )
        stats = {"loss_sum": float(loss.total.detach()), **loss.stats}
        return flat, GroupLoss(loss.total.detach(), loss.weight, stats, loss.notes)

    def update(self, learning_rate: float | None = None) -> UpdateReport:
        """Reduce over all processes, divide, clip, step, publish. Collective.

        ``learning_rate`` is set in all groups of the optimizer first, where it is given.
        """
        place = self._active()
        if isinstance(self.accumulator, UnorderedAccumulator):
            total = self.accumulator.total(place.group)
        else:
            total = all_reduce_tree(self.accumulator.local_sums(), place.group)
        return self.apply(total, learning_rate)

    def apply(self, total: RankSum, learning_rate: float | None = None) -> UpdateReport:
        """Make the update from a gradient that is summed already, and begin the next one.

        Raises VirtualRankError for a weight below 1, another length and a norm that is not finite;
        nothing is changed then.
        """
        size = sum(master.numel() for master in self.masters.values())
        if total.tokens < 1 or total.flat.numel() != size:
            raise VirtualRankError(
                f"update {self.updates + 1}: expected {size} gradient elements and a weight of at "
                f"least 1, found {total.flat.numel()} and {total.tokens}; sum the gradients of "
                "this model's groups"
            )
        norm = math.sqrt(total.flat.double().square_().sum().item()) / total.tokens
        if not math.isfinite(norm):
            raise VirtualRankError(
                f"update {self.updates + 1}: expected a finite gradient norm, found {norm}; look "
                "for the group whose loss is not finite and drop it with a declared reason"
            )
        clips = self.clip_norm is not None and norm > self.clip_norm
        limit = self.clip_norm if self.clip_norm is not None else math.inf
        scale = min(1.0, limit / norm) / total.tokens if norm > 0.0 else 1.0 / total.tokens
        start = 0
        for master in self.masters.values():
            part = total.flat[start : start + master.numel()].view(master.shape)
            start += master.numel()
            master.grad = part * scale
        if learning_rate is not None:
            for settings in self.optimizer.param_groups:
                settings["lr"] = learning_rate
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        self.publish()
        self.updates += 1
        self.accumulator.reset()
        stats = dict(total.stats)
        return UpdateReport(self.updates, total.tokens, stats, norm, scale, clips)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model; nothing to do where they are its parameters."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter:
                parameter.copy_(master.to(self.precision or parameter.dtype))

    # -- state -------------------------------------------------------------------------------

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors by part and name: ``model``, ``masters`` and ``optimizer``.

        As a bundle saves them, a move carries them and the recorder fingerprints them.
        """
        model = {
            name: parameter.detach().to(self.precision or parameter.dtype)
            for name, parameter in self.parameters.items()
        }
        masters = {name: master.detach() for name, master in self.masters.items()}
        state = optimizer_tensors(self.optimizer, self.masters)
        return {"model": model, "masters": masters} | ({"optimizer": state} if state else {})

    def load(self, parts: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Take over tensors that ``parts`` gave, into the live objects; all or nothing.

        ``optimizer`` may be absent: no step was taken yet. Raises VirtualRankError for other
        names, shapes or dtypes.
        """
        load_tensors("masters", self.masters, parts["masters"], write=False)
        if "model" in parts:
            target = {n: p.to(self.precision or p.dtype) for n, p in self.parameters.items()}
            load_tensors("model", target, parts["model"], write=False)
        load_optimizer(self.optimizer, self.masters, parts.get("optimizer", {}))
        load_tensors("masters", self.masters, parts["masters"])
        if "model" in parts:
            load_tensors("model", self.parameters, parts["model"], cast=True)
        else:
            self.publish()
        self.updates = updates

    def numbers(self) -> dict[str, Any]:
        """What a move carries beside tensors: updates made and the optimizer's settings."""
        return {
            "updates": self.updates,
            "optimizer": optimizer_hyper_parameters(self.optimizer),
        }

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Take over what ``numbers`` gave."""
        self.updates = int(numbers["updates"])
        load_hyper_parameters(self.optimizer, numbers["optimizer"])

    # -- places ------------------------------------------------------------------------------

    def at(self, place: Place | None, snapshots: Iterable[Mapping[str, Any]] = ()) -> VirtualRanks:
        """This trainer at another place, its half-done update taken from ``snapshots``.

        Model, optimizer and masters are shared; this object and its half-done update stay as they
        are, so that a move which fails later leaves everything in place.
        """
        twin = object.__new__(VirtualRanks)
        twin.__dict__.update(self.__dict__)
        twin.place = place
        twin.accumulator = self._accumulator(place)
        pieces = list(snapshots)
        if place is not None and pieces:
            twin.accumulator.restore(pieces)
        return twin

    def resize(self, store: Store, generation: str, rank: int, world: int, processes: int) -> None:
        """Go on with ``world`` processes; every one of the ``processes`` that take part calls it.

        Those are all that train before or after; ``rank`` is this one's number among them, and
        ranks 0 to world - 1 train afterwards. State goes to processes that have none, half-done
        sums to the new owners of their virtual ranks, both checked by fingerprint. ``generation``
        is new for each resize; ``store`` outlives all of them.
        """
        from shiftbook.checkpoint.elastic_move import move

        moved = move(self, store, generation, rank, world, processes)
        self.__dict__.update(moved.__dict__)

    def _accumulator(self, place: Place | None) -> GradientAccumulator | UnorderedAccumulator:
        kind = GradientAccumulator if self.reduction == "tree" else UnorderedAccumulator
        where = place or Place()
        return kind(self.plan, where.world, where.rank)

    def _active(self) -> Place:
        if self.place is None:
            raise VirtualRankError(
                "expected a process that trains, found one that a resize left out; "
                "resize to more processes, or leave the updates to the others"
            )
        return self.place

    def _check(self) -> None:
        if self.reduction not in ("tree", "unordered"):
            raise VirtualRankError(f"expected reduction tree or unordered, found {self.reduction}")
        if not self.parameters:
            raise VirtualRankError("expected a model with trained parameters, found none")
        if list(self.masters) != list(self.parameters):
            raise VirtualRankError(
                f"expected masters of the {len(self.parameters)} trained parameters in the model's "
                f"order, found {len(self.masters)}: {list(self.masters)[:4]}; make them with "
                "fp32_masters(model)"
            )
        for name, master in self.masters.items():
            if master.dtype != torch.float32 or master.shape != self.parameters[name].shape:
                raise VirtualRankError(
                    f"{name}: expected a float32 master of shape "
                    f"{tuple(self.parameters[name].shape)}, found {master.dtype} of shape "
                    f"{tuple(master.shape)}; pass masters=fp32_masters(model), and make the "
                    "optimizer from them"
                )
        check_optimizer(self.optimizer, self.masters)


def _flat(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A parameter's gradient as a float32 vector; zeros where the loss does not depend on it."""
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.reshape(-1).float()
