"""Goal: a patch carries every bit from one version to the next, for any dtype, layout and update.

Method: hypothesis draws tensors of every dtype with random bits and random updates; receivers have
strides of their own; the path of devices runs on the processor's memory and on CUDA where there is.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.patch import apply_patch, encode_anchor, encode_patch, read_patch
from shiftbook.checkpoint.patch_codec import from_planes, to_planes
from shiftbook.checkpoint.patch_places import place_of
from shiftbook.checkpoint.patch_series import compose
from tests.checkpoint.patch_states import (
    State,
    all_bits,
    bits,
    blank,
    copied,
    model,
    states,
    updated,
)

torch.set_num_threads(1)
shares = st.sampled_from([0.0, 0.004, 0.03, 0.3, 1.0])
seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=150)
@given(states(), shares, seeds)
def test_a_patch_and_an_anchor_carry_every_bit(base: State, share: float, seed: int) -> None:
    new = updated(base, share, seed)
    untouched = all_bits(base)
    data = encode_patch(base, new, base_version=4, version=5, nan="carry")
    assert all_bits(base) == untouched
    receiver = copied(base)
    done = apply_patch(data, receiver, version=4)
    assert all_bits(receiver) == all_bits(new)
    assert (done.version, done.fingerprints) == (5, fingerprint_tensors(new))
    receiver = blank(base)
    apply_patch(encode_anchor(new, version=5, nan="carry"), receiver, version=None)
    assert all_bits(receiver) == all_bits(new)


@settings(deadline=None, max_examples=100)
@given(states(), shares, seeds)
def test_strides_on_both_sides_do_not_matter(base: State, share: float, seed: int) -> None:
    """The receiver's tensors are every second element of larger ones, or transposed."""
    new = updated(base, share, seed)
    turned = {}
    for name, tensor in new.items():
        backwards = tuple(reversed(range(tensor.dim())))
        turned[name] = tensor.permute(backwards).contiguous().permute(backwards)
    data = encode_patch(base, new, base_version=1, version=2, nan="carry")
    assert encode_patch(base, turned, base_version=1, version=2, nan="carry") == data
    spread: State = {}
    for name, tensor in base.items():
        room = torch.zeros([2 * n for n in tensor.shape], dtype=torch.uint8)
        wide = room.new_zeros(room.numel() * tensor.element_size()).view(tensor.dtype)
        window = wide.view(room.shape)[tuple(slice(None, None, 2) for _ in tensor.shape)]
        place_of(window).write(None, place_of(tensor).read())
        spread[name] = window
    assert all_bits(spread) == all_bits(base)
    apply_patch(data, spread, version=1)
    assert all_bits(spread) == all_bits(new)


@settings(deadline=None, max_examples=100)
@given(states(), shares, seeds)
def test_the_path_of_devices(base: State, share: float, seed: int) -> None:
    new = updated(base, share, seed)

    def there(state: State) -> dict:
        return {name: place_of(tensor, on_device=True) for name, tensor in state.items()}

    data = encode_patch(there(base), there(new), base_version=1, version=2, nan="carry")
    assert data == encode_patch(base, new, base_version=1, version=2, nan="carry")
    receiver = copied(base)
    apply_patch(data, there(receiver), version=1)
    assert all_bits(receiver) == all_bits(new)
    receiver = blank(base)
    apply_patch(encode_anchor(there(new), version=2, nan="carry"), there(receiver), version=None)
    assert all_bits(receiver) == all_bits(new)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors() -> None:
    base = model()
    new = updated(base, 0.004, 3)
    data = encode_patch(base, new, base_version=1, version=2, nan="carry")
    there = {name: tensor.cuda() for name, tensor in base.items()}
    fresh = {name: tensor.cuda() for name, tensor in new.items()}
    assert encode_patch(there, fresh, base_version=1, version=2, nan="carry") == data
    apply_patch(data, there, version=1)
    assert all_bits({name: t.cpu() for name, t in there.items()}) == all_bits(new)


