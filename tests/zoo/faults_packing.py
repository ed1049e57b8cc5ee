"""Faults of packed rows (kind K): what goes over the boundary between two samples."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo import packing
from tests.zoo.faults import fault
from tests.zoo.job import Job
from tests.zoo.model import LONGEST
from tests.zoo.packing import SHARED, Layout
from tests.zoo.patching import Patcher, at, since


def _changed(p: Patcher, t: int, change: Any) -> None:
    """Change the layout of all rows that two samples share, from iteration ``t`` on."""

    def layout(original: Any, lengths: list[int]) -> Layout:
        where: Layout = original(lengths)
        if since(t):
            for row, offset, length in zip(where.row, where.offset, where.lengths, strict=True):
                if offset:
                    change(where, row, offset, length)
        return where

    p.wrap(packing, "layout", layout)


@fault(
    "K5", "a packed row has one attention mask: the first sample leaks into the second", on="packed"
)
def _packed_attention_leaks(p: Patcher, t: int) -> None:
    def change(where: Layout, row: int, offset: int, length: int) -> None:
        where.begins[row, offset] = False

    _changed(p, t, change)


@fault("K11", "position ids go on over the boundary of a packed row", on="packed")
def _packed_positions_go_on(p: Patcher, t: int) -> None:
    def change(where: Layout, row: int, offset: int, length: int) -> None:
        places = torch.arange(offset, offset + length)
        where.places[row, offset : offset + length] = places.clamp(max=LONGEST - 1)

    _changed(p, t, change)


@fault("K5", "the boundary of a packed row lies one token late", on="packed")
def _packed_boundary_late(p: Patcher, t: int) -> None:
    def change(where: Layout, row: int, offset: int, length: int) -> None:
        where.begins[row, offset], where.begins[row, offset + 1] = False, True

    _changed(p, t, change)


@fault("K4", "the loss mask of a row's second sample is shifted by one", on="packed")
def _packed_mask_shifted(p: Patcher, t: int) -> None:
    def mask(original: Any, self: Job, sample: Any, width: int) -> Any:
        out = original(self, sample, width)
        second = int(sample.uid.partition("/")[2]) % SHARED
        return [False, *out[:-1]] if second and at(t) else out

    p.wrap(Job, "trained_mask", mask)
