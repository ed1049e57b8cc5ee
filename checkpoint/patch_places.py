"""The bits of a tensor as flat units that a patch reads and writes where they lie."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.elements import element_view
from shiftbook.checkpoint.errors import PatchRefused
from shiftbook.checkpoint.patch_codec import (
    Changes,
    Found,
    Positions,
    Units,
    find_changes,
    moved,
    sums_of_changes,
)
from shiftbook.checkpoint.patch_kernel import put_units
from shiftbook.checkpoint.positions import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class HostPlace:
    """A tensor in host memory: its units (elements, or halves of 16-byte ones) in C order."""

    dtype: str
    shape: tuple[int, ...]
    units: NDArray[Any]
    obstacle: str | None = None

    def read(self) -> Units:
        """All units, flat; a copy only where strides ask for one."""
        return np.ascontiguousarray(self.units).reshape(-1)

    def moved(self, changes: Changes) -> tuple[Units, tuple[int, int]]:
        """New bits at the changed positions, and what they add to the fingerprint's sums."""
        if self.units.flags.c_contiguous:
            return moved(self.units.reshape(-1), changes)
        old = self.units[np.unravel_index(changes.positions, self.units.shape)]
        new = np.asarray(old + changes.differences)
        return new, sums_of_changes(changes.positions, old, new)

    def write(self, positions: Positions | None, units: Units) -> None:
        """Put units at positions (None: everywhere), in place."""
        if positions is None:
            self.units[...] = units.reshape(self.units.shape)
        elif self.units.flags.c_contiguous:
            put_units(self.units.reshape(-1), positions, units)
        else:
            self.units[np.unravel_index(positions, self.units.shape)] = units

    def why_read_only(self) -> str | None:
        """Why `write` would not reach the tensor; None when it would."""
        return self.obstacle or (None if self.units.flags.writeable else "it is read-only")

    def key(self) -> tuple[Any, ...] | None:
        """Equal for tensors that are the same elements in memory; None for empty ones."""
        start = self.units.__array_interface__["data"][0]
        return (start, self.units.strides, self.units.shape) if self.units.size else None

    def copy(self) -> HostPlace:
        """The same content in memory of its own."""
        return HostPlace(self.dtype, self.shape, self.units.copy())


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """A tensor on a device: only changed units travel."""

    dtype: str
    shape: tuple[int, ...]
    bits: Any
    """The units as a flat torch tensor of signed integers (uint8 for bytes)."""
    obstacle: str | None = None

    def read(self) -> Units:
        """As HostPlace does."""
        return _unsigned(self.bits.cpu().numpy())

    def moved(self, changes: Changes) -> tuple[Units, tuple[int, int]]:
        """As HostPlace does."""
        torch = sys.modules["torch"]
        where = torch.from_numpy(changes.positions).to(self.bits.device)
        old = _unsigned(self.bits[where].cpu().numpy())
        new = np.asarray(old + changes.differences)
        return new, sums_of_changes(changes.positions, old, new)

    def write(self, positions: Positions | None, units: Units) -> None:
        """As HostPlace does."""
        torch = sys.modules["torch"]
        signed = "u1" if units.dtype.itemsize == 1 else f"i{units.dtype.itemsize}"
        values = torch.from_numpy(np.ascontiguousarray(units).view(signed)).to(self.bits.device)
        if positions is None:
            self.bits.copy_(values)
        else:
            self.bits[torch.from_numpy(positions).to(self.bits.device)] = values

    def why_read_only(self) -> str | None:
        """As HostPlace does."""
        return self.obstacle

    def key(self) -> tuple[Any, ...] | None:
        """As HostPlace does."""
        if not self.bits.numel():
            return None
        return (str(self.bits.device), self.bits.data_ptr(), self.bits.numel())


Place = HostPlace | DevicePlace


def place_of(tensor: Any, *, on_device: bool = False) -> Place:
    """The place of a numpy array or torch tensor; a place is its own.

    `on_device` takes the path of a device for a tensor of the processor's memory as well. Raises
    UnsupportedTensor.
    """
    if isinstance(tensor, HostPlace | DevicePlace):
        return tensor
    torch = sys.modules.get("torch")
    obstacle = None
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.is_conj() or tensor.is_neg():
            obstacle = "it is a lazily conjugated or negated view"
        dense = tensor.layout is torch.strided and type(tensor).__name__ != "DTensor"
        if dense and not tensor.is_meta and (on_device or tensor.device.type != "cpu"):
            from shiftbook.checkpoint.device_sums import device_bits

            name = str(tensor.dtype).removeprefix("torch.")
            if not tensor.is_contiguous():
                obstacle = "it is not contiguous on its device"
            return DevicePlace(name, tuple(tensor.shape), device_bits(tensor), obstacle)
    elif isinstance(tensor, np.ndarray) and tensor.dtype.byteorder == ">":
        obstacle = "its bytes are in big-endian order"
    array, name = element_view(tensor, None)
    shape = tuple(int(n) for n in array.shape)
    if ITEM_BYTES[name] == 16:
        array = array[..., None].view(np.uint64)
    return HostPlace(name, shape, array, obstacle)


def changes_between(base: Place, new: Place, *, summed: bool = False) -> Found:
    """Compare two places; where both lie on one device the comparison happens there.

    `summed` asks for the sums of the new one's fingerprint; see `find_changes`.
    """
    if isinstance(base, DevicePlace) and isinstance(new, DevicePlace):
        torch = sys.modules["torch"]
        if base.bits.device == new.bits.device:
            where = torch.nonzero(base.bits != new.bits).reshape(-1)
            positions = where.cpu().numpy()
            old, fresh = (_unsigned(p.bits[where].cpu().numpy()) for p in (base, new))
            if not summed:
                return Found(positions, old, fresh)
            from shiftbook.checkpoint.device_sums import sum_block

            start = np.zeros(1, dtype=np.uint64)
            return Found(positions, old, fresh, sum_block(new.bits.reshape(1, -1), start))
    return find_changes(base.read(), new.read(), summed=summed)


def check_writable(name: str, place: Place) -> None:
    """Raise PatchRefused when a write would not reach the tensor."""
    why = place.why_read_only()
    if why is not None:
        raise PatchRefused(
            f"{name}: expected a tensor that can be written in place, but {why}; "
            "apply the patch to a plain, writable tensor",
            tensor=name,
        )


def _unsigned(values: NDArray[Any]) -> Units:
    return values.view(f"u{values.dtype.itemsize}")
