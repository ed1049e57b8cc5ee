"""Tied weights: finds names that share memory and gives a group of them one fingerprint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shiftbook.checkpoint.errors import TiedWeightsDiffer


def alias_groups(tensors: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Groups of names (sorted, two or more each) whose tensors are the same elements in memory.

    The same start, dtype, shape and strides; a part of another tensor is no alias of it. Empty
    tensors have no memory to share and are left out.
    """
    by_place: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        place = _place(tensor)
        if place is not None:
            by_place.setdefault(place, []).append(name)
    return tuple(sorted(tuple(sorted(names)) for names in by_place.values() if len(names) > 1))


def complete_tied(
    fingerprints: Mapping[str, str], groups: Iterable[Sequence[str]]
) -> dict[str, str]:
    """The map with every name of each declared group in it, all with the group's one value.

    An engine that keeps one tensor for input and output embeddings reports one name; the trainer
    reports two. Completed, both maps hold the same names. Raises TiedWeightsDiffer when members of
    a group that are there have different values; a group of which none is there adds nothing.
    """
    completed = dict(fingerprints)
    for group in groups:
        found = {name: fingerprints[name] for name in group if name in fingerprints}
        values = set(found.values())
        if len(values) > 1:
            listed = ", ".join(f"{name} {value[:8]}…" for name, value in sorted(found.items()))
            raise TiedWeightsDiffer(
                f"tied weights: expected one fingerprint for {', '.join(group)}, found {listed}; "
                "one of them was written without the others: load all names of the group, or do "
                "not declare them tied"
            )
        if values:
            completed.update(dict.fromkeys(group, values.pop()))
    return completed


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """What two tensors that are the same elements have in common."""
    if hasattr(tensor, "__array_interface__") and not hasattr(tensor, "data_ptr"):
        start = tensor.__array_interface__["data"][0]
        size, device, strides = tensor.size, "cpu", tensor.strides
    else:
        start, size, device = tensor.data_ptr(), tensor.numel(), str(tensor.device)
        strides = tensor.stride()
    if not size:
        return None
    return (device, start, str(tensor.dtype), tuple(tensor.shape), tuple(strides))
