"""Fingerprints: one value for any sharding, stride and order, and the value that the text defines.

Method: an independent reading of the definition in plain Python integers is the oracle; hypothesis
draws dtypes, shapes and ways to cut a tensor into boxes; a golden value pins the format.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint import elements
from shiftbook.checkpoint.errors import (
    FingerprintError,
    IncompleteFingerprint,
    UnsupportedTensor,
)
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint, fingerprint_tensors

torch.set_num_threads(1)
MASK = (1 << 64) - 1
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def oracle(data: bytes, dtype: str, shape: tuple[int, ...]) -> str:
    """The definition, read word by word from the C-order bytes of a whole tensor."""
    key = int.from_bytes(hashlib.sha256(b"shiftbook-fingerprint-v1").digest()[:8], "little")
    sums = [0, 0]
    data += bytes(-len(data) % 4)
    for index in range(len(data) // 4):
        z = (key + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        word = int.from_bytes(data[4 * index : 4 * index + 4], "little")
        sums[0] += (z & 0xFFFFFFFF) * word
        sums[1] += (z >> 32) * word
    text = f"shiftbook-fingerprint-v1:{dtype}:{','.join(map(str, shape))}"
    bound = hashlib.sha256(text.encode()).digest()
    halves = [int.from_bytes(bound[:8], "big"), int.from_bytes(bound[8:16], "big")]
    return "".join(f"{(s + b) & MASK:016x}" for s, b in zip(sums, halves, strict=True))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, NaNs and infinities among them; booleans are 0 or 1."""
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, top, size=size, dtype=np.uint8)
    return (
        torch.from_numpy(raw).view(dtype).reshape(shape)
        if size
        else torch.empty(shape, dtype=dtype)
    )


def raw_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(DTYPES), shapes, seeds)
def test_value_is_the_defined_one(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    tensor = random_tensor(dtype, shape, seed)
    expected = oracle(raw_bytes(tensor), name_of(tensor), shape)
    assert fingerprint(tensor).hex == expected


def cuts(draw: st.DrawFn, corner: tuple[int, ...], size: tuple[int, ...], depth: int) -> list:
    """Cut a box into boxes, at random places along random axes."""
    axes = [axis for axis, n in enumerate(size) if n > 1]
    if depth == 0 or not axes or draw(st.booleans()):
        return [(corner, size)]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, size[axis] - 1))
    left = (*size[:axis], at, *size[axis + 1 :])
    right = (*size[:axis], size[axis] - at, *size[axis + 1 :])
    moved = (*corner[:axis], corner[axis] + at, *corner[axis + 1 :])
    return cuts(draw, corner, left, depth - 1) + cuts(draw, moved, right, depth - 1)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[torch.dtype, tuple[int, ...], list]:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
    boxes = cuts(draw, (0,) * len(shape), shape, 4)
    return draw(st.sampled_from(DTYPES)), shape, draw(st.permutations(boxes))


@settings(deadline=None, max_examples=300)
@given(tilings(), seeds, st.booleans())
def test_box_shards_add_up(tiling: tuple, seed: int, copied: bool) -> None:
    dtype, shape, boxes = tiling
    whole = random_tensor(dtype, shape, seed)
    total = Fingerprint.empty(name_of(whole), shape)
    for corner, size in boxes:
        window = tuple(slice(c, c + n) for c, n in zip(corner, size, strict=True))
        shard = whole[window].clone() if copied else whole[window]
        total += fingerprint(shard, offset=corner, shape=shape)
    assert total == fingerprint(whole)
    assert total.hex == fingerprint(whole).hex
    if len(boxes) > 1:  # one shard left out, whatever it holds
        corner, size = boxes[0]
        window = tuple(slice(c, c + n) for c, n in zip(corner, size, strict=True))
        part = fingerprint(whole[window], offset=corner, shape=shape)
        assert not part.complete
        with pytest.raises(IncompleteFingerprint, match="exactly once"):
            _ = part.hex


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(DTYPES), st.integers(1, 200), st.lists(st.integers(0, 200), max_size=6), seeds
)
def test_flat_ranges_add_up(dtype: torch.dtype, size: int, places: list[int], seed: int) -> None:
    flat = random_tensor(dtype, (size,), seed)
    edges = sorted({0, size, *(p for p in places if p < size)})
    parts = [fingerprint(flat[a:b], offset=a, shape=(size,)) for a, b in itertools.pairwise(edges)]
    total = Fingerprint.empty(name_of(flat), (size,))
    for part in reversed(parts):
        total += part
    assert total == fingerprint(flat)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 6), min_size=2, max_size=4), seeds)
def test_strides_do_not_matter(dtype: torch.dtype, sizes: list[int], seed: int) -> None:
    plain = random_tensor(dtype, tuple(sizes), seed)
    expected = fingerprint(plain)
    order = list(np.random.default_rng(seed).permutation(len(sizes)))
    back = [order.index(axis) for axis in range(len(sizes))]
    transposed = plain.permute(order).contiguous().permute(back)
    assert fingerprint(transposed) == expected
    spread = torch.zeros([2 * n for n in sizes], dtype=dtype)
    window = spread[tuple(slice(1, None, 2) for _ in sizes)]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(plain.element_size(), dtype)
    window.view(bits).copy_(plain.view(bits))  # as integers: a copy may change the bits of a NaN
    assert not window.is_contiguous() or window.numel() == 1
    assert fingerprint(window) == expected
    repeated = plain[:1].expand(sizes)
    assert fingerprint(repeated) == fingerprint(repeated.contiguous())


