"""Goal: an engine's tokens and log-probabilities do not depend on where or beside whom a turn runs.

Method: the same 96 turns (real questions, random small weights, so that every token is a real draw)
run on engines that differ in order, neighbours and number of lanes, are split over several engines,
and are drained in mid-turn and finished elsewhere; everything is compared with ``==`` on floats.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shiftbook.jobs.engine import TorchEngine, TurnRequest, TurnResult
from shiftbook.jobs.errors import EngineError, ModelError
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.model import ModelConfig, forward_train, init_params, upcast
from shiftbook.jobs.task import new_episode

CONFIG = ModelConfig()
SEED = 20240611

Outcome = dict[tuple[str, int], TurnResult]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    print("seed", SEED)
    params = init_params(CONFIG, SEED)
    return {name: (tensor * 3).to(torch.bfloat16) for name, tensor in params.items()}


def requests(count: int = 96) -> list[TurnRequest]:
    made = []
    for index in range(count):
        uid = format_uid(index // 8, index % 8)
        request = new_episode(SEED, uid, index // 8).next_request()
        request.max_new = 24
        made.append(request)
    return made


def engine_with(weights: dict[str, torch.Tensor], lanes: int = 8, version: int = 0) -> TorchEngine:
    engine = TorchEngine(CONFIG, lanes)
    engine.load(weights, version)
    return engine


def finish(engine: TorchEngine, todo: list[TurnRequest] | None = None) -> Outcome:
    for request in todo or []:
        engine.submit(request)
    done: Outcome = {}
    while engine.running or engine.waiting:
        done.update({(result.uid, result.turn): result for result in engine.step()})
    return done


@pytest.fixture(scope="module")
def expected(weights: dict[str, torch.Tensor]) -> Outcome:
    return finish(engine_with(weights), requests())


def test_order_does_not_matter(weights: dict[str, torch.Tensor], expected: Outcome) -> None:
    shuffled = requests()
    random.Random(SEED).shuffle(shuffled)
    assert finish(engine_with(weights), shuffled) == expected


def test_neighbours_do_not_matter(weights: dict[str, torch.Tensor], expected: Outcome) -> None:
    """One turn alone on eight lanes gives the same bits as among 95 others."""
    for request in requests()[5:95:30]:
        assert finish(engine_with(weights), [request])[request.key] == expected[request.key]


@pytest.mark.parametrize("lanes", [1, 3, 4, 5, 16])
def test_number_of_lanes_does_not_matter(
    weights: dict[str, torch.Tensor], expected: Outcome, lanes: int
) -> None:
    assert finish(engine_with(weights, lanes), requests()) == expected


@pytest.mark.parametrize("split", [(8, 8), (4, 16), (8, 8, 8, 8)])
def test_split_over_engines_does_not_matter(
    weights: dict[str, torch.Tensor], expected: Outcome, split: tuple[int, ...]
) -> None:
    done: Outcome = {}
    for index, lanes in enumerate(split):
        done |= finish(engine_with(weights, lanes), requests()[index :: len(split)])
    assert done == expected


def test_turns_drained_midway_finish_elsewhere(
    weights: dict[str, torch.Tensor], expected: Outcome
) -> None:
    """Every 17 steps all requests move to a fresh engine with another number of lanes."""
    done: Outcome = {}
    moved_tokens, todo, hops = 0, requests(), 0
    while todo:
        engine = engine_with(weights, (8, 16, 4)[hops % 3])
        for request in todo:
            engine.submit(request)
        for _ in range(17 + hops):
            done.update({(result.uid, result.turn): result for result in engine.step()})
        todo = engine.drain()
        moved_tokens += sum(len(request.partial) for request in todo)
        assert engine.running == engine.waiting == 0
        hops += 1
    assert hops > 5
    assert moved_tokens > 50
    assert done == expected


def test_drain_returns_every_request_with_its_partial_turn(
    weights: dict[str, torch.Tensor],
) -> None:
    engine = engine_with(weights, 4)
    for request in requests(12):
        engine.submit(request)
    done = [result for _ in range(25) for result in engine.step()]
    owed = engine.drain()
    assert {r.uid for r in done} | {r.uid for r in owed} == {r.uid for r in requests(12)}
    assert len(done) + len(owed) == 12
    partial = [request for request in owed if request.partial]
    assert partial
    for request in partial:
        assert len(request.partial) == len(request.partial_logps) == len(request.partial_versions)


def test_urgent_requests_take_free_lanes_first_and_equals_keep_their_order(
    weights: dict[str, torch.Tensor],
) -> None:
    engine = engine_with(weights, 1)
    made = requests(6)
    for request, priority in zip(made, [0, 0, -2, -1, -2, 0], strict=True):
        request.priority = priority
        engine.submit(request)
    order = [result.uid for result in iter_results(engine)]
    assert order == [made[i].uid for i in (2, 4, 3, 0, 1, 5)]


def iter_results(engine: TorchEngine) -> list[TurnResult]:
    found: list[TurnResult] = []
    while engine.running or engine.waiting:
        found += engine.step()
    return found


def test_log_probabilities_are_those_of_the_training_pass(
    weights: dict[str, torch.Tensor], expected: Outcome
) -> None:
    params = upcast(weights)
    for request in requests()[::12]:
        result = expected[request.key]
        tokens = torch.tensor([request.context + result.tokens])
        logps = torch.log_softmax(forward_train(CONFIG, params, tokens[:, :-1]), -1)
        start = len(request.context) - 1
        chosen = logps[0, start:].gather(1, tokens[0, start + 1 :, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(result.logps, dtype=torch.float32), atol=2e-5)


def test_counters_add_up(weights: dict[str, torch.Tensor], expected: Outcome) -> None:
    engine = engine_with(weights)
    finish(engine, requests())
    sampled = sum(len(result.tokens) for result in expected.values())
    context = sum(len(request.context) for request in requests())
    assert engine.sampled_tokens == sampled
    assert engine.replayed_tokens == context - len(requests())
    assert engine.lane_steps == engine.sampled_tokens + engine.replayed_tokens
    assert engine.lane_steps <= engine.steps * engine.lanes


def test_new_weights_flush_the_cache_and_mark_later_tokens(
    weights: dict[str, torch.Tensor],
) -> None:
    """After a load in mid-turn, the rest of the turn is what a fresh engine with the new weights
    says after the same partial turn."""
    newer = {name: (tensor.float() * 1.1).to(torch.bfloat16) for name, tensor in weights.items()}
    engine = engine_with(weights)
    for request in requests(8):
        engine.submit(request)
    early = [result for _ in range(22) for result in engine.step()]
    engine.load(newer, 1)
    twin = engine_with(newer, version=1)
    other = engine_with(newer, version=1)
    for request in engine.drain():
        twin.submit(request)
        other.submit(request)
    for request in other.drain():
        engine.submit(request)
    continued = finish(engine)
    assert continued == finish(twin)
    assert len(early) + len(continued) == 8
    assert any(0 in r.versions and 1 in r.versions for r in continued.values())


def test_unload_leaves_nothing_and_refuses_to_serve(weights: dict[str, torch.Tensor]) -> None:
    engine = engine_with(weights)
    assert engine.resident_bytes() > 4 * sum(tensor.numel() for tensor in weights.values())
    engine.submit(requests(1)[0])
    with pytest.raises(EngineError, match="drain"):
        engine.unload()
    owed = engine.drain()
    engine.unload()
    assert engine.resident_bytes() == 0
    engine.submit(owed[0])
    with pytest.raises(EngineError, match="load first"):
        engine.step()
    with pytest.raises(EngineError, match="load first"):
        engine.resident()


def test_resident_weights_are_those_that_were_loaded(weights: dict[str, torch.Tensor]) -> None:
    resident = engine_with(weights).resident()
    assert list(resident) == list(weights)
    for name, tensor in weights.items():
        assert resident[name].dtype == torch.bfloat16
        assert torch.equal(resident[name], tensor), name


def test_bad_requests_and_weights_are_refused(weights: dict[str, torch.Tensor]) -> None:
    engine = engine_with(weights)
    request = requests(1)[0]
    engine.submit(request)
    with pytest.raises(EngineError, match="held already"):
        engine.submit(request)
    with pytest.raises(EngineError, match="expected a context"):
        engine.submit(TurnRequest("000001/0", 0, []))
    with pytest.raises(EngineError, match="partial"):
        engine.submit(TurnRequest("000001/0", 0, [1], partial=[7]))
    with pytest.raises(ModelError, match="bfloat16"):
        engine.load(upcast(weights), 1)
    with pytest.raises(ModelError, match="missing"):
        engine.load({name: weights[name] for name in list(weights)[1:]}, 1)


def test_salted_lanes_reach_no_value_of_older_weights(weights: dict[str, torch.Tensor]) -> None:
    """Loaded in mid-turn, an engine goes on as one whose caches were flushed does; without a new
    salt it goes on otherwise."""
    other = {name: tensor * 2 for name, tensor in weights.items()}

    def changed(caches: Any, *, salted: bool = True) -> Outcome:
        engine = TorchEngine(CONFIG, 4, caches=caches)
        engine.load(weights, 0)
        todo = requests(4)
        for request in todo:
            engine.submit(request)
        for _ in range(len(todo[0].context) + 6):
            engine.step()
        salt = engine._salt
        engine.load(other, 1)
        assert engine.flush() == (("kv (salted)",) if caches == "salt" else ("kv",))
        if not salted:
            engine._salt = salt
        return finish(engine)

    flushed = changed("flush")
    assert {v for result in flushed.values() for v in result.versions} == {0, 1}
    assert changed("salt") == flushed
    assert changed("salt", salted=False) != flushed
