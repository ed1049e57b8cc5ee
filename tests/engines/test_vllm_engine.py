"""Goal: vLLM computes the trainer's own policy, takes versions as one operation, and lies nowhere.

Method: one real vLLM in a Ray actor. Its tokens and log-probabilities are compared with the
reference engine and a plain torch forward; versions are taken in mid-generation; the cache is left
unflushed, a load is torn, weights are unreadable; the record of a run across an update is judged by
the verifier, honest and with wrongly stamped tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.recorder import (
    Consumed,
    Generated,
    Recorder,
    data_digests,
    dataset_digest,
)
from shiftbook.jobs import tokenizer
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.engine_types import TurnRequest, TurnResult
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.probe import Probe, expected_logps
from shiftbook.jobs.task import new_episode
from shiftbook.ledger.events.training import Transform
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, UpdatePlan
from shiftbook.verify.verdict import Verdict, verify
from tests.engines import away
from tests.engines.conftest import TOLERANCE, Call
from tests.engines.marks import VLLM

pytestmark = VLLM

CONFIG = ModelConfig()
EIGHT = 8
"""Prompts of a batch."""
Weights = dict[str, torch.Tensor]


def policy(version: int) -> Weights:
    """The base policy, and others near it."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: (t.float() * (1 + 0.05 * version * torch.rand(t.shape, generator=generator))).to(
            torch.bfloat16
        )
        for name, t in load_policy().items()
    }


def probe(version: int) -> Probe:
    return Probe(expected_logps(policy(version), CONFIG))


def take(call: Call, version: int) -> Any:
    weights = policy(version)
    return call("take", weights, version, probe(version), fingerprint_tensors(weights))


def requests(count: int, first: int = 0) -> list[TurnRequest]:
    return [
        new_episode(0, format_uid(n, 0), n, CONFIG.context).next_request()
        for n in range(first, first + count)
    ]


def by_uid(results: list[TurnResult]) -> dict[str, TurnResult]:
    return {result.uid: result for result in results}


def reference(version: int, wanted: list[TurnRequest]) -> dict[str, TurnResult]:
    engine = TorchEngine(CONFIG, 4)
    engine.load(policy(version), version)
    for request in wanted:
        engine.submit(request)
    found: list[TurnResult] = []
    while engine.running or engine.waiting:
        found += engine.step()
    return by_uid(found)


def replayed(request: TurnRequest, result: TurnResult, stamps: list[int]) -> np.ndarray:
    """Log-probability of each token by a torch forward under the version it is stamped with."""
    return away.replayed(request.context, result, stamps, policy)


def offered(version: int) -> dict[str, Any]:
    """A version as the job sends it to an engine."""
    weights = policy(version)
    prints = {f"model/{name}": value for name, value in fingerprint_tensors(weights).items()}
    return {
        "weights": weights, "version": version, "fingerprints": prints, "probe": probe(version),
    }  # fmt: skip


@pytest.fixture
def engine(engine_process: Call) -> Call:
    engine_process("anew")
    return engine_process


def test_nothing_is_served_before_the_first_verified_version(engine: Call) -> None:
    none = "expected a verified policy version, found none"
    engine("submit", requests(1))
    with pytest.raises(Exception, match=none):
        engine("steps", 1)
    weights, prints = policy(0), fingerprint_tensors(policy(0))
    # A first version that fails leaves nothing to go back to.
    for refused, said in (
        (engine("take", weights, 0, probe(0), fingerprint_tensors(policy(1))), "differing: "),
        (engine("take", weights, 0, probe(1), prints), "probe: log-probabilities differ"),
    ):
        assert refused.failure.startswith(said)
        assert refused.rolled_back_to is None
        with pytest.raises(Exception, match=none):
            engine("steps", 1)
    assert engine("take", weights, 0, probe(0), prints).failure is None
    assert {version for r in engine("finish") for version in r.versions} == {0}


def test_a_version_is_taken_step_by_step_around_turns_that_run(engine: Call) -> None:
    take(engine, 0)
    engine("submit", requests(6))
    early = engine("steps", 3)
    weights = policy(1)
    taken, order = engine("take_traced", weights, 1, probe(1), fingerprint_tensors(weights))
    assert taken.failure is None
    # Pause, load, fingerprint, flush, probe; then every turn that was kept goes on.
    assert order[:5] == ["drain", "load", "resident", "flush", "probe"]
    assert order[5:] == ["submit"] * (6 - len(early))
    assert engine("figures")["version"] == 1
    assert len(engine("finish")) == 6 - len(early) > 0