def test_large_strided_tensors_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_COPY_BYTES", 64)
    for dtype in (torch.bfloat16, torch.float64, torch.int8):
        plain = random_tensor(dtype, (6, 5, 7), 11)
        strided = plain.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        assert not strided.is_contiguous()
        assert fingerprint(strided) == fingerprint(plain)
        halves = [
            fingerprint(strided[:, :2], offset=(0, 0, 0), shape=plain.shape),
            fingerprint(strided[:, 2:], offset=(0, 2, 0), shape=plain.shape),
        ]
        assert halves[0] + halves[1] == fingerprint(plain)


def test_numpy_torch_and_threads_agree() -> None:
    tensor = torch.randn(1 << 20, generator=torch.Generator().manual_seed(5))
    assert fingerprint(tensor.numpy()) == fingerprint(tensor)
    assert fingerprint(tensor, threads=3) == fingerprint(tensor)
    swapped = tensor.numpy().astype(">f4")
    assert fingerprint(swapped) == fingerprint(tensor)
    bits = tensor.bfloat16()
    as_bits = bits.view(torch.int16).numpy().view(np.uint16)
    assert fingerprint(as_bits, dtype="bfloat16") == fingerprint(bits)
    assert fingerprint(as_bits).hex != fingerprint(bits).hex
    read_only = tensor.numpy().copy()
    read_only.flags.writeable = False
    assert fingerprint(read_only) == fingerprint(tensor)


def test_parameters_and_lazily_conjugated_tensors() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0))
    assert fingerprint(parameter) == fingerprint(torch.arange(6.0))
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert fingerprint(values.conj()) == fingerprint(values.conj().resolve_conj())
    assert fingerprint(values.conj()) != fingerprint(values)


def test_empty_and_scalar_tensors_are_bound_to_dtype_and_shape() -> None:
    values = {
        fingerprint(torch.empty(shape, dtype=dtype)).hex
        for shape in ((0,), (0, 3), (3, 0))
        for dtype in (torch.float32, torch.float16, torch.int64)
    }
    assert len(values) == 9
    zeros = {
        fingerprint(torch.zeros(shape, dtype=dtype)).hex
        for shape in ((), (1,), (1, 1), (2, 3), (3, 2), (6,))
        for dtype in (torch.float32, torch.int32, torch.float64, torch.bool)
    }
    assert len(zeros) == 24
    assert fingerprint(torch.tensor(3.0)).hex != fingerprint(torch.tensor([3.0])).hex


def test_a_zero_shard_read_twice_for_another_left_out_is_refused() -> None:
    zeros = torch.zeros(32, dtype=torch.bfloat16)
    first = fingerprint(zeros[:16], offset=0, shape=(32,))
    second = fingerprint(zeros[16:], offset=16, shape=(32,))
    assert (first + second).hex == fingerprint(zeros).hex
    with pytest.raises(IncompleteFingerprint):
        _ = (first + first).hex
    with pytest.raises(IncompleteFingerprint):
        _ = (first + second + second).hex


def test_hex_comes_back() -> None:
    found = fingerprint(torch.arange(10, dtype=torch.int8))
    assert Fingerprint.from_hex(found.hex, "int8", (10,)) == found
    assert str(found) == found.hex
    for broken in ("", "0" * 31, "G" * 32, found.hex.upper() + "0"):
        with pytest.raises(FingerprintError, match="32 lower-case hex digits"):
            Fingerprint.from_hex(broken, "int8", (10,))


def test_golden_values_pin_the_format() -> None:
    ramp = torch.arange(1000, dtype=torch.float32).reshape(10, 100)
    assert fingerprint_tensors({"a": ramp, "b": ramp.bfloat16(), "c": ramp.double()}) == GOLDEN


GOLDEN = {
    "a": "b12b0eef26b482647148a014f2f6d18c",
    "b": "3fa61ef2e1da6b8091bef0e52619b891",
    "c": "fea80dea8740f9406eeb39870048b7bb",
}


@pytest.mark.parametrize(
    "unfit",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.empty(3, device="meta"),
        np.array(["text"]),
        np.array([object()]),
        [1.0, 2.0],
        np.zeros(3, dtype="datetime64[s]"),
    ],
    ids=["sparse", "meta", "text", "object", "list", "dates"],
)
def test_what_has_no_bits_is_refused(unfit: object) -> None:
    with pytest.raises(UnsupportedTensor, match="expected"):
        fingerprint(unfit)


def test_misplaced_shards_are_refused() -> None:
    shard = torch.zeros(2, 3)
    for offset in (-1, 7, (0, 2), (3, 0), (0,), (0, 0, 0), (-1, 0)):
        with pytest.raises(FingerprintError, match="does not fit"):
            fingerprint(shard, offset=offset, shape=(4, 3))
    with pytest.raises(UnsupportedTensor, match="4 bytes"):
        fingerprint(shard, dtype="bfloat16")
    with pytest.raises(FingerprintError, match="one logical tensor"):
        _ = fingerprint(shard) + fingerprint(shard.reshape(3, 2))


@pytest.mark.parametrize("obstacle", ["no folder", "full disk"])
def test_the_kernel_works_without_a_place_for_its_cache(tmp_path: Path, obstacle: str) -> None:
    """A child with nowhere to cache machine code (numba looks at NUMBA_CACHE_DIR first)."""
    program = """
import resource, sys
import numpy as np
from shiftbook.checkpoint.fingerprint import fingerprint
if sys.argv[1] == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
print(fingerprint(np.arange(1000, dtype=np.float32).reshape(10, 100)).hex)
"""
    folder = tmp_path if obstacle == "full disk" else Path("/proc/cannot/be/made")
    done = subprocess.run(
        [sys.executable, "-c", program, obstacle],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == GOLDEN["a"]
    if obstacle == "full disk":
        assert not [f for f in tmp_path.rglob("*.nbc") if f.stat().st_size]
