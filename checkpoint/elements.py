"""Turns tensors into unsigned views of their bits and says where their elements stand."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.errors import FingerprintError, UnsupportedTensor
from shiftbook.checkpoint.positions import ITEM_BYTES

_COPY_BYTES = 4 << 20  # strided tensors are read through copies of about this size
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def element_view(tensor: Any, dtype: str | None) -> tuple[NDArray[Any], str]:
    """The bits of a numpy array or torch tensor as unsigned integers, and its dtype's name.

    Shape and strides stay; nothing is copied unless the tensor lies on a device. Elements of 16
    bytes have no unsigned type and stay complex128. Raises UnsupportedTensor.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        array, found = _torch_bits(tensor, torch)
    elif isinstance(tensor, np.ndarray | np.generic):
        array, found = _numpy_bits(np.asarray(tensor))
    else:
        raise UnsupportedTensor(
            f"expected a numpy array or a torch tensor, found {type(tensor).__name__}; "
            "gather or convert it first"
        )
    name = dtype if dtype is not None else found
    if name not in ITEM_BYTES or ITEM_BYTES[name] != array.dtype.itemsize:
        raise UnsupportedTensor(
            f"expected a dtype among {', '.join(sorted(ITEM_BYTES))} whose elements have the "
            f"tensor's {array.dtype.itemsize} bytes, found {name!r}"
        )
    return array, name


def is_plain(tensor: Any, torch: Any) -> bool:
    """True for a torch tensor whose memory is read as it is: dense, on the processor, not lazy."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.is_quantized
    )


def _check_dense(tensor: Any, name: str, torch: Any) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedTensor(
            f"expected a dense torch tensor with data, found layout {tensor.layout}, "
            f"dtype {name}, device {tensor.device}; convert it with to_dense() or dequantize()"
        )
    if type(tensor).__name__ == "DTensor":
        raise UnsupportedTensor(
            "expected a local shard, found a DTensor; take shard_fingerprint() of "
            "shiftbook.checkpoint.shards, or pass tensor.to_local() with its offset and the whole "
            "tensor's shape"
        )


def _torch_bits(tensor: Any, torch: Any) -> tuple[NDArray[Any], str]:
    name = str(tensor.dtype).removeprefix("torch.")
    if is_plain(tensor, torch):
        dense = tensor.detach()
    else:
        _check_dense(tensor, name, torch)
        dense = tensor.detach().resolve_conj().resolve_neg().cpu()
    if dense.is_complex() and dense.element_size() > 4:
        array = dense.numpy()
        return (array.view(np.uint64) if array.dtype.itemsize == 8 else array), name
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = dense.view(integers[dense.element_size()]).numpy()
    return bits.view(_UNSIGNED[bits.dtype.itemsize]), name


def _numpy_bits(array: NDArray[Any]) -> tuple[NDArray[Any], str]:
    name = array.dtype.name
    if array.dtype.hasobject or name not in ITEM_BYTES:
        raise UnsupportedTensor(
            f"expected an array of a dtype among {', '.join(sorted(ITEM_BYTES))}, found "
            f"{array.dtype}; name the logical dtype with dtype= and pass its bits as unsigned "
            "integers"
        )
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    width = array.dtype.itemsize
    return (array.view(_UNSIGNED[width]) if width <= 8 else array), name


@dataclass(frozen=True, slots=True)
class Runs:
    """Where a shard stands: a box at `corner` of shape `grid`, `base` elements further on."""

    corner: tuple[int, ...]
    grid: tuple[int, ...]
    base: int

    @classmethod
    def of(cls, local: Sequence[int], offset: int | Sequence[int], whole: tuple[int, ...]) -> Runs:
        """Place a shard of shape `local`; see `fingerprint` for the two meanings of `offset`."""
        shape = tuple(int(n) for n in local)
        if isinstance(offset, int | np.integer):
            start, size, room = int(offset), math.prod(shape), math.prod(whole)
            if start < 0 or start + size > room:
                raise FingerprintError(
                    f"shard does not fit: expected elements within 0 to {room} of a tensor of "
                    f"shape {whole}, found {start} to {start + size}; pass the whole shape and "
                    "the flat index of the first element"
                )
            return cls((0,) * len(shape), shape, start)
        corner = tuple(int(n) for n in offset)
        fits = len(corner) == len(shape) == len(whole) and all(
            c >= 0 and c + n <= g for c, n, g in zip(corner, shape, whole, strict=True)
        )
        if not fits:
            raise FingerprintError(
                f"shard does not fit: expected a box inside shape {whole}, found shape {shape} "
                f"at {corner}; give one start for each axis"
            )
        return cls(corner, whole, 0)

    def _outer_axes(self, local: Sequence[int]) -> int:
        """How many leading axes enumerate runs; the others are contiguous in the whole tensor."""
        axis = len(local)
        while axis > 0 and (axis == len(local) or local[axis] == self.grid[axis]):
            axis -= 1
        return axis

    def run_length(self, local: Sequence[int]) -> int:
        """Elements in each contiguous run of a box of shape `local`."""
        return math.prod(local[self._outer_axes(local) :])

    def starts(
        self, local: Sequence[int], within: Sequence[int] | None = None
    ) -> NDArray[np.uint64]:
        """Flat index of each run's first element, for the box at `within` the shard's corner."""
        outer = self._outer_axes(local)
        shift = tuple(within) if within is not None else (0,) * len(local)
        flat = np.full((1,), self.base, dtype=np.uint64)
        for axis, (corner, extra) in enumerate(zip(self.corner, shift, strict=True)):
            stride = math.prod(self.grid[axis + 1 :])
            first = corner + extra
            count = local[axis] if axis < outer else 1
            positions = np.arange(first, first + count, dtype=np.uint64) * np.uint64(stride)
            flat = (flat[:, None] + positions[None, :]).reshape(-1)
        return flat


def contiguous_blocks(
    array: NDArray[Any], runs: Runs
) -> Iterator[tuple[NDArray[Any], NDArray[np.uint64]]]:
    """Yield the array as C-contiguous `[run, element]` blocks with their runs' first indices."""
    if array.size == 0:
        return
    yield from _split(array, runs, (0,) * array.ndim, 0)


def _split(
    array: NDArray[Any], runs: Runs, within: tuple[int, ...], axis: int
) -> Iterator[tuple[NDArray[Any], NDArray[np.uint64]]]:
    if array.flags.c_contiguous or array.nbytes <= _COPY_BYTES or axis == array.ndim:
        block = np.ascontiguousarray(array)
        yield block.reshape(-1, runs.run_length(array.shape)), runs.starts(array.shape, within)
        return
    row_bytes = max(1, array.nbytes // array.shape[axis])
    step = max(1, _COPY_BYTES // row_bytes)
    for first in range(0, array.shape[axis], step):
        part = array[(slice(None),) * axis + (slice(first, first + step),)]
        moved = (*within[:axis], within[axis] + first, *within[axis + 1 :])
        yield from _split(part, runs, moved, axis + (1 if step == 1 else 0))
