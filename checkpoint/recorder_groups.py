"""The record of model-parallel groups: what several ranks hold whole, and what each was fed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shiftbook.checkpoint.compare import check_hex, root
from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder_state import digest, ids_bytes, value_digest
from shiftbook.ledger.events.training import ModelParallelGroup, ModelParallelMember

NAMED = 8
"""Tensors that are named where a rank's copies are others; the root covers all of them."""


class GroupRecords:
    """Collects the members of each group, in the order in which they are told."""

    def __init__(self) -> None:
        self._members: dict[str, list[ModelParallelMember]] = {}
        self._first: dict[str, dict[str, str]] = {}
        """Digest by name of the copies that the first rank of each group told."""

    def add(
        self,
        group: str,
        rank: int,
        copies: Mapping[str, Any] | None,
        fed: Iterable[Any] | str | None,
    ) -> None:
        """Take in one rank; raises RecorderMisuse where there is nothing to compare it by."""
        if copies is None and fed is None:
            raise RecorderMisuse(
                f"expected the copies that rank {rank} of group {group} holds, or the tokens that "
                "it was fed, found neither; a group is compared by one of them"
            )
        held: str | None = None
        differing: tuple[str, ...] = ()
        if copies is not None:
            digests = {name: _digest_of(name, value) for name, value in copies.items()}
            held = root(digests)
            differing = _differing(self._first.setdefault(group, digests), digests)
        rows = None if fed is None else fed_digest(fed)
        member = ModelParallelMember(rank=rank, copies=held, differing=differing, fed=rows)
        self._members.setdefault(group, []).append(member)

    def groups(self) -> tuple[ModelParallelGroup, ...] | None:
        """All groups, None where none was told."""
        made = (ModelParallelGroup(name=n, members=tuple(m)) for n, m in self._members.items())
        return tuple(made) or None


def fed_digest(rows: Iterable[Any] | str) -> str:
    """32 hex digits over rows of token ids in their order: what a rank sends to the recorder's."""
    if isinstance(rows, str):
        return check_hex("a digest of what a rank was fed", rows)
    return digest("".join(digest(ids_bytes(row)) for row in rows).encode())


def _digest_of(name: str, value: Any) -> str:
    if isinstance(value, str):
        return check_hex(f"the fingerprint of {name}", value)
    return value_digest(value)


def _differing(first: Mapping[str, str], found: Mapping[str, str]) -> tuple[str, ...]:
    both = first.keys() | found.keys()
    return tuple(sorted(name for name in both if first.get(name) != found.get(name))[:NAMED])
