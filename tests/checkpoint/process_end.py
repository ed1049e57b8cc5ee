"""How a process of a group ends."""

from __future__ import annotations

import os
import sys


def end_process() -> None:
    """End without taking the interpreter down first.

    Threads of gloo outlive `destroy_process_group`. One that lets go of the last tensor of a
    collective while the interpreter is taken down aborts the process, once in some hundred runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
