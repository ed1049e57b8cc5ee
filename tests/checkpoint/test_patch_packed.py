"""Goal: changes that are packed into bits come back, whatever their number, place and size.

Method: hypothesis draws tensors of one to four blocks in every width, with scattered, neighbouring
and long steps, more of them at one place than are hashed together; packed bits are altered at
random and read; patches that the first format wrote are read and applied.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint import patch_blocks, patch_codec
from shiftbook.checkpoint.errors import PatchDamaged, PatchRefused, PatchUnencodable
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.patch import apply_patch, encode_patch, read_patch
from shiftbook.checkpoint.patch_codec import (
    Changes,
    decode_changes,
    encode_changes,
)
from shiftbook.checkpoint.patch_format import BLOCK, TensorPatch
from shiftbook.checkpoint.patch_numbers import count_nan
from shiftbook.checkpoint.patch_places import place_of
from shiftbook.checkpoint.patch_series import compose
from tests.checkpoint.patch_states import State, all_bits, blank, copied, stepped
from tests.checkpoint.test_many_tensors import EVERY_DTYPE

torch.set_num_threads(1)
OLD_PATCHES = Path(__file__).parent.parent / "assets" / "patches"
DTYPES = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64"}
seeds = st.integers(0, 2**32 - 1)
widths = st.sampled_from([1, 2, 4, 8])
sizes = st.sampled_from([1, 2, 63, 64, 65, 2047, 2049, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])


def drawn(width: int, size: int, share: float, run: int, most: int, seed: int) -> Changes:
    """About so many changes in runs, most steps of one, some of up to `most`."""
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(rng.random(size) < share / run)
    positions = np.unique((starts[:, None] + np.arange(run)).reshape(-1))
    positions = positions[positions < size].astype(np.int64)
    steps = np.ones(positions.size, dtype=f"u{width}")
    longer = rng.random(steps.size) < 0.1
    top = min(most, 2 ** (8 * width - 1))
    steps[longer] = rng.integers(1, top, size=int(longer.sum()), endpoint=True, dtype=np.uint64)
    down = rng.random(steps.size) < 0.5
    steps[down] = np.array(0, steps.dtype) - steps[down]
    return Changes(positions, steps)


def record_of(width: int, size: int, fields: dict) -> TensorPatch:
    blank = "0" * 32
    return TensorPatch(dtype=DTYPES[width], shape=(size,), base=blank, result=blank, **fields)


@settings(deadline=None, max_examples=100)
@given(
    widths,
    sizes,
    st.sampled_from([0.0, 0.001, 0.03, 0.4, 1.0]),
    st.sampled_from([1, 2, 50]),
    st.sampled_from([1, 2, 200, 2**63]),
    seeds,
)
def test_changes_come_back(
    width: int, size: int, share: float, run: int, most: int, seed: int
) -> None:
    changes = drawn(width, size, share, run, most, seed)
    fields, stored = encode_changes(changes, size)
    record = record_of(width, size, fields)
    if fields["encoding"] == "same":
        assert not changes.positions.size
        return
    back = decode_changes("w", record, [memoryview(each) for each in stored])
    assert np.array_equal(back.positions, changes.positions)
    assert np.array_equal(back.differences, changes.differences)
    neighbours = np.diff(changes.positions) == 1
    neighbours &= np.diff(changes.positions // BLOCK) == 0
    minus_one = np.array(0, changes.differences.dtype) - np.array(1, changes.differences.dtype)
    others = (changes.differences != 1) & (changes.differences != minus_one)
    changed = changes.positions.size
    scattered = 2 * neighbours.sum() <= changed and 4 * others.sum() <= changed
    if scattered:
        assert fields["encoding"] == "packed"
    elif fields["encoding"] == "packed":  # few ones, and no longer than planes without zstd
        assert changed < 1024
        assert len(stored[0]) <= changed * (1 + width) + 16 + 8 * -(-size // BLOCK)
    if scattered:  # the bound of patch_bits' docstring: two bits more than the low ones, a sign
        low = np.log2(max(1, size / changed))
        head = 20 * (-(-size // BLOCK))
        long = others.sum() * (4 + np.log2(changed + 1) + 2 * 8 * width)
        assert len(stored[0]) <= head + (changed * (low + 4) + long) / 8


@settings(deadline=None, max_examples=300)
@given(widths, st.integers(1, 3000), st.booleans(), seeds)
def test_altered_bits_are_refused_or_lie_inside(
    width: int, size: int, longer: bool, seed: int
) -> None:
    """Nothing is read or written outside; what comes out are rising positions below the size."""
    changes = drawn(width, size, 0.2, 1, 9 if longer else 1, seed)
    fields, stored = encode_changes(changes, size)
    if fields["encoding"] != "packed":
        return
    rng = np.random.default_rng(seed)
    altered = bytearray(stored[0])
    for _ in range(rng.integers(1, 4)):
        altered[rng.integers(len(altered))] ^= 1 << int(rng.integers(8))
    try:
        back = decode_changes("w", record_of(width, size, fields), [memoryview(altered)])
    except PatchDamaged:
        return
    assert back.positions.size == changes.positions.size
    assert back.positions[0] >= 0
    assert back.positions[-1] < size
    assert (np.diff(back.positions) > 0).all()


def many(seed: int) -> State:
    """More tensors than are hashed together, of one to three blocks and of two widths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [BLOCK] * 9 + [2 * BLOCK + 77, BLOCK + 1, 3, 0, 5001]
    state = {f"t{n}": torch.randn(size, generator=generator) for n, size in enumerate(lengths)}
    half = {f"h{n}": tensor.bfloat16() for n, tensor in enumerate(state.values())}
    return state | half


