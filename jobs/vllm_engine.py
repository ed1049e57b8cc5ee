"""The rollout engine on vLLM, in-process; this module imports without vLLM.

The policy is the same one, in Hugging Face format (``jobs/hf_policy.py``), with a tokenizer by
which vLLM takes text too; the job's own token ids go in and come out. Turns that do not fit on the
lanes wait here, so that a pause takes everything back at once.
One engine a process: vLLM keeps its parallel state in globals.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftbook.jobs import tokenizer
from shiftbook.jobs.engine_types import Caches, TurnRequest, TurnResult, check_request
from shiftbook.jobs.errors import EngineError
from shiftbook.jobs.hf_policy import save_hf, to_hf
from shiftbook.jobs.keyed_rng import turn_key
from shiftbook.jobs.model import ModelConfig, check_params, parameter_shapes
from shiftbook.jobs.vllm_weights import close_reload, packed_bytes, read_resident

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    # A few small functions of vLLM would be compiled in every process, with a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
}
"""What vLLM and torch's compiler read as they are imported; variables that are set stay."""
BLOCK = 32
"""Tokens of a block of the prefix cache."""
KV_BYTES = 64 << 20


class _Lane:
    """A turn that vLLM decodes: its request, and what was sampled so far."""

    __slots__ = ("key", "limit", "logps", "request", "tokens", "versions")

    def __init__(self, request: TurnRequest, context: int) -> None:
        self.request = request
        self.tokens = list(request.partial)
        self.logps = list(request.partial_logps)
        self.versions = list(request.partial_versions)
        self.key = turn_key(request.seed, request.uid, request.turn)
        self.limit = min(request.max_new, context - len(request.context))

    def as_request(self) -> TurnRequest:
        """The request with what has been sampled so far as its partial turn."""
        request = self.request
        return TurnRequest(
            uid=request.uid,
            turn=request.turn,
            context=list(request.context),
            partial=list(self.tokens),
            partial_logps=list(self.logps),
            partial_versions=list(self.versions),
            max_new=request.max_new,
            seed=request.seed,
            priority=request.priority,
            version=request.version,
        )


