"""Named tensors and updates of them, as the tests of patches draw them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hypothesis import strategies as st

from shiftbook.checkpoint.patch_format import MAGIC
from shiftbook.ledger import canonical
from tests.checkpoint.test_fingerprint import random_tensor
from tests.checkpoint.test_many_tensors import EVERY_DTYPE

State = dict[str, torch.Tensor]


def bits(tensor: torch.Tensor) -> bytes:
    """The bits in C order, NaNs as they are."""
    if not tensor.numel():
        return b""
    plain = tensor.resolve_conj().contiguous().reshape(-1)
    plain = plain.as_strided(plain.shape, (1,))  # one element may have any stride
    return plain.view(torch.uint8).numpy().tobytes()


def all_bits(state: State) -> dict[str, bytes]:
    """The bits of each tensor."""
    return {name: bits(tensor) for name, tensor in state.items()}


def copied(state: State) -> State:
    """The same content elsewhere."""
    return {name: tensor.clone() for name, tensor in state.items()}


def blank(state: State) -> State:
    """Zeros in the same forms; torch cannot fill all of these dtypes."""
    zeros = {}
    for name, tensor in state.items():
        raw = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        zeros[name] = raw.view(tensor.dtype).reshape(tensor.shape)
    return zeros


def updated(state: State, share: float, seed: int) -> State:
    """Random new bytes for about a share of the elements; booleans stay 0 or 1."""
    rng = np.random.default_rng(seed)
    new = copied(state)
    for tensor in new.values():
        if not tensor.numel():
            continue
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        where = np.flatnonzero(rng.random(raw.size) < share)
        top = 2 if tensor.dtype is torch.bool else 256
        raw[where] = rng.integers(0, top, size=where.size, dtype=np.uint8)
    return new


def stepped(state: State, share: float, seed: int, most: int = 1) -> State:
    """A share of the elements moves by up to `most` in the last place, up or down."""
    rng = np.random.default_rng(seed)
    new = copied(state)
    for tensor in new.values():
        unsigned = np.dtype(f"u{min(8, tensor.element_size())}")
        units = tensor.reshape(-1).view(torch.uint8).numpy().view(unsigned)
        where = np.flatnonzero(rng.random(units.size) < share)
        steps = rng.integers(1, most, size=where.size, endpoint=True).astype(unsigned)
        units[where] += np.where(rng.random(where.size) < 0.5, steps, np.array(0) - steps).astype(
            unsigned
        )
    return new


@st.composite
def states(draw: st.DrawFn) -> State:
    """One to four tensors of any dtype, empty ones and scalars included."""
    seed = draw(st.integers(0, 2**32 - 1))
    kinds = draw(st.lists(st.sampled_from(EVERY_DTYPE), min_size=1, max_size=4))
    shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    return {f"t{n}": random_tensor(dtype, draw(shapes), seed + n) for n, dtype in enumerate(kinds)}


def model(seed: int = 0) -> State:
    """A small model in the dtypes of one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(90, 40, generator=generator).bfloat16(),
        "norm": torch.ones(40),
        "steps": torch.arange(3),
        "weight": torch.randn(40, 80, generator=generator).bfloat16(),
    }


def forged(data: bytes, change: Any) -> bytes:
    """A patch whose header went through `change` and whose lengths and SHA-256 are right again."""
    stored = int.from_bytes(data[16:24], "little")
    plain = int.from_bytes(data[24:32], "little")
    text = pa.Codec("zstd").decompress(data[32 : 32 + stored], decompressed_size=plain)
    header = canonical.decode(bytes(text))
    changed = change(header)
    encoded = canonical.encode(header if changed is None else changed)
    small = pa.Codec("zstd").compress(encoded, asbytes=True)
    lengths = len(small).to_bytes(8, "little") + len(encoded).to_bytes(8, "little")
    return signed(MAGIC + lengths + small + data[32 + stored : -32])


def signed(body: bytes) -> bytes:
    """The bytes with their SHA-256."""
    return body + hashlib.sha256(body).digest()