def test_it_computes_the_trainers_policy_and_draws_the_same_tokens(engine: Call) -> None:
    taken = take(engine, 0)
    assert taken.failure is None
    assert (taken.fingerprint_of, taken.caches_flushed) == ("resident", ("prefix",))
    assert taken.fingerprints == fingerprint_tensors(policy(0))
    assert taken.gap.good
    wanted = requests(24)
    engine("submit", wanted)
    found, expected = by_uid(engine("finish")), reference(0, wanted)
    same = [uid for uid in expected if found[uid].tokens == expected[uid].tokens]
    print(f"{len(same)} of {len(expected)} turns with the reference engine's tokens")
    assert len(same) >= len(expected) - 1  # a draw on the edge of an interval may fall otherwise
    gaps = [
        np.abs(np.array(found[uid].logps) - np.array(expected[uid].logps)).max() for uid in same
    ]
    print(f"largest gap of a log-probability {max(gaps):.2g}")
    assert max(gaps) < 1e-4
    assert {found[uid].finish_reason for uid in same} == {
        expected[uid].finish_reason for uid in same
    }


def test_text_is_read_and_written_as_the_jobs_own_tokens(engine: Call) -> None:
    """The folder's tokenizer inside vLLM: contexts as text give the turns that ids give."""
    take(engine, 0)
    wanted = requests(8)
    engine("submit", wanted)
    by_ids = by_uid(engine("finish"))
    for request, (read, drawn, text) in zip(wanted, engine("from_text", wanted), strict=True):
        assert read == request.context
        assert drawn == by_ids[request.uid].tokens
        assert text == tokenizer.decode(drawn)


@pytest.mark.parametrize("caches", ["flush", "salt"])
def test_tokens_carry_their_version_across_an_update_in_mid_generation(
    engine: Call, caches: str
) -> None:
    engine("anew", caches)
    take(engine, 0)
    wanted = requests(8)
    engine("submit", wanted)
    early = engine("steps", 3)
    assert take(engine, 1).failure is None
    results = by_uid(early + engine("finish"))
    assert results.keys() == {request.uid for request in wanted}
    crossed = [r for r in results.values() if set(r.versions) == {0, 1}]
    assert crossed
    for request in wanted:
        result = results[request.uid]
        assert result.versions == sorted(result.versions)
        again = replayed(request, result, result.versions)
        assert np.abs(again - np.array(result.logps)).max() < 2e-4
    # Each as the version did it that stands beside it, and not as the other one would have.
    wrong = [
        np.abs(replayed(q, r, [1] * len(r.tokens)) - np.array(r.logps)).max()
        for q in wanted
        for r in [results[q.uid]]
        if r in crossed
    ]
    assert max(wrong) > 1e-2


def test_turns_that_a_move_interrupts_go_on_under_a_later_version(engine: Call) -> None:
    wanted = requests(8)
    seen = engine("away_and_back", wanted, offered(0), offered(1))
    away.check_away(seen, wanted, policy, TOLERANCE)


def test_a_turn_that_is_taken_back_goes_on_in_another_engine(engine: Call) -> None:
    take(engine, 0)
    wanted = requests(6, first=40)
    engine("submit", wanted)
    early = engine("steps", 2)
    moved = engine("drain")
    assert any(request.partial for request in moved)
    assert engine("figures")["running"] == 0
    found = by_uid(early) | reference(0, moved)
    whole = reference(0, wanted)
    assert {uid: r.tokens for uid, r in found.items()} == {u: r.tokens for u, r in whole.items()}


def test_an_unflushed_cache_is_seen_by_the_probe_and_the_version_refused(engine: Call) -> None:
    take(engine, 0)
    engine("keep_cache")
    taken = take(engine, 1)
    assert taken.fingerprints == fingerprint_tensors(policy(1))  # the weights are right
    assert not taken.gap.good
    assert "probe: log-probabilities differ" in taken.failure
    print(taken.failure)


def test_salted_caches_need_no_flush(engine: Call) -> None:
    engine("anew", "salt")
    assert take(engine, 0).caches_flushed == ("prefix (salted)",)
    assert take(engine, 1).failure is None
    assert take(engine, 2).gap.good


