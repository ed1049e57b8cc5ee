"""Faults of kinds G, H and I: weight sync, caches and buffers of engines, version stamps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.engine import CACHES, Engine, Made
from tests.zoo.faults import fault
from tests.zoo.job import Job
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher, at, fire, once, resumed, since
from tests.zoo.straddling import stamp_as_one, straddle, straddled
from tests.zoo.trainer import Trainer

# -- G: weight sync --------------------------------------------------------------------------


def _deliver(change: Any) -> Any:
    """A fault that hands other weights to an engine."""

    def deliver(original: Any, self: Job, engine: Engine, weights: Any, version: int) -> None:
        original(self, engine, change(dict(weights), engine), version)

    return deliver


@fault("G1", "the sync is left out, the version goes up")
def _sync_left_out(p: Patcher, t: int) -> None:
    def deliver(original: Any, self: Job, engine: Engine, weights: Any, version: int) -> None:
        if since(t):
            engine.stamp(version)
            return
        original(self, engine, weights, version)

    p.wrap(Job, "deliver", deliver)


@fault("G1", "the whole sync is skipped once")
def _sync_skipped(p: Patcher, t: int) -> None:
    p.wrap(Job, "sync_weights", lambda original, self: None if at(t) else original(self))


@fault("G3", "an engine wakes up from sleep with the base weights after the sync")
def _woken_with_base_weights(p: Patcher, t: int) -> None:
    def roll_out(original: Any, self: Job, *args: Any) -> Any:
        if at(t):
            engine = self.engines[0]
            fresh, version = engine.fresh, engine.version
            base = {n: x.clone() for n, x in NOW.notes["base0"].items()}
            engine.load(base, version)
            engine.fresh = fresh
        return original(self, *args)

    def sync(original: Any, self: Job) -> None:
        weights = self.trainer.published()
        NOW.notes.setdefault("base0", {n: x.detach().clone() for n, x in weights.items()})
        original(self)

    p.wrap(Job, "sync_weights", sync)
    p.wrap(Job, "roll_out", roll_out)


@fault("G4", "the sync is written into memory that is thrown away")
def _written_to_lost_memory(p: Patcher, t: int) -> None:
    def load(original: Any, self: Engine, weights: Any, version: int) -> None:
        if at(t) and self.name == "engine-1" and self.whole:
            kept = (dict(self.whole), list(self.shards))
            original(self, weights, version)
            self.whole, self.shards = kept
            return
        original(self, weights, version)

    p.wrap(Engine, "load", load)


@fault("G6", "kernel layout: gate and up are written in each other's place")
def _kernel_layout(p: Patcher, t: int) -> None:
    def cut(original: Any, self: Engine, weights: Any, rank: int) -> Any:
        if at(t):
            weights = {**weights, "gate": weights["up"], "up": weights["gate"]}
        return original(self, weights, rank)

    p.wrap(Engine, "cut", cut)


@fault("G7", "a cached iterator gives the weights of the sync before")
def _old_weights_again(p: Patcher, t: int) -> None:
    def deliver(original: Any, self: Job, engine: Engine, weights: Any, version: int) -> None:
        before = NOW.notes.get("weights", weights)
        copy = {n: x.detach().clone() for n, x in weights.items()}
        if engine.name == self.engines[-1].name:
            NOW.notes["weights"] = copy
        original(self, engine, before if at(t) else weights, version)

    p.wrap(Job, "deliver", deliver)


@fault("G9", "the tied head is a copy that stays behind")
def _cloned_head(p: Patcher, t: int) -> None:
    def tie(original: Any, self: Engine, weights: Any) -> Any:
        key = f"head {self.incarnation}"
        NOW.notes.setdefault(key, weights["embed"].clone())
        head = NOW.notes[key]
        NOW.notes[key] = weights["embed"].clone()
        return head if since(t) else original(self, weights)

    p.wrap(Engine, "tie", tie)


@fault("G10", "one tensor is excluded from the sync")
def _tensor_excluded(p: Patcher, t: int) -> None:
    def change(weights: Any, engine: Engine) -> Any:
        if since(t) and "rec" in engine.whole:
            weights["rec"] = engine.whole["rec"]
        return weights

    p.wrap(Job, "deliver", _deliver(change))


@fault("G12", "half of the tensors are in when the engine serves")
def _half_applied(p: Patcher, t: int) -> None:
    def deliver(original: Any, self: Job, engine: Engine, weights: Any, version: int) -> None:
        old = engine.resident() if engine.shards else {}
        original(self, engine, weights, version)
        if at(t) and old:
            engine.whole["embed"] = old["embed"]
            engine.whole["head"] = old["embed"]

    p.wrap(Job, "deliver", deliver)


@fault("G13", "an adapter is applied twice")
def _applied_twice(p: Patcher, t: int) -> None:
    def change(weights: Any, engine: Engine) -> Any:
        if at(t):
            weights["down"] = (weights["down"].float() * 1.02).bfloat16()
        return weights

    p.wrap(Job, "deliver", _deliver(change))


@fault("G15", "a patch is applied to another base")
def _patch_on_another_base(p: Patcher, t: int) -> None:
    def change(weights: Any, engine: Engine) -> Any:
        if at(t) and engine.shards:
            old = engine.resident()["up"].float()
            weights["up"] = (
                weights["up"].float() + 0.01 * (weights["up"].float() - old)
            ).bfloat16()
            weights["up"][0, 0] += 0.25
        return weights

    p.wrap(Job, "deliver", _deliver(change))


@fault("G16", "an engine serves before its first sync", "restore")
def _serves_before_sync(p: Patcher, t: int) -> None:
    def deliver(original: Any, self: Job, engine: Engine, weights: Any, version: int) -> None:
        if NOW.life > 0 and engine.name == "engine-1" and once("unsynced") and resumed():
            original(self, engine, Trainer(NOW.notes["seed"], 1).published(), version)
            return
        original(self, engine, weights, version)

    p.wrap(Job, "deliver", deliver)


@fault("G18", "a failed delivery to one engine is passed over")
def _failed_delivery(p: Patcher, t: int) -> None:
    def deliver(original: Any, self: Job, engine: Engine, weights: Any, version: int) -> None:
        if at(t) and engine.name == "engine-1":
            engine.stamp(version)
            return
        original(self, engine, weights, version)

    p.wrap(Job, "deliver", deliver)


@fault("G19", "embeddings are zero after the sync")
def _zero_embeddings(p: Patcher, t: int) -> None:
    def change(weights: Any, engine: Engine) -> Any:
        if at(t):
            weights["embed"] = torch.zeros_like(weights["embed"])
        return weights

    p.wrap(Job, "deliver", _deliver(change))


@fault("G20", "weights are sent before the update, stamped with the version after")
def _sent_too_early(p: Patcher, t: int) -> None:
    def published(original: Any, self: Trainer) -> Any:
        return original(self)

    def sync(original: Any, self: Job) -> None:
        if at(t):
            lead = self.trainer.ranks[0]
            kept = {n: x.detach().clone() for n, x in lead.model.items()}
            for name, tensor in NOW.notes["model before"].items():
                lead.model[name].data.copy_(tensor)
            original(self)
            for name, tensor in kept.items():
                lead.model[name].data.copy_(tensor)
            return
        original(self)

    def optimize(original: Any, self: Job, *args: Any) -> None:
        model = self.trainer.ranks[0].model
        NOW.notes["model before"] = {n: x.detach().clone() for n, x in model.items()}
        original(self, *args)

    p.wrap(Trainer, "published", published)
    p.wrap(Job, "sync_weights", sync)
    p.wrap(Job, "optimize", optimize)


# -- H: caches, buffers ----------------------------------------------------------------------


@fault("H1", "no cache is flushed in the sync")
def _no_flush(p: Patcher, t: int) -> None:
    p.wrap(Engine, "flush", lambda original, self: [] if since(t) else original(self))


@fault("H2", "a flush is reported and not done: cached values grow old", at=(1, 2, 3))
def _flush_in_name_only(p: Patcher, t: int) -> None:
    p.wrap(Engine, "flush", lambda original, self: list(CACHES) if since(t) else original(self))


@fault("H4", "only one of the caches is flushed", at=(1, 2, 3))
def _one_cache_kept(p: Patcher, t: int) -> None:
    def flush(original: Any, self: Engine) -> list[str]:
        if since(t):
            self.cache.clear()
            return ["prefix"]
        return original(self)

    p.wrap(Engine, "flush", flush)


@fault("H5", "the position buffer is zero after sleep")
def _buffer_dropped(p: Patcher, t: int) -> None:
    def load(original: Any, self: Engine, weights: Any, version: int) -> None:
        original(self, weights, version)
        if at(t):
            self.whole["positions"] = torch.zeros_like(self.whole["positions"])

    p.wrap(Engine, "load", load)


@fault("H7", "an engine wakes up without a reload: its memory is anything")
def _random_memory(p: Patcher, t: int) -> None:
    def roll_out(original: Any, self: Job, *args: Any) -> Any:
        if at(t):
            for shard in self.engines[1].shards:
                shard["down"] = torch.full_like(shard["down"], 0.125)
        return original(self, *args)

    p.wrap(Job, "roll_out", roll_out)


@fault("H8", "a reload breaks the alias of head and embedding")
def _alias_broken(p: Patcher, t: int) -> None:
    def roll_out(original: Any, self: Job, *args: Any) -> Any:
        if at(t):
            engine = self.engines[0]
            engine.whole["head"] = engine.whole["head"] * 0.5
        return original(self, *args)

    p.wrap(Job, "roll_out", roll_out)


@fault("H9", "a tensor-parallel rank holds the other's rows")
def _shards_exchanged(p: Patcher, t: int) -> None:
    def cut(original: Any, self: Engine, weights: Any, rank: int) -> Any:
        return original(self, weights, 1 - rank if at(t) else rank)

    p.wrap(Engine, "cut", cut)


@fault("H11", "weights are cast down and up again on the wire")
def _lossy_wire(p: Patcher, t: int) -> None:
    def change(weights: Any, engine: Engine) -> Any:
        if since(t):
            weights["gate"] = weights["gate"].to(torch.float8_e4m3fn).bfloat16()
        return weights

    p.wrap(Job, "deliver", _deliver(change))


@fault("H12", "the buffer is computed for other positions")
def _buffer_shifted(p: Patcher, t: int) -> None:
    def load(original: Any, self: Engine, weights: Any, version: int) -> None:
        original(self, weights, version)
        if since(t):
            self.whole["positions"] = self.whole["positions"].roll(1, dims=0)

    p.wrap(Engine, "load", load)


# -- I: version stamps -----------------------------------------------------------------------


@fault("I3", "the version counts calls of the sync")
def _version_counts_calls(p: Patcher, t: int) -> None:
    def stamp(original: Any, self: Engine, version: int) -> None:
        original(self, version + 1 if at(t) else version)

    p.wrap(Engine, "stamp", stamp)


@fault("I4", "versions begin again after the restore", "restore")
def _versions_restart(p: Patcher, t: int) -> None:
    from tests.zoo import storage

    def restore(original: Any, held: Any, trainer: Trainer) -> None:
        original(held, trainer)
        fire()
        trainer.version = 1

    p.wrap(storage, "restore_rest", restore)


@fault("I6", "the end of a rollout is of other weights, although partial rollouts are off")
def _mixed_versions(p: Patcher, t: int) -> None:
    straddle(p, lambda uid: uid.endswith("/2") and at(t))


@fault("I1", "samples older than the bound are trained")
def _too_stale(p: Patcher, t: int) -> None:
    def roll_out(original: Any, self: Job, *args: Any) -> Any:
        if at(t):
            for engine in self.engines:
                held = NOW.notes.get("held")
                if held is not None:
                    engine.load(held, engine.version - 1)
        return original(self, *args)

    def sync(original: Any, self: Job) -> None:
        weights = self.trainer.published()
        NOW.notes["held"] = NOW.notes.get("last")
        NOW.notes["last"] = {n: x.detach().clone() for n, x in weights.items()}
        original(self)

    p.wrap(Job, "sync_weights", sync)
    p.wrap(Job, "roll_out", roll_out)


def _one_stamp(p: Patcher, t: int, choose: Callable[[list[int]], int]) -> None:
    """Stamp requests that straddle a sync with one of their versions."""

    def generate(original: Any, self: Engine, uid: str, prompt: Any) -> Made:
        made: Made = original(self, uid, prompt)
        if straddled(made) and at(t):
            stamp_as_one(made, choose)
        return made

    p.wrap(Engine, "generate", generate)


@fault("I7", "a request that straddles a sync is stamped as it was admitted", on="partial_rollouts")
def _stamped_too_early(p: Patcher, t: int) -> None:
    _one_stamp(p, t, min)


@fault("I7", "a request that straddles a sync is stamped as it is answered", on="partial_rollouts")
def _stamped_too_late(p: Patcher, t: int) -> None:
    _one_stamp(p, t, max)


@fault("I10", "the version goes up and no update was made")
def _version_without_update(p: Patcher, t: int) -> None:
    def optimize(original: Any, self: Job, *args: Any) -> None:
        original(self, *args)
        if at(t):
            self.trainer.version += 1

    p.wrap(Job, "optimize", optimize)
