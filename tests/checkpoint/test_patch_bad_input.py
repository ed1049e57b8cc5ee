"""Goal: a patch that is no patch, or not for these tensors, is refused with its cause and no trace.

Method: one altered bit anywhere, a cut anywhere, headers and sections that were forged under a
right SHA-256, wrong bases, names, shapes and dtypes; each time the receiver's bits are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint.errors import (
    PatchDamaged,
    PatchError,
    PatchRefused,
    PatchUnencodable,
    UnsupportedTensor,
)
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.patch import Lossy, apply_patch, encode_anchor, encode_patch, read_patch
from shiftbook.checkpoint.patch_series import compose
from tests.checkpoint.patch_states import (
    State,
    all_bits,
    copied,
    forged,
    model,
    signed,
    stepped,
    updated,
)

torch.set_num_threads(1)
BASE = model()
NEW = updated(BASE, 0.02, 5)
PATCH = encode_patch(BASE, NEW, base_version=1, version=2, nan="carry")
ANCHOR = encode_anchor(NEW, version=2, nan="carry")
STEPPED = stepped(BASE, 0.05, 6)
PACKED = encode_patch(BASE, STEPPED, base_version=1, version=2)
LOSSY_BASE = {"w": torch.linspace(-1, 1, 9000)}
LOSSY_NEW = {"w": torch.linspace(-1, 1, 9000).sin()}
LOSSY = encode_patch(LOSSY_BASE, LOSSY_NEW, base_version=1, version=2, lossy=Lossy(max_error=0.01))


def refused(
    data: bytes, error: type[PatchError], said: str, state: State | None = None, **how: Any
) -> PatchError:
    """Apply, expect the error, and find every bit where it was."""
    receiver = copied(BASE if state is None else state)
    before = all_bits(receiver)
    with pytest.raises(error, match=said) as caught:
        apply_patch(data, receiver, **{"version": 1, **how})
    assert all_bits(receiver) == before
    return caught.value


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([PATCH, PACKED, ANCHOR, LOSSY]), st.integers(0, 2**31), st.integers(0, 7))
def test_one_flipped_bit_anywhere(data: bytes, place: int, bit: int) -> None:
    altered = bytearray(data)
    altered[place % len(data)] ^= 1 << bit
    refused(bytes(altered), PatchDamaged, "expected a patch")


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([PATCH, ANCHOR]), st.integers(0, 2**31), st.booleans())
def test_cut_off_or_with_something_after_it(data: bytes, place: int, longer: bool) -> None:
    refused(data + b"x" if longer else data[: place % len(data)], PatchDamaged, "expected a patch")


def test_no_patch_at_all() -> None:
    refused(b"", PatchDamaged, "found 0 bytes")
    refused(b"PK\x03\x04" + bytes(100), PatchDamaged, "other bytes")
    refused(forged(PATCH, lambda h: h | {"tensors": {}}), PatchDamaged, "without tensors")
    with pytest.raises(PatchUnencodable, match="found none"):
        encode_anchor({}, version=1)
    with pytest.raises(PatchUnencodable, match="the same tensors"):
        encode_patch({}, {}, base_version=1, version=2)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([PATCH, PACKED, ANCHOR, LOSSY]), st.integers(0, 2**31), st.integers(1, 255))
def test_forged_sections_are_seen_by_the_result(data: bytes, place: int, mask: int) -> None:
    """The SHA-256 is right, the planes are not: a position, a difference or a frame is another."""
    start = read_patch(data).payload_start
    altered = bytearray(data[:-32])
    altered[start + place % (len(altered) - start)] ^= mask
    base, new = (LOSSY_BASE, LOSSY_NEW) if data is LOSSY else (BASE, NEW)
    new = STEPPED if data is PACKED else new
    receiver = copied(base)
    before = all_bits(receiver)
    try:
        done = apply_patch(signed(bytes(altered)), receiver, version=1, accept_error=0.01)
    except PatchDamaged:
        assert all_bits(receiver) == before
    else:  # a byte of a zstd frame that means nothing
        assert done.fingerprints == read_patch(data).header.result_fingerprints
        assert data is LOSSY or all_bits(receiver) == all_bits(new)


def mutate(rng: random.Random, value: Any) -> Any:
    """The value with one field somewhere in it removed, doubled or replaced."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutate(rng, value[key])}
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:index] + value[index + 1 :]
        return [*value[:index], mutate(rng, value[index]), *value[index + 1 :]]
    if isinstance(value, str) and rng.random() < 0.7:
        return "".join(rng.sample(value, len(value)))
    return rng.choice([0, 1, -1, 7, 2**40, 2**63, 2**64 - 1, None, "", "x", [], {}, 1.5, True])


