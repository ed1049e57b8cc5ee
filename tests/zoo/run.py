"""One run of the zoo's job with something put in, and the verdict on its ledger."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import Verdict, verify
from tests.zoo.job import Job, Shape
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher

PutIn = Callable[[Patcher], None]


@dataclass
class Result:
    """What one run came to and what the judge says."""

    final: str | None
    """Digest of the final state; None where the run stopped with an error."""
    rewards: list[float]
    exit_code: int
    invariants: tuple[str, ...]
    """Those that speak, the earliest first."""
    latency: int | None
    """Events between the fault and the first finding."""
    error: str = ""
    could_not: tuple[str, ...] = ()
    told: tuple[str, ...] = field(default_factory=tuple)
    fired: bool = True
    """False where what was put in never came to act."""

    @property
    def caught(self) -> bool:
        """True when the verdict is not clean."""
        return self.exit_code != 0


def folder() -> Path:
    """A new folder, in memory where the machine has it."""
    fast = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="zoo-", dir=fast if fast.is_dir() else None))


def run(shape: Shape, put_in: PutIn | None = None, *, uncounted: str | None = None) -> Result:
    """Run and judge; everything put in is taken out again.

    With `uncounted`, the final state of the run without it, a run that ends with that state or an
    error is not judged: nobody asks for its verdict.
    """
    torch.set_num_threads(1)
    NOW.reset()
    NOW.notes["seed"] = shape.seed
    place, patcher = folder(), Patcher()
    url = f"sqlite:///{place}/ledger.db"
    final, rewards, error = None, [], ""
    try:
        job = Job(shape, place, url)
        if put_in is not None:
            put_in(patcher)
        try:
            outcome = job.run()
            final, rewards = outcome.final, outcome.rewards
        except Exception as stopped:
            # A fault may stop the job: then it is not silent. The type and place tell how.
            last = traceback.extract_tb(stopped.__traceback__)[-1]
            error = f"{type(stopped).__name__}: {stopped} ({last.name}:{last.lineno})"
        finally:
            patcher.undo()
        if uncounted is not None and final in (None, uncounted):
            return Result(final, rewards, exit_code=0, invariants=(), latency=None, error=error)
        return _judged(verify(url), url, final, rewards, error)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _judged(
    verdict: Verdict, url: str, final: str | None, rewards: list[float], error: str
) -> Result:
    findings = verdict.findings
    latency = None
    fired_ns = NOW.notes.get("fired_ns")
    if findings and fired_ns is not None:
        with Ledger.open(url, read_only=True) as ledger:
            begun = next(
                (e.position for e in ledger.read() if e.occurred_ns >= fired_ns),
                findings[0].position,
            )
        later = [f.position for f in findings if f.position >= begun]
        latency = (later[0] if later else findings[0].position) - begun
    return Result(
        final=final,
        rewards=rewards,
        exit_code=verdict.exit_code,
        invariants=tuple(dict.fromkeys(f.invariant for f in findings)),
        latency=latency,
        error=error,
        could_not=verdict.could_not,
        fired=fired_ns is not None,
        told=tuple(
            f"{f.invariant} at {f.position}: expected {f.expected}; found {f.found}"
            for f in findings[:6]
        ),
    )
