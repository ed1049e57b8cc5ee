"""A component whose process takes as long to be ready as the test wants."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from shiftbook.jobs.components import ToolWorker
from shiftbook.scheduler.workers.host import HostSpec

LOOK_AGAIN_S = 0.02


class SlowStart(ToolWorker):
    """Like an engine that loads a large model: nothing goes on before the file is there."""

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        begun, ready = (Path(config["folder"]) / f"{spec.replica}.{n}" for n in ("begun", "ready"))
        begun.touch()
        while not ready.exists():
            threading.Event().wait(LOOK_AGAIN_S)
        super().__init__(spec, config)
