"""Faults of kinds A, B and C: position and order, partition and identity, random streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.zoo import loader as loader_module
from tests.zoo import storage
from tests.zoo.engine import Engine
from tests.zoo.faults import fault
from tests.zoo.job import Job
from tests.zoo.loader import DATASET, GROUP, PROMPTS, Loader
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher, at, fire, once, resumed, since
from tests.zoo.trainer import Trainer

# -- A: position and order -------------------------------------------------------------------


def _edited(change: Any) -> Any:
    def load(original: Any, self: Loader, state: dict[str, Any]) -> None:
        fire()
        original(self, change(state))

    return load


@fault("A1", "sampler restarts at its beginning after the restore", "restore")
def _sampler_restarts(p: Patcher, t: int) -> None:
    p.wrap(
        Loader,
        "load",
        _edited(lambda s: {**s, "sampler": {**s["sampler"], "epoch": 0, "position": 0}}),
    )


@fault("A3", "the epoch is lost in the restore, the place inside it is kept", "restore")
def _epoch_lost(p: Patcher, t: int) -> None:
    p.wrap(Loader, "load", _edited(lambda s: {**s, "sampler": {**s["sampler"], "epoch": 0}}))


@fault("A4", "every epoch in the order of the first: set_epoch is not called any more")
def _same_order_each_epoch(p: Patcher, t: int) -> None:
    def draw(original: Any, self: Loader) -> Any:
        drawn = []
        for d in original(self):
            if d.epoch == 0 or not since(t):
                drawn.append(d)
                continue
            index = (
                loader_module.Sampler(DATASET, NOW.notes["seed"])
                .draw(DATASET)[d.ordinal % DATASET]
                .index
            )
            drawn.append(replace(d, index=index, prompt=self.fetch(index)))
        return drawn

    p.wrap(Loader, "draw", draw)


@fault("A6", "the skip of a resume is done again in a later epoch")
def _skips_again(p: Patcher, t: int) -> None:
    def draw(original: Any, self: Loader) -> Any:
        if at(t) and once("skipped"):
            self.sampler.draw(PROMPTS)
        return original(self)

    p.wrap(Loader, "draw", draw)


@fault("A7", "consumed samples are skipped in the sampler and again in the trainer", "restore")
def _skipped_twice(p: Patcher, t: int) -> None:
    def load(original: Any, self: Loader, state: Any) -> None:
        original(self, state)
        fire()
        self.sampler.draw(PROMPTS)

    p.wrap(Loader, "load", load)


@fault("A9", "the resume offset counts group members as prompts", "restore")
def _offset_by_replication(p: Patcher, t: int) -> None:
    def load(original: Any, self: Loader, state: Any) -> None:
        original(self, state)
        fire()
        self.sampler.draw(self.sampler.state().ordinal)

    p.wrap(Loader, "load", load)


@fault("A15", "epochs after the resume are shortened to the remainder", "restore")
def _short_epochs(p: Patcher, t: int) -> None:
    def draw(original: Any, self: Loader) -> Any:
        drawn = original(self)
        return [d if not resumed() else replace(d, index=d.index % 6) for d in drawn]

    p.wrap(Loader, "draw", draw)


@fault("A16", "the shuffle buffer is refilled from where the cursor stands", "restore")
def _buffer_refilled(p: Patcher, t: int) -> None:
    def load(original: Any, self: Loader, state: Any) -> None:
        original(self, state)
        fire()
        self.buffer = []
        self.fill()

    p.wrap(Loader, "load", load)


@fault("A19", "the buffer of drawn prompts is not in the checkpoint", "restore")
def _buffer_not_saved(p: Patcher, t: int) -> None:
    def state(original: Any, self: Loader) -> Any:
        fire()
        return {**original(self), "buffer": []}

    def take(original: Any, self: Loader) -> Any:
        if not self.buffer:
            self.fill()
        return original(self)

    p.wrap(Loader, "state", state)
    p.wrap(Loader, "take", take)


@fault("A22", "cursor and buffer of the checkpoint are of two moments", "restore")
def _torn_snapshot(p: Patcher, t: int) -> None:
    def state(original: Any, self: Loader) -> Any:
        now = original(self)
        before = NOW.notes.get("sampler", now["sampler"])
        NOW.notes["sampler"] = now["sampler"]
        fire()
        return {**now, "sampler": before}

    p.wrap(Loader, "state", state)


@fault("A27", "the iteration restored is one too high", "restore")
def _iteration_off_by_one(p: Patcher, t: int) -> None:
    def load(original: Any, folder: Any) -> Any:
        held = original(folder)
        fire()
        return {**held, "iteration": held["iteration"] + 1}

    p.wrap(storage, "load", load)


@fault("A30", "the permutation comes from another seed after the resume", "restore")
def _permutation_of_another_seed(p: Patcher, t: int) -> None:
    def draw(original: Any, self: Loader) -> Any:
        drawn = original(self)
        return [replace(d, index=(d.index * 3 + 1) % DATASET) if resumed() else d for d in drawn]

    p.wrap(Loader, "draw", draw)


# -- B: partition and identity ---------------------------------------------------------------


@fault("B3", "both ranks compute the same groups")
def _ranks_share_a_batch(p: Patcher, t: int) -> None:
    def prepare(original: Any, self: Job, *args: Any) -> Any:
        batches = original(self, *args)
        return dict.fromkeys(batches, batches[0]) if at(t) else batches

    p.wrap(Job, "prepare", prepare)


@fault("B6", "the last micro batch of a rank is lost in the split")
def _short_split(p: Patcher, t: int) -> None:
    def prepare(original: Any, self: Job, *args: Any) -> Any:
        batches = original(self, *args)
        if at(t):
            last = max(v for v in batches if batches[v])
            batches[last] = batches[last][:-1]
        return batches

    p.wrap(Job, "prepare", prepare)


@fault("B7", "a group is dealt to the wrong virtual rank, whose count stays")
def _group_on_two_ranks(p: Patcher, t: int) -> None:
    def prepare(original: Any, self: Job, *args: Any) -> Any:
        batches = original(self, *args)
        if at(t) and batches[0]:
            batches[1] = [batches[0][0], *batches[1]]
        return batches

    p.wrap(Job, "prepare", prepare)


@fault("B9", "tokens of another tokenizer come out of an old cache")
def _old_token_cache(p: Patcher, t: int) -> None:
    def fetch(original: Any, self: Loader, index: int) -> Any:
        prompt = original(self, index)
        return tuple((token - 1) % 8 + 2 for token in prompt) if since(t) else prompt

    p.wrap(Loader, "fetch", fetch)


@fault("B10", "the data set is built from another file in the second life", "restore")
def _data_built_otherwise(p: Patcher, t: int) -> None:
    def build(original: Any, self: Loader, seed: int) -> Any:
        return original(self, seed + 1000 if NOW.life > 0 and resumed() else seed)

    p.wrap(Loader, "build", build)


@fault("B12", "a short buffer is filled with empty samples")
def _empty_samples(p: Patcher, t: int) -> None:
    def collate(original: Any, self: Job, members: Any) -> Any:
        batch = original(self, members)
        if at(t) and once("emptied"):
            batch.tokens[0] = 0
        return batch

    p.wrap(Job, "collate", collate)


@fault("B13", "long samples vanish before the update, without a record")
def _slow_samples_vanish(p: Patcher, t: int) -> None:
    def select(original: Any, self: Job, iteration: int, samples: Any) -> Any:
        kept = original(self, iteration, samples)
        return kept[:-GROUP] if at(t) and len(kept) > GROUP else kept

    p.wrap(Job, "filter", select)


@fault("B14", "two prompts are exchanged on their way to the engines")
def _prompts_exchanged(p: Patcher, t: int) -> None:
    def generate(original: Any, self: Job, prompts: Any) -> Any:
        if at(t):
            a, b, *rest = prompts
            prompts = [replace(a, prompt=b.prompt), replace(b, prompt=a.prompt), *rest]
        return original(self, prompts)

    p.wrap(Job, "generate", generate)


# -- C: random streams -----------------------------------------------------------------------


@fault("C1", "every rank is restored from rank 0's random state", "restore")
def _streams_of_rank_0(p: Patcher, t: int) -> None:
    def restore(original: Any, held: Any, trainer: Trainer) -> None:
        original({**held, "streams": dict.fromkeys(held["streams"], held["streams"][0])}, trainer)
        fire()

    p.wrap(storage, "restore_streams", restore)


@fault("C2", "dropout streams collapse: all are seeded alike", "run")
def _one_seed_for_all(p: Patcher, t: int) -> None:
    def new_stream(original: Any, self: Trainer, virtual_rank: int) -> Any:
        fire()
        return original(self, 0)

    p.wrap(Trainer, "new_stream", new_stream)


@fault("C4", "after growing back the new rank shares a stream", "restore")
def _grown_rank_shares_a_stream(p: Patcher, t: int) -> None:
    def resize(original: Any, self: Trainer, ranks: int) -> None:
        original(self, ranks)
        fire()
        self.streams[1].set_state(self.streams[0].get_state())

    p.wrap(Trainer, "resize", resize)


@fault("C5", "streams are restored and then seeded again by a late initialisation", "restore")
def _reseeded_late(p: Patcher, t: int) -> None:
    def late(original: Any, self: Job) -> None:
        if resumed():
            for v, stream in self.trainer.streams.items():
                stream.manual_seed(self.trainer.seed * 1000 + 17 + v)

    p.wrap(Job, "late_init", late)


@fault("C7", "random states are not restored", "restore")
def _streams_not_restored(p: Patcher, t: int) -> None:
    p.wrap(storage, "restore_streams", lambda original, *args: fire())


@fault("C8", "both engines draw with one seed: the same completions")
def _engines_share_a_seed(p: Patcher, t: int) -> None:
    def generate(original: Any, self: Engine, uid: str, prompt: Any) -> Any:
        if at(t):
            made = original(self, f"{uid.partition('/')[0]}/0", prompt)
            made.uid = uid
            return made
        return original(self, uid, prompt)

    p.wrap(Engine, "generate", generate)


@fault("C10", "an evaluation draws from the training stream")
def _evaluation_draws(p: Patcher, t: int) -> None:
    def roll_out(original: Any, self: Job, *args: Any) -> Any:
        if at(t):
            torch.rand(3, generator=self.trainer.streams[0])
        return original(self, *args)

    p.wrap(Job, "roll_out", roll_out)


@fault("C11", "activation checkpointing recomputes with another mask")
def _other_mask_in_recompute(p: Patcher, t: int) -> None:
    def recompute(original: Any, self: Trainer, stream: Any, state: Any, tokens: Any) -> Any:
        if at(t):
            return self.keep_mask(stream, tokens.shape)
        return original(self, stream, state, tokens)

    p.wrap(Trainer, "recompute_mask", recompute)


@fault("C14", "sampling is keyed by place in the batch, not by uid")
def _keyed_by_place(p: Patcher, t: int) -> None:
    def choose(original: Any, self: Engine, logp: Any, uid: str, place: int) -> int:
        return original(self, logp, "000000/0" if since(t) else uid, place)

    p.wrap(Engine, "choose", choose)
