"""Goal: what goes wrong in a job on Ray without anybody noticing is named by the judge.

Method: the reference job runs on a cluster whose parts have one fault each (``divergent.py``),
outside of what they record. The job must end as if nothing had been, and the verdict must name the
fault by an invariant that is about it; a fault that the gate can see must be refused by it instead.
A judge that follows a live job must freeze it, and the job must train on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.topology import Topology
from shiftbook.verify.guard import Guard
from shiftbook.verify.verdict import follow
from tests.one_cluster import OneCluster
from tests.scheduler.conftest import OnRay
from tests.scheduler.divergent import FAULT_FILE
from tests.scheduler.test_faults import (
    in_training,
    kill_an_engine_in_a_move,
    propose_until,
)
from tests.scheduler.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SIZE = {"iterations": 3, "groups": 4}
NAMED_BY = {
    "sync-not-loaded": "I8",
    "old-version-said": "I13",
    "optimizer-lost-after-load": "I17",
    "masters-overwritten": "I17",
    "step-applied-twice": "I17",
    "published-from-other-weights": "I6",
    "stale-part-in-bundle": "I17",
    "reward-slips-by-one": "I12",
    "tokens-changed-before-training": "I11",
    "members-swapped": "I11",
    "a-sample-twice": "I10",
    "sampler-restarts": "I2",
    "sampler-skips": "I2",
    "sampler-of-another-seed": "I3",
    "prompts-of-other-indices": "I4",
    "cache-not-flushed": "I7",
    "members-share-a-stream": "I9",
    "model-not-published": "I22",
    "kl-left-out": "I26",
    "rate-not-used": "recomputed",
}
"""Fault to the invariant that has to name it, others may as well."""


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the processes of the cluster read their fault."""
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT_FILE, str(path))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield path


