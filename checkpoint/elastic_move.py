"""Moves a trainer's state between processes when their number changes, over gloo and one store.

The store outlives every group; each group is built anew under a prefix of it, which takes
milliseconds and leaks nothing, where ``init_process_group`` would take half a second.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shiftbook.checkpoint.live import LiveSnapshot
from shiftbook.checkpoint.virtual_ranks import VirtualRankError

if TYPE_CHECKING:
    from shiftbook.checkpoint.elastic import VirtualRanks

GROUP_LIMIT_S = 60.0
"""How long a process waits for the others; one that never comes costs this once."""


def join_group(
    store: dist.Store, generation: str, rank: int, world: int, *, limit_s: float = GROUP_LIMIT_S
) -> Any:
    """The gloo group of ``world`` processes that meet under ``generation``; None for one alone."""
    if world == 1:
        return None
    named = dist.PrefixStore(generation, store)
    return dist.ProcessGroupGloo(named, rank, world, timedelta(seconds=limit_s))


def move(
    trainer: VirtualRanks, store: dist.Store, generation: str, rank: int, world: int, processes: int
) -> VirtualRanks:
    """``trainer`` at its place in a world of ``world``; see ``VirtualRanks.resize``."""
    from shiftbook.checkpoint.elastic import Place

    if not world <= processes or not 0 <= rank < processes:
        raise VirtualRankError(
            f"expected {world} of {processes} processes to train, and a number from 0 to "
            f"{processes - 1}, found {rank}; all that train before or after take part in a resize"
        )
    everyone = join_group(store, f"{generation}/move", rank, processes)
    agree(everyone, settings(trainer))
    standing = _standing(trainer, everyone, rank)
    source = standing.index(max(standing))
    training = [updates for updates in standing if updates >= 0]
    if not training or min(training) != max(training):
        raise VirtualRankError(
            f"expected processes that stand at one update, found updates {standing} by number "
            "(-1: without state); begin with `at(Place())` on one process, and resize at the same "
            "update everywhere"
        )
    if any(updates != standing[source] for updates in standing[:world]):
        # Someone who will train has no state, or an old one.
        _spread_state(trainer, everyone, rank, source, stale=trainer.place is None)
    pieces = _pieces(trainer, everyone, rank, world, [u >= 0 for u in standing])
    place = None
    if rank < world:
        place = Place(rank, world, join_group(store, f"{generation}/train", rank, world))
    return trainer.at(place, pieces)


def settings(trainer: VirtualRanks) -> dict[str, Any]:
    """What all processes must have alike to give the same bits."""
    return {
        "parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in trainer.parameters.items()],
        "virtual ranks and groups": (
            trainer.plan.virtual_ranks,
            trainer.plan.groups_per_iteration,
        ),
        "seed": trainer.seed,
        "clip norm": trainer.clip_norm,
        "precision": str(trainer.precision),
        "reduction": trainer.reduction,
        "optimizer": type(trainer.optimizer).__name__,
        "threads": torch.get_num_threads(),
        "kernels": (torch.__version__, torch.backends.cpu.get_cpu_capability()),
    }


def agree(group: Any, mine: Mapping[str, Any]) -> None:
    """Raise VirtualRankError, on every process, naming the first setting that differs."""
    if group is None:
        return
    digests = [
        int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
        for value in mine.values()
    ]
    for number, other in enumerate(_all(group, torch.tensor(digests))):
        for (name, value), here, there in zip(mine.items(), digests, other.tolist(), strict=True):
            if here != there:
                raise VirtualRankError(
                    f"expected the same {name} in all processes, found another in process "
                    f"{number} than {value!r} here; start them with the same program and settings"
                )


def _all(group: Any, tensor: Tensor) -> list[Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([outputs], [tensor]).wait()
    return outputs


def _standing(trainer: VirtualRanks, group: Any, rank: int) -> list[int]:
    """Updates made by each process; -1 where one has no part in the training yet."""
    mine = trainer.updates if trainer.place is not None else -1
    if group is None:
        return [mine]
    return [int(other) for other in _all(group, torch.tensor([mine]))]


def _spread_state(
    trainer: VirtualRanks, group: Any, rank: int, source: int, *, stale: bool
) -> None:
    """Send the tensors of process ``source`` to all; those that have none take them over."""
    blob = b""
    if rank == source:
        blob = _packed(
            LiveSnapshot.take(
                policy_version=trainer.updates,
                iteration=trainer.updates,
                tensors=trainer.parts(),
                accumulators={"numbers": trainer.numbers()},
            )
        )
    snapshot = _unpacked(_broadcast(group, blob, source), trainer)
    if stale:
        trainer.load(snapshot.tensors, snapshot.policy_version)
        trainer.load_numbers(snapshot.accumulators["numbers"])


def _pieces(
    trainer: VirtualRanks, group: Any, rank: int, world: int, holds: list[bool]
) -> list[Mapping[str, Any]]:
    """Half-done sums that this process goes on with: its own, and those that others hand over."""
    held = trainer.place is not None
    pieces: list[Mapping[str, Any]] = [trainer.accumulator.snapshot()] if held else []
    for source in range(len(holds)):
        if not holds[source]:
            continue
        if group is None:
            break
        blob = b""
        if rank == source:
            blob = _packed(
                LiveSnapshot.take(
                    policy_version=trainer.updates,
                    iteration=trainer.updates,
                    tensors={},
                    accumulators=trainer.accumulator.handed_over(rank, world),
                    uids=tuple(trainer.accumulator.uids),
                )
            )
        received = _broadcast(group, blob, source)
        if rank != source:
            pieces.append(_unpacked(received, trainer).accumulators)
    return pieces


def _packed(snapshot: LiveSnapshot) -> bytes:
    stream = io.BytesIO()
    torch.save(dict(vars(snapshot)), stream)
    return stream.getvalue()


def _unpacked(blob: bytes, trainer: VirtualRanks) -> LiveSnapshot:
    """The snapshot on the trainer's device, which need not be named as the source's is; its tensors
    are checked against the fingerprints taken at the source."""
    device = next(trainer.model.parameters()).device
    snapshot = LiveSnapshot(**torch.load(io.BytesIO(blob), map_location=device, weights_only=True))
    snapshot.check()
    return snapshot


def _broadcast(group: Any, blob: bytes, source: int) -> bytes:
    if group is None:
        return blob
    size = torch.tensor([len(blob)])
    options = dist.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    group.broadcast([size], options).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    if blob:
        data.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
    group.broadcast([data], options).wait()
    return data.numpy().tobytes()
