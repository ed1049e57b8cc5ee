"""Fingerprints of logical tensors: 128 bits that no sharding, layout, stride or device changes.

**What is computed.** The elements of a logical tensor, in C order, are read as one stream of
32-bit words x_0, x_1, ... (little-endian bits; elements of 1 and 2 bytes share a word, those of 8
count as two words, of 16 as four). With z_w the SplitMix64 hash of the word index w under a fixed
key, and a_w, b_w the lower and upper 32 bits of z_w,

    S_0 = sum over w of a_w * x_w  mod 2^64,      S_1 = sum over w of b_w * x_w  mod 2^64.

The value is (S_0, S_1) plus two 64-bit numbers derived by SHA-256 from dtype and shape. Both sums
are linear in the bits, hence: shards add up, in any order; a changed element changes S by a *
(new - old) without a look at the rest; and nothing but the position in the logical tensor enters.

**The bound.** Take two fixed contents of one dtype and shape that differ, d_w = x'_w - x_w, and
model the hash as a random function: all a_w, b_w independent and uniform in [0, 2^32). Choose one
w with d_w != 0; 0 < |d_w| < 2^32. Whatever the other terms sum to, S_0 agrees only if a_w * d_w =
c mod 2^64 for one fixed c. Two multipliers a != a' that both do so would give (a - a') * d_w = 0
mod 2^64; but 0 < |a - a'| < 2^32 and 0 < |d_w| < 2^32, so the product is an integer with 0 <
|product| < 2^64: a contradiction. At most one of the 2^32 multipliers fits, so S_0 agrees with
probability <= 2^-32, and, b_w being independent of it, both sums agree with probability <= 2^-64,
which is below 2^-60.

Because the multiplier has 32 bits and the product is exact in 64, no low bits are lost: a change
that is a multiple of a high power of two (a flipped sign is 2^31 or 2^15) is bound like any
other. With 64-bit multipliers the same sum would lose v_2(d) bits. Two facts hold without any
model, because SplitMix64 is a bijection of 64-bit numbers: exchanging two words (a_i = a_j and
b_i = b_j is impossible for i != j) always shows, and so does a change of a single word, but for
the one index in 2^64 whose hash is zero. Different dtype or shape: values agree only if the
difference of the sums hits the difference of two SHA-256 prefixes, 2^-128 for contents that were
not made from it.

**Zeros.** A word of zero bits adds nothing, so a shard of zeros that was read twice or left out
does not show in the sums. Partial fingerprints therefore carry a third number: each contiguous
run [start, end) adds g(end) - g(start) mod 2^64 with g a keyed hash. Runs that tile the tensor
telescope to g(size) - g(0). Any other cover leaves some g(i) with a nonzero whole coefficient,
since how often element i is read is the running sum of those coefficients; it passes with a
probability of at most 2^(k-64), 2^k being the largest power of two that divides them all (1 for a
shard that was dropped or read twice). `hex` refuses such a cover; it is not part of the value.

**What it is not.** The key is public and the sums are linear: whoever wants to can make two
tensors with one fingerprint. SHA-256 of the files at rest is the guard against that.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.compare import check_hex, root
from shiftbook.checkpoint.elements import Runs, contiguous_blocks, element_view
from shiftbook.checkpoint.errors import (
    FingerprintError,
    IncompleteFingerprint,
    UnsupportedTensor,
)
from shiftbook.checkpoint.host_sums import sum_block as sum_block_on_host
from shiftbook.checkpoint.positions import COVER_KEY, ITEM_BYTES, KEY, MASK_64, mix, mix_array

__all__ = ["Fingerprint", "fingerprint", "fingerprint_tensors", "root", "update"]

_BINDING_DOMAIN = b"shiftbook-fingerprint-v1"
_AT_ZERO = np.zeros(1, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The sums over all or some elements of one logical tensor; `+` joins disjoint parts of it."""

    dtype: str
    shape: tuple[int, ...]
    sums: tuple[int, int]
    cover: int

    @classmethod
    def empty(cls, dtype: str, shape: Sequence[int]) -> Fingerprint:
        """The fingerprint of no element yet: the start value when shards are added up."""
        _item_bytes(dtype)
        return cls(dtype, tuple(int(n) for n in shape), (0, 0), 0)

    @classmethod
    def whole(cls, dtype: str, shape: Sequence[int], sums: tuple[int, int]) -> Fingerprint:
        """The fingerprint of a whole tensor whose two sums (mod 2^64) are known."""
        blank = cls.empty(dtype, shape)
        return cls(dtype, blank.shape, sums, _whole_cover(blank.shape))

    @classmethod
    def from_hex(cls, value: str, dtype: str, shape: Sequence[int]) -> Fingerprint:
        """Read a complete fingerprint back, so that `update` can go on from a recorded one."""
        check_hex("from_hex", value)
        blank = cls.empty(dtype, shape)
        bound = _binding(dtype, blank.shape)
        halves = (int(value[:16], 16), int(value[16:], 16))
        sums = tuple((half - bind) & MASK_64 for half, bind in zip(halves, bound, strict=True))
        return cls(dtype, blank.shape, (sums[0], sums[1]), _whole_cover(blank.shape))

    @property
    def complete(self) -> bool:
        """True when the parts joined so far cover each element once (see "Zeros" above)."""
        return self.cover == _whole_cover(self.shape)

    @property
    def hex(self) -> str:
        """The value: 32 hex digits, bound to dtype and shape. IncompleteFingerprint for a part."""
        if not self.complete:
            raise IncompleteFingerprint(
                f"fingerprint of a {self.dtype} tensor of shape {self.shape}: expected parts that "
                "cover each element exactly once, found a gap or an overlap; add the fingerprints "
                "of all shards, each once"
            )
        bound = _binding(self.dtype, self.shape)
        halves = [(s + bind) & MASK_64 for s, bind in zip(self.sums, bound, strict=True)]
        return f"{halves[0]:016x}{halves[1]:016x}"

    def __add__(self, other: Fingerprint) -> Fingerprint:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise FingerprintError(
                "fingerprints add up only within one logical tensor: expected a part of "
                f"{self.dtype} {self.shape}, found one of {other.dtype} {other.shape}; pass the "
                "whole tensor's shape to fingerprint() for each shard"
            )
        return Fingerprint(
            self.dtype,
            self.shape,
            (
                (self.sums[0] + other.sums[0]) & MASK_64,
                (self.sums[1] + other.sums[1]) & MASK_64,
            ),
            (self.cover + other.cover) & MASK_64,
        )

    def __str__(self) -> str:
        return self.hex