def test_the_salt_is_new_with_each_load_not_with_each_version(engine: Call) -> None:
    """Other weights under a version that was served before, as in the next job of a process."""
    engine("anew", "salt")
    assert take(engine, 0).failure is None
    engine("unload")
    other = policy(1)
    taken = engine("take", other, 0, probe(1), fingerprint_tensors(other))
    assert taken.failure is None


def test_a_salt_that_does_not_change_is_seen_by_the_probe(engine: Call) -> None:
    engine("anew", "salt")
    engine("salt_once")
    assert take(engine, 0).failure is None
    taken = take(engine, 1)
    assert taken.fingerprints == fingerprint_tensors(policy(1))
    assert "probe: log-probabilities differ" in taken.failure


def test_vllm_does_not_flush_while_turns_run_and_that_is_an_error(engine: Call) -> None:
    take(engine, 0)
    engine("submit", requests(2))
    engine("steps", 2)
    assert "did not flush it with" in engine("flush_while_running")


def test_a_torn_load_goes_back_to_the_last_good_version(engine: Call) -> None:
    take(engine, 0)
    engine("submit", requests(4))
    early = engine("steps", 2)
    engine("tear_next_load", 11)
    taken = take(engine, 1)
    assert "the sender was lost after 11 tensors" in taken.failure
    assert taken.rolled_back_to == 0
    results = early + engine("finish")
    assert {version for r in results for version in r.versions} == {0}
    assert {r.uid: r.tokens for r in results} == {
        uid: r.tokens for uid, r in reference(0, requests(4)).items()
    }
    assert take(engine, 1).failure is None


def test_weights_that_do_not_fit_are_refused_and_nothing_is_written(engine: Call) -> None:
    take(engine, 0)
    before = engine("resident")
    name = "layers.1.feedforward.up.weight"
    short = {n: t for n, t in policy(1).items() if n != name}
    for bad, said in (
        (short, "missing"),
        (policy(1) | {"extra.weight": torch.zeros(1)}, "unknown"),
        (policy(1) | {name: torch.zeros(3, 3, dtype=torch.bfloat16)}, "expected shape"),
    ):
        taken = engine("take", bad, 1, probe(1), None)
        assert said in taken.failure
        assert taken.rolled_back_to == 0
    broken = policy(1)
    broken[name][0, 0] = float("nan")
    taken = engine("take", broken, 1, probe(1), None)
    assert "expected finite weights, found others in layers.1" in taken.failure
    after = engine("resident")
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_unreadable_weights_are_handed_over_and_probed(engine: Call) -> None:
    engine("anew", "flush", False)
    taken = take(engine, 0)
    assert (taken.fingerprint_of, taken.failure) == ("handed_over", None)
    engine("submit", requests(1))
    engine("finish")
    first = engine("first_use")
    assert first["parts"] == {}
    assert first["gap"].good


def test_unloaded_it_holds_no_policy(engine: Call) -> None:
    take(engine, 0)
    assert engine("figures")["bytes"] > 0
    engine("unload")
    assert engine("figures") | {"cached_tokens": 0} == {
        "version": -1, "loaded": -1, "bytes": 0, "cached_tokens": 0, "running": 0,
    }  # fmt: skip
    assert not any(tensor.any() for tensor in engine("resident").values())


def test_the_verifier_judges_a_run_across_an_update(engine: Call, tmp_path: Path) -> None:
    batches = [requests(EIGHT), requests(EIGHT, first=EIGHT)]
    taken = [take(engine, 0)]
    engine("submit", batches[0])
    made = [by_uid(engine("finish"))]
    engine("submit", batches[1])
    early = engine("steps", 3)
    taken.append(take(engine, 1))
    made.append(by_uid(early + engine("finish")))
    assert any(set(result.versions) == {0, 1} for result in made[1].values())
    honest = {uid: r.versions for part in made for uid, r in part.items()}
    stamped = {uid: [max(versions)] * len(versions) for uid, versions in honest.items()}
    clean = judged(tmp_path / "honest.db", batches, made, honest, taken)
    assert clean.findings == ()
    assert clean.exit_code == 0  # whatever the plan requires was checked
    for invariant in ("I2", "I6", "I13", "I16", "I21"):
        assert clean.coverage.row(invariant).status == "checked"
    found = judged(tmp_path / "stamped.db", batches, made, stamped, taken)
    assert {finding.invariant for finding in found.findings} == {"I16"}


