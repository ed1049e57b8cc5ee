"""A process with one vLLM engine, driven from a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shiftbook.jobs import tokenizer
from shiftbook.jobs.components import RolloutWorker
from shiftbook.jobs.engine_types import TurnRequest, TurnResult
from shiftbook.jobs.keyed_rng import turn_key
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.probe import Probe
from shiftbook.jobs.serving import ServedEngine, Taken
from shiftbook.jobs.vllm_engine import Caches, VllmEngine
from tests.engines.away import SPEC, Away, away_and_back
from tests.engines.faulty import torn

LANES = 4
STEPS = ("drain", "load", "resident", "flush", "probe", "submit")
"""What serving asks of an engine as it takes a version."""


class EngineActor:
    """The engine and what serves it; ``anew`` makes both again around the process's vLLM."""

    def __init__(self) -> None:
        self._config = ModelConfig()
        self._serving: ServedEngine | None = None
        self.anew()

    def anew(self, caches: Caches = "flush", read_resident: bool = True) -> None:
        """An engine without a policy."""
        if self._serving is not None:
            self._serving.drain()
            self._serving.unload()
            self._engine._llm.reset_prefix_cache()
        self._engine = VllmEngine(self._config, LANES, caches=caches, read_resident=read_resident)
        self._serving = ServedEngine(self._engine, self._config)

    def _served(self) -> ServedEngine:
        assert self._serving is not None
        return self._serving

    def take(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        probe: Probe | None = None,
        source: Mapping[str, str] | None = None,
    ) -> Taken:
        """Take a version."""
        return self._served().take(weights, version, probe, source)

    def take_traced(
        self, weights: Mapping[str, Tensor], version: int, probe: Probe, source: Mapping[str, str]
    ) -> tuple[Taken, list[str]]:
        """Take a version; what was asked of the engine meanwhile, in order."""
        engine: Any = self._engine
        order: list[str] = []

        def traced(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                order.append(name)
                return method(*arguments)

            return call

        for name in STEPS:
            setattr(engine, name, traced(name, getattr(engine, name)))
        try:
            return self._served().take(weights, version, probe, source), order
        finally:
            for name in STEPS:
                delattr(engine, name)

    def submit(self, requests: list[TurnRequest]) -> None:
        """Queue turns."""
        for request in requests:
            self._served().submit(request)

    def steps(self, count: int) -> list[TurnResult]:
        """So many steps."""
        return [result for _ in range(count) for result in self._served().step()]

    def finish(self) -> list[TurnResult]:
        """Steps until nothing is left to do."""
        results: list[TurnResult] = []
        while self._engine.running or self._engine.waiting:
            results += self._served().step()
        return results

    def drain(self) -> list[TurnRequest]:
        """Take all turns back."""
        return self._served().drain()

    def first_use(self) -> dict[str, Any] | None:
        """What was read at the first generation."""
        return self._served().first_use()

    def from_text(self, requests: list[TurnRequest]) -> list[tuple[list[int], list[int], str]]:
        """The turns again, by vLLM itself with each context as text: the ids that it read, the ids
        that it drew by the same keys, and the text that it made of them."""
        from vllm import SamplingParams

        from shiftbook.jobs.keyed_sampling import BEGUN, KEY

        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request.max_new,
                stop_token_ids=[tokenizer.END],
                ignore_eos=True,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                extra_args={
                    KEY: turn_key(request.seed, request.uid, request.turn),
                    BEGUN: 0,
                },
            )
            for request in requests
        ]
        texts = [tokenizer.decode(request.context) for request in requests]
        outputs = self._engine._llm.generate(texts, params, use_tqdm=False)
        return [
            (list(o.prompt_token_ids), list(o.outputs[0].token_ids), o.outputs[0].text)
            for o in outputs
        ]

    def away_and_back(
        self, requests: list[TurnRequest], start: dict[str, Any], later: dict[str, Any]
    ) -> Away:
        """A worker of the job around the process's vLLM, moved in mid-generation."""
        worker = RolloutWorker(SPEC, {"engine": "vllm", "lanes": LANES})
        return away_and_back(worker, requests, start, later)

    def figures(self) -> dict[str, Any]:
        """Counters and state."""
        engine = self._engine
        return {
            "version": self._served().version,
            "loaded": engine.version,
            "bytes": engine.resident_bytes(),
            "cached_tokens": engine.cached_tokens,
            "running": engine.running,
        }

    def unload(self) -> None:
        """Hold no policy."""
        self._served().drain()
        self._served().unload()

    def resident(self) -> dict[str, Tensor] | None:
        """The weights as they are read back."""
        return self._engine.resident()

    def keep_cache(self) -> None:
        """From now on the prefix cache is not flushed, and the engine says that it was."""
        self._engine.flush = lambda: ("prefix",)  # type: ignore[method-assign]

    def salt_once(self) -> None:
        """From now on all versions have one salt; the engine says that each has its own."""
        self._engine._prompt = lambda tokens: {  # type: ignore[method-assign]
            "prompt_token_ids": tokens,
            "cache_salt": "one",
        }

    def tear_next_load(self, after: int) -> None:
        """The next load breaks when so many tensors were written."""
        engine: Any = self._engine
        reload = engine._reload

        def once(tensors: Any) -> None:
            engine._reload = reload
            reload(torn(dict(tensors), after))

        engine._reload = once

    def flush_while_running(self) -> str:
        """What the engine answers when its cache is to be flushed in the middle of a turn."""
        from shiftbook.jobs.errors import EngineError

        try:
            self._engine.flush()
        except EngineError as error:
            return str(error)
        return "flushed"