def fingerprint(
    tensor: Any,
    *,
    offset: int | Sequence[int] = 0,
    shape: Sequence[int] | None = None,
    dtype: str | None = None,
    threads: int = 1,
) -> Fingerprint:
    """Fingerprint a numpy array or torch tensor, or one shard of a logical tensor.

    `shape` is the whole logical tensor's (by default the tensor is the whole). `offset` says where
    the shard stands in it: a number is the flat index of its first element, the shard being a
    contiguous range of the flattened tensor; a sequence holds the start along each axis, the shard
    being that box. `dtype` names the logical dtype where the array cannot (bf16 bits held as
    uint16, say). Tensors are read in place, strided ones through copies of at most a few MB; one
    on a device is summed there (copied there first when it is not contiguous). `threads` > 1
    splits large contiguous tensors.

    Raises UnsupportedTensor for what is not dense and FingerprintError for a shard that does not
    fit into `shape`.
    """
    if _on_device(tensor):
        return _device_fingerprint(tensor, offset, shape, dtype)
    array, dtype_name = element_view(tensor, dtype)
    whole = tuple(int(n) for n in shape) if shape is not None else tuple(array.shape)
    if (
        isinstance(offset, int)
        and offset == 0
        and whole == array.shape
        and array.flags.c_contiguous
    ):
        # The common case, short because bundles and syncs fingerprint many small tensors.
        sums = sum_block_on_host(array.reshape(1, -1), _AT_ZERO, threads) if array.size else (0, 0)
        cover = _whole_cover(whole)
    else:
        runs = Runs.of(array.shape, offset, whole)
        sums = (0, 0)
        for block, starts in contiguous_blocks(array, runs):
            more = sum_block_on_host(block, starts, threads)
            sums = (sums[0] + more[0], sums[1] + more[1])
        local = tuple(array.shape)
        cover = _cover(runs.starts(local), runs.run_length(local)) if array.size else 0
    return Fingerprint(dtype_name, whole, (sums[0] & MASK_64, sums[1] & MASK_64), cover)


def update(
    fp: Fingerprint, indices: Any, old_bits: NDArray[Any], new_bits: NDArray[Any]
) -> Fingerprint:
    """The fingerprint after some elements changed, without reading the others.

    `indices` are flat indices of distinct elements in the logical tensor; `old_bits` and
    `new_bits` hold those elements before and after (arrays of the tensor's element width: its own
    dtype or the unsigned integers of that width; 1-D, as long as `indices`). Raises
    FingerprintError when lengths or widths do not fit, or an index repeats or lies outside.
    """
    item_bytes = _item_bytes(fp.dtype)
    flat = np.asarray(indices)
    size = math.prod(fp.shape)
    if flat.ndim != 1 or (flat.size and flat.dtype.kind not in "iu"):
        raise FingerprintError(
            f"update: expected a 1-D array of integer indices, found {flat.dtype} {flat.shape}"
        )
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= size):
        raise FingerprintError(
            f"update: expected indices from 0 to {size - 1} for shape {fp.shape}, "
            f"found {int(flat.min())} to {int(flat.max())}; use flat indices in C order"
        )
    if np.unique(flat).size != flat.size:
        raise FingerprintError("update: expected distinct indices, found one twice; merge them")
    words, columns, shifts = _word_positions(flat.astype(np.uint64), item_bytes)
    delta = np.zeros(columns.shape, dtype=np.uint64)
    for sign, bits in ((1, new_bits), (-1, old_bits)):
        values = _bits_of(bits, flat.size, item_bytes) << shifts
        delta = delta + values if sign > 0 else delta - values
    hashes = mix_array(KEY, words)
    low = int(((hashes & np.uint64(0xFFFF_FFFF)) * delta).sum(dtype=np.uint64))
    high = int(((hashes >> np.uint64(32)) * delta).sum(dtype=np.uint64))
    sums = ((fp.sums[0] + low) & MASK_64, (fp.sums[1] + high) & MASK_64)
    return Fingerprint(fp.dtype, fp.shape, sums, fp.cover)


