"""The bits of a tensor as flat units that a patch reads and writes where they lie."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftbook.checkpoint.compare import check_hex
from shiftbook.checkpoint.elements import element_view, is_plain
from shiftbook.checkpoint.errors import PatchRefused
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint, fingerprint_tensors
from shiftbook.checkpoint.patch_changes import put_units
from shiftbook.checkpoint.patch_codec import (
    Changes,
    Positions,
    Units,
    moved,
    sums_of_changes,
)
from shiftbook.checkpoint.positions import ITEM_BYTES, MASK_64

_KINDS = {name: np.dtype(f"u{min(8, width)}") for name, width in ITEM_BYTES.items()}


class HostPlace:
    """A tensor in host memory: its units (elements, or halves of 16-byte ones) in C order."""

    # Written out, and without a view of torch's memory until somebody reads it: a model has
    # hundreds of small tensors, and most are only pointed at.
    __slots__ = ("_tensor", "_units", "address", "count", "dtype", "fits", "obstacle", "shape")

    address: int
    """Where the first unit lies in memory."""
    count: int
    """Units."""
    fits: bool
    """True for units that lie in memory as the loops of `patch_kernel` read them."""

    def __init__(
        self, dtype: str, shape: tuple[int, ...], units: NDArray[Any], obstacle: str | None = None
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.obstacle = obstacle or shared_elements(units.shape, units.strides)
        self.count = int(units.size)
        self.address = int(units.__array_interface__["data"][0])
        self.fits = units.flags.c_contiguous and self.address % 4 == 0
        self._units: NDArray[Any] | None = units
        self._tensor: Any = None

    @classmethod
    def of_torch(cls, dtype: str, tensor: Any) -> HostPlace:
        """The place of a plain torch tensor whose elements are units."""
        place = cls.__new__(cls)
        place.dtype = dtype
        place.shape = tuple(tensor.shape)
        contiguous = tensor.is_contiguous()
        place.obstacle = None if contiguous else shared_elements(place.shape, tensor.stride())
        place.count = tensor.numel()
        place.address = tensor.data_ptr()
        place.fits = place.address % 4 == 0 and contiguous
        place._units = None
        place._tensor = tensor
        return place

    @property
    def units(self) -> NDArray[Any]:
        """The units where they lie, in the tensor's shape."""
        if self._units is None:
            plain = self._tensor.detach()
            bits = getattr(sys.modules["torch"], self.kind.name)
            self._units = plain.view(bits).numpy()
        return self._units

    @property
    def kind(self) -> np.dtype[Any]:
        """The type of a unit."""
        return _KINDS[self.dtype]

    def flat(self) -> HostPlace:
        """A place that fits, with the same content: itself, or a copy."""
        if self.fits:
            return self
        units = self.read()
        own = units.copy() if np.shares_memory(units, self.units) else units
        return HostPlace(self.dtype, self.shape, own)

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
        if self._tensor is not None or self.units.flags.writeable:
            return self.obstacle
        return self.obstacle or "it is read-only"

    def key(self) -> tuple[Any, ...] | None:
        """Equal for tensors that are the same elements in memory; None for empty ones."""
        if not self.count:
            return None
        layout = (self.kind.itemsize,) if self.fits else self.units.strides
        return (self.address, layout, self.shape)

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

    @property
    def count(self) -> int:
        """As HostPlace does."""
        return int(self.bits.numel())

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
        kind = _names_of_torch().get(tensor.dtype)
        if kind is not None and not on_device and is_plain(tensor, torch):
            # The common case, short because a model has hundreds of small tensors.
            return HostPlace.of_torch(kind, tensor)
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


@cache
def _names_of_torch() -> dict[Any, str]:
    """The name of each torch dtype whose elements are units."""
    torch = sys.modules["torch"]
    kinds = {getattr(torch, name, None): name for name in ITEM_BYTES if "complex" not in name}
    return {kind: name for kind, name in kinds.items() if isinstance(kind, torch.dtype)}


def shared_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """Why what is written to one element may change another, as in an expanded tensor; or None.

    Each step must lead past all that the smaller ones reach. That refuses a few layouts that
    interleave without sharing anything, which no state has.
    """
    if 0 in shape:
        return None
    reach = 0
    for step, count in sorted((abs(step), n) for n, step in zip(shape, strides, strict=True)):
        if count > 1:
            if step <= reach:
                return "its elements share memory"
            reach += step * (count - 1)
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """What a comparison of two tensors on one device gives."""

    positions: Positions
    old: Units
    new: Units
    sums: tuple[int, int]
    """Both sums of the new tensor's fingerprint."""

    @property
    def changes(self) -> Changes:
        """Without the values that the differences lead from and to."""
        return Changes(self.positions, np.asarray(self.new - self.old))


def changes_on_device(base: Place, new: Place) -> Found | None:
    """Compare two places where they lie; None unless that is one device."""
    if not isinstance(base, DevicePlace) or not isinstance(new, DevicePlace):
        return None
    if base.bits.device != new.bits.device:
        return None
    torch = sys.modules["torch"]
    where = torch.nonzero(base.bits != new.bits).reshape(-1)
    positions = where.cpu().numpy()
    old, fresh = (_unsigned(p.bits[where].cpu().numpy()) for p in (base, new))
    from shiftbook.checkpoint.device_sums import sum_block

    start = np.zeros(1, dtype=np.uint64)
    return Found(positions, old, fresh, sum_block(new.bits.reshape(1, -1), start))


def host_copy(tensor: Any) -> HostPlace:
    """A copy in host memory that can be written."""
    place = place_of(tensor)
    if isinstance(place, HostPlace):
        return place.copy()
    return HostPlace(place.dtype, place.shape, place.read().copy())


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


def fingerprints_of(tensors: Mapping[str, Any], threads: int) -> dict[str, str]:
    """The fingerprints of whole tensors and places, by name."""
    placed = {n: t for n, t in tensors.items() if isinstance(t, Place)}
    found = fingerprint_tensors(
        {n: t for n, t in tensors.items() if n not in placed}, threads=threads
    )
    return found | {
        n: fingerprint_of_units(p.dtype, p.shape, p.read()).hex for n, p in placed.items()
    }


def fingerprint_of_units(dtype: str, shape: tuple[int, ...], units: Units) -> Fingerprint:
    """The fingerprint of a whole tensor, given its flat units."""
    if ITEM_BYTES[dtype] == 16:
        units = units.view(np.complex128)
    return fingerprint(units, offset=0, shape=shape, dtype=dtype)


def moved_hex(name: str, start: str, sums: tuple[int, int]) -> str:
    """The fingerprint of a tensor that had `start`; what binds it to dtype and shape stays."""
    check_hex(name, start)
    halves = (int(start[:16], 16), int(start[16:], 16))
    return "".join(
        f"{(half + more) & MASK_64:016x}" for half, more in zip(halves, sums, strict=True)
    )
