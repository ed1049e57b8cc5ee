"""Goal: the reference job runs on vLLM on Ray, and the verifier names what goes wrong there.

Method: small jobs whose rollout process is vLLM. One is moved by an operator: an engine is retired
in mid-generation and brought up again with a later version. The others are static, honest and each
with one fault that is put into the engine from outside (``tests/engines/faulty.py``): a cache that
is not flushed, an engine that reads old weights from disk when it wakes up, loads that break or do
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from shiftbook.jobs.config import GROUP_SIZE
from shiftbook.jobs.errors import JobError
from shiftbook.ledger.job_state import OperationState
from shiftbook.ledger.topology import Topology
from shiftbook.verify.verdict import Verdict
from tests.engines.conftest import JOB_LIMIT_S, TOLERANCE, OnVllm
from tests.engines.marks import VLLM
from tests.scheduler.test_faults import propose
from tests.scheduler.waiting import until

pytestmark = VLLM

SYNC = ["WeightSyncStarted", "WeightSyncDelivered", "LogProbsReplayed", "WeightSyncCommitted"]


def named(verdict: Verdict) -> dict[str, str]:
    """What was found, by invariant."""
    return {finding.invariant: finding.found for finding in verdict.findings}


def bodies(on_vllm: OnVllm, type_: str) -> list[dict[str, Any]]:
    return [stored.body for stored in on_vllm.ledger.read(types={type_})]


def generating(on_vllm: OnVllm, iteration: int) -> bool:
    """Whether most turns of this iteration, or of a later one, are still to be made."""
    import ray

    running = on_vllm.running[-1]
    status = running.status()
    if status is None or status["phase"] != "training":
        return False  # on a slow machine an attempt may end while the engines still start
    telemetry = ray.get(running.loop.telemetry.remote(), timeout=60)
    progress = telemetry["progress"]
    return bool(
        progress
        and telemetry["iteration"] >= iteration
        and progress["turns_done"] > 10
        and progress["outstanding"] > progress["groups"] * GROUP_SIZE // 2
    )


def test_an_honest_job_is_clean_and_its_engine_was_probed(on_vllm: OnVllm) -> None:
    on_vllm.finish("honest")
    verdict = on_vllm.verdict()
    assert named(verdict) == {}
    assert verdict.exit_code == 0
    assert verdict.coverage.row("I16").status == "checked"
    assert verdict.coverage.row("I6").status == "checked"
    opened = bodies(on_vllm, "JobOpened")[0]["plan"]
    assert opened["sampling"]["engine"] == "shiftbook.jobs.vllm_engine"
    assert opened["sampling"]["batch_composition"] == "distribution"
    assert opened["tolerances"] == {"I16": 2e-5}
    assert {b["fingerprint_of"] for b in bodies(on_vllm, "WeightSyncDelivered")} == {"resident"}
    assert all(b["caches_flushed"] == ["prefix"] for b in bodies(on_vllm, "WeightSyncCommitted"))
    gaps = [b["mean_gap"] for b in bodies(on_vllm, "LogProbsReplayed")]
    print(f"{len(gaps)} probes, mean gaps up to {max(gaps):.2g}")
    assert len(gaps) == 3
    # Each sync is one operation, and no sample of a version comes before the end of its sync.
    events = list(on_vllm.ledger.read())
    ended: dict[int, int] = {}
    for started in (e for e in events if e.type == "WeightSyncStarted"):
        steps = [e for e in events if e.operation == started.operation]
        assert [step.type for step in steps] == SYNC
        ended[started.body["version"]] = steps[-1].position
    assert sorted(ended) == [0, 1, 2]
    made = [e for e in events if e.type == "SamplesGenerated"]
    assert len(made) == 2
    assert all(e.position > ended[e.body["policy_version"]] for e in made)


def test_a_device_leaves_an_engine_in_mid_generation_and_comes_back_to_it(on_vllm: OnVllm) -> None:
    """Two moves by an operator: the last slot goes from rollout to the trainer alone, its engine
    retired with turns in hand; an update later it goes back, and the trainer to the other slot."""
    job = "moves"
    on_vllm.begin(job, schedule="dynamic", proposer="operator", iterations=4, groups=16)
    first, last = on_vllm.devices
    apart = Topology.of({"rollout": [first], "tool": [], "inference": [last], "trainer": [last]})
    back = Topology.of(
        {"rollout": [first, last], "tool": [], "inference": [first], "trainer": [first]}
    )
    engine = back.replicas("rollout")[-1].name

    def last_move() -> OperationState:
        return list(on_vllm.ledger.state().job(job).operations.values())[-1]

    def move(iteration: int, after: Topology) -> OperationState:
        """Move in the middle of this iteration's turns. A proposal that comes before the controller
        is there is abandoned: asked again in the middle of the next ones."""
        while True:
            until(lambda: generating(on_vllm, iteration), JOB_LIMIT_S)
            propose(on_vllm, job, after)
            until(lambda: not last_move().open, 60)
            if last_move().status != "abandoned":
                assert last_move().status == "committed"
                return last_move()

    away = move(0, apart)
    status = on_vllm.statuses()[engine]
    assert (status["state"], status["resident_bytes"]) == ("idle", 0)
    updates = len(bodies(on_vllm, "UpdateApplied"))
    returned = move(updates + 1, back)  # by then it has missed a version
    on_vllm.running[-1].wait(JOB_LIMIT_S)
    on_vllm.running[-1].end()

    events = list(on_vllm.ledger.read(job=job))

    def of(operation: str, type_: str) -> Any:
        return next(e for e in events if (e.operation, e.type) == (operation, type_))

    # Retired: what it had begun went back with its tokens, and nothing else was moved.
    custody = {c["replica"]: c for c in of(away.operation, "ReallocationQuiesced").body["custody"]}
    assert custody.keys() == {engine}
    assert custody[engine]["requests"]
    assert custody[engine]["partial_tokens"] > 0
    assert away.strategy == "pause"
    # Brought up: a version that it never had, verified before the process was said to serve it.
    assert returned.strategy == "reshard"
    verified = of(returned.operation, "ReallocationVerified")
    policy = {n: v for n, v in verified.body["after"].items() if n.startswith("rollout/model/")}
    assert policy
    assert policy.items() <= verified.body["before"].items()
    (started,) = (
        e for e in events
        if (e.operation, e.type) == (returned.operation, "ReplicaStarted")
        and e.body["replica"] == engine
    )  # fmt: skip
    later = [e for e in events if e.body.get("replica") == engine and e.position > started.position]
    used, probe = (
        next(e for e in later if e.type == type_)
        for type_ in ("StateFirstUsed", "LogProbsReplayed")
    )
    assert verified.position < started.position
    assert used.body["after"] == "move"
    assert used.body["policy_version"] >= 1
    assert probe.body["version"] == used.body["policy_version"]
    assert 0 < probe.body["mean_gap"] <= TOLERANCE
    assert bodies(on_vllm, "JobOpened")[0]["plan"]["tolerances"] == {"I16": TOLERANCE}
    verdict = on_vllm.verdict()
    assert named(verdict) == {}
    assert verdict.exit_code == 0
    for invariant in ("I6", "I13", "I16", "move-equality"):
        assert verdict.coverage.row(invariant).status == "checked", invariant


def test_a_job_with_salted_caches_and_patched_syncs_is_clean(on_vllm: OnVllm) -> None:
    on_vllm.finish("salted", caches="salt", sync_encoding="patch")
    verdict = on_vllm.verdict()
    assert named(verdict) == {}
    assert verdict.exit_code == 0
    assert verdict.coverage.row("I16").status == "checked"
    (opened,) = bodies(on_vllm, "JobOpened")
    assert opened["plan"]["sampling"]["cache_policy"] == opened["config"]["caches"] == "salt"
    committed = bodies(on_vllm, "WeightSyncCommitted")
    assert [b["caches_flushed"] for b in committed] == [["prefix (salted)"]] * 3
    delivered = bodies(on_vllm, "WeightSyncDelivered")
    assert [b["encoding"] for b in delivered] == ["whole", "patch", "patch"]
    assert all(b["moved_bytes"] < b["full_bytes"] for b in delivered[1:])


def test_an_honest_job_is_clean_where_weights_cannot_be_read(on_vllm: OnVllm) -> None:
    on_vllm.finish("handed", "unreadable")
    verdict = on_vllm.verdict()
    assert named(verdict) == {}
    assert verdict.exit_code == 0
    assert {b["fingerprint_of"] for b in bodies(on_vllm, "WeightSyncDelivered")} == {"handed_over"}
    # A probe at each sync, and one more at the first generation after it.
    assert len(bodies(on_vllm, "LogProbsReplayed")) == 5


def test_a_cache_that_is_not_flushed_is_refused_and_named(on_vllm: OnVllm) -> None:
    with pytest.raises(JobError, match=r"none took it .*probe: log-probabilities differ"):
        on_vllm.finish("cache", "cache-kept")
    verdict = on_vllm.verdict()
    print(named(verdict))
    assert named(verdict).keys() == {"I16"}
    outcomes = [o for b in bodies(on_vllm, "WeightSyncCommitted") for o in b["outcomes"]]
    assert [o["outcome"] for o in outcomes] == ["serving", "failed", "failed"]


def test_an_engine_that_serves_with_a_stale_cache_is_named(on_vllm: OnVllm) -> None:
    on_vllm.finish("served", "cache-kept-and-served")
    verdict = on_vllm.verdict()
    print(named(verdict))
    assert named(verdict).keys() == {"I16"}
    assert all("stale cache" in f.cause for f in verdict.findings)


def test_an_engine_that_reloads_old_weights_on_wake_up_is_named(on_vllm: OnVllm) -> None:
    on_vllm.finish("reload", "reloads-from-disk")
    verdict = on_vllm.verdict()
    print(named(verdict))
    assert "I6" in named(verdict)
    assert any("between their arrival and their first use" in f.cause for f in verdict.findings)


def test_the_same_where_weights_cannot_be_read(on_vllm: OnVllm) -> None:
    on_vllm.finish("unreadable", "reloads-from-disk-unreadable")
    verdict = on_vllm.verdict()
    print(named(verdict))
    assert "I16" in named(verdict)
    assert {b["fingerprint_of"] for b in bodies(on_vllm, "WeightSyncDelivered")} == {"handed_over"}


def test_a_load_that_breaks_is_rolled_back_and_offered_again(on_vllm: OnVllm) -> None:
    on_vllm.finish("breaks", "load-breaks-once")
    assert named(on_vllm.verdict()) == {}
    outcomes = [b["outcomes"][0] for b in bodies(on_vllm, "WeightSyncCommitted")]
    assert [o["outcome"] for o in outcomes] == ["serving", "failed", "serving", "serving"]
    assert (
        "the sender was lost after 11 tensors; it went back to version 0" in outcomes[1]["reason"]
    )


def test_a_load_that_does_nothing_is_refused_and_named(on_vllm: OnVllm) -> None:
    with pytest.raises(JobError, match=r"none took it .*differing"):
        on_vllm.finish("nothing", "load-does-nothing")
    verdict = on_vllm.verdict()
    print(named(verdict))
    assert "I6" in named(verdict)
