"""FSDP2 whose gradients are reduced in the fixed tree: sharded parameters, and the same bits.

``fully_shard`` leaves the order of its sums to the library, so that another number of processes
gives other last bits. ``ShardedRanks`` puts its own reduce-scatter in that place: a process keeps
the gradients of its virtual ranks apart until the last of them, adds them in their subtree, sends
each process the shards that it owns, and adds those in the rest of the tree. That holds one
unsharded gradient for each virtual rank of the process, one at least, for the length of an update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shiftbook.checkpoint.elastic import STREAM, GroupLoss, LossFunction, UpdateReport
from shiftbook.checkpoint.random_streams import keyed_streams
from shiftbook.checkpoint.reduction_tree import RankSum, reduce_tree
from shiftbook.checkpoint.virtual_ranks import VirtualRankError, VirtualRankPlan


class TreeReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP module; ``slots`` is the number of this process's virtual
    ranks, and so of the calls that make one update."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.kept: list[Tensor] = []
        self.calls = 0
        """Reductions since the last update."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for input and output, from torch's own allocator."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Keep the gradient of a virtual rank; with the last one, reduce them all."""
        block = self._block(input_tensor)
        if block is None:
            output_tensor.zero_()
            return
        received = torch.empty_like(block)
        dist.all_to_all_single(received, block, group=group)
        output_tensor.copy_(_tree(list(received.view(group.size(), -1))))

    def alone(self, output_tensor: Tensor) -> None:
        """The same for a world of one, where FSDP calls no collective but its hook."""
        block = self._block(output_tensor)
        if block is None:
            output_tensor.zero_()
        else:
            output_tensor.copy_(block)

    def _block(self, gradient: Tensor) -> Tensor | None:
        """The sum over this process's virtual ranks once it is complete."""
        self.calls += 1
        self.kept.append(gradient.clone())
        if len(self.kept) < self.slots:
            return None
        kept, self.kept = self.kept, []
        return _tree(kept)


def _tree(flats: list[Tensor]) -> Tensor:
    return reduce_tree([RankSum(flat, 0) for flat in flats]).flat