@settings(deadline=None, max_examples=400)
@given(st.sampled_from([PATCH, PACKED, ANCHOR, LOSSY]), st.integers(0, 2**63))
def test_forged_headers(data: bytes, seed: int) -> None:
    rng = random.Random(seed)
    altered = forged(data, lambda header: mutate(rng, header))
    receiver = copied(LOSSY_BASE if data is LOSSY else BASE)
    before = all_bits(receiver)
    expected = read_patch(data).header.result_fingerprints
    try:
        done = apply_patch(altered, receiver, version=1, accept_error=1.0)
    except PatchError:
        assert all_bits(receiver) == before
    else:  # the version, say: content that no fingerprint speaks of
        assert done.fingerprints == expected == fingerprint_tensors(receiver)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h | {"format": "shiftbook-patch-v9"}, "a newer Shiftbook"),
        (lambda h: h | {"base_root": "0" * 32}, "base root"),
        (lambda h: h | {"result_root": "0" * 32}, "result root"),
        (lambda h: h | {"more": 1}, "more"),
    ],
)
def test_headers_say_what_is_wrong(change: Callable[[dict], dict], said: str) -> None:
    refused(forged(PATCH, change), PatchDamaged, said)


def test_another_base_is_refused() -> None:
    refused(PATCH, PatchRefused, "expected version 1, .* found 2", version=2)
    refused(PATCH, PatchRefused, "found None", version=None)
    for name in BASE:
        other = copied(BASE)
        flat = other[name].reshape(-1)
        flat[-1] = flat[-1] + 1
        error = refused(PATCH, PatchRefused, f"changed: {name}", state=other)
        assert error.tensor == name
    applied = copied(BASE)
    apply_patch(PATCH, applied, version=1)
    refused(PATCH, PatchRefused, "found other contents", state=applied)


def test_other_names_shapes_and_dtypes_are_refused() -> None:
    more = copied(BASE) | {"bias": torch.zeros(2)}
    less = {name: tensor for name, tensor in copied(BASE).items() if name != "norm"}
    flat = copied(BASE) | {"embed": BASE["embed"].reshape(40, 90).clone()}
    half = copied(BASE) | {"embed": BASE["embed"].half()}
    for data in (PATCH, ANCHOR):
        refused(data, PatchRefused, r"extra \['bias'\]", state=more)
        refused(data, PatchRefused, r"missing \['norm'\]", state=less)
        assert refused(data, PatchRefused, "embed: expected bfloat16", state=flat).tensor == "embed"
        refused(data, PatchRefused, "found float16", state=half)
    for base, new, said in (
        (BASE, more, "extra"),
        (BASE, less, "missing"),
        (BASE, flat, "embed: expected"),
        (BASE, half, "embed: expected"),
    ):
        with pytest.raises(PatchUnencodable, match=said):
            encode_patch(base, new, base_version=1, version=2)


def test_what_cannot_be_written_is_refused_before_anything_is() -> None:
    frozen = {name: tensor.numpy() for name, tensor in copied(BASE).items() if name == "norm"}
    frozen["norm"].flags.writeable = False
    good = np.ones(40, dtype=np.float32)
    base = {"a": good, "b": frozen["norm"]}
    new = {"a": good + 1, "b": good + 2}
    data = encode_patch(base, new, base_version=1, version=2)
    with pytest.raises(PatchRefused, match="b: expected a tensor that can be written"):
        apply_patch(data, base, version=1)
    assert (base["a"] == 1).all()
    swapped = {"a": good.copy(), "b": good.astype(">f4")}
    with pytest.raises(PatchRefused, match="big-endian"):
        apply_patch(data, swapped, version=1)
    with pytest.raises(UnsupportedTensor):
        apply_patch(data, {"a": good, "b": torch.empty(40, device="meta")}, version=1)


def test_names_that_share_memory_get_one_content() -> None:
    table = torch.zeros(6, 4)
    tied = {"embed": table, "head": table}
    same = {"embed": torch.ones(6, 4), "head": torch.ones(6, 4)}
    apply_patch(encode_patch(tied, same, base_version=1, version=2), tied, version=1)
    assert torch.equal(table, torch.ones(6, 4))
    parted = {"embed": torch.ones(6, 4), "head": torch.full((6, 4), 2.0)}
    data = encode_patch(tied, parted, base_version=2, version=3)
    with pytest.raises(PatchRefused, match="one tensor here"):
        apply_patch(data, tied, version=2)
    assert torch.equal(table, torch.ones(6, 4))


