"""What the processes of a group find, each for itself, before any of them waits for the others.

An error that one process alone raises leaves the others waiting in the next collective. So what can
fail is tried on all, the outcomes are gathered, and what one could not do is raised on every one.
Without an initialised process group this process is the whole group.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_all(act: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What each process makes of it, in rank order, on every process.

    Raises the error of the first process that has one, on all; its text says which process that
    was where not all of them say the same.
    """
    if not dist.is_initialized():
        return [act()]
    outcome: tuple[Any, Exception | None] = (None, None)
    try:
        outcome = (act(), None)
    except Exception as error:  # the others wait for an answer
        outcome = (None, _sent(error))
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, outcome, group=group)
    failed = {rank: error for rank, (_, error) in enumerate(everywhere) if error is not None}
    if failed:
        rank, first = next(iter(failed.items()))
        if len(failed) < len(everywhere) or len({str(e) for e in failed.values()}) > 1:
            first.args = (f"process {rank} of {len(everywhere)}: {first}", *first.args[1:])
        raise first
    return [made for made, _ in everywhere]


def on_first(act: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What the group's first process makes of it, on all; an error of its own is raised on all."""
    if not dist.is_initialized():
        return act()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [act(), None]
        except Exception as error:  # the others wait for an answer
            outcome = [None, _sent(error)]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    made: T = outcome[0]
    return made


def _sent(error: Exception) -> Exception:
    """The error as it can travel: the whole of it, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error of some library may hold anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
