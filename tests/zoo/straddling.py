"""Requests that straddle a weight sync: begun under the old weights, ended under the new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.zoo.engine import Engine, Made
from tests.zoo.job import Job
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher


def straddle(p: Patcher, due: Callable[[str], bool]) -> None:
    """Let the requests that are ``due`` (by uid) run when the weights come.

    The state so far and the first token are of the old weights, what follows is of the new ones; so
    say the stamps, token by token.
    """

    def deliver(original: Any, self: Job, engine: Engine, weights: Any, version: int) -> None:
        before = (engine.weights(), engine.version) if engine.shards else None
        NOW.notes[f"before {engine.incarnation}"] = before
        original(self, engine, weights, version)

    def first_token(original: Any, self: Engine, w: Any, prompt: list[int]) -> Any:
        before = NOW.notes.get(f"before {self.incarnation}")
        if not NOW.notes.get("straddles") or before is None:
            return original(self, w, prompt)
        old, version = before
        h = np.zeros(w["rec"].shape[0], dtype=np.float32)
        for place, token in enumerate(prompt):
            h, logp = self.step(old, h, token, place)
        return h, logp, version

    def generate(original: Any, self: Engine, uid: str, prompt: Any) -> Made:
        NOW.notes["straddles"] = due(uid)
        made: Made = original(self, uid, prompt)
        if NOW.notes["straddles"] and made.cache_version < self.version:
            made.versions[made.sampled.index(True)] = made.cache_version
        return made

    p.wrap(Job, "deliver", deliver)
    p.wrap(Engine, "first_token", first_token)
    p.wrap(Engine, "generate", generate)


def stamp_as_one(made: Made, choose: Callable[[list[int]], int]) -> None:
    """Give all tokens one of the versions that they are of, in the engine's books too."""
    version = choose([v for v, on in zip(made.versions, made.sampled, strict=True) if on])
    made.versions = [version] * len(made.versions)
    made.cache_version = version


def straddled(made: Made) -> bool:
    """True where the sampled tokens are of several versions."""
    return len({v for v, on in zip(made.versions, made.sampled, strict=True) if on}) > 1
