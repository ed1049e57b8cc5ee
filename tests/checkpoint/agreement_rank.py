"""One of two processes of the tests of what a group agrees on: what differs is raised on both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shiftbook.checkpoint.errors import CheckpointError
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.sharded_bundle import restore_into, save_sharded
from shiftbook.checkpoint.shards import distributed_fingerprints
from tests.checkpoint.bundle_states import fields
from tests.checkpoint.process_end import end_process

Answer = dict[str, Any]
WEIGHTS = {"embed": (10, 6), "head": (6, 10), "norm": (3,)}


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A logical state; 3 and 10 elements stand in two uneven and two even shards."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in WEIGHTS.items()}


def refusal(act: Any, *arguments: Any, **how: Any) -> str:
    """What an error of the package says."""
    try:
        act(*arguments, **how)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def spread(members: dict[str, torch.Tensor], mesh: Any, axis: int = 0) -> dict[str, Any]:
    """The tensors in shards along an axis (along the first where there is no other)."""
    return {
        name: distribute_tensor(tensor, mesh, [Shard(min(axis, tensor.dim() - 1))])
        for name, tensor in members.items()
    }


def save(rank: int, shelf: Path, mesh: Any) -> Answer:
    """One save after the other, in which process 1 has something else than process 0."""
    sharded = {"model": spread(weights(1), mesh)}
    mine = rank == 1

    def refused(changes: dict[str, Any], parts: Any = sharded, **how: Any) -> str:
        return refusal(save_sharded, shelf, fields(1, **changes), parts, **how)

    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    answer = {
        "conflict": refused({"rng": {"torch": f"0{rank}", "sampler": "ab"}}),
        "iteration": refused({"policy_version": 5 + rank}),
        "unfit": refused({"policy_version": -1} if mine else {}),
        "name": refused({}, {"a/b" if mine else "model": sharded["model"]}),
        "tensor": refused({}, {"model": {"w": partial if mine else sharded["model"]["norm"]}}),
        "shape": refused({}, {**sharded, "counts": {"n": torch.ones(2 + rank)}}),
        "part": refused({}, {**sharded, **({"counts": {"n": torch.ones(2)}} if mine else {})}),
        "declared": refused({}, declared=["model", *(["rng"] if mine else [])]),
        "kinds": refused({}, kinds={"model": "theta"} if mine else None),
        "not_there": refused({"rng": {}}, declared=["model", "rng"]),
    }
    # Process 0 has the most to write, and process 1 other plain tensors.
    parts = {
        **sharded,
        "copies": {"plain": torch.full((3,), float(rank)), "seen": torch.full((2,), rank)},
        "heavy": {"w": distribute_tensor(torch.ones(3, 4096), mesh, [Shard(0)])},
        "replica": {"w": distribute_tensor(torch.ones(4), mesh, [Replicate()])},
    }
    own = {f"rank/{rank}/torch": f"0{rank}", "sampler": "abcd"}
    saved = save_sharded(shelf, fields(2, rng=own), parts)
    one = fields(3, rng={"torch": "01"} if mine else {})
    declared = [
        "rng", "sampler", "in_flight_uids", "scheduler", "controllers", *saved.manifest.parts,
    ]  # fmt: skip
    brought = save_sharded(shelf, one, parts, declared=declared)
    return answer | {
        "path": str(saved.path),
        "rng": saved.manifest.rng,
        "brought": brought.manifest.rng,
    }


def restore(rank: int, shelf: Path, mesh: Any) -> Answer:
    """Into shards along the second axis; `shelf` holds a folder for each case."""
    answer: Answer = {}

    def fresh(part: str) -> dict[str, Any]:
        return {part: spread(weights(9), mesh, axis=1)}

    def prints(parts: Any) -> Any:
        flat = {f"{p}/{n}": t for p, members in parts.items() for n, t in members.items()}
        return distributed_fingerprints(flat)

    for case in ("dcp", "safetensors", "hugging-face"):
        parts = fresh("policy")
        restore_into(next((shelf / case).glob("bundle-*")), parts)
        answer[case] = prints(parts)
    reference = next((shelf / "reference").glob("bundle-*"))
    parts = fresh("model") | fresh("reference") | {"plain": {"w": torch.zeros(2)}}
    answer["taken"] = restore_into(reference, parts)
    answer["reference"] = prints(parts)
    mixed = next((shelf / "mixed").glob("bundle-*"))
    parts = fresh("model") | fresh("optimizer")
    before = prints(parts)
    answer["mixed"] = refusal(restore_into, mixed, parts)
    answer["untouched"] = prints(parts) == before
    answer["in_place"] = refusal(restore_into, mixed, parts, in_place=True)
    answer["mixture"] = prints(parts) != before
    parts = fresh("model") | fresh("optimizer")
    if rank == 1:
        parts["model"]["norm"] = torch.zeros(4)
    answer["other_places"] = refusal(restore_into, mixed, parts)
    parts = fresh("model") | fresh("optimizer")  # which both take part in
    if rank == 1:
        parts["optimizer"]["norm"] = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    answer["partial"] = refusal(restore_into, mixed, parts)
    damaged = next((shelf / "damaged").glob("bundle-*"))
    parts = fresh("model") | fresh("reference")
    answer["damaged"] = refusal(restore_into, damaged, parts)
    answer["damaged_untouched"] = prints(parts) == {
        f"{part}/{name}": value
        for part in parts
        for name, value in fingerprint_tensors(weights(9)).items()
    }
    return answer


def main() -> None:
    """`save` or `restore`; the group must still be of use after all the refusals."""
    act, rank, store, shelf = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    mesh = init_device_mesh("cpu", (2,))
    answer = {"save": save, "restore": restore}[act](rank, shelf, mesh)
    there = torch.ones(1)
    dist.all_reduce(there)
    print(json.dumps(answer | {"there": there.item()}))
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main()
