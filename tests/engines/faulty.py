"""The rollout worker of the reference job on vLLM with one fault, for tests.

Which fault stands in ``fault.txt`` beside the job's base policy; without that file there is none.
Faults are put into the engine from outside; the recorder and the gate are the job's own.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shiftbook.jobs.components import RolloutWorker
from shiftbook.jobs.hf_policy import save_hf, to_hf
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.probe import Probe
from shiftbook.jobs.serving import After, ServedEngine, Taken
from shiftbook.scheduler.workers.component import Answer
from shiftbook.scheduler.workers.host import HostSpec

FACTORY = "tests.engines.faulty:FaultyRollout"
FILE = "fault.txt"
FAULTS = (
    "unreadable",  # no fault: weights that cannot be read back, as in other builds of vLLM
    "cache-kept",
    "cache-kept-and-served",
    "reloads-from-disk",
    "reloads-from-disk-unreadable",
    "load-breaks-once",
    "load-does-nothing",
)


def torn(tensors: Mapping[str, Tensor], after: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors from a sender that dies when so many were sent."""
    for place, item in enumerate(tensors.items()):
        if place == after:
            raise ConnectionError(f"the sender was lost after {after} tensors")
        yield item


class FaultyRollout(RolloutWorker):
    """The job's worker with a fault."""

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        super().__init__(spec, config)
        base = Path(config["base_policy"])
        file = base.with_name(FILE)
        self._fault = file.read_text(encoding="utf-8") if file.exists() else ""
        assert self._fault in ("", *FAULTS), self._fault
        engine: Any = self._serving.engine
        self._write = engine._write
        self._broke = False
        if self._fault == "unreadable":
            engine._read_resident = False
        elif self._fault.startswith("cache-kept"):
            engine.flush = lambda: ("prefix",)  # says so, and does nothing
        elif self._fault.startswith("reloads-from-disk"):
            engine._read_resident = not self._fault.endswith("unreadable")
            folder = Path(tempfile.mkdtemp(prefix="shiftbook-old-"))
            self._old = save_hf(folder, load_policy(base), ModelConfig())
        elif self._fault.startswith("load-"):
            engine._write = self._write_badly

    def _take(self, serving: ServedEngine, payload: dict[str, Any], after: After) -> Taken:
        if self._fault == "cache-kept-and-served":
            # An engine that measures, reports, and serves whatever was found.
            payload = payload | {"probe": Probe(payload["probe"].expected, math.inf)}
        return super()._take(serving, payload, after)

    def _write_badly(self, weights: Mapping[str, Tensor]) -> None:
        engine: Any = self._serving.engine
        if engine.version < 0 or not any(t.any() for t in weights.values()):
            self._write(weights)  # the first load, and the last one of zeros
        elif self._fault == "load-breaks-once" and not self._broke:
            self._broke = True
            tensors = to_hf({name: t.float() for name, t in weights.items()}, ModelConfig())
            engine._reload(torn(tensors, 11))
        elif self._fault == "load-breaks-once":
            self._write(weights)

    def step(self) -> list[Answer]:
        """One step; an engine that reloads from disk on wake-up does so before its first one."""
        serving = self._serving
        if self._fault.startswith("reloads") and serving._after == "sync":
            llm: Any = serving.engine._llm  # type: ignore[attr-defined]
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._old)})
            serving.engine.flush()
        return super().step()