@pytest.fixture(scope="module")
def faulty_cluster(
    one_cluster: OneCluster, fault_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A cluster whose workers and loops are those of ``divergent.py``."""
    from shiftbook.jobs import config, loop
    from shiftbook.jobs.runner import Cluster, Place
    from tests.scheduler import divergent

    one_cluster.close()
    with pytest.MonkeyPatch.context() as patch:
        for component, part in (("rollout", "Rollout"), ("trainer", "Trainer")):
            path = f"tests.scheduler.divergent:{part}"
            patch.setitem(config.FACTORIES, component, path)
        patch.setattr(loop, "TrainingLoop", divergent.Loop)
        with Cluster(Place(tmp_path_factory.mktemp("faulty")), 2) as cluster:
            cluster.warm()
            yield cluster


@pytest.fixture
def on_faulty(faulty_cluster: Any, fault_file: Path, tmp_path: Path) -> Iterator[OnRay]:
    jobs = OnRay(tmp_path, faulty_cluster)
    yield jobs
    fault_file.write_text("none")
    jobs.close()


def test_without_a_fault_the_verdict_is_clean(on_faulty: OnRay) -> None:
    on_faulty.run("honest", schedule="static", **SIZE)
    verdict = on_faulty.verdict("honest")
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not


@pytest.mark.parametrize("fault", NAMED_BY)
def test_a_fault_is_named(on_faulty: OnRay, fault_file: Path, fault: str) -> None:
    fault_file.write_text(fault)
    status = on_faulty.run(fault, schedule="static", **SIZE)
    assert status["error"] is None, "the job must not notice"
    verdict = on_faulty.verdict(fault)
    named = {(finding.invariant, finding.severity) for finding in verdict.findings}
    print(fault, sorted(named))
    assert verdict.exit_code == 1
    assert (NAMED_BY[fault], "stop") in named


def test_a_reshard_that_loses_state_is_refused(on_faulty: OnRay, fault_file: Path) -> None:
    """Fingerprints at the target differ from those at the source: the move is rolled back."""
    fault_file.write_text("optimizer-lost-in-reshard")
    first, last = on_faulty.devices
    both = {"tool": [], "inference": [first, last], "trainer": [first, last]}
    running = on_faulty.start("lossy", schedule="dynamic", proposer="operator", **SIZE)
    in_training(on_faulty, "lossy")
    state = on_faulty.ledger.state
    # The first update gives the optimizer something that can be lost.
    until(lambda: state().job("lossy").iteration > 0, 60)

    def refused() -> bool:
        moves = state().job("lossy").operations.values()
        return any(move.status == "rolled_back" for move in moves)

    propose_until(on_faulty, "lossy", Topology.of(both | {"rollout": [first]}), refused)
    running.wait(120)
    running.end()
    assert refused()
    verdict = on_faulty.verdict("lossy")
    assert verdict.exit_code == 0, [f.plain() for f in verdict.findings] or verdict.could_not


@pytest.mark.parametrize("boundary", ["quiesced", "verified"])
def test_an_engine_that_recovery_brought_up_with_another_policy_is_named(
    on_faulty: OnRay, fault_file: Path, boundary: str
) -> None:
    """A move died half-way; what its engine says when it is there again is judged as in a sync."""
    job = f"recovered-{boundary}"
    running = on_faulty.start(job, schedule="dynamic", proposer="operator", **SIZE)
    in_training(on_faulty, job)
    # Only processes that begin from here on have the fault.
    fault_file.write_text("another-policy-after-recovery")
    operation, replica = kill_an_engine_in_a_move(on_faulty, job, boundary)
    running.wait(120)
    running.end()
    verdict = on_faulty.verdict(job)
    probes = list(on_faulty.ledger.read(job=job, operation=operation, types={"LogProbsReplayed"}))
    assert [stored.body["replica"] for stored in probes] == [replica]
    named = {
        (f.invariant, f.severity) for f in verdict.findings if f.position == probes[0].position
    }
    assert named == {("I16", "stop")}


def test_a_followed_job_is_frozen_and_trains_on(on_faulty: OnRay, fault_file: Path) -> None:
    fault_file.write_text("step-applied-twice")
    job, ledger = "followed", on_faulty.ledger
    running = on_faulty.start(job, schedule="dynamic", iterations=8, groups=8, random_moves=5)
    in_training(on_faulty, job)
    verdicts: list[Any] = []

    def judge() -> None:
        with Ledger.open(on_faulty.place.ledger_url, create=False) as guarded:
            guard = Guard(guarded)
            verdicts.append(
                follow(
                    on_faulty.place.ledger_url,
                    job,
                    stop=threading.Event(),
                    poll_s=0.02,
                    on_finding=guard.on_finding,
                )
            )

    judging = threading.Thread(target=judge, daemon=True)
    judging.start()
    until(lambda: ledger.state().job(job).safe_mode is not None, 90)
    iteration = ledger.state().job(job).iteration
    until(lambda: ledger.state().job(job).iteration > iteration + 1, 60)
    gate = Gate(ledger, by="operator")
    with pytest.raises(InvalidInput):
        gate.thaw(job, by="operator:ada", reason=" ")
    gate.thaw(job, by="operator:ada", reason="the second step was looked at")
    running.wait(120)
    running.end()
    judging.join(60)

    events = list(ledger.read(job=job))
    entered = next(e for e in events if e.type == "SafeModeEntered")
    left = next(e for e in events if e.type == "SafeModeLeft")
    flag = next(e for e in events if e.type == "DivergenceFlagged")
    assert entered.body["by"] == "verifier"
    assert flag.body["invariant"] in {"I8", "I17"}
    assert left.body["by"] == "operator:ada"
    assert left.body["reason"]
    windows = [e for e in events if e.type == "WindowObserved"]
    late = [w for w in windows if flag.body["at"] < w.position < entered.position]
    assert len(late) <= 1, "frozen within one window"
    between = {e.type for e in events if entered.position < e.position < left.position}
    assert "WeightSyncCommitted" in between
    assert "UpdateApplied" in between
    # A move that had quiesced ends; no other one begins.
    assert "ReallocationGranted" not in between
    assert [verdict.exit_code for verdict in verdicts] == [1]
