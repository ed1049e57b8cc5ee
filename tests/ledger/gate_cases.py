"""Jobs, proposals and clocks that the tests of the gate share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shiftbook.ledger.events.job import Edge, ElasticRange, JobOpened
from shiftbook.ledger.events.reallocation import Candidate, GainRealized, Interval
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.events.sync import WeightSyncStarted
from shiftbook.ledger.gate import Gate, Proposal
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, MovePlan, Plan, SamplingPlan, UpdatePlan
from shiftbook.ledger.topology import Device, Topology

FINGERPRINT = "0" * 31 + "1"
OTHER_FINGERPRINT = "f" * 32
BUNDLE = "ab" * 32

HALF = Topology.of({"rollout": ["n/0"], "trainer": ["n/1"], "tool": []})
WIDE = Topology.of({"rollout": ["n/0", "n/1"], "trainer": ["n/1"], "tool": []})
TRAIN = Topology.of({"rollout": [], "trainer": ["n/0", "n/1"], "tool": []})


@dataclass
class Clock:
    """A boot clock and a wall clock that the test moves."""

    boot_s: float = 1000.0
    wall_ns: int = 1_700_000_000_000_000_000

    def boottime_s(self) -> float:
        return self.boot_s

    def now_ns(self) -> int:
        return self.wall_ns

    def forward(self, seconds: float) -> None:
        self.boot_s += seconds
        self.wall_ns += int(seconds * 1e9)


def plan(**moves: Any) -> Plan:
    """A plan whose moves cost nothing to try."""
    return Plan(
        seed=7,
        iterations=10,
        data=DataPlan(
            dataset_digest="d",
            tokenizer_digest="t",
            dataset_size=64,
            sampler_rule="permutation",
            seed=7,
        ),
        sampling=SamplingPlan(),
        update=UpdatePlan(prompts_per_update=8, group_size=4, virtual_ranks=4, learning_rate=1e-3),
        moves=MovePlan(**{"step_limit_s": 20.0, **moves}),
    )


def opened(
    devices: tuple[str, ...] = ("n/0", "n/1"), topology: Topology = HALF, **moves: Any
) -> JobOpened:
    """A job of three components; the tool takes no device."""
    return JobOpened(
        components=("rollout", "trainer", "tool"),
        edges=(Edge(source="rollout", target="trainer"),),
        devices=tuple(Device(name=name) for name in devices),
        topology=topology,
        elastic={
            "rollout": ElasticRange(minimum=0, maximum=4),
            "trainer": ElasticRange(minimum=0, maximum=4),
        },
        plan=plan(**moves),
        job_path="jobs.reference:job",
    )


def start(gate: Gate, job: str = "j", attempt: str = "a1", topology: Topology = HALF) -> Grant:
    """Start an attempt of a job that is open."""
    return gate.start_attempt(
        job,
        attempt,
        parent=None,
        bundle=None,
        iteration=0,
        topology=topology,
        policy_version=0,
        policy_fingerprint=FINGERPRINT,
        pid=1,
    )


def running(gate: Gate, job: str = "j", **moves: Any) -> Grant:
    """Open a job and start its first attempt."""
    gate.open_job(job, opened(**moves))
    return start(gate, job)


def bundle(attempt: str = "a1", policy_version: int = 0, digest: str = BUNDLE) -> CheckpointSaved:
    """A durable bundle."""
    return CheckpointSaved(
        attempt=attempt,
        bundle=digest,
        path="bundles/0",
        iteration=policy_version,
        policy_version=policy_version,
        parts={"params": FINGERPRINT},
        cursor=0,
        bytes=10,
        save_s=0.1,
    )


def proposal(after: Topology = WIDE, **changes: Any) -> Proposal:
    """A move that every rule of ``plan()`` allows."""
    made = Proposal(
        after=after,
        strategy="pause",
        sees=plan().view(),
        candidates=(
            Candidate(
                after=after,
                strategy="pause",
                predicted_end_s=10.0,
                predicted_gain_s=5.0,
                predicted_cost_s=1.0,
                probability=0.9,
                chosen=True,
            ),
        ),
        bottleneck_before="rollout",
        bottleneck_after="trainer",
        predicted_throughput=3.0,
        predicted_gain_s=5.0,
        gain_interval=Interval(low=2.0, high=8.0),
        predicted_cost_s=1.0,
        horizon_s=30.0,
        model_version=3,
        owed={"rollout": 0, "trainer": 0, "tool": 0},
    )
    return replace(made, **changes)


def gain(adjusted_s: float) -> GainRealized:
    """What a move brought."""
    return GainRealized(
        baseline_window_s=1.0,
        observed_window_s=1.0,
        raw_gain_s=adjusted_s,
        counterfactual="same tokens at the speed before",
        counterfactual_end_s=10.0,
        observed_end_s=10.0 - adjusted_s,
        adjusted_gain_s=adjusted_s,
        interval=Interval(low=adjusted_s - 1, high=adjusted_s + 1),
        device_s_before=1.0,
        device_s_after=1.0,
        predicted_gain_s=5.0,
    )


def sync_started(grant: Grant, version: int = 1) -> WeightSyncStarted:
    """A weight sync under a standing grant."""
    return WeightSyncStarted(
        attempt=grant.operation,
        version=version,
        source={"w": FINGERPRINT},
        source_root=FINGERPRINT,
        encoding="full",
        targets=("rollout-n.0",),
        epoch=grant.epoch,
    )


def advance(gate: Gate, grant: Grant, upto: str) -> Grant:
    """Take a granted move forward to a status."""
    for status in ("quiesced", "transferred", "verified", "committed"):
        step(gate, grant, status)
        if status == upto:
            break
    return grant


def step(gate: Gate, grant: Grant, status: str) -> Any:
    """Take one named step of a move."""
    if status == "quiesced":
        return gate.quiesced(grant, [], kv_tokens_lost=0, quiesce_s=0.1)
    if status == "transferred":
        return gate.transferred(grant, moved_bytes=5, transfer_s=0.1, parts={"weights": 5})
    if status == "verified":
        return gate.verified(grant, {"p": FINGERPRINT}, {"p": FINGERPRINT})
    if status == "committed":
        return gate.committed(
            grant, moved_bytes=5, stall_s=0.2, kv_tokens_lost=0, stalls={"rollout": 0.2}
        )
    if status == "rolled_back":
        before = gate.ledger.state().job(grant.job).operations[grant.operation].before
        return gate.rolled_back(grant, "test", before)
    if status == "poisoned":
        return gate.poisoned(grant, "test")
    raise AssertionError(f"no step {status}")


def open_gate(url: str, clock: Clock | None = None, *, by: str = "gate") -> Gate:
    """A gate on a ledger."""
    clock_ = clock or Clock()
    ledger = Ledger.open(url, now_ns=clock_.now_ns)
    return Gate(ledger, by=by, boottime_s=clock_.boottime_s, now_ns=clock_.now_ns)


def await_(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until a condition holds; fail after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s"
        time.sleep(0.002)


class FileMover:
    """A small cluster that lives in a file, so it survives the process that moves it.

    The file holds where processes stand and whether they take work. ``broken`` makes every act
    of the mover fail; ``log`` keeps what it was asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = False
        self.failures = 0
        self.log: list[str] = []

    @classmethod
    def create(cls, path: Path, topology: Topology) -> FileMover:
        mover = cls(path)
        mover.write(topology, working=True)
        return mover

    def write(self, topology: Topology, *, working: bool) -> None:
        """Change the cluster at once, as ``os.replace`` does."""
        text = json.dumps({"topology": topology.model_dump(mode="json"), "working": working})
        new = self.path.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(self.path)

    def _read(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return value

    def working(self) -> bool:
        """True when the processes take work."""
        return bool(self._read()["working"])

    def inspect(self) -> Topology:
        return Topology.model_validate(self._read()["topology"])

    def restore(self, topology: Topology, grant: Grant) -> None:
        self._act("restore", topology)

    def finish(self, topology: Topology, grant: Grant) -> None:
        self._act("finish", topology)

    def _act(self, name: str, topology: Topology) -> None:
        self.log.append(name)
        if self.broken:
            raise OSError(f"{name}: the cluster does not answer")
        if self.failures:
            self.failures -= 1
            raise OSError(f"{name}: a hiccup")
        self.write(topology, working=True)

    def close(self) -> None:
        self.log.append("close")


WORLD_FOLDER = "SHIFTBOOK_TEST_WORLD"
"""Environment variable that names the folder of clusters, for child processes too."""


def world_path(ledger: Ledger) -> Path:
    """Where the cluster of a ledger's job is kept."""
    if ledger.path is not None:
        return Path(ledger.path).with_suffix(".world.json")
    return Path(os.environ[WORLD_FOLDER]) / "world.json"


def open_file_mover(ledger: Ledger, job: str) -> FileMover:
    """Mover of the cluster beside a ledger, found by its name by recovery."""
    return FileMover(world_path(ledger))


FILE_MOVER = "tests.ledger.gate_cases:open_file_mover"

BETWEEN = Topology.of({"rollout": ["n/0"], "trainer": [], "tool": []})
"""Where processes stand in the middle of the move from HALF to WIDE."""


class Process:
    """A child that runs ``gate_process.py`` and is spoken to line by line."""

    def __init__(self, *arguments: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.ledger.gate_process", *arguments],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self._in, self._out = self.child.stdin, self.child.stdout

    @property
    def pid(self) -> int:
        return self.child.pid

    def send(self, **message: Any) -> None:
        """Write one line."""
        self._in.write(json.dumps(message) + "\n")
        self._in.flush()

    def receive(self) -> dict[str, Any]:
        """Read one line; fails where the child has ended."""
        line = self._out.readline()
        assert line, f"the child ended with {self.child.wait()}"
        value: dict[str, Any] = json.loads(line)
        return value

    def ask(self, **message: Any) -> dict[str, Any]:
        """Write a line and read the answer."""
        self.send(**message)
        return self.receive()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *details: object) -> None:
        self.child.kill()
        self.child.wait()
        self._in.close()
        self._out.close()
