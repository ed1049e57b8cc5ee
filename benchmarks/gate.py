"""Time all events of one reallocation through the gate, on SQLite with synchronous=FULL.

Run: ``python benchmarks/gate.py [--moves N] [--directory DIR]``. A reallocation is the window it
was decided on, the proposal, the grant, four steps and the realised gain: eight events in eight
durable appends, each decided under the append lock. Beside it stands a bare ``sqlite3`` that
inserts and commits the same bytes. Bound: 10 ms, median.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

from shiftbook.ledger.events.job import Edge, ElasticRange, JobOpened
from shiftbook.ledger.events.observation import ComponentWindow, WindowObserved
from shiftbook.ledger.events.reallocation import (
    Candidate,
    Custody,
    GainRealized,
    Interval,
    Strategy,
)
from shiftbook.ledger.gate import Gate, Proposal
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, UpdatePlan
from shiftbook.ledger.topology import Device, Topology

BOUND_MS = 10.0
COMPONENTS = ("rollout", "inference", "tool", "trainer")
DEVICES = tuple(f"node/{index}" for index in range(8))
PLACES = (
    Topology.of({"rollout": list(DEVICES[:5]), "trainer": list(DEVICES[5:]), "inference": []}),
    Topology.of({"rollout": list(DEVICES[:3]), "trainer": list(DEVICES[3:]), "inference": []}),
)
FINGERPRINTS = {f"layer.{index}.weight": f"{index:032x}" for index in range(24)}


def job() -> JobOpened:
    """A job of four components on eight devices."""
    return JobOpened(
        components=COMPONENTS,
        edges=(Edge(source="rollout", target="trainer"),),
        devices=tuple(Device(name=name) for name in DEVICES),
        topology=PLACES[0],
        elastic={
            name: ElasticRange(minimum=0, maximum=len(DEVICES))
            for name in ("rollout", "trainer", "inference")
        },
        plan=Plan(
            seed=1,
            iterations=10,
            data=DataPlan(
                dataset_digest="d",
                tokenizer_digest="t",
                dataset_size=4096,
                sampler_rule="permutation",
                seed=1,
            ),
            sampling=SamplingPlan(),
            update=UpdatePlan(
                prompts_per_update=64, group_size=8, virtual_ranks=4, learning_rate=1e-6
            ),
        ),
        job_path="benchmarks.gate:job",
    )


def window() -> WindowObserved:
    """What the planner saw."""
    seen = ComponentWindow(
        replicas=3, throughput=12.5, queue=40, running=24, waiting=16, busy_share=0.93, kv_use=0.4
    )
    return WindowObserved(
        attempt="a1",
        iteration=1,
        start_ns=time.time_ns(),
        window_s=1.0,
        components=dict.fromkeys(COMPONENTS, seen),
    )


def proposal(gate: Gate, after: Topology, position: int) -> Proposal:
    """A move with five candidates."""
    plan = gate.ledger.state().job("bench").plan
    assert plan is not None
    strategy: Strategy = "pause"
    candidate = Candidate(
        after=after,
        strategy=strategy,
        predicted_end_s=30.0,
        predicted_gain_s=4.0,
        predicted_cost_s=1.0,
        probability=0.9,
    )
    return Proposal(
        after=after,
        strategy=strategy,
        sees=plan.view(),
        candidates=(candidate,) * 5,
        bottleneck_before="rollout",
        bottleneck_after="trainer",
        predicted_throughput=20.0,
        predicted_gain_s=4.0,
        gain_interval=Interval(low=1.0, high=7.0),
        predicted_cost_s=1.0,
        horizon_s=30.0,
        model_version=1,
        window=position,
    )


def reallocate(gate: Gate, number: int) -> None:
    """Every event of one reallocation."""
    seen = gate.ledger.append("bench", window())
    after = PLACES[(number + 1) % 2]
    operation = gate.propose("bench", proposal(gate, after, seen.first))
    grant = gate.grant("bench", operation)
    custody = [
        Custody(
            replica=f"rollout-node.{index}",
            incarnation="1",
            requests=tuple(f"{index}/{member}#2" for member in range(8)),
            partial_tokens=512,
            receiver="queue",
        )
        for index in range(3)
    ]
    gate.quiesced(grant, custody, kv_tokens_lost=100, quiesce_s=0.05)
    gate.transferred(grant, moved_bytes=1 << 20, transfer_s=0.2, parts={"weights": 1 << 20})
    gate.verified(grant, FINGERPRINTS, FINGERPRINTS)
    gate.committed(
        grant, moved_bytes=1 << 20, stall_s=0.4, kv_tokens_lost=100, stalls={"rollout": 0.4}
    )
    gate.gain_realized(
        "bench",
        operation,
        GainRealized(
            baseline_window_s=1.0,
            observed_window_s=1.0,
            raw_gain_s=3.0,
            counterfactual="remaining units at the rate before",
            counterfactual_end_s=30.0,
            observed_end_s=27.0,
            adjusted_gain_s=3.0,
            interval=Interval(low=2.0, high=4.0),
            device_s_before=1.0,
            device_s_after=1.0,
            predicted_gain_s=4.0,
        ),
    )


def bare(path: Path, ledger: Ledger, moves: int) -> list[float]:
    """Milliseconds of a bare insert and commit of the same bytes, move by move."""
    events = [stored.data for stored in ledger.read()][3:]
    each = len(events) // moves
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE events (position INTEGER PRIMARY KEY, data BLOB)")
    times_ms = []
    for number in range(moves):
        begun_s = time.perf_counter()
        for data in events[number * each : (number + 1) * each]:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO events (data) VALUES (?)", (data,))
            connection.execute("COMMIT")
        times_ms.append((time.perf_counter() - begun_s) * 1e3)
    connection.close()
    return times_ms


def main() -> int:
    """Run, print, and say by the exit code whether the bound holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--directory", type=Path, default=None, help="where the files are made")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as folder,
        Ledger.open(f"sqlite:///{folder}/book.db") as ledger,
    ):
        gate = Gate(ledger, by="bench")
        gate.open_job("bench", job())
        gate.start_attempt(
            "bench",
            "a1",
            parent=None,
            bundle=None,
            iteration=0,
            topology=PLACES[0],
            policy_version=0,
            policy_fingerprint="0" * 32,
            pid=1,
        )
        times_ms = []
        for number in range(options.moves):
            begun_s = time.perf_counter()
            reallocate(gate, number)
            times_ms.append((time.perf_counter() - begun_s) * 1e3)
        events = ledger.head().size - 3
        bare_ms = statistics.median(bare(Path(folder) / "bare.db", ledger, options.moves))
    median_ms = statistics.median(times_ms)
    p99_ms = sorted(times_ms)[int(0.99 * len(times_ms))]
    print(f"moves {options.moves}, events a move {events / options.moves:g}")
    print(f"one reallocation: median {median_ms:.2f} ms, p99 {p99_ms:.2f} ms")
    print(f"bare sqlite3, the same bytes: median {bare_ms:.2f} ms, {median_ms / bare_ms:.1f} x")
    print(f"ratio to the bound of {BOUND_MS:g} ms: {median_ms / BOUND_MS:.2f} (at most 1)")
    return 0 if median_ms <= BOUND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