class VllmEngine:
    """Generates turns with vLLM; an ``Engine``.

    ``caches`` says how values of older weights are kept apart: ``flush`` empties the prefix cache,
    ``salt`` gives each load of the process blocks of its own, so that neither a load that failed
    nor another job leaves any to the next. ``read_resident`` off makes every fingerprint one of
    what was handed over, as with engines whose weights cannot be read.
    ``cached_tokens`` counts prompt tokens that came from the prefix cache. ``folder`` is the policy
    that vLLM was started with: zeros, on disk.
    """

    beside = False

    def __init__(
        self,
        config: ModelConfig,
        lanes: int = 8,
        *,
        caches: Caches = "flush",
        read_resident: bool = True,
    ) -> None:
        self.config, self.lanes, self.caches = config, lanes, caches
        self.version = -1
        self._salt = 0
        self.steps = self.lane_steps = self.sampled_tokens = self.replayed_tokens = 0
        self.cached_tokens = 0
        self._read_resident = read_resident
        self.folder, self._llm = _of_process(config, lanes)
        self._queue: list[tuple[int, int, TurnRequest]] = []
        self._arrival = itertools.count()
        self._lanes: dict[str, _Lane] = {}
        self._keys: set[tuple[str, int]] = set()

    @property
    def running(self) -> int:
        """Turns that vLLM decodes."""
        return len(self._lanes)

    @property
    def waiting(self) -> int:
        """Turns that wait for a free lane."""
        return len(self._queue)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write bfloat16 ``weights`` of policy ``version`` over the present ones.

        Raises ``EngineError`` for a bad version or while turns are decoded, ``ModelError`` for
        names and shapes that do not fit, before anything is written.
        """
        if version < 0:
            raise EngineError(f"expected a policy version of at least 0, found {version}")
        if self._lanes:
            raise EngineError(
                f"expected an idle engine, found {self.running} running turns; drain it first"
            )
        check_params(self.config, weights)
        self._salt = next(_loads)
        self._write(weights)
        self.version = version

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        tensors = to_hf({name: t.float() for name, t in weights.items()}, self.config)
        self._reload(iter(tensors.items()))

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        except Exception:
            self._llm.collective_rpc(close_reload)
            raise

    def unload(self) -> None:
        """Overwrite the policy with zeros. The memory stays allocated: vLLM frees it only with its
        process. Raises ``EngineError`` while the engine still owes requests."""
        if self._keys:
            raise EngineError(
                f"expected no requests at unload, found {self.running} running and "
                f"{self.waiting} waiting; drain the engine first"
            )
        if self.version >= 0:
            self._write(_zeros(self.config))
            self.flush()
        self.version = -1

    def flush(self) -> tuple[str, ...]:
        """Empty the prefix cache; with ``salt`` older blocks are unreachable as it is.

        Raises ``EngineError`` where vLLM did not do it, as it refuses while requests run.
        """
        if self.caches == "salt":
            return ("prefix (salted)",)
        if not self._llm.reset_prefix_cache():
            raise EngineError(
                f"expected an empty prefix cache, found that vLLM did not flush it with "
                f"{self.running} turns running; drain the engine first"
            )
        return ("prefix",)

    def resident(self) -> dict[str, Tensor] | None:
        """The weights that vLLM's layers compute with; see ``jobs/vllm_weights.py``."""
        if not self._read_resident:
            return None
        found: dict[str, Tensor] | None = self._llm.collective_rpc(
            read_resident, args=(self.config,)
        )[0]
        return found

    def resident_bytes(self) -> int:
        """Bytes of weights and of the KV cache; 0 without a policy."""
        return 0 if self.version < 0 else packed_bytes(self.config) + KV_BYTES

    def probe(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probabilities float64 [P, V] of the next token after each prompt.

        Blocks that are cached are read, as in generation. Raises ``EngineError`` while turns run.
        """
        if self._lanes:
            raise EngineError(
                f"expected an idle engine for a probe, found {self.running} running turns; "
                "drain it first"
            )
        from vllm import SamplingParams

        size = self.config.vocabulary
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=size, detokenize=False)
        outputs = self._llm.generate(
            [self._prompt(list(prompt)) for prompt in prompts], params, use_tqdm=False
        )
        return np.array(
            [
                [output.outputs[0].logprobs[0][token].logprob for token in range(size)]
                for output in outputs
            ]
        )

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn. Raises ``EngineError`` for a request that is held already or malformed."""
        check_request(request, self._keys, self.config.context)
        self._keys.add(request.key)
        heapq.heappush(self._queue, (request.priority, next(self._arrival), request))

    def step(self) -> list[TurnResult]:
        """One step of vLLM over all lanes; returns the turns that ended in it."""
        if self.version < 0:
            raise EngineError("expected an engine with weights, found none loaded; call load first")
        self._fill_lanes()
        if not self._lanes:
            return []
        outputs = self._llm.llm_engine.step()
        self.steps += 1
        self.lane_steps += len(self._lanes)
        return [result for output in outputs if (result := self._absorb(output))]

    def drain(self) -> list[TurnRequest]:
        """Hand over all requests, running (with their partial turns) and waiting."""
        if self._lanes:
            self._llm.llm_engine.abort_request(list(self._lanes))
        running = [lane.as_request() for lane in self._lanes.values()]
        waiting = [entry[2] for entry in sorted(self._queue, key=lambda entry: entry[:2])]
        self._lanes.clear()
        self._queue.clear()
        self._keys.clear()
        return running + waiting

    def _prompt(self, tokens: list[int]) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if self.caches == "salt":
            prompt["cache_salt"] = f"load-{self._salt}"
        return prompt

    def _fill_lanes(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._queue and len(self._lanes) < self.lanes:
            request = heapq.heappop(self._queue)[2]
            lane = _Lane(request, self.config.context)
            # A name of its own each time: vLLM may still clear away the request before.
            name = f"{request.uid}#{request.turn}#{next(self._arrival)}"
            params = SamplingParams(
                temperature=0.0,
                max_tokens=lane.limit - len(lane.tokens),
                stop_token_ids=[tokenizer.END],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={
                    "shiftbook_key": lane.key,
                    "shiftbook_begun": len(lane.tokens),
                },
            )
            self._llm.llm_engine.add_request(
                name, self._prompt([*request.context, *request.partial]), params
            )
            self.replayed_tokens += len(request.context) + len(request.partial) - 1
            self._lanes[name] = lane

    def _absorb(self, output: Any) -> TurnResult | None:
        """Take in what one request got in a step; the result where its turn has ended."""
        lane = self._lanes.get(output.request_id)
        if lane is None:
            return None
        part = output.outputs[0]
        if part.token_ids and not len(lane.tokens) - len(lane.request.partial):
            self.cached_tokens += output.num_cached_tokens or 0
        for token, logps in zip(part.token_ids, part.logprobs, strict=True):
            lane.tokens.append(int(token))
            lane.logps.append(float(logps[token].logprob))
            lane.versions.append(self.version)
            self.sampled_tokens += 1
        if not output.finished:
            return None
        del self._lanes[output.request_id]
        request = lane.request
        self._keys.discard(request.key)
        if lane.tokens[-1] == tokenizer.END:
            reason = "end"
        elif len(request.context) + len(lane.tokens) >= self.config.context:
            reason = "context"
        else:
            reason = "budget"
        # Which version wrote a block of vLLM's cache it does not say: no cache_version.
        return TurnResult(
            uid=request.uid,
            turn=request.turn,
            tokens=lane.tokens,
            logps=lane.logps,
            versions=lane.versions,
            finish_reason=reason,
            stream=lane.key,
        )


def _zeros(config: ModelConfig) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}


_loads = itertools.count(1)
"""Numbers of the loads in this process, whose engines share one cache."""

_started: dict[tuple[ModelConfig, int], tuple[Path, Any]] = {}
"""The vLLM of this process, by what it was made for."""


def _of_process(config: ModelConfig, lanes: int) -> tuple[Path, Any]:
    """The process's one vLLM and its policy folder, started at the first call."""
    if (config, lanes) not in _started:
        if _started:
            raise EngineError(
                "expected one vLLM engine a process, found one of another model or number of "
                "lanes; make this one in a process of its own"
            )
        folder = Path(tempfile.mkdtemp(prefix="shiftbook-policy-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _started[config, lanes] = folder, _start(folder, config, lanes)
    return _started[config, lanes]


def _start(folder: Path, config: ModelConfig, lanes: int) -> Any:
    """vLLM on a policy of zeros; import and start take some ten seconds."""
    if "llvmlite" in sys.modules and "vllm" not in sys.modules:
        # Looking through all modules as it starts, vLLM trips over those of numba's compiler.
        raise EngineError(
            "expected a process without numba's compiler to start vLLM in, found it loaded; "
            "make the engine before anything is fingerprinted there"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    save_hf(folder, _zeros(config), config)
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
        block_size=BLOCK,
        max_num_seqs=max(lanes, 4),
        max_num_batched_tokens=max(lanes, 4) * config.context,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        async_scheduling=False,
        disable_log_stats=True,
        logits_processors=["shiftbook.jobs.keyed_sampling:KeyedSampler"],
        max_logprobs=config.vocabulary,
        seed=0,
    )
