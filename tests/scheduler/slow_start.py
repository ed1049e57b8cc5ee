"""Components whose processes take as long to be ready as the test wants."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from shiftbook.jobs.components import RolloutWorker, ToolWorker
from shiftbook.scheduler.workers.host import HostSpec

LOOK_AGAIN_S = 0.02
HOLDS = "SHIFTBOOK_TEST_HOLDS"
"""Names the folder of holds."""


class SlowStart(ToolWorker):
    """Like an engine that loads a large model: nothing goes on before the file is there."""

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        begun, ready = (Path(config["folder"]) / f"{spec.replica}.{n}" for n in ("begun", "ready"))
        begun.touch()
        while not ready.exists():
            threading.Event().wait(LOOK_AGAIN_S)
        super().__init__(spec, config)


class HeldRollout(RolloutWorker):
    """An engine whose next process is not ready while its file lies in the folder of holds."""

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        folder = Path(os.environ[HOLDS])
        hold = folder / f"{spec.replica}.hold"
        if hold.exists():
            (folder / f"{spec.replica}.begun").touch()
        while hold.exists():
            threading.Event().wait(LOOK_AGAIN_S)
        super().__init__(spec, config)
