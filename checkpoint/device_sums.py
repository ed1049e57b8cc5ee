"""The sums of a fingerprint by torch operations, where a tensor lies: nothing travels to the host.

The arithmetic is that of `shiftbook.checkpoint.kernel` in signed 64-bit integers, which wrap as
the unsigned ones do. A dozen passes over pieces of a few MB: a device has the bandwidth for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from shiftbook.checkpoint.positions import GAMMA, KEY, MASK_64, MIX_1, MIX_2

_PIECE = 1 << 22
"""Elements looked at in one go: bounds the memory on the device to about 200 MB."""

_LOW_32 = 0xFFFF_FFFF


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of 64-bit numbers that torch holds as signed ones."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _hashes(words: torch.Tensor) -> torch.Tensor:
    z = (words + 1) * _signed(GAMMA) + _signed(KEY)
    z = (z ^ _shifted(z, 30)) * _signed(MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(MIX_2)
    return z ^ _shifted(z, 31)


def _pieces(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    row_step = max(1, _PIECE // max(1, columns))
    for row in range(0, rows, row_step):
        for column in range(0, columns, _PIECE):
            yield slice(row, row + row_step), slice(column, column + _PIECE)


def sum_block(bits: torch.Tensor, starts: NDArray[np.uint64]) -> tuple[int, int]:
    """Both sums over `bits[run, element]` (contiguous, any integer dtype of the element's width).

    `starts` are the flat indices of the runs' first elements in the logical tensor.
    """
    if not bits.numel():
        return 0, 0
    item_bytes = bits.element_size()
    first = torch.from_numpy(starts.astype(np.int64)).to(bits.device)
    per_word = max(1, 4 // item_bytes)
    if item_bytes > 4:
        bits, first = bits.view(torch.int32), first * (item_bytes // 4)
    elif per_word > 1 and bits.shape[0] == 1 and _in_whole_words(bits, int(starts[0]), per_word):
        bits, first, per_word = bits.view(torch.int32), first // per_word, 1
    width_bits = 8 * min(4, bits.element_size())
    low = high = 0
    for rows, columns in _pieces(*bits.shape):
        values = bits[rows, columns].to(torch.int64) & ((1 << width_bits) - 1)
        column = torch.arange(
            columns.start, columns.start + values.shape[1], device=bits.device, dtype=torch.int64
        )
        index = first[rows, None] + column[None, :]
        if per_word > 1:
            values = values << (index % per_word * width_bits)
            index = index // per_word
        z = _hashes(index)
        low += int(((z & _LOW_32) * values).sum())
        high += int((_shifted(z, 32) * values).sum())
    return low & MASK_64, high & MASK_64


def _in_whole_words(bits: torch.Tensor, start: int, per_word: int) -> bool:
    aligned = bits.data_ptr() % 4 == 0 and bits.storage_offset() % per_word == 0
    return start % per_word == 0 and bits.shape[1] % per_word == 0 and aligned


def device_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in C order as integers of their width, on its own device.

    16-byte elements become pairs of 8-byte ones. Copies only what is not contiguous.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if dense.stride() != (1,):  # one element: any stride is called contiguous, but not for a view
        dense = dense.as_strided(dense.shape, (1,))
    if dense.is_complex():
        dense = torch.view_as_real(dense).reshape(-1)
        if dense.element_size() < 8:
            return dense.view({2: torch.int32, 4: torch.int64}[dense.element_size()])
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return dense.view(integers[dense.element_size()])