def judged(
    file: Path,
    batches: list[list[TurnRequest]],
    made: list[dict[str, TurnResult]],
    stamps: dict[str, list[int]],
    taken: list[Any],
) -> Verdict:
    """The verdict on a job of one update; its second batch was begun before it and ended after."""
    weights, used = policy(0), policy(1)
    prompts = [request.context for batch in batches for request in batch]
    digests = data_digests(prompts)
    plan = Plan(
        seed=0,
        iterations=2,
        data=DataPlan(
            dataset_digest=dataset_digest(digests), tokenizer_digest="t", dataset_size=2 * EIGHT,
            sampler_rule="sequential-v1", seed=0,
        ),
        sampling=SamplingPlan(
            engine="vllm", batch_composition="distribution", staleness_bound=1,
            partial_rollouts=True,
        ),
        update=UpdatePlan(
            prompts_per_update=EIGHT, group_size=1, virtual_ranks=1, learning_rate=1e-3
        ),
        required_invariants=("I2", "I6", "I13", "I16", "I16.used", "I21", "I21.micro-batches"),
        tolerances={"I16": TOLERANCE},
    )  # fmt: skip
    url = f"sqlite:///{file}"
    now = [weights]
    state: dict[str, Any] = {"step": torch.zeros(1)}

    def synced(record: Recorder, version: int) -> None:
        with record.sync(version, policy(version), ["engine"]) as sync:
            sync.delivered(
                "engine",
                "engine#1",
                root(taken[version].fingerprints),
                caches_flushed=taken[version].caches_flushed,
            )

    with Recorder.open(url, "across", plan, policy=weights) as record:
        record.data(digests, tokenizer="t")
        record.started("rollout", "engine", "engine#1")
        synced(record, 0)
        drawn(record, 0, batches[0])
        samples = generated(record, 0, batches[0], made[0], stamps)
        record.rewarded(
            0, {s.uid: 0.0 for s in samples}, {s.uid: s.tokens for s in samples}, by="none"
        )
        record.consumed(
            0,
            [Consumed(s.uid, s.tokens, trained=s.sampled, logps=s.logps) for s in samples],
            version=0,
        )
        drawn(record, 1, batches[1])  # begun ahead, under version 0
        with record.update(
            0, lambda: {"model": now[0], "masters": now[0], "optimizer": state}
        ) as update:
            now[0], state["step"] = used, torch.ones(1)
            tokens = sum(len(result.tokens) for result in made[0].values())
            update.micro_batch(
                tokens=tokens,
                samples=EIGHT,
                divisor=tokens,
                groups=[uid.partition("/")[0] for uid in made[0]],
            )
            update.applied(version=1, optimizer_step=1, learning_rate=1e-3, loss=0.0, grad_norm=1.0)
        synced(record, 1)
        generated(record, 1, batches[1], made[1], stamps)
    return verify(url)


def drawn(record: Recorder, iteration: int, batch: list[TurnRequest]) -> None:
    """Record the prompts of a batch, which is drawn in order."""
    first = iteration * EIGHT
    record.drawn(
        iteration,
        start=first,
        epoch=0,
        indices=range(first, first + EIGHT),
        prompts=[request.context for request in batch],
    )


def generated(
    record: Recorder,
    iteration: int,
    batch: list[TurnRequest],
    results: dict[str, TurnResult],
    stamps: dict[str, list[int]],
) -> list[Generated]:
    """Record the turns of a batch, each token stamped, and what a torch forward says of them."""
    samples = []
    for request in batch:
        result, versions = results[request.uid], stamps[request.uid]
        given = len(request.context)
        samples.append(
            Generated(
                request.uid,
                request.context + result.tokens,
                [0.0] * given + result.logps,
                [-1] * given + versions,
                "engine",
                "engine#1",
                sampled=[False] * given + [True] * len(result.tokens),
                prompt=request.context,
            )
        )
        record.replayed(
            iteration,
            "behaviour",
            result.logps,
            replayed(request, result, versions),
            replica="engine",
            version=max(versions),
        )
    transform = Transform(temperature=1.0, top_p=1.0, log_probs="raw")
    record.generated(iteration, samples, version=iteration, transform=transform)
    return samples
