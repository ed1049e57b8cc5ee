"""A rollout worker whose device leaves in mid-generation and comes back with a later version.

Driven as a move drives it, whatever its engine: quiesce, drop, restore, resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs.components import RolloutWorker
from shiftbook.jobs.engine_types import TurnRequest, TurnResult
from shiftbook.jobs.model import ModelConfig, forward_train, upcast
from shiftbook.scheduler.workers.component import Drained, Layout, Loaded
from shiftbook.scheduler.workers.host import HostSpec

SPEC = HostSpec("rollout", "rollout-0", None, "node", "shiftbook.jobs.components:RolloutWorker")


@dataclass
class Away:
    """What was seen on the way."""

    drained: Drained
    bytes_away: int
    """Held while the device was another component's."""
    loaded: Loaded
    results: list[TurnResult]
    first_uses: tuple[dict[str, Any] | None, dict[str, Any] | None]
    """At the first start, which a sync records, and after the move."""


def away_and_back(
    worker: RolloutWorker,
    requests: Sequence[TurnRequest],
    start: dict[str, Any],
    later: dict[str, Any],
) -> Away:
    """Begin the turns under ``start``, leave after a few tokens, and end them under ``later``."""
    layout = Layout(0, 1, "operation")
    worker.prepare(layout, start)
    worker.activate()
    for request in requests:
        worker.submit(request.key, request)
    results = []
    while worker.load()["tokens"] < len(requests):
        results += [answer.value for answer in worker.step()]
    started = worker.first_use()
    drained = worker.drain()
    worker.drop()
    bytes_away = worker.resident_bytes()
    loaded = worker.prepare(layout, later | {"reboot": False})  # as a move's payload says
    worker.activate()
    for key, item in drained.items:
        worker.submit(key, item)
    while worker.has_work():
        results += [answer.value for answer in worker.step()]
    seen = Away(drained, bytes_away, loaded, results, (started, worker.first_use()))
    worker.drop()
    return seen


def replayed(
    context: Sequence[int],
    result: TurnResult,
    stamps: Sequence[int],
    policy: Callable[[int], Mapping[str, Tensor]],
) -> np.ndarray:
    """Log-probability of each token by a torch forward under the version it is stamped with."""
    config = ModelConfig()
    tokens = torch.tensor([[*context, *result.tokens]])
    out = []
    for place, version in enumerate(stamps):
        with torch.inference_mode():
            logits = forward_train(config, upcast(policy(version)), tokens)[0]
        at = len(context) + place
        out.append(float(torch.log_softmax(logits[at - 1].double(), -1)[tokens[0, at]]))
    return np.array(out)


def check_away(
    seen: Away,
    requests: Sequence[TurnRequest],
    policy: Callable[[int], Mapping[str, Tensor]],
    tolerance: float,
) -> None:
    """Nothing was lost, each token says which version made it, and the later version was verified
    before anything was made under it. The versions are 0 and 1."""
    taken_back = {item.uid: item for _, item in seen.drained.items}
    begun = {uid: item for uid, item in taken_back.items() if item.partial}
    assert begun, "no turn was in mid-generation"
    assert seen.drained.partial_tokens == sum(len(item.partial) for item in begun.values())
    assert seen.bytes_away == 0
    results = {result.uid: result for result in seen.results}
    assert len(seen.results) == len(results) == len(requests)
    for request in requests:
        result = results[request.uid]
        item = taken_back.get(request.uid)
        before = result.tokens if item is None else item.partial  # all of it, where it had ended
        stamps = [0] * len(before) + [1] * (len(result.tokens) - len(before))
        assert result.versions == stamps
        assert result.tokens[: len(before)] == before
        again = replayed(request.context, result, stamps, policy)
        assert np.abs(again - np.array(result.logps)).max() < 10 * tolerance
    # A wrong stamp would have been seen: the versions differ on these very tokens.
    crossed = [r for r in requests if set(results[r.uid].versions) == {0, 1}]
    other = [
        replayed(r.context, results[r.uid], [0] * len(results[r.uid].tokens), policy)
        - np.array(results[r.uid].logps)
        for r in crossed
    ]
    assert max(np.abs(gap).max() for gap in other) > 1e-2
    started, moved = seen.first_uses
    assert started is not None
    assert started["version"] == 0
    assert "gap" not in started  # the sync that brought it up has told
    assert moved is not None
    assert (moved["after"], moved["version"]) == ("move", 1)
    assert moved["gap"].good
    assert 0 < moved["gap"].mean < tolerance
    assert seen.loaded.fingerprints == {
        f"model/{name}": value for name, value in fingerprint_tensors(policy(1)).items()
    }
