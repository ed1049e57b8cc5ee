"""The rollout engine: continuous batching over fixed lanes, the same bits wherever a turn runs.

Every token enters through the same decode step: the question, tool results, and the tokens that a
moved request had sampled elsewhere. A prefill would give other last bits; replaying does not. The
number for each sampled token is keyed by (seed, uid, turn, position), so neither lanes, neighbours,
order nor worker changes what a sample says.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shiftbook.jobs import tokenizer
from shiftbook.jobs.engine_types import Caches, TurnRequest, TurnResult, check_request
from shiftbook.jobs.errors import EngineError
from shiftbook.jobs.keyed_rng import turn_key, uniform_at
from shiftbook.jobs.model import DecodeKernel, ModelConfig

__all__ = ["TorchEngine", "TurnRequest", "TurnResult"]


class _Lane:
    """A running request: its known tokens, and how many of them stand in the KV cache."""

    __slots__ = (
        "fed",
        "key",
        "known",
        "limit",
        "logps",
        "oldest",
        "request",
        "salt",
        "start",
        "versions",
    )

    def __init__(self, request: TurnRequest, context: int) -> None:
        self.request = request
        self.key = turn_key(request.seed, request.uid, request.turn)
        self.known = [*request.context, *request.partial]
        self.start = len(request.context)
        self.limit = min(self.start + request.max_new, context)
        self.logps = list(request.partial_logps)
        self.versions = list(request.partial_versions)
        self.fed = self.salt = 0
        self.oldest = -1
        """Oldest version that wrote any of the values that stand in the cache."""

    def as_request(self) -> TurnRequest:
        """The request with what has been sampled so far as its partial turn."""
        request = self.request
        return TurnRequest(
            uid=request.uid,
            turn=request.turn,
            context=list(request.context),
            partial=self.known[self.start :],
            partial_logps=list(self.logps),
            partial_versions=list(self.versions),
            max_new=request.max_new,
            seed=request.seed,
            priority=request.priority,
            version=request.version,
        )


LEAST_ROWS = 4


class TorchEngine:
    """Generates turns of episodes on a fixed number of lanes; an ``Engine``.

    Nothing is cached but the keys and values of the lanes, and a lane carries the salt of the load
    that they were written under. One of another salt is written anew from its first token on.
    ``caches="flush"`` also lets a sync empty them all, which ``salt`` finds needless.
    ``steps`` counts decode steps, ``lane_steps`` the lanes in use summed over them,
    ``sampled_tokens`` new tokens, and ``replayed_tokens`` lane steps that fed a known token
    without sampling after it.
    """

    beside = True

    def __init__(self, config: ModelConfig, lanes: int = 8, *, caches: Caches = "flush") -> None:
        self.config = config
        self.caches = caches
        self._salt = 0
        self.lanes = lanes
        self.version = -1
        self.steps = self.lane_steps = self.sampled_tokens = self.replayed_tokens = 0
        self._kernel: DecodeKernel | None = None
        self._slots: list[_Lane | None] = [None] * lanes
        self._queue: list[tuple[int, int, TurnRequest]] = []
        self._arrival = itertools.count()
        self._keys: set[tuple[str, int]] = set()
        # Matrix products take another path for few rows and for the last of an odd number, which
        # gives other bits: more rows are computed then, and nobody reads them.
        self._rows = max(LEAST_ROWS, lanes + lanes % 2)
        self._tokens = np.zeros(self._rows, np.int64)
        self._positions = np.zeros(self._rows, np.int64)
        self._token_view = torch.from_numpy(self._tokens)
        self._position_view = torch.from_numpy(self._positions)

    @property
    def running(self) -> int:
        """Requests that occupy a lane."""
        return sum(lane is not None for lane in self._slots)

    @property
    def waiting(self) -> int:
        """Requests that wait for a free lane."""
        return len(self._queue)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take bfloat16 ``weights`` of policy ``version`` (>= 0); all KV of older ones is dropped.

        Requests that run keep their partial tokens and are replayed under the new weights.
        Raises ``ModelError`` when the weights do not fit, ``EngineError`` for a bad version.
        """
        if version < 0:
            raise EngineError(f"expected a policy version of at least 0, found {version}")
        self._kernel = DecodeKernel(self.config, weights, self._rows)
        self.version = version
        self._salt += 1

    def flush(self) -> tuple[str, ...]:
        """Write the lanes' KV anew from the first token on; salted, that of older loads already is
        out of reach."""
        if self.caches == "salt":
            return ("kv (salted)",)
        self._salt += 1
        return ("kv",)

    def probe(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probabilities float64 [P, V] of the next token after each prompt, by decode steps.

        Raises ``EngineError`` without weights, or while turns are being decoded.
        """
        kernel = self._loaded()
        if self.running:
            raise EngineError(
                f"expected an idle engine for a probe, found {self.running} running turns; "
                "drain it first"
            )
        found = [
            row
            for start in range(0, len(prompts), self.lanes)
            for row in self._probe_lanes(kernel, prompts[start : start + self.lanes])
        ]
        return np.array(found)

    def _probe_lanes(
        self, kernel: DecodeKernel, prompts: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        found: list[np.ndarray] = [np.empty(0)] * len(prompts)
        for lane in range(self.lanes):
            kernel.forget(lane)
        for position in range(max(len(prompt) for prompt in prompts)):
            self._tokens.fill(tokenizer.PAD)
            self._positions.fill(0)
            for lane, prompt in enumerate(prompts):
                if position < len(prompt):
                    self._tokens[lane], self._positions[lane] = prompt[position], position
            with torch.inference_mode():
                logits = kernel.step(self._token_view, self._position_view)
            for lane, prompt in enumerate(prompts):
                if position == len(prompt) - 1:
                    found[lane] = torch.log_softmax(logits[lane].double(), 0).numpy()
        return found

    def unload(self) -> None:
        """Drop weights and KV; afterwards ``resident_bytes()`` is 0 and ``step`` refuses.

        Raises ``EngineError`` while the engine still owes requests: ``drain`` it first.
        """
        if self._keys:
            raise EngineError(
                f"expected no requests at unload, found {self.running} running and "
                f"{self.waiting} waiting; drain the engine first"
            )
        self._kernel = None
        self.version = -1

    def resident(self) -> dict[str, Tensor]:
        """The weights as the decode kernel reads them: bfloat16, logical layout, declared order."""
        return self._loaded().resident()

    def resident_bytes(self) -> int:
        """Bytes of weights, KV cache and step buffers held; 0 without weights."""
        return 0 if self._kernel is None else self._kernel.resident_bytes()

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn. Raises ``EngineError`` for a request that is held already or malformed."""
        check_request(request, self._keys, self.config.context)
        self._keys.add(request.key)
        heapq.heappush(self._queue, (request.priority, next(self._arrival), request))

    def step(self) -> list[TurnResult]:
        """One decode step of all lanes; returns the turns that ended in it.

        Raises ``EngineError`` without weights. With nothing to do it does nothing.
        """
        kernel = self._loaded()
        self._fill_lanes(kernel)
        active = [(index, lane) for index, lane in enumerate(self._slots) if lane is not None]
        if not active:
            return []
        self._tokens.fill(tokenizer.PAD)
        self._positions.fill(0)
        sampling = []
        for index, lane in active:
            if lane.salt != self._salt:
                lane.fed, lane.salt = 0, self._salt
            if lane.fed == 0:
                kernel.forget(index)
                lane.oldest = self.version
            lane.oldest = min(lane.oldest, self.version)
            self._tokens[index] = lane.known[lane.fed]
            self._positions[index] = lane.fed
            lane.fed += 1
            if lane.fed == len(lane.known):
                sampling.append((index, lane))
        with torch.inference_mode():
            logits = kernel.step(self._token_view, self._position_view)
        self.steps += 1
        self.lane_steps += len(active)
        self.replayed_tokens += len(active) - len(sampling)
        self.sampled_tokens += len(sampling)
        if not sampling:
            return []
        self._sample(logits.numpy(), sampling)
        return [result for index, lane in sampling if (result := self._finished(index, lane))]

    def drain(self) -> list[TurnRequest]:
        """Hand over all requests, running (with their partial turns) and waiting, in urgency order.

        The engine owes nothing afterwards; weights and counters stay.
        """
        running = [lane.as_request() for lane in self._slots if lane is not None]
        waiting = [entry[2] for entry in sorted(self._queue, key=lambda entry: entry[:2])]
        self._slots = [None] * self.lanes
        self._queue.clear()
        self._keys.clear()
        return running + waiting

    def _loaded(self) -> DecodeKernel:
        if self._kernel is None:
            raise EngineError("expected an engine with weights, found none loaded; call load first")
        return self._kernel

    def _fill_lanes(self, kernel: DecodeKernel) -> None:
        if not self._queue:
            return
        for index, lane in enumerate(self._slots):
            if lane is None and self._queue:
                request = heapq.heappop(self._queue)[2]
                self._slots[index] = _Lane(request, self.config.context)

    def _sample(self, logits: np.ndarray, sampling: list[tuple[int, _Lane]]) -> None:
        """Append one keyed token to each sampling lane, by a float64 cumulative sum."""
        shifted = logits.astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        cumulative = np.cumsum(np.exp(shifted), axis=1)
        last = logits.shape[1] - 1
        for index, lane in sampling:
            total = cumulative[index, last]
            position = len(lane.known) - lane.start
            point = uniform_at(lane.key, position) * total
            token = min(int(np.searchsorted(cumulative[index], point, side="right")), last)
            lane.known.append(token)
            lane.logps.append(float(shifted[index, token] - np.log(total)))
            lane.versions.append(self.version)

    def _finished(self, index: int, lane: _Lane) -> TurnResult | None:
        """The result when the lane's turn has ended, and the lane is free again."""
        length = len(lane.known)
        if lane.known[-1] == tokenizer.END:
            reason = "end"
        elif length >= self.config.context:
            reason = "context"
        elif length >= lane.limit:
            reason = "budget"
        else:
            return None
        self._slots[index] = None
        self._keys.discard(lane.request.key)
        return TurnResult(
            uid=lane.request.uid,
            turn=lane.request.turn,
            tokens=lane.known[lane.start :],
            logps=lane.logps,
            versions=lane.versions,
            finish_reason=reason,
            stream=lane.key,
            cache_version=lane.oldest,
        )
