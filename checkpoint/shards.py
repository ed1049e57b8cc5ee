"""Fingerprints of distributed tensors: each rank sums its own shard, one small all-reduce joins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shiftbook.checkpoint.errors import FingerprintError
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint
from shiftbook.checkpoint.positions import MASK_64


def shard_fingerprint(tensor: Any, *, threads: int = 1) -> Fingerprint:
    """This rank's part of a DTensor's fingerprint (FSDP2 parameters are DTensors).

    Where mesh axes replicate, the rank at the start of each such axis contributes and the others
    an empty part, so that the parts of all ranks add up to the whole. Raises FingerprintError for
    a tensor with pending partial sums: its elements are not there yet.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(int(n) for n in tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise FingerprintError(
            f"expected a DTensor of shards and replicas, found placements {tensor.placements}; "
            "redistribute the partial sums first"
        )
    place = tensor.device_mesh.get_coordinate()
    replicated = (isinstance(placement, Replicate) for placement in tensor.placements)
    if place is None or any(
        at for at, copied in zip(place, replicated, strict=True) if copied
    ):  # outside of the mesh, or a further copy
        return Fingerprint.empty(name, shape)
    local = tensor.to_local()
    expected, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(local.shape) != tuple(expected):
        raise FingerprintError(
            f"expected a local shard of shape {tuple(expected)} for placements "
            f"{tensor.placements}, found {tuple(local.shape)}; the shards of this tensor are no "
            "boxes: pass each box to fingerprint() with its offset"
        )
    if not local.numel():
        return Fingerprint.empty(name, shape)
    return fingerprint(local, offset=offset, shape=shape, threads=threads)


def distributed_fingerprints(
    tensors: Mapping[str, Any], group: dist.ProcessGroup | None = None, *, threads: int = 1
) -> dict[str, str]:
    """Fingerprints of whole logical tensors from all ranks of a group, on every rank.

    DTensors count by shard; a plain tensor is taken from the group's first rank. 24 bytes a tensor
    travel. Raises FingerprintError on every rank when the ranks hold other names, dtypes or
    shapes, or when their shards leave a gap (a mesh that is larger than the group).
    """
    parts = local_fingerprints(tensors, group, threads=threads)
    _agree_on_names(parts, group)
    return {name: part.hex for name, part in join_over_ranks(parts, group).items()}


def local_fingerprints(
    tensors: Mapping[str, Any], group: dist.ProcessGroup | None = None, *, threads: int = 1
) -> dict[str, Fingerprint]:
    """This rank's parts of the fingerprints, sorted by name; nothing travels."""
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    parts: dict[str, Fingerprint] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, DTensor):
            parts[name] = shard_fingerprint(tensor, threads=threads)
        elif first:
            parts[name] = fingerprint(tensor, threads=threads)
        else:
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts[name] = Fingerprint.empty(dtype, tuple(tensor.shape))
    return parts


def join_over_ranks(
    parts: Mapping[str, Fingerprint], group: dist.ProcessGroup | None = None
) -> dict[str, Fingerprint]:
    """Adds the parts of all ranks, which have the same names in the same order."""
    if not dist.is_initialized():
        return dict(parts)
    table = torch.tensor(
        [[_signed(n) for n in (*part.sums, part.cover)] for part in parts.values()],
        dtype=torch.int64,
    ).reshape(-1, 3)
    table = table.to(_device_of(group))
    dist.all_reduce(table, group=group)  # int64 wraps as the sums do, whatever the order
    return {
        name: Fingerprint(
            part.dtype,
            part.shape,
            (int(row[0]) & MASK_64, int(row[1]) & MASK_64),
            int(row[2]) & MASK_64,
        )
        for (name, part), row in zip(parts.items(), table.tolist(), strict=True)
    }


def _agree_on_names(parts: Mapping[str, Fingerprint], group: dist.ProcessGroup | None) -> None:
    text = repr([(name, part.dtype, part.shape) for name, part in parts.items()])
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device=_device_of(group))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if extremes.tolist() != [digest, -digest]:
        raise FingerprintError(
            f"expected the same tensors on all ranks, found other names, dtypes or shapes than "
            f"this rank's {len(parts)}; pass the same logical tensors everywhere"
        )


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