@pytest.mark.parametrize("threads", [1, 3])
def test_many_tensors_at_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = many(1)
    new = stepped(base, 0.01, 2)
    data = encode_patch(base, new, base_version=0, version=1, threads=threads)
    assert {r.encoding for r in read_patch(data).header.tensors.values()} == {"same", "packed"}
    alone = [
        encode_patch({n: base[n]}, {n: new[n]}, base_version=0, version=1) for n in ("t9", "h10")
    ]
    for patch in alone:
        ((name, record),) = read_patch(patch).header.tensors.items()
        assert read_patch(data).header.tensors[name] == record
    receiver = copied(base)
    done = apply_patch(data, receiver, version=0, threads=threads)
    assert all_bits(receiver) == all_bits(new)
    assert done.fingerprints == fingerprint_tensors(new)
    known = fingerprint_tensors(base)
    receiver = copied(base)
    apply_patch(data, receiver, version=0, threads=threads, fingerprints=known)
    assert all_bits(receiver) == all_bits(new)
    monkeypatch.setattr(patch_blocks, "_LEAST_WORDS", 1)  # room is made as it goes
    monkeypatch.setattr(patch_blocks, "_WORDS_PER_BYTE", 0.0)
    monkeypatch.setattr(patch_codec, "_LEAST_WORDS", 1)
    again = encode_patch(base, new, base_version=0, version=1, threads=threads)
    assert again == data


def test_a_changed_base_shows_in_any_block() -> None:
    base = many(1)
    data = encode_patch(base, stepped(base, 0.01, 2), base_version=0, version=1)
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 76):
        receiver = copied(base)
        receiver["h9"].view(torch.int16)[place] ^= 1
        before = all_bits(receiver)
        with pytest.raises(PatchRefused, match="changed: h9"):
            apply_patch(data, receiver, version=0)
        assert all_bits(receiver) == before


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_nan_is_refused_in_every_dtype(dtype: torch.dtype) -> None:
    """Random bits: refused just where numpy finds a NaN among the changed units."""
    refused = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        top = 2 if dtype is torch.bool else 256
        raw = rng.integers(0, top, size=(2, 3 * dtype.itemsize), dtype=np.uint8)
        base, new = ({"w": torch.from_numpy(each.copy()).view(dtype)} for each in raw)
        units = [place_of(state["w"]).read() for state in (base, new)]
        count = count_nan(str(dtype).removeprefix("torch."), units[1][units[0] != units[1]])
        if count:
            refused += 1
            with pytest.raises(PatchUnencodable, match=f"found {count} NaN"):
                encode_patch(base, new, base_version=0, version=1)
        else:
            receiver = copied(base)
            apply_patch(encode_patch(base, new, base_version=0, version=1), receiver, version=0)
            assert all_bits(receiver) == all_bits(new)
    print(f"{dtype}: {refused} of 40 refused")


def test_patches_of_the_first_format_are_read() -> None:
    """An anchor, byte planes and int8 steps, as Shiftbook wrote them before bits were packed."""
    anchor, changes, lossy = (
        (OLD_PATCHES / f"v1-{kind}.patch").read_bytes() for kind in ("anchor", "changes", "lossy")
    )
    headers = [read_patch(each).header for each in (anchor, changes, lossy)]
    assert {header.format for header in headers} == {"shiftbook-patch-v1"}
    encodings = {r.encoding for header in headers for r in header.tensors.values()}
    assert encodings == {"same", "changes", "bits", "int8"}
    shapes = {
        name: torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        for name, record in headers[0].tensors.items()
    }
    receiver = blank(shapes)
    apply_patch(anchor, receiver, version=None)
    base = copied(receiver)
    assert fingerprint_tensors(base) == headers[1].base_fingerprints
    apply_patch(changes, receiver, version=0)
    assert fingerprint_tensors(receiver) == headers[1].result_fingerprints
    new = stepped(receiver, 0.01, 3)
    packed = encode_patch(receiver, new, base_version=1, version=2, nan="carry")
    assert read_patch(packed).header.format == "shiftbook-patch-v2"
    composed = compose(changes, packed)
    assert composed == encode_patch(base, new, base_version=0, version=2, nan="carry")
    apply_patch(lossy, receiver, version=1, accept_error=0.01)
    assert fingerprint_tensors(receiver) == headers[2].result_fingerprints
