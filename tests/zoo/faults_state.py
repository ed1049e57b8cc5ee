"""Faults of kinds D and F: what a restore leaves behind, and what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.zoo import storage
from tests.zoo.faults import fault
from tests.zoo.job import Job
from tests.zoo.model import HIDDEN, Tensors
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher, at, fire, resumed
from tests.zoo.trainer import KL_FIRST, SCALE, Trainer, new_rank

# -- D: optimizer, schedule, masters, average, controllers, reference ----------------------------


def _after_rank(change: Any) -> Any:
    """A fault that changes a rank right after it was restored."""

    def restore(original: Any, rank: Any, held: Any) -> None:
        original(rank, held)
        fire()
        change(rank, held)

    return restore


def _zero(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.zero_()


@fault("D1", "the optimizer is made anew", "restore")
def _fresh_optimizer(p: Patcher, t: int) -> None:
    def change(rank: Any, held: Any) -> None:
        _zero(rank.first)
        _zero(rank.second)
        rank.step = 0

    p.wrap(storage, "restore_rank", _after_rank(change))


@fault("D3", "the second moments are not loaded", "restore")
def _second_moment_lost(p: Patcher, t: int) -> None:
    p.wrap(storage, "restore_rank", _after_rank(lambda rank, held: _zero(rank.second)))


@fault("D4", "moments of two parameters of one shape are exchanged", "restore")
def _moments_by_position(p: Patcher, t: int) -> None:
    def change(rank: Any, held: Any) -> None:
        rank.first["rec"].copy_(held["first"]["down"])
        rank.first["down"].copy_(held["first"]["rec"])

    p.wrap(storage, "restore_rank", _after_rank(change))


@fault("D6", "the optimizer's counter is not restored", "restore")
def _counter_lost(p: Patcher, t: int) -> None:
    p.wrap(storage, "restore_rank", _after_rank(lambda rank, held: setattr(rank, "step", 0)))


@fault("D7", "moments went through bf16 on their way to the disk", "restore")
def _moments_rounded(p: Patcher, t: int) -> None:
    def payload(original: Any, *args: Any) -> Any:
        fire()
        kept = original(*args)
        kept["first"] = {n: x.bfloat16().float() for n, x in kept["first"].items()}
        return kept

    p.wrap(storage, "rank_payload", payload)


@fault("D9", "the schedule is restored and then stepped again", "restore")
def _schedule_stepped_twice(p: Patcher, t: int) -> None:
    def restore(original: Any, held: Any, trainer: Trainer) -> None:
        original(held, trainer)
        fire()
        trainer.scheduled += held["scheduled"]

    p.wrap(storage, "restore_rest", restore)


@fault("D10", "the schedule begins again after the restore", "restore")
def _schedule_restarts(p: Patcher, t: int) -> None:
    def restore(original: Any, held: Any, trainer: Trainer) -> None:
        original({**held, "scheduled": 0}, trainer)
        fire()

    p.wrap(storage, "restore_rest", restore)


@fault("D10", "the base rate is read after the warm-up has scaled it")
def _rate_of_another_base(p: Patcher, t: int) -> None:
    p.wrap(
        Trainer,
        "learning_rate",
        lambda original, self: original(self) * (0.5 if at(t) else 1.0),
    )


@fault("D12", "masters are not refreshed from the loaded model", "restore")
def _masters_stale(p: Patcher, t: int) -> None:
    def change(rank: Any, held: Any) -> None:
        for name, tensor in new_rank(
            0, Trainer(NOW.notes["seed"], 1).ranks[0].masters
        ).masters.items():
            rank.masters[name].copy_(tensor)

    p.wrap(storage, "restore_rank", _after_rank(change))


@fault("D13", "a reload writes through the masters after the restore", "restore")
def _masters_overwritten(p: Patcher, t: int) -> None:
    def late(original: Any, self: Job) -> None:
        if resumed():
            self.trainer.ranks[0].masters["rec"].mul_(1.001)

    p.wrap(Job, "late_init", late)


@fault("D16", "masters are built again from the bf16 model", "restore")
def _masters_from_bf16(p: Patcher, t: int) -> None:
    def change(rank: Any, held: Any) -> None:
        for name, tensor in rank.masters.items():
            tensor.copy_(held["model"][name].float())

    p.wrap(storage, "restore_rank", _after_rank(change))


@fault("D18", "the adaptive KL coefficient is the config's again", "restore")
def _kl_from_config(p: Patcher, t: int) -> None:
    def restore(original: Any, held: Any, trainer: Trainer) -> None:
        original({**held, "kl": KL_FIRST}, trainer)
        fire()

    p.wrap(storage, "restore_rest", restore)


@fault("D19", "the normaliser's count is not saved", "restore")
def _count_lost(p: Patcher, t: int) -> None:
    def restore(original: Any, held: Any, trainer: Trainer) -> None:
        original({**held, "rewards": 0}, trainer)
        fire()

    p.wrap(storage, "restore_rest", restore)


@fault("D20", "the average of the weights begins anew", "restore")
def _average_restarts(p: Patcher, t: int) -> None:
    def change(rank: Any, held: Any) -> None:
        for name, tensor in rank.ema.items():
            tensor.copy_(rank.masters[name])

    p.wrap(storage, "restore_rank", _after_rank(change))


@fault("D20", "the average is not updated")
def _average_stands(p: Patcher, t: int) -> None:
    p.wrap(Trainer, "average", lambda original, self, rank: None if at(t) else original(self, rank))


@fault("D20", "the average has another decay")
def _average_decays_otherwise(p: Patcher, t: int) -> None:
    def average(original: Any, self: Trainer, rank: Any) -> None:
        if not at(t):
            return original(self, rank)
        for name, master in rank.masters.items():
            rank.ema[name].mul_(0.5).add_(master, alpha=0.5)

    p.wrap(Trainer, "average", average)


@fault("D21", "one parameter is initialised again", "restore")
def _one_parameter_anew(p: Patcher, t: int) -> None:
    def change(rank: Any, held: Any) -> None:
        rank.masters["norm"].fill_(1.0)
        rank.model["norm"].data.fill_(1.0)

    p.wrap(storage, "restore_rank", _after_rank(change))


@fault("D22", "the reference is the policy of the checkpoint", "restore")
def _reference_is_the_policy(p: Patcher, t: int) -> None:
    def restore(original: Any, held: Any, trainer: Trainer) -> None:
        original({**held, "reference": held["model"]}, trainer)
        fire()

    p.wrap(storage, "restore_rest", restore)


@fault("D22", "the reference shares its memory with the policy", at=(0, 1, 3))
def _reference_follows(p: Patcher, t: int) -> None:
    def one(original: Any, self: Job, iteration: int) -> None:
        if at(t):
            model = self.trainer.ranks[0].model
            self.trainer.reference = {n: x.detach() for n, x in model.items()}
        original(self, iteration)

    p.wrap(Job, "one", one)


@fault("D23", "the loss scale is not restored: one rank keeps another", "restore")
def _scale_not_restored(p: Patcher, t: int) -> None:
    def change(rank: Any, held: Any) -> None:
        rank.scale = SCALE / 2

    p.wrap(storage, "restore_rank", _after_rank(change))


# -- F: checkpoints ------------------------------------------------------------------------------


def _older_save(folder: Path) -> Path:
    """The first checkpoint of the job."""
    return min(folder.parent.glob("checkpoint-*"), key=lambda f: int(f.name.partition("-")[2]))


@fault("F1", "one rank's shard is of the checkpoint before", "restore")
def _shard_of_an_older_save(p: Patcher, t: int) -> None:
    def read(original: Any, path: Path) -> Any:
        older = _older_save(path.parent) / path.name
        if NOW.life > 0 and path.name == "rank1.pt" and older != path and resumed():
            return {**original(older), "step": original(path)["step"]}
        return original(path)

    p.wrap(storage, "read", read)


@fault("F2", "old weights with the new optimizer", "restore")
def _weights_of_an_older_save(p: Patcher, t: int) -> None:
    def load(original: Any, folder: Path) -> Any:
        held = original(folder)
        older = _older_save(folder)
        if NOW.life > 0 and folder != older and resumed():
            old = original(older)
            held["masters"], held["model"] = old["masters"], old["model"]
        return held

    p.wrap(storage, "load", load)


@fault("F4", "the save does not copy: the file holds later weights", "restore")
def _file_holds_later_weights(p: Patcher, t: int) -> None:
    def save(original: Any, folder: Any, bundle: Any, trainer: Trainer, *rest: Any) -> None:
        fire()
        kept = trainer.ranks[0].masters["rec"].clone()
        trainer.ranks[0].masters["rec"].add_(1e-3)
        original(folder, bundle, trainer, *rest)
        trainer.ranks[0].masters["rec"].copy_(kept)

    p.wrap(storage, "save", save)


@fault("F5", "the file's counters are read late", "restore")
def _late_counter(p: Patcher, t: int) -> None:
    def payload(original: Any, *args: Any) -> Any:
        fire()
        kept = original(*args)
        kept["scheduled"] += 1
        return kept

    p.wrap(storage, "rest_payload", payload)


@fault("F8", "fused gate and up are cut as one: chunks interleave", "restore")
def _fused_cut_as_one(p: Patcher, t: int) -> None:
    def joined(original: Any, shards: Any, like: Tensors) -> Tensors:
        whole = original(shards, like)
        if NOW.life > 0 and len(shards) == 2 and resumed():
            rows = whole["gate_up"].reshape(4, HIDDEN // 2, -1)
            whole["gate_up"] = rows[[0, 2, 1, 3]].reshape(whole["gate_up"].shape)
        return whole

    p.wrap(storage, "joined", joined)


@fault("F10", "shards are joined in the wrong order", "restore")
def _shards_joined_backwards(p: Patcher, t: int) -> None:
    def joined(original: Any, shards: Any, like: Tensors) -> Tensors:
        if NOW.life > 0 and resumed():
            even = all(a[n].numel() == b[n].numel() for a, b in [shards] for n in a)
            if even:
                shards = list(reversed(shards))
        return original(shards, like)

    p.wrap(storage, "joined", joined)


@fault("F11", "every rank loads shard 0", "restore")
def _every_rank_shard_0(p: Patcher, t: int) -> None:
    def joined(original: Any, shards: Any, like: Tensors) -> Tensors:
        if NOW.life > 0 and resumed():
            shards = [shards[0] for _ in shards]
        return original(shards, like)

    p.wrap(storage, "joined", joined)


@fault("F13", "the checkpoint of another seed is loaded, silently in part", "restore")
def _load_fails_in_part(p: Patcher, t: int) -> None:
    def restore(original: Any, held: Any, *rest: Any) -> None:
        fire()
        fresh = Trainer(NOW.notes["seed"] + 5, 1).ranks[0]
        held = {
            **held,
            "masters": fresh.masters,
            "model": {n: x.detach() for n, x in fresh.model.items()},
        }
        original(held, *rest)

    p.wrap(storage, "restore", restore)


@fault("F14", "the model is restored on the first rank only, and ranks grow from it", "restore")
def _resize_from_a_stale_copy(p: Patcher, t: int) -> None:
    def copy_of(original: Any, self: Trainer, rank: Any, number: int) -> Any:
        made = original(self, rank, number)
        if number == 1:
            fire()
            made.masters["rec"].mul_(1.01)
            made.refresh_model()
        return made

    p.wrap(Trainer, "copy_of", copy_of)


@fault("F14", "moments are lost when the ranks grow", "restore")
def _moments_lost_in_a_resize(p: Patcher, t: int) -> None:
    def copy_of(original: Any, self: Trainer, rank: Any, number: int) -> Any:
        made = original(self, rank, number)
        fire()
        _zero(made.first)
        return made

    p.wrap(Trainer, "copy_of", copy_of)


@fault("F16", "a tensor of the checkpoint is stored in half precision", "restore")
def _stored_in_half(p: Patcher, t: int) -> None:
    def write(original: Any, path: Path, payload: Any) -> None:
        fire()
        if "masters" in payload:
            payload["masters"] = {n: x.half().float() for n, x in payload["masters"].items()}
        original(path, payload)

    p.wrap(storage, "write", write)
