"""Goal: a job whose ledger's server is gone trains on, moves nothing, and loses no record.

Method: a real PostgreSQL server is stopped in the middle of a job on Ray, at any time and between
two steps of a reallocation, and started again 30 s later. The job must end with the samples and
the policy of a run that nobody disturbed; all records must stand once and in order of each writer,
the outage among them; and the verdict must be clean.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.dialect import side_path
from shiftbook.ledger.events import reallocation
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.sync import WeightSyncCommitted
from shiftbook.ledger.topology import Topology
from tests.one_cluster import OneCluster
from tests.postgres_server import PostgresServer, running_server
from tests.scheduler.conftest import OnRay
from tests.scheduler.test_faults import in_training, propose_until
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SIZE = {"iterations": 8, "groups": 8}
OUTAGE_S = 30.0
OUTAGE = {"LedgerUnreachable", "LedgerRestored"}
MOVES = {name for name in vars(reallocation) if name.startswith("Reallocation")}
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def on_postgres(
    ray_cluster: Any, server: PostgresServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[OnRay]:
    name = "".join(c if c.isalnum() else "_" for c in request.node.name.lower())
    jobs = OnRay(tmp_path, ray_cluster, url=server.url(name[:50]))
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def undisturbed(
    one_cluster: OneCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Any]:
    jobs = OnRay(tmp_path_factory.mktemp("undisturbed"), one_cluster.shared())
    jobs.run("calm", schedule="static", **SIZE)
    record = jobs.record("calm")
    jobs.close()
    return record


def ends_well(on_postgres: OnRay, job: str, undisturbed: dict[int, Any]) -> None:
    running = on_postgres.running[-1]
    running.wait(LIMIT_S)
    running.end()
    assert on_postgres.record(job) == undisturbed
    stands_once_and_clean(on_postgres, job)


def stands_once_and_clean(on_postgres: OnRay, job: str) -> None:
    verdict = on_postgres.verdict(job)
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not
    events = list(on_postgres.ledger.read())
    assert [e.position for e in events] == list(range(len(events)))
    by_writer: dict[str, list[int]] = {}
    for event in events:
        by_writer.setdefault(event.writer, []).append(event.sequence)
    for writer, sequences in by_writer.items():
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences))), writer
    # What happened first stands first, for each writer that spools; the outage frames the others.
    times: dict[str, list[int]] = {}
    for event in events:
        if event.writer.startswith("spool-") and event.type not in OUTAGE:
            times.setdefault(event.writer, []).append(event.occurred_ns)
    assert times
    for writer, found in times.items():
        assert found == sorted(found), writer
    batches = [keyed for keyed, _ in groupby((e.job, e.key) for e in events if e.key is not None)]
    assert len(batches) == len(set(batches)), "each key is one batch"


def inside(
    on_postgres: OnRay, window: tuple[int, int], types: type[Event] | tuple[type[Event], ...]
) -> list[str]:
    """Events of some kinds that say of themselves that they happened in a time."""
    return [
        event.type
        for event in on_postgres.ledger.read()
        if window[0] <= event.occurred_ns <= window[1] and isinstance(event.parsed(), types)
    ]


def nothing_moved_and_syncs_went_on(on_postgres: OnRay, window: tuple[int, int]) -> None:
    moves = tuple(kind for name, kind in vars(reallocation).items() if name in MOVES)
    assert not inside(on_postgres, window, moves)
    assert inside(on_postgres, window, WeightSyncCommitted), "weight syncs go on"


def says_that_it_was_away(on_postgres: OnRay) -> None:
    types = [event.type for event in on_postgres.ledger.read()]
    assert set(types) >= OUTAGE


@pytest.mark.first
def test_training_goes_on_without_the_server(
    on_postgres: OnRay, server: PostgresServer, undisturbed: dict[int, Any]
) -> None:
    job = "in-the-dark"
    running = on_postgres.start(job, schedule="dynamic", **SIZE)
    in_training(on_postgres, job)
    until(lambda: on_postgres.ledger.state().job(job).iteration >= 1, 60)
    server.stop("fast")
    went_s, went_ns = time.monotonic(), time.time_ns()
    try:
        done = len((running.status() or {})["iterations"])
        until(lambda: len((running.status() or {})["iterations"]) > done + 1, OUTAGE_S)
        assert time.monotonic() - went_s < OUTAGE_S, "two iterations and their syncs in the dark"
        topology = {r: s["state"] for r, s in on_postgres.statuses().items()}
        until(lambda: time.monotonic() - went_s >= OUTAGE_S, OUTAGE_S + 1)
        now = {r: s["state"] for r, s in on_postgres.statuses().items()}
        if (running.status() or {})["phase"] == "training":
            assert now == topology, "nothing moves"
    finally:
        came_ns = time.time_ns()
        server.start()
    ends_well(on_postgres, job, undisturbed)
    says_that_it_was_away(on_postgres)
    nothing_moved_and_syncs_went_on(on_postgres, (went_ns, came_ns))


def test_the_loop_dies_while_its_records_are_spooled(
    on_postgres: OnRay, server: PostgresServer, undisturbed: dict[int, Any]
) -> None:
    job = "dies-in-the-dark"
    running = on_postgres.start(job, schedule="static", **SIZE)
    in_training(on_postgres, job)
    until(lambda: on_postgres.ledger.state().job(job).iteration >= 1, 60)
    server.stop("immediate")
    try:
        done = len((running.status() or {})["iterations"])
        until(lambda: len((running.status() or {})["iterations"]) > done, OUTAGE_S)
        pid = (running.status() or {})["pid"]
        os.kill(pid, signal.SIGKILL)
        # Its next process comes up while the server is still away, and waits for it.
        until(lambda: (running.status() or {}).get("pid") not in (None, pid), 60)
        assert (running.status() or {})["phase"] == "starting"
    finally:
        server.start()
    ends_well(on_postgres, job, undisturbed)
    says_that_it_was_away(on_postgres)
    assert len(on_postgres.ledger.state().job(job).attempts) == 2


def test_a_full_spool_stops_the_training_and_the_same_command_takes_it_up(
    on_postgres: OnRay, server: PostgresServer, undisturbed: dict[int, Any]
) -> None:
    """Nothing is trained that cannot be recorded; what the spool acknowledged is kept."""
    job = "full-in-the-dark"
    disk = side_path(on_postgres.place.ledger_url, ".spool")
    disk.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        running = on_postgres.start(job, schedule="static", **SIZE)
        in_training(on_postgres, job)
        until(lambda: on_postgres.ledger.state().job(job).iteration >= 1, 60)
        server.stop("fast")
        try:
            error = until(lambda: (running.status() or {}).get("error"), 90)
            assert "No space left on device" in error
            assert "make space" in error
            running.end()
        finally:
            server.start()
        larger = ["mount", "-o", "remount,size=64m", str(disk)]
        subprocess.run(larger, check=True, capture_output=True)
        again = on_postgres.start(job, schedule="static", **SIZE)
        again.wait(LIMIT_S)
        again.end()
        found = on_postgres.record(job)
        resumed = list(on_postgres.ledger.read(types={"AttemptStarted"}))[-1].body["iteration"]
        # The end of the iteration at which the spool was full was refused, so it stands nowhere;
        # where its bundle was recorded before that, the next attempt does not make it again.
        assert [number for number, entry in found.items() if "" in entry] in ([], [resumed - 1])
        assert {n: e for n, e in found.items() if "" not in e}.items() <= undisturbed.items()
        assert max(found) == max(undisturbed)
        stands_once_and_clean(on_postgres, job)
        says_that_it_was_away(on_postgres)
        assert len(on_postgres.ledger.state().job(job).attempts) == 2
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_the_outage_begins_between_two_steps_of_a_move(
    on_postgres: OnRay, server: PostgresServer, undisturbed: dict[int, Any]
) -> None:
    import ray

    job = "half-moved"
    running = on_postgres.start(job, schedule="dynamic", proposer="operator", **SIZE)
    in_training(on_postgres, job)
    # A move that holds the whole job at its very beginning leaves nothing to record in an outage.
    until(lambda: on_postgres.ledger.state().job(job).iteration >= 1, 60)
    pid = ray.get(running.controller.status.remote(), timeout=30)["pid"]
    ray.get(running.controller.stop_at.remote("quiesced"), timeout=30)
    first_slot, last_slot = on_postgres.devices[:2]
    after = Topology.of(
        {
            "rollout": [first_slot],
            "tool": [],
            "inference": [first_slot, last_slot],
            "trainer": [first_slot, last_slot],
        }
    )

    def stopped() -> bool:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1]
        return state.split()[0] == "T"

    operation = propose_until(on_postgres, job, after, stopped)
    server.stop("fast")
    went_s = time.monotonic()
    try:
        os.kill(pid, signal.SIGCONT)
        until(lambda: time.monotonic() - went_s >= OUTAGE_S / 3, OUTAGE_S)
    finally:
        server.start()
    until(lambda: not on_postgres.ledger.state().job(job).operations[operation].open, 90)
    status = on_postgres.ledger.state().job(job).operations[operation].status
    assert status in {"rolled_back", "committed", "abandoned"}, status
    ends_well(on_postgres, job, undisturbed)
    says_that_it_was_away(on_postgres)
