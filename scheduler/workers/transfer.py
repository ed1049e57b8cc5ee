"""What moves between processes goes through Ray's object store, by reference."""

from __future__ import annotations

from typing import Any

from shiftbook.scheduler.cluster import import_ray

FETCH_LIMIT_S = 15.0


def offer(value: Any) -> Any:
    """Put a value into the object store of this node; returns its reference."""
    return import_ray().put(value)


def fetch(value: Any) -> Any:
    """The value behind a reference (or the value itself); raises when its owner is gone."""
    ray = import_ray()
    return ray.get(value, timeout=FETCH_LIMIT_S) if isinstance(value, ray.ObjectRef) else value
