"""Generic mutations of the job's own functions, drawn by seed: no fault in mind, only a slip.

An operator (skip, repeat, reorder, stale value, swapped arguments, wrong rank, off by one, dropped
call, wrong dtype) is put on one call of one function, from a drawn iteration on or in it alone.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.zoo import storage
from tests.zoo.engine import Engine, Made
from tests.zoo.job import Job, Scorer
from tests.zoo.loader import Drawn, Loader
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher, fire
from tests.zoo.trainer import Batch, Rank, Trainer

FUNCTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Loader": (Loader, ("draw", "fetch", "fill", "take", "state", "load")),
    "Engine": (
        Engine,
        (
            "load",
            "tie",
            "cut",
            "stamp",
            "flush",
            "step",
            "choose",
            "prefix",
            "first_token",
            "generate",
        ),
    ),
    "Trainer": (
        Trainer,
        (
            "new_stream",
            "keep_mask",
            "score",
            "recompute_mask",
            "loss",
            "truncated",
            "kl",
            "accumulate",
            "backward",
            "take_gradients",
            "add",
            "clear",
            "all_reduce",
            "scatter",
            "norm",
            "clip",
            "learning_rate",
            "adam",
            "average",
            "move_controllers",
            "place",
            "published",
            "resize",
            "copy_of",
        ),
    ),
    "Rank": (Rank, ("cast", "refresh_model")),
    "Scorer": (Scorer, ("score", "score_all")),
    "Job": (
        Job,
        (
            "route",
            "generate",
            "filter",
            "advantages",
            "deal",
            "trained_mask",
            "pad",
            "collate",
            "reward_of",
            "divisor",
            "prepare",
            "sync_weights",
            "deliver",
        ),
    ),
    "storage": (
        storage,
        (
            "shard",
            "joined",
            "rank_payload",
            "rest_payload",
            "write",
            "read",
            "load",
            "restore",
            "restore_rank",
            "restore_rest",
            "restore_streams",
        ),
    ),
}
"""The job's own functions: all but those that hand its state to the recorder."""

OPERATORS = (
    "skip",
    "repeat",
    "reorder",
    "stale value",
    "swapped arguments",
    "wrong rank",
    "off by one",
    "dropped call",
    "wrong dtype",
)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """What is drawn: where, which operator, in which iteration, at which call, once or for good."""

    number: int
    owner: str
    name: str
    operator: str
    iteration: int
    call: int
    lasting: bool

    def __str__(self) -> str:
        when = "from" if self.lasting else "in"
        return (
            f"{self.operator} {self.owner}.{self.name} {when} iteration {self.iteration}, "
            f"call {self.call}"
        )

    def put_in(self, patcher: Patcher) -> None:
        """Wrap the function."""
        _Mutant(self).put_in(patcher)


def draw(number: int) -> Mutation:
    """The mutation of a number; the same for ever."""
    chance = random.Random(f"mutation {number}")
    places = [(owner, name) for owner, (_, names) in FUNCTIONS.items() for name in names]
    owner, name = chance.choice(places)
    once_in_a_life = owner == "storage" or name in ("resize", "copy_of", "new_stream")
    return Mutation(
        number=number,
        owner=owner,
        name=name,
        operator=chance.choice(applicable(owner, name)),
        iteration=0 if once_in_a_life else chance.randrange(0, 6),
        call=0 if once_in_a_life or name in ONCE else chance.randrange(0, 3),
        lasting=chance.random() < 0.6,
    )


ONCE = (
    "draw", "fill", "take", "state", "all_reduce", "scatter", "norm", "learning_rate",
    "move_controllers", "generate", "filter", "divisor", "prepare", "sync_weights", "score_all",
)  # fmt: skip
"""Functions that are called once in an iteration (an engine's ``generate``, more often)."""

RANKED = ("rank", "virtual_rank", "engine", "number", "ranks")
"""Parameters that say which rank or engine is meant."""


