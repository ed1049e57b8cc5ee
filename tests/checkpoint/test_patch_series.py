"""Goal: a sender's series keeps its receivers bit for bit where it thinks they are, lossy or not.

Method: a simulated training run of random updates; receivers apply each message, miss one, or stand
elsewhere; under the lossy encoding every element's error is measured at every step.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint.errors import PatchRefused, PatchUnencodable
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.patch import Lossy, apply_patch, encode_patch, read_patch
from shiftbook.checkpoint.patch_numbers import bits_of_numbers, numbers_of
from shiftbook.checkpoint.patch_series import PatchSender
from tests.checkpoint.patch_states import all_bits, blank, copied, model, updated

torch.set_num_threads(1)


def test_anchors_come_every_n_and_after_a_refusal() -> None:
    sender = PatchSender(anchor_every=4, nan="carry")
    weights = model()
    receiver, version = blank(weights), None
    kinds = []
    for step in range(12):
        if step == 6:
            receiver["norm"][0] = 7.0  # what the receiver has is no longer what it was sent
        data = sender.next(weights, version=step)
        kinds.append(read_patch(data).anchor)
        try:
            version = apply_patch(data, receiver, version=version).version
        except PatchRefused:
            assert step == 6
            sender.refused()
        else:
            assert all_bits(receiver) == all_bits(weights)
            assert sender.fingerprints == fingerprint_tensors(receiver)
        assert sender.version == step
        weights = updated(weights, 0.01, step)
    assert [step for step, anchor in enumerate(kinds) if anchor] == [0, 4, 7, 11]


def test_a_failed_message_leaves_the_series_where_it_was() -> None:
    sender = PatchSender()
    weights = {"w": torch.ones(8)}
    receiver = blank(weights)
    apply_patch(sender.next(weights, version=0), receiver, version=None)
    with pytest.raises(PatchUnencodable):
        sender.next({"w": torch.full((8,), float("nan"))}, version=1)
    with pytest.raises(PatchUnencodable):
        sender.next({"v": torch.ones(8)}, version=1)
    assert sender.version == 0
    weights["w"][3] = 2.0  # the sender keeps a copy, not these very tensors
    apply_patch(sender.next(weights, version=2), receiver, version=0)
    assert all_bits(receiver) == all_bits(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_lossy_errors_stay_within_the_bound_and_do_not_add_up(dtype: torch.dtype) -> None:
    """100 steps in one direction: without feedback the errors would add up to 100 times as much."""
    rng = np.random.default_rng(9)
    drift = torch.from_numpy(rng.normal(scale=1e-3, size=(70, 130)))
    truth = torch.from_numpy(rng.normal(scale=0.1, size=(70, 130)))
    bound = 4e-3 if dtype is torch.bfloat16 else 1e-3
    sender = PatchSender(anchor_every=1000, lossy=Lossy(max_error=bound))
    receiver = {"w": torch.zeros(70, 130, dtype=dtype), "step": torch.zeros((), dtype=torch.int64)}
    version, lossy, sizes = None, 0, []
    for step in range(100):
        target = {"w": truth.to(dtype), "step": torch.tensor(step)}
        data = sender.next(target, version=step)
        patch = read_patch(data)
        done = apply_patch(patch, receiver, version=version, accept_error=bound)
        version = done.version
        assert done.fingerprints == sender.fingerprints == fingerprint_tensors(receiver)
        error = float((receiver["w"].double() - target["w"].double()).abs().max())
        assert error <= bound
        assert int(receiver["step"]) == step
        record = patch.header.tensors["w"]
        if record.encoding == "int8":
            assert record.largest_error == error
            lossy += 1
            sizes.append(len(data))
        truth += drift
    print(f"{dtype}: {lossy} lossy messages of {np.mean(sizes):.0f} bytes")
    assert lossy > 60  # the others were shorter without loss
    assert np.mean(sizes) < 0.8 * receiver["w"].nbytes


def test_lossy_is_refused_by_who_did_not_declare_it() -> None:
    base, new = {"w": torch.linspace(-1, 1, 9000)}, {"w": torch.linspace(-1, 1, 9000).sin()}
    data = encode_patch(base, new, base_version=1, version=2, lossy=Lossy(max_error=0.01))
    receiver = copied(base)
    for accepted in (None, 0.001):
        with pytest.raises(PatchRefused, match=r"declares 0\.01 \(int8-difference\)"):
            apply_patch(data, receiver, version=1, accept_error=accepted)
    assert all_bits(receiver) == all_bits(base)
    apply_patch(data, receiver, version=1, accept_error=0.01)
    assert 0 < float((receiver["w"] - new["w"]).abs().max()) <= 0.01


def test_what_the_bound_does_not_allow_is_sent_without_loss() -> None:
    base = {"w": torch.zeros(5000), "inf": torch.zeros(5000), "few": torch.zeros(5000)}
    new = {
        "w": torch.linspace(0, 100, 5000),
        "inf": torch.full((5000,), float("inf")),
        "few": torch.nn.functional.one_hot(torch.tensor(7), 5000).float() / 3,
    }
    data = encode_patch(base, new, base_version=1, version=2, lossy=Lossy(max_error=1e-3))
    encodings = {t.encoding for t in read_patch(data).header.tensors.values()}
    assert encodings <= {"changes", "packed"}
    assert read_patch(data).header.lossy is None
    apply_patch(data, base, version=1)
    assert all_bits(base) == all_bits(new)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(width=64), min_size=1, max_size=40))
def test_numbers_are_rounded_as_torch_does(values: list[float]) -> None:
    """bfloat16 by way of float32, as documented; NaNs never come here."""
    finite = np.array([v for v in values if v == v], dtype=np.float64)
    with np.errstate(over="ignore"):
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
            wide = torch.from_numpy(finite.astype(np.float32) if name == "bfloat16" else finite)
            expected = wide.to(dtype)
            bits = bits_of_numbers(name, finite)
            assert np.array_equal(bits.view(np.int16), expected.view(torch.int16).numpy())
            assert np.array_equal(numbers_of(name, bits), expected.double().numpy())
