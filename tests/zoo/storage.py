"""Checkpoints of the job: a shard of tensors for each rank, and one file for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.zoo.loader import Loader
from tests.zoo.model import Tensors, logical
from tests.zoo.trainer import VIRTUAL_RANKS, Trainer, new_rank

KINDS = ("masters", "first", "second", "ema", "model")


def shard(tensors: Tensors, rank: int, ranks: int) -> Tensors:
    """Rank's contiguous part of each flattened tensor."""
    cut = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        edges = [flat.numel() * r // ranks for r in range(ranks + 1)]
        cut[name] = flat[edges[rank] : edges[rank + 1]].clone()
    return cut


def joined(shards: list[Tensors], like: Tensors) -> Tensors:
    """Whole tensors from all ranks' shards, in order of rank."""
    return {
        name: torch.cat([part[name] for part in shards]).reshape(tensor.shape)
        for name, tensor in like.items()
    }


def save(folder: Path, bundle: str, trainer: Trainer, loader: Loader, iteration: int) -> None:
    """Write all files; each names the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in trainer.ranks:
        write(folder / f"rank{rank.number}.pt", rank_payload(bundle, rank, len(trainer.ranks)))
    write(folder / "rest.pt", rest_payload(bundle, trainer, loader, iteration))


def rank_payload(bundle: str, rank: Any, ranks: int) -> dict[str, Any]:
    """What one rank writes."""
    tensors = {kind: shard(getattr(rank, kind), rank.number, ranks) for kind in KINDS}
    return {"bundle": bundle, "ranks": ranks, "step": rank.step, "scale": rank.scale, **tensors}


def rest_payload(bundle: str, trainer: Trainer, loader: Loader, iteration: int) -> dict[str, Any]:
    """What the first rank writes besides."""
    return {
        "bundle": bundle,
        "ranks": len(trainer.ranks),
        "iteration": iteration,
        "version": trainer.version,
        "reference": {name: tensor.clone() for name, tensor in trainer.reference.items()},
        "kl": trainer.kl_coefficient,
        "rewards": trainer.rewards_seen,
        "scheduled": trainer.scheduled,
        "streams": {v: s.get_state() for v, s in trainer.streams.items()},
        "loader": loader.state(),
    }


def write(path: Path, payload: dict[str, Any]) -> None:
    """One file."""
    torch.save(payload, path)


def read(path: Path) -> dict[str, Any]:
    """One file."""
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def load(folder: Path) -> dict[str, Any]:
    """All of a checkpoint: whole tensors by kind, and the rest."""
    rest = read(folder / "rest.pt")
    files = [read(folder / f"rank{rank}.pt") for rank in range(rest["ranks"])]
    like = Trainer(0, 1).ranks[0].masters
    whole = {kind: joined([file[kind] for file in files], like) for kind in KINDS}
    return {**rest, **whole, "step": files[0]["step"], "scale": files[0]["scale"]}


def restore(held: dict[str, Any], trainer: Trainer, loader: Loader, ranks: int) -> None:
    """Put a checkpoint into live objects, on another number of ranks where there are others."""
    trainer.ranks = []
    for number in range(ranks):
        rank = new_rank(number, held["masters"])
        restore_rank(rank, held)
        trainer.ranks.append(rank)
    restore_rest(held, trainer)
    restore_streams(held, trainer)
    loader.load(held["loader"])


def restore_rank(rank: Any, held: dict[str, Any]) -> None:
    """Tensors and counters of one rank."""
    for kind in ("first", "second", "ema"):
        for name, tensor in getattr(rank, kind).items():
            tensor.copy_(held[kind][name])
    for name, tensor in rank.model.items():
        tensor.data.copy_(held["model"][name])
    rank.step, rank.scale = held["step"], held["scale"]


def restore_rest(held: dict[str, Any], trainer: Trainer) -> None:
    """Reference, controllers, schedule and version."""
    trainer.reference = {name: tensor.clone() for name, tensor in held["reference"].items()}
    trainer.kl_coefficient, trainer.rewards_seen = held["kl"], held["rewards"]
    trainer.scheduled, trainer.version = held["scheduled"], held["version"]


def restore_streams(held: dict[str, Any], trainer: Trainer) -> None:
    """Random generators, each from its own state."""
    for virtual_rank in range(VIRTUAL_RANKS):
        trainer.streams[virtual_rank].set_state(held["streams"][virtual_rank])


def parts(held: dict[str, Any]) -> dict[str, Any]:
    """A loaded checkpoint as the parts of a state, for the recorder."""
    from tests.zoo.model import positions

    moments = {f"{n}/first": t for n, t in logical(held["first"]).items()}
    moments |= {f"{n}/second": t for n, t in logical(held["second"]).items()}
    found: dict[str, Any] = {
        "model": {**logical(held["model"], tied=True), "positions": positions()},
        "masters": logical(held["masters"]),
        "optimizer": {**moments, "step": held["step"]},
        "ema": logical(held["ema"]),
        "reference": {**logical(held["reference"], tied=True), "positions": positions()},
        "controllers": {"kl": held["kl"], "rewards": held["rewards"]},
        "scheduler": {"step": held["scheduled"]},
        "scaler": {"scale": held["scale"]},
        "loader": held["loader"],
    }
    for virtual_rank, state in held["streams"].items():
        found[f"rng:dropout/{virtual_rank}"] = {"state": state}
    return found
