"""Goal: what engines fuse, slice, copy, pad and tie has the fingerprint of the logical tensors.

Method: the whole logical tensors are the oracle; stored tensors are built from them by plain
slicing and concatenation, for all numbers of ranks, and read back through declared layouts.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint.errors import (
    FingerprintError,
    IncompleteFingerprint,
    LayoutError,
    TiedWeightsDiffer,
)
from shiftbook.checkpoint.fingerprint import fingerprint, fingerprint_tensors
from shiftbook.checkpoint.layouts import (
    Layout,
    Piece,
    Rows,
    fused,
    fused_qkv,
    join_parts,
    padded_vocabulary,
    piece_fingerprints,
    split,
    stack,
)
from shiftbook.checkpoint.tied import alias_groups, complete_tied

NAMES = ("q", "k", "v")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def hexes(parts: dict) -> dict[str, str]:
    return {name: part.hex for name, part in parts.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(0, 99),
)
def test_fused_qkv(ranks: int, kv_heads: int, head: int, columns: int | None, seed: int) -> None:
    rest = () if columns is None else (columns,)
    q = drawn(8 * head, *rest, seed=seed)
    k, v = (drawn(kv_heads * head, *rest, seed=seed + n) for n in (1, 2))
    copies = max(1, ranks // kv_heads)
    whole = fingerprint_tensors({"q": q, "k": k, "v": v})
    stored = []
    for rank in range(ranks):
        q_part = q.chunk(ranks)[rank]
        kv_parts = [t.chunk(min(ranks, kv_heads))[rank // copies] for t in (k, v)]
        stored.append(torch.cat([q_part, *kv_parts]))
    layouts = [fused_qkv(NAMES, 8, kv_heads, head, r, ranks, columns) for r in range(ranks)]
    parts = [piece_fingerprints(s, lay) for s, lay in zip(stored, layouts, strict=True)]
    assert hexes(join_parts(parts)) == whole
    assert hexes(join_parts(reversed(parts))) == whole
    for copy in range(1, copies):
        again = join_parts(
            piece_fingerprints(s, lay, copy=copy) for s, lay in zip(stored, layouts, strict=True)
        )
        assert hexes(again) == {name: whole[name] for name in ("k", "v")}
    if ranks > 1:
        with pytest.raises(IncompleteFingerprint):
            hexes(join_parts(parts[1:]))
        if not torch.equal(stored[0], stored[1]):
            swapped = [stored[1], stored[0], *stored[2:]]
            wrong = join_parts(
                piece_fingerprints(s, lay) for s, lay in zip(swapped, layouts, strict=True)
            )
            assert hexes(wrong) != whole


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 7), st.integers(0, 99))
def test_gate_up_and_plain_slices(ranks: int, rows: int, columns: int, seed: int) -> None:
    shape = (rows * ranks, columns * ranks)
    gate, up, down = (drawn(*shape, seed=seed + n) for n in range(3))
    parts = []
    for rank in range(ranks):
        merged = torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
        layout = fused({"gate": shape, "up": shape}, rank, ranks)
        parts.append(piece_fingerprints(merged, layout))
        columns_of = down.chunk(ranks, dim=1)[rank]
        parts.append(piece_fingerprints(columns_of, split("down", shape, 1, rank, ranks)))
    expected = fingerprint_tensors({"gate": gate, "up": up, "down": down})
    assert hexes(join_parts(parts)) == expected


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 30), st.integers(0, 9), st.integers(0, 99))
def test_padding_of_a_vocabulary_is_not_looked_at(
    ranks: int, rows: int, extra: int, seed: int
) -> None:
    padded_rows = -(-(rows + extra) // ranks) * ranks
    table = drawn(rows, 3, seed=seed)
    for filling in (0.0, float("nan")):
        padded = torch.cat([table, torch.full((padded_rows - rows, 3), filling).bfloat16()])
        parts = [
            piece_fingerprints(
                padded.chunk(ranks)[rank],
                padded_vocabulary("embed", (rows, 3), padded_rows, rank, ranks),
            )
            for rank in range(ranks)
        ]
        assert join_parts(parts)["embed"] == fingerprint(table)


def test_heads_that_alternate_are_declared_by_rows() -> None:
    q, k, v = (drawn(6, 4, seed=n) for n in range(3))
    stored = torch.cat([t[2 * head : 2 * head + 2] for head in range(3) for t in (q, k, v)])
    layout = stack([Rows(n, (6, 4), 2 * head, 2) for head in range(3) for n in NAMES])
    found = hexes(piece_fingerprints(stored, layout))
    assert found == fingerprint_tensors({"q": q, "k": k, "v": v})
    other_order = stack([Rows(n, (6, 4), 2 * head, 2) for n in NAMES for head in range(3)])
    assert hexes(piece_fingerprints(stored, other_order)) != found


def test_layouts_that_do_not_account_for_each_element_are_refused() -> None:
    box = Piece("w", (4, 4), (0, 0), (0, 0), (2, 4))
    with pytest.raises(LayoutError, match="overlap"):
        Layout((4, 4), (box, Piece("w", (4, 4), (2, 0), (1, 0), (2, 4))))
    with pytest.raises(LayoutError, match="found 8; declare the rest as padding"):
        Layout((4, 4), (box,))
    for at, offset in (((3, 0), (0, 0)), ((0, 0), (3, 0)), ((0,), (0, 0)), ((-1, 0), (0, 0))):
        with pytest.raises(LayoutError, match="expected a box inside"):
            Layout((4, 4), (Piece("w", (4, 4), offset, at, (2, 4)),))
    with pytest.raises(LayoutError, match="3 ranks divide"):
        split("w", (4, 4), 0, 0, 3)
    with pytest.raises(LayoutError, match="padded rows"):
        padded_vocabulary("embed", (9, 2), 8, 0, 2)
    with pytest.raises(LayoutError, match="expected a stored tensor"):
        piece_fingerprints(torch.zeros(4, 2), split("w", (4, 4), 0, 0, 2))
    with pytest.raises(FingerprintError, match="one logical tensor"):
        join_parts([{"w": fingerprint(torch.zeros(2))}, {"w": fingerprint(torch.zeros(3))}])


def test_alias_groups_are_names_of_the_same_memory() -> None:
    table, other = drawn(6, 4), drawn(6, 4)
    array = np.ones(3)
    found = alias_groups(
        {
            "head": table, "embed": table.view(6, 4), "rows": table[:3], "turned": table.t(),
            "other": other, "copy": table.clone(), "a": array, "b": array[:], "none": array[:0],
            "nothing": table[:0], "same": torch.nn.Parameter(other),
        }
    )  # fmt: skip
    assert found == (("a", "b"), ("embed", "head"), ("other", "same"))


def test_tied_names_are_completed_and_must_agree() -> None:
    table, other = drawn(6, 4), drawn(6, 4, seed=1)
    values = fingerprint_tensors({"embed": table, "norm": other})
    full = complete_tied(values, [("embed", "head"), ("x", "y")])
    assert full == {**values, "head": values["embed"]}
    assert complete_tied(full, [("embed", "head")]) == full
    stale = fingerprint_tensors({"embed": table, "head": other})
    for order in itertools.permutations(("embed", "head", "third")):
        with pytest.raises(TiedWeightsDiffer, match="expected one fingerprint for"):
            complete_tied(stale, [order])
