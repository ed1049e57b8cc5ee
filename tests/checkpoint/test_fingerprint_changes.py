"""Fingerprints: every change of the content shows, and an update equals a recompute.

Method: hypothesis draws tensors and changes of the kinds that happen to weights (a permutation, a
swap, a shift, a flipped sign, a dropped or doubled slice); a long run of random small changes of
one to four elements, in which each value must differ from the base.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint.errors import FingerprintError
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint, update

torch.set_num_threads(1)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = {
    "float64": np.uint64, "int64": np.uint64, "float32": np.uint32, "bfloat16": np.uint16,
    "float16": np.uint16, "int8": np.uint8, "uint8": np.uint8,
}  # fmt: skip


def drawn(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


sizes = st.integers(2, 300)
seeds = st.integers(0, 2**31 - 1)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(FLOATS), sizes, seeds)
def test_permutation_swap_and_shift_show(dtype: torch.dtype, size: int, seed: int) -> None:
    base = drawn(dtype, size, seed)
    rng = np.random.default_rng(seed)
    mixed = base[torch.from_numpy(rng.permutation(size))]
    i, j = (int(k) for k in rng.choice(size, 2, replace=False))
    swapped = base.clone()
    swapped[[i, j]] = base[[j, i]]
    value = fingerprint(base).hex
    for changed in (mixed, swapped, base.roll(1), base.roll(2), base.flip(0)):
        assert (fingerprint(changed).hex == value) == torch.equal(changed, base)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(FLOATS), sizes, seeds, st.data())
def test_flipped_signs_show(dtype: torch.dtype, size: int, seed: int, data: st.DataObject) -> None:
    base = drawn(dtype, size, seed)
    value = fingerprint(base).hex
    where = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    changed = base.clone()
    for index in where:
        changed[index] = -changed[index]
    assert fingerprint(changed).hex != value
    assert fingerprint(-base).hex != value
    zeros = torch.zeros(size, dtype=dtype)
    negative = zeros.clone()
    negative[min(where)] = -0.0
    assert fingerprint(negative).hex != fingerprint(zeros).hex


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(FLOATS), st.integers(4, 300), seeds, st.data())
def test_dropped_and_doubled_slices_show(
    dtype: torch.dtype, size: int, seed: int, data: st.DataObject
) -> None:
    base = drawn(dtype, size, seed)
    length = data.draw(st.integers(1, size // 2))
    start = data.draw(st.integers(0, size - length))
    other = data.draw(st.integers(0, size - length))
    zeroed = base.clone()
    zeroed[start : start + length] = 0
    doubled = base.clone()
    doubled[other : other + length] = base[start : start + length]
    closed_up = torch.cat([base[:start], base[start + length :], base[:length]])
    value = fingerprint(base).hex
    for changed in (zeroed, doubled, closed_up):
        same = torch.equal(changed, base)
        assert (fingerprint(changed).hex == value) == same


def test_all_swaps_of_a_tensor_differ_from_it_and_from_each_other() -> None:
    """Swapped words always show, by the bijection of the hash; here all pairs of 128 values."""
    base = torch.arange(128, dtype=torch.int32)
    seen = {fingerprint(base).hex}
    for i in range(128):
        for j in range(i):
            changed = base.clone()
            changed[[i, j]] = base[[j, i]]
            seen.add(fingerprint(changed).hex)
    assert len(seen) == 1 + 128 * 127 // 2


def changes_without_a_miss(rounds: int, seed: int) -> None:
    """Change one to four elements at random, by a bit, a sign, one unit or at random; look."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for dtype, unsigned in (("bfloat16", np.uint16), ("float32", np.uint32), ("int8", np.uint8)):
        width = unsigned(0).itemsize * 8
        values = rng.integers(0, 2**width, size=96, dtype=np.uint64).astype(unsigned)
        base = fingerprint(values, dtype=dtype).sums
        count = rounds // 3
        places = rng.integers(0, values.size, size=(count, 4))
        how_many = rng.integers(1, 5, size=count)
        flips = np.where(
            rng.random((count, 4)) < 0.7,
            np.left_shift(np.uint64(1), rng.integers(0, width, size=(count, 4), dtype=np.uint64)),
            rng.integers(1, 2**width, size=(count, 4), dtype=np.uint64),
        ).astype(unsigned)
        for where, what, n in zip(places, flips, how_many, strict=True):
            chosen = np.unique(where[:n])
            values[chosen] ^= what[: chosen.size]
            assert fingerprint(values, dtype=dtype).sums != base, (chosen, what)
            values[chosen] ^= what[: chosen.size]
        assert fingerprint(values, dtype=dtype).sums == base


def test_200_000_small_changes_all_show() -> None:
    changes_without_a_miss(200_000, seed=20_260_101)


@pytest.mark.slow
def test_two_million_small_changes_all_show() -> None:
    changes_without_a_miss(2_000_000, seed=20_260_102)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(DTYPES)), st.integers(1, 200), seeds, st.data())
def test_update_equals_recompute(dtype: str, size: int, seed: int, data: st.DataObject) -> None:
    unsigned = DTYPES[dtype]
    rng = np.random.default_rng(seed)
    top = np.iinfo(unsigned).max
    old = rng.integers(0, top, size=size, dtype=unsigned, endpoint=True)
    new = old.copy()
    places = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    new[places] = rng.integers(0, top, size=len(places), dtype=unsigned, endpoint=True)
    before = fingerprint(old, dtype=dtype)
    indices = np.array(places, dtype=np.int64)
    after = update(before, indices, old[indices], new[indices])
    assert after == fingerprint(new, dtype=dtype)
    recorded = Fingerprint.from_hex(before.hex, dtype, (size,))
    assert update(recorded, indices, old[indices], new[indices]).hex == after.hex
    assert update(after, indices, new[indices], old[indices]) == before


def test_update_takes_torch_values_of_a_matrix() -> None:
    old = torch.randn(5, 7, generator=torch.Generator().manual_seed(3)).bfloat16()
    new = old.clone()
    new[2, 3], new[4, 6] = 1.5, float("nan")
    where = torch.nonzero(old.reshape(-1).view(torch.int16) != new.reshape(-1).view(torch.int16))
    flat = where.reshape(-1).numpy()
    after = update(fingerprint(old), flat, old.reshape(-1)[flat], new.reshape(-1)[flat])
    assert after == fingerprint(new)


def test_update_refuses_what_has_no_meaning() -> None:
    base = fingerprint(torch.zeros(4))
    one = np.zeros(1, dtype=np.float32)
    two = np.zeros(2, dtype=np.float32)
    refused = [
        ([4], one, one, "0 to 3"),
        ([-1], one, one, "0 to 3"),
        ([1, 1], two, two, "twice"),
        ([0.5], one, one, "integer"),
        ([[1]], one, one, "1-D"),
        ([1], two, one, "1 elements"),
        ([1], one, one.astype(np.float64), "4 bytes"),
    ]
    for indices, old, new, said in refused:
        with pytest.raises(FingerprintError, match=said):
            update(base, np.array(indices), old, new)


@settings(deadline=None)
@given(st.sampled_from(FLOATS), seeds)
def test_same_bits_under_another_dtype_or_shape_differ(dtype: torch.dtype, seed: int) -> None:
    base = drawn(dtype, 12, seed)
    assume(bool(base.abs().sum() > 0))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[base.element_size()]
    views = [base, base.reshape(3, 4), base.reshape(4, 3), base.view(integers)]
    assert len({fingerprint(view).hex for view in views}) == len(views)