def fingerprint_tensors(
    tensors: Mapping[str, Any], *, threads: int = 1, share_hashes: bool | None = None
) -> dict[str, str]:
    """The 32 hex digits of each whole tensor, by name; see `root` for one digest of them all.

    Faster than one call for each: threads share all tensors' words evenly, and each position is
    hashed once for all tensors. That changes no value; `share_hashes=False` does without.
    """
    from shiftbook.checkpoint.many_tensors import whole_sums  # numba

    sums = whole_sums(tensors, threads, share_hashes)
    return {
        name: Fingerprint(dtype, shape, pair, _whole_cover(shape)).hex
        for name, (dtype, shape, pair) in sums.items()
    }


def bindings(kinds: Sequence[tuple[str, tuple[int, ...]]]) -> NDArray[np.uint64]:
    """What binds the fingerprint of each whole tensor to its dtype and shape: `[tensor, 2]`.

    The sums of a tensor and its row, added mod 2^64, are the two halves of its fingerprint.
    """
    return np.array([_binding(*kind) for kind in kinds], np.uint64).reshape(-1, 2)


def _on_device(tensor: Any) -> bool:
    """True for a torch tensor that the processor cannot read in place."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type not in ("cpu", "meta")
        and type(tensor).__name__ != "DTensor"
    )


def _device_fingerprint(
    tensor: Any, offset: int | Sequence[int], shape: Sequence[int] | None, dtype: str | None
) -> Fingerprint:
    """`fingerprint` by torch operations on the tensor's own device."""
    from shiftbook.checkpoint.device_sums import device_bits, sum_block

    name = dtype if dtype is not None else str(tensor.dtype).removeprefix("torch.")
    if _item_bytes(name) != tensor.element_size():
        raise UnsupportedTensor(
            f"expected a dtype whose elements have {tensor.element_size()} bytes, found {name!r}"
        )
    local = tuple(int(n) for n in tensor.shape)
    whole = tuple(int(n) for n in shape) if shape is not None else local
    runs = Runs.of(local, offset, whole)
    if not math.prod(local):
        return Fingerprint.empty(name, whole)
    starts, run_length = runs.starts(local), runs.run_length(local)
    bits = device_bits(tensor)
    per_element = tensor.element_size() // bits.element_size()  # 2 for complex128, else 1
    block = bits.reshape(-1, run_length * per_element)
    return Fingerprint(
        name, whole, sum_block(block, starts * np.uint64(per_element)), _cover(starts, run_length)
    )


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise FingerprintError(
            f"expected a dtype among {', '.join(sorted(ITEM_BYTES))}, found {dtype!r}"
        )
    return ITEM_BYTES[dtype]


@lru_cache(maxsize=65_536)
def _binding(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Two 64-bit numbers that stand for dtype and shape."""
    text = f"{dtype}:{','.join(map(str, shape))}".encode()
    digest = hashlib.sha256(_BINDING_DOMAIN + b":" + text).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


@lru_cache(maxsize=65_536)
def _whole_cover(shape: tuple[int, ...]) -> int:
    size = math.prod(shape)
    return (mix(COVER_KEY, size) - mix(COVER_KEY, 0)) & MASK_64


def _cover(starts: NDArray[np.uint64], run_length: int) -> int:
    ends = mix_array(COVER_KEY, starts + np.uint64(run_length))
    return int((ends - mix_array(COVER_KEY, starts)).sum(dtype=np.uint64))


def _word_positions(
    flat: NDArray[np.uint64], item_bytes: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Word index and bit shift of each element, as (element, word of the element) tables."""
    if item_bytes >= 4:
        per_item = item_bytes // 4
        lane = np.arange(per_item, dtype=np.uint64)
        words = flat[:, None] * np.uint64(per_item) + lane
        return words, words, np.zeros_like(words)
    per_word = np.uint64(4 // item_bytes)
    words = (flat // per_word)[:, None]
    return words, words, (flat % per_word * np.uint64(8 * item_bytes))[:, None]


def _bits_of(bits: NDArray[Any], count: int, item_bytes: int) -> NDArray[np.uint64]:
    """Elements as (element, 32-bit word) unsigned values."""
    array, _ = element_view(bits, None)
    if array.shape != (count,) or array.dtype.itemsize != item_bytes:
        raise FingerprintError(
            f"update: expected {count} elements of {item_bytes} bytes in one dimension, "
            f"found {array.shape} of {array.dtype.itemsize} bytes"
        )
    block = np.ascontiguousarray(array)
    words = block.view(np.uint32) if item_bytes >= 4 else block
    return words.astype(np.uint64).reshape(count, max(1, item_bytes // 4))