@settings(deadline=None, max_examples=150)
@given(states(), st.lists(st.tuples(shares, seeds), min_size=2, max_size=4), st.booleans())
def test_a_chain_composes_to_the_direct_patch(base: State, updates: list, anchored: bool) -> None:
    versions = [base]
    for share, seed in updates:
        versions.append(updated(versions[-1], share, seed))
    versions[-1] = updated(versions[0], 0.01, 1) if len(updates) > 3 else versions[-1]
    chain = [
        encode_patch(a, b, base_version=n, version=n + 1, nan="carry")
        for n, (a, b) in enumerate(itertools.pairwise(versions))
    ]
    last = len(chain)
    if anchored:
        chain.insert(0, encode_anchor(base, version=0, nan="carry"))
        direct = encode_anchor(versions[-1], version=last, nan="carry")
    else:
        direct = encode_patch(base, versions[-1], base_version=0, version=last, nan="carry")
    left = chain[0]
    for patch in chain[1:]:
        left = compose(left, patch)
    right = chain[-1]
    for patch in reversed(chain[:-1]):
        right = compose(patch, right)
    assert left == right == direct


def test_an_update_that_is_undone_leaves_an_empty_patch() -> None:
    base = model()
    new = updated(base, 0.1, 8)
    there = encode_patch(base, new, base_version=0, version=1, nan="carry")
    back = encode_patch(new, base, base_version=1, version=2, nan="carry")
    nothing = read_patch(compose(there, back))
    assert (nothing.changed, nothing.base_version, nothing.version) == (0, 0, 2)
    assert {t.encoding for t in nothing.header.tensors.values()} == {"same"}
    receiver = copied(base)
    apply_patch(nothing, receiver, version=0)
    assert all_bits(receiver) == all_bits(base)


def test_the_bytes_do_not_depend_on_threads() -> None:
    base, new = model(), updated(model(), 0.01, 2)
    expected = encode_patch(base, new, base_version=0, version=1, nan="carry")
    data = encode_patch(base, new, base_version=0, version=1, nan="carry", threads=3)
    assert data == expected


def test_a_known_base_is_not_read_again() -> None:
    base, new = model(), updated(model(), 0.01, 2)
    known = fingerprint_tensors(base)
    assert encode_patch(
        base, new, base_version=0, version=1, base_fingerprints=known, nan="carry"
    ) == encode_patch(base, new, base_version=0, version=1, nan="carry")


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 8))
def test_planes_come_back(values: list[int], least: int) -> None:
    array = np.array(values, dtype=np.uint64)
    planes = to_planes(array, least)
    top = max(values, default=0)
    assert len(planes) == max(least, (top.bit_length() + 7) // 8)
    assert np.array_equal(from_planes(planes, array.size, array.dtype), array)


def test_a_small_update_is_small() -> None:
    """0.4 % of bf16 elements move by one in the last place, as a small learning rate does."""
    base = {"weight": torch.randn(1024, 512, generator=torch.Generator().manual_seed(1)).bfloat16()}
    new = copied(base)
    rng = np.random.default_rng(4)
    raw = new["weight"].view(torch.int16).numpy().reshape(-1)
    where = rng.random(raw.size) < 0.004
    raw[where] += rng.choice([-1, 1], size=int(where.sum())).astype(np.int16)
    data = encode_patch(base, new, base_version=0, version=1)
    full_bytes = base["weight"].nbytes
    print(f"{len(data)} of {full_bytes} bytes: {len(data) / full_bytes:.4f}")
    assert len(data) < 0.004 * full_bytes
    record = read_patch(data).header.tensors["weight"]
    assert (record.changed, record.encoding) == (int(where.sum()), "packed")
    assert bits(new["weight"]) != bits(base["weight"])


def test_places_are_one_where_memory_layout_and_width_are_the_same() -> None:
    """However a tensor came here (torch, numpy, a view), and with another width it is another."""
    tensor = torch.zeros(6, 4, dtype=torch.bfloat16)
    key = place_of(tensor).key()
    for same in (
        torch.nn.Parameter(tensor),
        tensor[:],
        tensor.view(torch.int16).numpy(),
        tensor.view(torch.float16),
    ):
        assert place_of(same).key() == key
    wider = torch.zeros(2 * tensor.nbytes, dtype=torch.uint8)
    others = [wider[: 4 * n].view(t) for n, t in ((24, torch.float32), (12, torch.bfloat16))]
    assert others[0].shape == others[1].shape
    assert others[0].data_ptr() == others[1].data_ptr()
    assert place_of(others[0]).key() != place_of(others[1]).key()
    for other in (tensor.T, tensor[:, :3], tensor[1:], tensor.clone(), tensor.reshape(-1)):
        assert place_of(other).key() != key
    assert place_of(torch.zeros(0)).key() is None
