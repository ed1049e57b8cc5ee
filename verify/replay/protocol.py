"""What a job offers so that it can be run again: its conditions, and what it observes per step.

A TARGET is ``package.module:attribute`` (or ``file.py:attribute``). The attribute is an object with
the members of ``ReplayJob``, such as a ``Job``, or a function that takes ``config`` (a mapping or
None) and returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Equality = Literal["bits", "tolerance"]

_COMPONENT: ContextVar[str] = ContextVar("shiftbook_replay_component", default="")


@contextmanager
def component(name: str) -> Iterator[None]:
    """Say which component computes inside the block, so that ``--bisect`` can name it."""
    token = _COMPONENT.set(name)
    try:
        yield
    finally:
        _COMPONENT.reset(token)


def current_component() -> str:
    """The component whose block is running; empty outside of all."""
    return _COMPONENT.get()


@dataclass(frozen=True, slots=True)
class Start:
    """A bundle that a run begins with, as the ledger has it: where it lies and its id.
    ``iteration`` is the number of the first step to run, ``cursor`` the draw ordinal of its first
    sample."""

    path: str
    bundle: str
    iteration: int
    policy_version: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a job is run. ``moves`` is the seed of moves drawn at random between and within steps;
    None means that nothing moves. With a ``start`` the run begins there, and steps are numbered on
    from its iteration. The result should depend on ``seed``, ``steps`` and ``start`` alone."""

    seed: int
    steps: int
    schedule: str
    workers: Mapping[str, int] = field(default_factory=dict)
    moves: int | None = None
    start: Start | None = None

    def text(self) -> str:
        """As one line for people."""
        workers = ",".join(f"{name}={count}" for name, count in sorted(self.workers.items()))
        moves = "none" if self.moves is None else f"random:{self.moves}"
        return (
            f"seed={self.seed} steps={self.steps} schedule={self.schedule} "
            f"workers={workers or 'as-written'} moves={moves}"
            + ("" if self.start is None else f" from={self.start.iteration}")
        )


@dataclass(frozen=True, slots=True)
class Tensors:
    """Named tensors of a component: numpy arrays or torch tensors, as they are at this moment.

    ``each`` false puts their common root alone into golden traces, to keep those short. ``event``,
    here and below, is the position of what says so in the run's own ledger, where it writes one.
    """

    component: str
    name: str
    tensors: Mapping[str, Any]
    each: bool = True
    event: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample by its uid; digests as in ``shiftbook.ledger.digests``."""

    uid: str
    tokens: str
    logps: str | None = None
    reward: float | None = None
    event: int | None = None
    reward_event: int | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples that a component made, each known by its uid; their order does not matter."""

    component: str
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Named numbers of a component, such as a loss."""

    component: str
    values: Mapping[str, float]
    event: int | None = None


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of one random stream: its owner, and the state as bytes, text or tensor bytes."""

    component: str
    owner: str
    state: bytes | str


Observation = Tensors | Samples | Numbers | RandomState


@dataclass(frozen=True, slots=True)
class Step:
    """What one step showed, in the order in which data flowed: the first difference is the one to
    look at."""

    number: int
    observations: Sequence[Observation]


class ReplayJob(Protocol):
    """A job that can be run again."""

    @property
    def seed(self) -> int:
        """Seed where none is asked for."""

    @property
    def steps(self) -> int:
        """Steps where none are asked for; few, so that a run takes seconds."""

    @property
    def schedules(self) -> Sequence[str]:
        """Schedules that it can follow; the first is the one that others are held against."""

    @property
    def workers(self) -> Mapping[str, Sequence[int]]:
        """Worker counts that it can have, by component; the first is the reference."""

    @property
    def movable(self) -> bool:
        """True when it can make moves drawn by a seed."""

    @property
    def equality(self) -> Equality:
        """``bits`` when it promises the same bits; else ``tolerance``, which is measured."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that its process must start with."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What else its result depends on, as JSON can hold it."""

    def run(self, conditions: Conditions) -> Iterator[Step]:
        """Run from the beginning, or from the bundle of ``conditions.start`` where the job has a
        true member ``restorable``; yields each step once it is done."""


@dataclass(frozen=True)
class Job:
    """A job from a function ``run(conditions)`` that yields steps."""

    run: Callable[[Conditions], Iterator[Step]]
    seed: int = 0
    steps: int = 2
    schedules: Sequence[str] = ("as-written",)
    workers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    movable: bool = False
    equality: Equality = "bits"
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    restorable: bool = False
    """True when it can begin at ``conditions.start``: what a shadow of a live run needs."""
    partial: Sequence[str] = ()
    """Schedules under which it shows less than under the first one: what it leaves out is told, and
    is no divergence."""


def shows_all(job: ReplayJob, schedule: str) -> bool:
    """False under a schedule of which the job says that it shows a part alone."""
    return schedule not in getattr(job, "partial", ())


def state_bytes(state: Any) -> bytes:
    """The state of Python's ``random``, of numpy's or torch's generator, as bytes for
    ``RandomState``."""
    if hasattr(state, "numpy"):  # a torch tensor
        state = state.numpy()
    if hasattr(state, "tobytes"):
        return bytes(state.tobytes())
    return repr(state).encode()
