"""Goal: many tensors at once, shared hashes, threads and device sums give the values of one by one.

Method: hypothesis draws sets of tensors of odd sizes, strides and places in memory; the torch
operations of the device path run on the processor as well, and on CUDA where there is one.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint import many_tensors
from shiftbook.checkpoint.device_sums import device_bits, sum_block
from shiftbook.checkpoint.elements import Runs
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint, fingerprint_tensors
from tests.checkpoint.test_fingerprint import DTYPES, name_of, random_tensor

torch.set_num_threads(1)
EVERY_DTYPE = [*DTYPES, torch.complex32, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(EVERY_DTYPE), shapes), max_size=6),
    seeds,
    st.booleans(),
    st.integers(1, 3),
)
def test_many_at_once_are_each_by_itself(drawn: list, seed: int, share: bool, threads: int) -> None:
    tensors = {
        f"t{index}": random_tensor(dtype, shape, seed + index)
        for index, (dtype, shape) in enumerate(drawn)
    }
    if tensors:
        flat = random_tensor(torch.uint8, (41,), seed)
        tensors["unaligned"] = flat[1:]
        tensors["strided"] = flat[::3]
    found = fingerprint_tensors(tensors, threads=threads, share_hashes=share)
    assert list(found) == list(tensors)
    assert found == {name: fingerprint(tensor).hex for name, tensor in tensors.items()}


@pytest.mark.parametrize("share", [False, True])
def test_large_tensors_in_pieces(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    """Sizes around the block of shared hashes and the piece of a thread, cut small here."""
    monkeypatch.setattr(many_tensors, "_PIECE_WORDS", 4096)
    sizes = (1, 2, 2047, 2048, 2049, 8191, 100_003)
    tensors = {
        str(size): torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16()
        for size in sizes
    }
    expected = {name: fingerprint(tensor).hex for name, tensor in tensors.items()}
    for threads in (1, 2):
        assert fingerprint_tensors(tensors, threads=threads, share_hashes=share) == expected
    assert fingerprint_tensors({}, threads=2, share_hashes=share) == {}


def test_lazy_views_and_parameters() -> None:
    """Conjugated and negated views hold other bits than their memory; parameters hold theirs."""
    pair = random_tensor(torch.complex64, (4, 3), 11).nan_to_num()
    weight = torch.nn.Parameter(torch.randn(5, 2))
    lazy = {"conj": pair.conj(), "neg": pair.conj().imag, "parameter": weight, "odd": weight[1:, 0]}
    assert lazy["conj"].is_conj()
    assert lazy["neg"].is_neg()
    expected = {name: fingerprint(tensor.detach().clone()).hex for name, tensor in lazy.items()}
    assert fingerprint_tensors(lazy) == expected
    assert expected["conj"] != fingerprint(pair).hex


def device_sums_of(tensor: torch.Tensor, runs: Runs) -> tuple[int, int]:
    local = tuple(tensor.shape)
    bits = device_bits(tensor)
    wider = tensor.element_size() // bits.element_size()
    block = bits.reshape(-1, runs.run_length(local) * wider)
    return sum_block(block, runs.starts(local) * np.uint64(wider))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(EVERY_DTYPE), st.lists(st.integers(1, 7), max_size=3), seeds)
def test_torch_operations_give_the_same_sums(
    dtype: torch.dtype, sizes: list[int], seed: int
) -> None:
    whole = random_tensor(dtype, tuple(sizes), seed)
    expected = fingerprint(whole)
    assert device_sums_of(whole, Runs.of(whole.shape, 0, whole.shape)) == expected.sums
    if sizes and sizes[-1] > 1:  # two boxes, strided ones
        total = Fingerprint.empty(expected.dtype, whole.shape).sums
        for start, part in ((0, whole[..., :1]), (1, whole[..., 1:])):
            runs = Runs.of(part.shape, (*[0] * (len(sizes) - 1), start), tuple(whole.shape))
            more = device_sums_of(part, runs)
            total = tuple((a + b) % 2**64 for a, b in zip(total, more, strict=True))
        assert total == expected.sums


def test_one_element_of_any_stride() -> None:
    for dtype in (torch.float64, torch.complex128, torch.complex64, torch.bfloat16):
        window = random_tensor(dtype, (2,), 5)[::2]
        assert window.stride() == (2,)
        alone = device_sums_of(window, Runs.of((1,), 0, (1,)))
        assert alone == fingerprint(window.clone()).sums == fingerprint(window).sums


def test_pieces_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shiftbook.checkpoint.device_sums._PIECE", 100)
    for dtype, shape in ((torch.bfloat16, (7, 33)), (torch.float64, (450,)), (torch.int8, (3, 5))):
        whole = random_tensor(dtype, shape, 3)
        runs = Runs.of(whole.shape, 0, tuple(whole.shape))
        assert device_sums_of(whole, runs) == fingerprint(whole).sums


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_tensors_have_the_same_value(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (5,), (64, 129), (3, 4, 5)):
        whole = random_tensor(dtype, shape, math.prod(shape) + 1)
        there = whole.cuda()
        assert fingerprint(there) == fingerprint(whole)
        if len(shape) == 2 and shape[0]:
            assert fingerprint(there.t()) == fingerprint(whole.t())
            parts = [
                fingerprint(there[:, :7], offset=(0, 0), shape=shape),
                fingerprint(there[:, 7:], offset=(0, 7), shape=shape),
            ]
            assert parts[0] + parts[1] == fingerprint(whole)
    assert fingerprint_tensors({"a": there, "b": whole}) == {
        "a": fingerprint(whole).hex,
        "b": fingerprint(whole).hex,
    }


def test_new_dtypes_have_names() -> None:
    for dtype in EVERY_DTYPE:
        assert fingerprint(random_tensor(dtype, (6,), 1)).dtype == name_of(
            random_tensor(dtype, (1,), 1)
        )
