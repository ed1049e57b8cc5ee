"""Roots of the parts of a training state, as the recorder writes them into its events.

A part is a map of names to tensors, numbers, texts or bytes, or the root itself where the job has
it already. Tensors are fingerprinted as logical tensors; anything else by its exact value.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from shiftbook.checkpoint.compare import check_hex, root
from shiftbook.checkpoint.errors import RecorderMisuse

if TYPE_CHECKING:
    import torch

Part: TypeAlias = "Mapping[str, Any] | str"
"""Values by name, or their root as 32 hex digits."""

State: TypeAlias = Mapping[str, Part]
"""Parts by name, such as ``model``, ``masters``, ``optimizer``, ``rng:dropout/0``."""

RNG = "rng:"
"""Before the owner's name: the part that holds the state of a random generator."""


def value_digest(value: Any) -> str:
    """32 hex digits for one value; a tensor's are its fingerprint."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        from shiftbook.checkpoint.fingerprint import fingerprint  # numba: only for tensors

        return fingerprint(value).hex
    if isinstance(value, bool | int):
        data = b"int:%d" % int(value)
    elif isinstance(value, float):
        data = b"float:" + struct.pack("<d", value)
    elif isinstance(value, str):
        data = b"text:" + value.encode("utf-8")
    elif isinstance(value, bytes | bytearray | memoryview):
        data = b"bytes:" + bytes(value)
    elif value is None:
        data = b"none:"
    elif isinstance(value, list | tuple):
        data = b"list:" + b"".join(value_digest(item).encode() for item in value)
    elif isinstance(value, Mapping):
        data = b"map:" + part_root(value).encode()
    else:
        raise RecorderMisuse(
            "expected tensors, numbers, texts, bytes, or lists and maps of them in a part of the "
            f"state, found {type(value).__name__}; name what is to be compared"
        )
    return hashlib.sha256(data).hexdigest()[:32]


def part_root(part: Part) -> str:
    """Root of a part; 32 hex digits."""
    if isinstance(part, str):
        return check_hex("a part's root", part)
    return root({name: value_digest(value) for name, value in part.items()})


def roots(state: State) -> dict[str, str]:
    """Root of each part, by name."""
    return {name: part_root(part) for name, part in state.items()}


def optimizer_part(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """A torch optimizer's state by parameter name: ``name/exp_avg``, ``name/step`` and so on.

    ``names`` are the parameters it was made from. Hyper-parameters are not part of it.
    """
    by_id = {id(tensor): name for name, tensor in names.items()}
    part: dict[str, Any] = {}
    for tensor, values in optimizer.state.items():
        name = by_id.get(id(tensor))
        if name is None:
            raise RecorderMisuse(
                "expected optimizer state of named parameters, found state of a tensor that no "
                "name has; pass the names of all parameters that the optimizer was made from"
            )
        for key, value in values.items():
            part[f"{name}/{key}"] = value
    return part


def uid(ordinal: int, member: int = 0) -> str:
    """Uid of a sample: its draw ordinal and its place in the group."""
    return f"{ordinal:06d}/{member}"


def ids_bytes(tokens: Any) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers, from a list, array or tensor."""
    return _array_bytes(tokens, "<u4")


def floats_bytes(values: Any) -> bytes:
    """Numbers as little-endian float32 bits."""
    return _array_bytes(values, "<f4")


_CODES = {"<u4": "I", "<f4": "f"}
"""The same types as the standard library has them, on machines whose bytes are in that order."""


def _array_bytes(values: Any, code: str) -> bytes:
    if type(values) is list and sys.byteorder == "little":
        # A quarter of the time that numpy takes for a short list.
        try:
            return array(_CODES[code], values).tobytes()
        except (TypeError, ValueError, OverflowError):  # nested, or no such numbers
            pass
    # An array that has the type already is read at once: a step has thousands of them.
    try:
        if values.dtype.str == code:
            found: bytes = values.tobytes()
            return found
    except AttributeError:  # a list, or a tensor
        pass
    import numpy as np

    return bytes(np.asarray(values).astype(code, copy=False).tobytes())


@lru_cache(maxsize=4096)  # a sample's bytes come three times in an iteration, masks more often
def digest(data: bytes) -> str:
    """32 hex digits: SHA-256, halved."""
    return hashlib.sha256(data).hexdigest()[:32]


def mask_digest(mask: Iterable[bool]) -> str:
    """32 hex digits over which tokens of a sample count, one byte each."""
    import numpy as np

    return digest(np.asarray(mask).astype("u1", copy=False).tobytes())