@cache
def applicable(owner: str, name: str) -> tuple[str, ...]:
    """Operators that can change anything about a function, by its signature."""
    signature = inspect.signature(getattr(FUNCTIONS[owner][0], name))
    taken = {n: str(p.annotation) for n, p in signature.parameters.items() if n != "self"}
    gives = str(signature.return_annotation) != "None"
    out = ["skip", "repeat", "dropped call"]
    if gives:
        out += ["reorder", "stale value", "off by one", "wrong dtype"]
    if len(set(taken.values())) < len(taken):
        out.append("swapped arguments")
    if any(n in RANKED for n in taken):
        out.append("wrong rank")
    return tuple(out)


class _Mutant:
    """Counts calls of one function in a run and distorts those that were drawn."""

    def __init__(self, mutation: Mutation) -> None:
        self.m = mutation
        self.calls: dict[tuple[int, int], int] = {}
        self.last: Any = None
        self.random = random.Random(f"details {mutation.number}")

    def put_in(self, patcher: Patcher) -> None:
        patcher.wrap(FUNCTIONS[self.m.owner][0], self.m.name, self)

    def due(self) -> bool:
        """True where this call is to be distorted."""
        here = (NOW.life, NOW.iteration)
        number = self.calls.get(here, 0)
        self.calls[here] = number + 1
        if NOW.iteration < self.m.iteration:
            return False
        if self.m.lasting:
            return True
        first = (NOW.iteration == self.m.iteration or self.m.iteration == 0) and not NOW.notes.get(
            "mutated"
        )
        return first and number == self.m.call

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.due():
            result = original(*args, **kwargs)
            self.last = _kept(result)
            return result
        NOW.notes["mutated"] = True
        fire()
        return getattr(self, self.m.operator.replace(" ", "_"))(original, args, kwargs)

    def skip(self, original: Any, args: Any, kwargs: Any) -> Any:
        """The function does nothing; its value is that of doing nothing."""
        if getattr(original, "__annotations__", {}).get("return") == "None":
            return None
        if self.last is not None:
            return _nothing(self.last)
        return _nothing(original(*args, **kwargs))

    def dropped_call(self, original: Any, args: Any, kwargs: Any) -> Any:
        """The call is left out; the caller goes on with what it had before."""
        return _kept(self.last) if self.last is not None else self.skip(original, args, kwargs)

    def repeat(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Called twice."""
        original(*args, **kwargs)
        return original(*args, **kwargs)

    def stale_value(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Called, but the value is that of the call before."""
        result = original(*args, **kwargs)
        stale, self.last = self.last, _kept(result)
        return result if stale is None else stale

    def reorder(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Elements of the value, or of the first list handed in, in another order."""
        result = original(*args, **kwargs)
        changed = _reordered(result)
        if changed is not None:
            return changed
        return self._on_argument(original, args, kwargs, _reordered, result)

    def off_by_one(self, original: Any, args: Any, kwargs: Any) -> Any:
        """A number is one too high, a list begins one later."""
        result = original(*args, **kwargs)
        changed = _off_by_one(result)
        if changed is not None:
            return changed
        return self._on_argument(original, args, kwargs, _off_by_one, result)

    def wrong_dtype(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Tensors or numbers through a narrower type."""
        result = original(*args, **kwargs)
        changed = _narrowed(result)
        if changed is not None:
            return changed
        return self._on_argument(original, args, kwargs, _narrowed, result)

    def wrong_rank(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Another rank, virtual rank or engine than the one that is meant."""
        changed = list(args)
        for place, value in enumerate(args):
            if isinstance(value, Rank | Engine):
                known = NOW.notes.setdefault(f"others {type(value).__name__}", {})
                key = value.number if isinstance(value, Rank) else value.name
                known[key] = value
                other = [v for k, v in known.items() if k != key]
                if other:
                    changed[place] = other[0]
                    return original(*changed, **kwargs)
            elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1:
                changed[place] = 1 - value
                return original(*changed, **kwargs)
        return original(*args, **kwargs)

    def swapped_arguments(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Two arguments of one type in each other's place."""
        for a in range(1, len(args)):
            for b in range(a + 1, len(args)):
                if type(args[a]) is type(args[b]) and args[a] is not args[b]:
                    changed = list(args)
                    changed[a], changed[b] = changed[b], changed[a]
                    return original(*changed, **kwargs)
        return original(*args, **kwargs)

    def _on_argument(
        self, original: Any, args: Any, kwargs: Any, change: Callable[[Any], Any], result: Any
    ) -> Any:
        """The function again with one argument changed, where its value cannot be."""
        if result is not None:
            return result
        for place in range(len(args) - 1, 0, -1):
            changed = change(args[place])
            if changed is not None:
                return original(*args[:place], changed, *args[place + 1 :], **kwargs)
        return result


def _kept(value: Any) -> Any:
    """A value as it is now, for a later call."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _kept(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_kept(v) for v in value)
    return copy.copy(value) if isinstance(value, Batch | Made) else value


def _nothing(value: Any) -> Any:
    """What a function that does nothing gives in place of a value."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return type(value)(0)
    if isinstance(value, list):
        return []
    if isinstance(value, dict):
        return {k: _nothing(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_nothing(v) for v in value)
    return value


def _reordered(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] > 1:
        return value.flip(0)
    if isinstance(value, np.ndarray) and value.ndim and value.shape[0] > 1:
        return value[::-1].copy()
    if isinstance(value, list) and len(value) > 1:
        return [value[1], value[0], *value[2:]]
    if isinstance(value, tuple) and len(value) > 1 and type(value[0]) is type(value[1]):
        return (value[1], value[0], *value[2:])
    if isinstance(value, dict) and len(value) > 1:
        return _swapped_values(value)
    return None


def _swapped_values(value: dict[Any, Any]) -> Any:
    keys = list(value)
    for a in range(len(keys)):
        for b in range(a + 1, len(keys)):
            x, y = value[keys[a]], value[keys[b]]
            alike = type(x) is type(y) and getattr(x, "shape", None) == getattr(y, "shape", None)
            if alike:
                return {**value, keys[a]: y, keys[b]: x}
    return None


def _off_by_one(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 1.0
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.roll(1, dims=-1)
    if isinstance(value, np.ndarray) and value.ndim:
        return np.roll(value, 1)
    if isinstance(value, list) and len(value) > 1:
        return value[1:] + value[:1]
    if isinstance(value, tuple) and value:
        return _first_changed(value, _off_by_one)
    if isinstance(value, dict) and value:
        return _one_changed(value, _off_by_one)
    return None


def _narrowed(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.bfloat16().float()
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.to(torch.float8_e4m3fn).bfloat16()
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(np.float16).astype(value.dtype)
    if isinstance(value, float):
        return float(np.float16(value))
    if isinstance(value, dict) and value:
        changed = {k: _narrowed(v) for k, v in value.items()}
        if any(v is not None for v in changed.values()):
            return {k: value[k] if v is None else v for k, v in changed.items()}
        return None
    if isinstance(value, tuple) and value:
        return _first_changed(value, _narrowed)
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [float(np.float16(v)) for v in value]
    return None


def _first_changed(value: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    for place, item in enumerate(value):
        changed = change(item)
        if changed is not None:
            return (*value[:place], changed, *value[place + 1 :])
    return None


def _one_changed(value: dict[Any, Any], change: Callable[[Any], Any]) -> Any:
    for key, item in value.items():
        changed = change(item)
        if changed is not None:
            return {**value, key: changed}
    return None


__all__ = ["FUNCTIONS", "OPERATORS", "Drawn", "Mutation", "draw"]
