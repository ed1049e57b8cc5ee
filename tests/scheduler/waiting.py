"""Waiting for a condition with a deadline, for tests with real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

POLL_S = 0.03


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait for a condition; its value. Fails after the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        threading.Event().wait(POLL_S)
    pytest.fail(f"not within {limit_s:.0f} s: {condition}")