NUMBERS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", [*NUMBERS, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_that_became_nan_are_refused_unless_they_are_meant(dtype: torch.dtype) -> None:
    base = {"w": torch.ones(20).to(dtype)}
    new = {"w": torch.cat([torch.ones(18), torch.tensor([float("nan"), 2.0])]).to(dtype)}
    for make in (
        lambda **how: encode_patch(base, new, base_version=1, version=2, **how),
        lambda **how: encode_anchor(new, version=2, **how),
    ):
        with pytest.raises(PatchUnencodable, match="w: expected numbers, found 1 NaN") as caught:
            make()
        assert caught.value.tensor == "w"
        receiver = copied(base)
        apply_patch(make(nan="carry"), receiver, version=1)
        assert all_bits(receiver) == all_bits(new)
    if dtype is not torch.float8_e4m3fn:  # which has no infinity
        infinite = {"w": torch.full((20,), float("-inf")).to(dtype)}
        encode_patch(base, infinite, base_version=1, version=2)
    encode_patch(new, new, base_version=1, version=2)  # an old NaN is nobody's news


def test_a_base_that_changed_since_it_was_fingerprinted_is_noticed() -> None:
    known = fingerprint_tensors(BASE)
    other = copied(BASE)
    other["norm"][3] = 5.0
    with pytest.raises(PatchUnencodable, match="norm: expected a base with fingerprint"):
        encode_patch(other, NEW, base_version=1, version=2, base_fingerprints=known, nan="carry")


def test_patches_that_do_not_follow_each_other_do_not_compose() -> None:
    later = encode_patch(NEW, updated(NEW, 0.1, 1), base_version=2, version=3, nan="carry")
    compose(PATCH, later)
    with pytest.raises(PatchRefused, match="in the order"):
        compose(later, PATCH)
    with pytest.raises(PatchRefused, match="in the order"):
        compose(PATCH, forged(later, lambda h: h | {"base_version": 5}))
    with pytest.raises(PatchRefused, match="lossy"):
        compose(LOSSY, _after_lossy())
    assert compose(PATCH, ANCHOR) == ANCHOR


def _after_lossy() -> bytes:
    receiver = copied(LOSSY_BASE)
    apply_patch(LOSSY, receiver, version=1, accept_error=0.01)
    return encode_patch(receiver, LOSSY_NEW, base_version=2, version=3)


@pytest.mark.parametrize(
    "shared",
    [
        torch.zeros(1, 8).expand(4, 8),
        torch.zeros(4, 1).expand(4, 8),
        torch.zeros(32).as_strided((4, 8), (2, 1)),
        np.lib.stride_tricks.as_strided(np.zeros(32, "f4"), (4, 8), (0, 4), writeable=True),
    ],
    ids=["rows", "columns", "windows", "numpy"],
)
def test_a_tensor_whose_elements_share_memory_is_not_written(shared: Any) -> None:
    """One write would change other elements, unseen by what the patch's fingerprints promise."""
    base, new = torch.zeros(4, 8), torch.zeros(4, 8)
    new[1, 2] = 1.0
    patch = encode_patch({"w": base}, {"w": new}, base_version=0, version=1)
    with pytest.raises(PatchRefused, match="its elements share memory"):
        apply_patch(patch, {"w": shared}, version=0)
    assert not np.asarray(shared).any()
    transposed = torch.zeros(8, 4).t()
    apply_patch(patch, {"w": transposed}, version=0)
    assert torch.equal(transposed, new)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"nan": "keep"}, "found 'keep'"),
        ({"version": -1}, "found -1"),
        ({"version": None}, "found None"),
        ({"base_version": -3}, "found -3"),
        ({"base_fingerprints": {"w": "0" * 32}}, "found none of"),
    ],
)
def test_what_no_reader_would_take_is_not_written(how: dict[str, Any], said: str) -> None:
    with pytest.raises(PatchUnencodable, match=said):
        encode_patch(BASE, NEW, **{"base_version": 1, "version": 2, "nan": "carry", **how})
    if "base" not in str(how):
        with pytest.raises(PatchUnencodable, match=said):
            encode_anchor(NEW, **{"version": 2, "nan": "carry", **how})