class ShardedRanks:
    """Virtual ranks over a model that ``fully_shard`` has sharded over one mesh axis.

    Gradients come out as those of ``VirtualRanks`` (the plan's groups in declared order, the tree
    over virtual ranks), so 1, 2 and 4 processes give the same parameters bit for bit. The clipping
    norm is a sum over rows, the same on any number of processes, but its last bits are not those
    of ``VirtualRanks``, which sums one flat vector. ``optimizer`` is made from the sharded model's
    float32 parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        plan: VirtualRankPlan,
        seed: int = 0,
        clip_norm: float | None = None,
        updates: int = 0,
    ) -> None:
        self.model, self.optimizer, self.loss, self.plan = model, optimizer, loss, plan
        self.seed, self.clip_norm, self.updates = seed, clip_norm, updates
        self.parameters: dict[str, DTensor] = {}
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) or not _is_sharded(parameter):
                raise VirtualRankError(
                    f"{name}: expected a float32 DTensor sharded over rows on one mesh axis, found "
                    f"{type(parameter).__name__} of {parameter.dtype}; call fully_shard on the "
                    "whole model first, with a mesh of one axis"
                )
            self.parameters[name] = parameter
        mesh = next(iter(self.parameters.values())).device_mesh
        self.group, self.rank, self.world = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.block = plan.block_of(self.rank, self.world)
        self._comms = [self._install(m) for m in model.modules() if isinstance(m, FSDPModule)]
        self._due = [group for rank in self.block for group in plan.groups_of(rank)]
        self._begin()

    def _install(self, module: FSDPModule) -> TreeReduceScatter:
        comm = TreeReduceScatter(len(self.block))
        module.set_custom_reduce_scatter(comm)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)  # or shards of unlike groups would not add up
        if self.world == 1:
            module.set_all_reduce_hook(comm.alone)
        return comm

    def _begin(self) -> None:
        self._left = list(self._due)
        self._weight = 0
        self._stats: list[dict[str, float]] = []
        for comm in self._comms:
            comm.calls = 0
        self.optimizer.zero_grad(set_to_none=True)

    def missing(self) -> list[int]:
        """Groups of this process that are not in yet; they come in this order."""
        return list(self._left)

    def add(self, group: int, batch: Any) -> GroupLoss:
        """Gradient of the next group. Collective: all processes add their n-th group together."""
        if not self._left or group != self._left[0]:
            raise VirtualRankError(
                f"expected group {self._left[0] if self._left else None} next, found {group}; "
                "a sharded model adds its groups in declared order, in step with the others"
            )
        rank = self.plan.rank_of(group)
        last = group == self.plan.groups_of(rank)[-1]
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        with keyed_streams(self.seed, f"{STREAM}/{rank}", self.updates, group):
            found = self.loss(self.model, batch)
            loss = found if isinstance(found, GroupLoss) else GroupLoss(*found)
            torch.autograd.backward(loss.total)
        self._left.pop(0)
        self._weight += loss.weight
        self._stats.append({"loss_sum": float(loss.total.detach()), **loss.stats})
        return loss

    def update(self, learning_rate: float | None = None) -> UpdateReport:
        """Divide, clip and step. Collective. The report's statistics are this process's own."""
        if self._left:
            raise VirtualRankError(f"expected every group to be in, still missing {self._left}")
        if any(comm.calls != comm.slots for comm in self._comms):
            raise VirtualRankError(
                f"expected {len(self.block)} reductions of each sharded module, one for each "
                f"virtual rank, found {sorted({comm.calls for comm in self._comms})}; a module "
                "that a forward uses more than once, or not in every group, is to be sharded with "
                "the module around it and not by itself"
            )
        device = next(iter(self.parameters.values())).to_local().device
        weight = torch.tensor([self._weight], device=device)
        dist.all_reduce(weight, group=self.group)
        total = int(weight)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = self._norm() / total
        if not math.isfinite(norm):
            raise VirtualRankError(
                f"update {self.updates + 1}: expected a finite gradient norm, found {norm}; look "
                "for the group whose loss is not finite and drop it with a declared reason"
            )
        limit = math.inf if self.clip_norm is None else self.clip_norm
        scale = min(1.0, limit / norm) / total if norm > 0.0 else 1.0 / total
        for parameter in self.parameters.values():
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().mul_(scale)
        if learning_rate is not None:
            for settings in self.optimizer.param_groups:
                settings["lr"] = learning_rate
        self.optimizer.step()
        self.updates += 1
        names = self._stats[0] if self._stats else {}
        stats = {name: sum(one[name] for one in self._stats) for name in names}
        self._begin()
        return UpdateReport(self.updates, total, stats, norm, scale, norm > limit)

    def _norm(self) -> float:
        """Norm of the summed gradient: float64 sums by row, then over all rows in order."""
        rows = []
        for parameter in self.parameters.values():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            local = gradient.to_local().double().square()
            sums = local.flatten(1).sum(1) if local.dim() > 1 else local
            shape = torch.Size([gradient.shape[0]])
            whole = DTensor.from_local(
                sums,
                gradient.device_mesh,
                [Shard(0)],
                run_check=False,
                shape=shape,
                stride=(1,),
            )
            rows.append(whole.full_tensor())
        return math.sqrt(float(torch.cat(rows).sum()))

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """The live sharded tensors by part and name, ``model`` and ``optimizer``.

        ``distributed_fingerprints`` takes their fingerprints; ``torch.distributed.checkpoint``
        saves them.
        """
        state = {
            f"{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        model = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {"model": model, "optimizer": state}

    def load(self, parts: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Take over whole tensors by part and name, as every process has read them; each keeps
        its shards. For a resize into another mesh."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.to_local().copy_(_shard(parts["model"][name], parameter).to_local())
        for full, tensor in parts["optimizer"].items():
            name, _, key = full.rpartition("/")
            parameter = self.parameters[name]
            value = _shard(tensor, parameter) if tensor.dim() else tensor.clone()
            self.optimizer.state[parameter][key] = value
        self.updates = updates


def whole(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Sharded tensors gathered on every process. Collective."""
    return {
        part: {
            name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
            for name, t in tensors.items()
        }
        for part, tensors in parts.items()
    }


def _shard(tensor: Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _is_sharded(parameter: DTensor) -> bool:
    return parameter.dtype == torch.float32 and tuple(parameter.placements) == (Shard(0),)
