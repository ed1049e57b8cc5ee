"""A trace: what one run showed, a line for each observation, in order."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from shiftbook.verify.errors import ReplayFailed
from shiftbook.verify.replay.protocol import (
    Conditions,
    Equality,
    Numbers,
    Observation,
    RandomState,
    Samples,
    Step,
    Tensors,
)

Kind = Literal["tensor", "root", "sample", "number", "random"]
KINDS: tuple[Kind, ...] = ("tensor", "root", "sample", "number", "random")
STACK = ("torch", "numpy")
"""Packages whose version decides about bits."""


@dataclass(frozen=True, slots=True)
class Line:
    """One observation: where it was made, what was seen, and what of it.

    Fields of a tensor: form, fingerprint, norm; of a root: tensors, root; of a sample: tokens,
    logps, reward; of a number: value; of a random stream: state. Numbers are written so that they
    give back the same float64.
    """

    step: int
    component: str
    kind: Kind
    name: str
    fields: Mapping[str, str]
    detail: bool = False
    """True for what a golden trace leaves out."""
    kept: str | None = None
    """File with the tensor's bits."""
    event: int | None = None
    """Position of the event in the ledger that it was read from."""
    reward_event: int | None = None
    """Position of the one that has the reward."""

    @property
    def key(self) -> tuple[int, str, str, str]:
        """What it is compared by."""
        return self.step, self.component, self.kind, self.name

    def event_of(self, field_name: str) -> int | None:
        """Position of the event that has a field."""
        return self.reward_event if field_name == "reward" else self.event

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "fields": dict(self.fields)
        }


@dataclass(frozen=True)
class Trace:
    """The lines of one run, and what they depend on."""

    target: str
    config: Mapping[str, Any]
    equality: Equality
    conditions: Conditions
    stack: str
    lines: tuple[Line, ...]
    whole: bool = True
    """False where it holds a part of what the job observes, as a ledger does."""
    source: str = ""
    """Where it was read from; empty for a run."""
    tolerances: Mapping[str, float] = field(default_factory=dict)

    @property
    def config_digest(self) -> str:
        """SHA-256 of the configuration as canonical JSON, in hex."""
        return config_digest(self.config)


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of a configuration as canonical JSON, in hex."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def stack() -> str:
    """What decides about bits besides the job: interpreter, packages, processor as torch uses it.

    Names torch only where the job has imported it.
    """
    import sys

    found = [f"python={'.'.join(platform.python_version_tuple()[:2])}"]
    for name in STACK:
        if name in sys.modules:
            found.append(f"{name}={metadata.version(name)}")
    capability = ""
    torch = sys.modules.get("torch")
    if torch is not None:
        capability = f"/{torch.backends.cpu.get_cpu_capability()}"
    found.append(f"machine={platform.machine()}{capability}")
    return " ".join(found)


def label(text: str) -> str:
    """A name as a trace holds it: without spaces and control characters."""
    return quote(text, safe="/.:-_+[](){}@=,~!$&'*;#<>|") or "-"


def step_lines(steps: Iterator[Step], keep: Path | None) -> Iterator[Line]:
    """A line for each observation of a run; tensors' bits go to the folder ``keep``."""
    seen = 0
    for step in steps:
        if not isinstance(step, Step):
            raise ReplayFailed(
                f"expected the job to yield Step, found {type(step).__name__}; yield "
                "shiftbook.verify.replay.protocol.Step(number, observations)"
            )
        keys: set[tuple[int, str, str, str]] = set()
        for observation in step.observations:
            for line in observation_lines(step.number, observation, keep, seen):
                seen += 1
                if line.key in keys:
                    raise ReplayFailed(
                        f"expected names that occur once, found {line.kind} {line.name} of "
                        f"{line.component} twice in step {line.step}; name observations apart"
                    )
                keys.add(line.key)
                yield line


def observation_lines(
    step: int, observation: Observation, keep: Path | None = None, number: int = 0
) -> Iterator[Line]:
    """The lines of one observation."""
    of = label(observation.component)
    if isinstance(observation, Tensors):
        yield from _tensor_lines(step, of, observation, keep, number)
    elif isinstance(observation, Samples):
        for sample in sorted(observation.samples, key=lambda one: one.uid):
            fields = {"tokens": sample.tokens}
            if sample.logps is not None:
                fields["logps"] = sample.logps
            if sample.reward is not None:
                fields["reward"] = repr(float(sample.reward))
            yield Line(
                step, of, "sample", label(sample.uid), fields,
                event=sample.event, reward_event=sample.reward_event,
            )  # fmt: skip
    elif isinstance(observation, Numbers):
        for name, value in observation.values.items():
            shown = {"value": repr(float(value))}
            yield Line(step, of, "number", label(name), shown, event=observation.event)
    elif isinstance(observation, RandomState):
        state = observation.state
        data = state.encode() if isinstance(state, str) else state
        digest = hashlib.sha256(data).hexdigest()[:32]
        yield Line(step, of, "random", label(observation.owner), {"state": digest})
    else:
        raise ReplayFailed(
            f"expected Tensors, Samples, Numbers or RandomState, found "
            f"{type(observation).__name__}; observe with what "
            "shiftbook.verify.replay.protocol offers"
        )


def _tensor_lines(
    step: int, of: str, seen: Tensors, keep: Path | None, number: int
) -> Iterator[Line]:
    from shiftbook.checkpoint.compare import root
    from shiftbook.checkpoint.kept_tensors import describe
    from shiftbook.checkpoint.kept_tensors import keep as keep_tensor

    prints: dict[str, str] = {}
    for offset, (name, tensor) in enumerate(seen.tensors.items()):
        kept = None
        if keep is not None:
            kept = str(keep / f"{number + offset:07d}.npy")
            keep_tensor(tensor, Path(kept))
        fields = describe(tensor)
        prints[name] = fields["fingerprint"]
        yield Line(
            step,
            of,
            "tensor",
            label(f"{seen.name}/{name}"),
            fields,
            not seen.each,
            kept,
            seen.event,
        )
    fields = {"tensors": str(len(prints)), "root": root(prints)}
    yield Line(step, of, "root", label(seen.name), fields, event=seen.event)
