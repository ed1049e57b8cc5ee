"""Puts faults into the job from outside, by wrapping its functions, and takes them out again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.zoo.now import NOW

Wrapper = Callable[..., Any]
"""f(original, *arguments): stands in for a function of the job."""
INHERITED = object()
"""Stands for what a class has from another one: it is taken away again, not put back."""


class Patcher:
    """Wraps attributes of classes and modules; ``undo`` restores all of them."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> None:
        """Stand ``wrapper(original, ...)`` in for ``owner.name``."""
        original = getattr(owner, name)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.put(owner, name, stand_in)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Stand ``value`` in for ``owner.name``."""
        self._done.append((owner, name, vars(owner).get(name, INHERITED)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._done:
            owner, name, original = self._done.pop()
            if original is INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def fire() -> None:
    """Note the moment at which a fault first did something."""
    NOW.notes.setdefault("fired_ns", time.time_ns())


def at(iteration: int) -> bool:
    """True in that iteration, and noted as the moment of the fault."""
    if NOW.iteration == iteration:
        fire()
        return True
    return False


def since(iteration: int) -> bool:
    """True from that iteration on."""
    if NOW.iteration >= iteration:
        fire()
        return True
    return False


def resumed() -> bool:
    """True in the life after the restore."""
    if NOW.life > 0:
        fire()
        return True
    return False


def once(name: str) -> bool:
    """True the first time that it is asked for a name in a run."""
    if name in NOW.notes:
        return False
    NOW.notes[name] = True
    return True
