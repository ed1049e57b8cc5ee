"""Legitimate variants of what is in a batch: a replay buffer, and samples packed into one row."""

from __future__ import annotations

from typing import Any

from tests.zoo import packing, storage
from tests.zoo import trainer as trainer_module
from tests.zoo.engine import Made
from tests.zoo.job import Job
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher
from tests.zoo.variants import variant

USES = 2
"""Times that the replay buffer may hand out a sample, its first use among them."""


@variant(
    "a replay buffer: a group of the iteration before is trained once more, as declared",
    plan={
        "update": {"epochs_per_batch": USES, "sample_reuse": "at_most"},
        "sampling": {"staleness_bound": 1},
    },
)
def _replay_buffer(p: Patcher) -> None:
    replay(p, USES)


def replay(p: Patcher, uses: int) -> None:
    """Train the first group of an iteration in the next ones too, ``uses`` times in all.

    The buffer stands in the checkpoint beside the loader: what is restored goes on with it.
    """

    def prepare(original: Any, self: Job, iteration: int, samples: list[Made]) -> Any:
        held = buffer()
        self.scores = {**self.scores, **{s.uid: reward for s, reward, _ in held}}
        batches = original(self, iteration, [*(s for s, _, _ in held), *samples])
        first = samples[0].uid.partition("/")[0]
        fresh = [(s, self.scores[s.uid], 0) for s in samples if s.uid.partition("/")[0] == first]
        used = [(s, reward, times + 1) for s, reward, times in [*held, *fresh]]
        NOW.notes["replay"] = [entry for entry in used if entry[2] < uses]
        return batches

    def begin(original: Any, self: Job) -> int:
        NOW.notes["replay"] = []
        return original(self)

    def rest_payload(original: Any, *args: Any) -> Any:
        return {**original(*args), "replay": plain(buffer())}

    def restore_rest(original: Any, held: Any, *rest: Any) -> None:
        original(held, *rest)
        NOW.notes["replay"] = [(Made(**s), reward, times) for s, reward, times in held["replay"]]

    def saved_state(original: Any, self: Job) -> Any:
        return {**original(self), "replay": {"samples": plain(buffer())}}

    def parts(original: Any, held: Any) -> Any:
        return {**original(held), "replay": {"samples": held["replay"]}}

    p.wrap(Job, "prepare", prepare)
    p.wrap(Job, "begin", begin)
    p.wrap(Job, "saved_state", saved_state)
    p.wrap(storage, "rest_payload", rest_payload)
    p.wrap(storage, "restore_rest", restore_rest)
    p.wrap(storage, "parts", parts)


def buffer() -> list[tuple[Made, float, int]]:
    """Samples that may be trained again: with their rewards, and how often they were trained."""
    held: list[tuple[Made, float, int]] = NOW.notes["replay"]
    return held


def plain(held: list[tuple[Made, float, int]]) -> list[list[Any]]:
    """The buffer as numbers and texts, for the checkpoint."""
    return [[dict(vars(sample)), reward, times] for sample, reward, times in held]


@variant("two samples share a row: positions begin anew in it, and no state goes over")
def _packed(p: Patcher) -> None:
    share_rows(p)


def share_rows(p: Patcher) -> None:
    """Pack the rows of each batch for the trainer's forward."""

    def collate(original: Any, self: Job, members: list[Made]) -> Any:
        packing.remember(self, members)
        return original(self, members)

    p.wrap(Job, "collate", collate)
    p.wrap(trainer_module, "forward", packing.forward)
