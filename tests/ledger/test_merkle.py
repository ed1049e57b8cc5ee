"""Goal: roots and proofs are those of RFC 6962 and RFC 9162, and no wrong proof is believed.

Method: the tree of RFC 9162, 2.1.5, with its named nodes; the vectors that Certificate Transparency
implementations share; proofs of the independent library pymerkle, which must be ours; every proof
of every tree up to 70 leaves; and random proofs with a flipped bit, a hash too many or too few, and
wrong positions, sizes and roots, of which each must be refused.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache

import pymerkle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymerkle.proof import ConsistencyProof, InclusionProof

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.errors import ProofInvalid
from shiftbook.ledger.merkle import (
    EMPTY_ROOT,
    CompactRange,
    Subtree,
    consistency_path,
    edge_of,
    inclusion_path,
    node_hash,
    range_root,
    tree_root,
    verify_consistency,
    verify_inclusion,
)

SHARED = [
    bytes.fromhex(text)
    for text in (
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]  # fmt: skip
"""Entries of the vectors that Certificate Transparency implementations test with."""

ROOTS = (
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)

A = "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7"
B = "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e"
C = "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"
D = "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"
E = "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0"
F = "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a"
INCLUSION = {
    (0, 1): [],
    (0, 8): [A, B, C],
    (5, 8): [D, E, ROOTS[4]],
    (2, 3): [ROOTS[2]],
    (1, 5): [ROOTS[1], B, D],
}
CONSISTENCY = {
    (1, 1): [],
    (1, 8): [A, B, C],
    (6, 8): [F, E, ROOTS[4]],
    (2, 5): [B, D],
}


def subtrees(leaves: list[bytes]) -> Subtree:
    """Hashes of complete subtrees, each computed once."""

    @cache
    def node(level: int, index: int) -> bytes:
        if level == 0:
            return leaves[index]
        return node_hash(node(level - 1, 2 * index), node(level - 1, 2 * index + 1))

    return node


LEAVES = [leaf_hash(b"entry %d" % number) for number in range(700)]
NODE = subtrees(LEAVES)


@cache
def root_of(size: int) -> bytes:
    """Root by the recursive definition of RFC 9162, 2.1.1, written out once more."""

    def mth(start: int, stop: int) -> bytes:
        if stop - start == 1:
            return LEAVES[start]
        half = 1
        while half * 2 < stop - start:
            half *= 2
        left, right = mth(start, start + half), mth(start + half, stop)
        return hashlib.sha256(b"\x01" + left + right).digest()

    return mth(0, size) if size else hashlib.sha256(b"").digest()


def test_the_shared_vectors() -> None:
    leaves = [leaf_hash(entry) for entry in SHARED]
    node = subtrees(leaves)
    for size, expected in enumerate(ROOTS):
        assert tree_root(leaves[:size]).hex() == expected
        assert range_root(0, size, node).hex() == expected
    for (index, size), path in INCLUSION.items():
        found = inclusion_path(index, size, node)
        assert [value.hex() for value in found] == path
        verify_inclusion(leaves[index], index, size, found, bytes.fromhex(ROOTS[size]))
    for (old, new), path in CONSISTENCY.items():
        found = consistency_path(old, new, node)
        assert [value.hex() for value in found] == path
        roots = bytes.fromhex(ROOTS[old]), bytes.fromhex(ROOTS[new])
        verify_consistency(old, new, *roots, found)


def test_the_tree_drawn_in_the_rfc() -> None:
    """RFC 9162, 2.1.5: seven leaves a to f and j, nodes g, h, i, k, l."""
    names = {}
    for name, level, index in (
        ("a", 0, 0), ("b", 0, 1), ("c", 0, 2), ("d", 0, 3), ("e", 0, 4), ("f", 0, 5), ("j", 0, 6),
        ("g", 1, 0), ("h", 1, 1), ("i", 1, 2), ("k", 2, 0),
    ):  # fmt: skip
        names[NODE(level, index)] = name
    names[node_hash(NODE(1, 2), NODE(0, 6))] = "l"

    def told(path: list[bytes]) -> str:
        return "".join(names[value] for value in path)

    assert told(inclusion_path(0, 7, NODE)) == "bhl"
    assert told(inclusion_path(3, 7, NODE)) == "cgl"
    assert told(inclusion_path(4, 7, NODE)) == "fjk"
    assert told(inclusion_path(6, 7, NODE)) == "ik"
    assert told(consistency_path(3, 7, NODE)) == "cdgl"
    assert told(consistency_path(4, 7, NODE)) == "l"
    assert told(consistency_path(6, 7, NODE)) == "ijk"


def test_every_proof_of_every_small_tree() -> None:
    """69 trees; with pymerkle as the judge of each inclusion and consistency proof."""
    oracle = pymerkle.InmemoryTree(algorithm="sha256")
    for size in range(1, 70):
        oracle.append_entry(b"entry %d" % (size - 1))
        root = root_of(size)
        assert oracle.get_root() == root == tree_root(LEAVES[:size])
        for index in range(size):
            path = inclusion_path(index, size, NODE)
            verify_inclusion(LEAVES[index], index, size, path, root)
            theirs = oracle.prove_inclusion(index + 1, size)
            assert theirs.path == [LEAVES[index], *path]
        for old in range(1, size + 1):
            path = consistency_path(old, size, NODE)
            verify_consistency(old, size, root_of(old), root, path)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 700), st.data())
def test_pymerkle_believes_our_proofs_and_makes_the_same(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    old = data.draw(st.integers(1, size))
    rule = oracle_700().prove_inclusion(index + 1, size).rule
    path = [LEAVES[index], *inclusion_path(index, size, NODE)]
    ours = InclusionProof("sha256", True, size, index + 1, rule, path)
    pymerkle.verify_inclusion(LEAVES[index], root_of(size), ours)
    theirs = oracle_700().prove_consistency(old, size)
    pymerkle.verify_consistency(root_of(old), root_of(size), theirs)
    path = as_the_rfc_has_it(theirs, old)
    assert path == consistency_path(old, size, NODE)
    verify_consistency(old, size, root_of(old), root_of(size), path)


def as_the_rfc_has_it(proof: ConsistencyProof, old: int) -> list[bytes]:
    """Pymerkle goes down to a leaf where the old tree ends between two subtrees, and shows the way
    up to there; the RFC shows the whole subtree to the right, and its left neighbour first."""
    first = proof.subset.index(1)
    path: list[bytes] = proof.path[first:]
    if first:
        right = proof.path[0]
        for bit, value in zip(proof.rule, proof.path[1:first], strict=False):
            right = node_hash(value, right) if bit else node_hash(right, value)
        path.insert(1, right)
    # The RFC leaves out what the verifier knows: the old root, where it is one complete subtree.
    return path[1:] if old & (old - 1) == 0 or old == proof.size else path


@cache
def oracle_700() -> pymerkle.InmemoryTree:
    tree = pymerkle.InmemoryTree(algorithm="sha256")
    for number in range(700):
        tree.append_entry(b"entry %d" % number)
    return tree


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 700), st.randoms(use_true_random=False))
def test_no_wrong_inclusion_proof_is_believed(size: int, chance: random.Random) -> None:
    index = chance.randrange(size)
    path, root, leaf = inclusion_path(index, size, NODE), root_of(size), LEAVES[index]
    verify_inclusion(leaf, index, size, path, root)
    wrong: list[tuple[bytes, int, int, list[bytes], bytes]] = [
        (flipped(leaf, chance), index, size, path, root),
        (leaf, index, size, path, flipped(root, chance)),
        (leaf, index, size, [*path, LEAVES[0]], root),
        (leaf, size, size, path, root),
        (leaf, -1, size, path, root),
        (leaf[:31], index, size, path, root),
        (leaf, index, size, path, EMPTY_ROOT),
    ]
    wrong += [(leaf, other, size, path, root) for other in range(size) if other != index][:20]
    if path:
        at = chance.randrange(len(path))
        one = [*path[:at], flipped(path[at], chance), *path[at + 1 :]]
        wrong += [
            (leaf, index, size, one, root),
            (leaf, index, size, path[:-1], root),
            (leaf, index, size, path[1:], root),
            (leaf, index, size, [*path[:at], path[at][:16], *path[at + 1 :]], root),
        ]
        if len(set(path)) > 1:
            wrong.append((leaf, index, size, path[::-1], root))
    for attempt in wrong:
        with pytest.raises(ProofInvalid):
            verify_inclusion(*attempt)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 700), st.randoms(use_true_random=False))
def test_no_wrong_consistency_proof_is_believed(new: int, chance: random.Random) -> None:
    old = chance.randint(1, new)
    path, roots = consistency_path(old, new, NODE), (root_of(old), root_of(new))
    verify_consistency(old, new, *roots, path)
    other = leaf_hash(b"another")
    fork = tree_root([*LEAVES[: old - 1], other])
    wrong: list[tuple[int, int, bytes, bytes, list[bytes]]] = [
        (old, new, fork, roots[1], path),
        (old, new, flipped(roots[0], chance), roots[1], path),
        (old, new, roots[0], flipped(roots[1], chance), path),
        (old, new, *roots, [*path, other]),
        (new + 1, new, *roots, path),
        (-1, new, *roots, path),
        (0, new, *roots, path),
    ]
    if path:
        at = chance.randrange(len(path))
        one = [*path[:at], flipped(path[at], chance), *path[at + 1 :]]
        wrong += [
            (old, new, *roots, one),
            (old, new, *roots, path[:-1]),
            (old, new, *roots, path[1:]),
            (old, new, *roots, []),
        ]
    for attempt in wrong:
        with pytest.raises(ProofInvalid):
            verify_consistency(*attempt)


def flipped(value: bytes, chance: random.Random) -> bytes:
    changed = bytearray(value)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 700), st.integers(0, 700))
def test_an_edge_goes_on_where_another_ended(first: int, more: int) -> None:
    size = min(700, first + more)
    nodes: dict[tuple[int, int], bytes] = {}
    tree = CompactRange(
        first,
        edge_of(first, NODE),
        lambda level, number, value: nodes.update({(level, number): value}),
    )
    for leaf in LEAVES[first:size]:
        tree.append(leaf)
    assert tree.root() == root_of(size)
    assert tree.edge == edge_of(size, NODE)
    # Every subtree of 256 leaves that was filled on the way was told, and is right.
    assert sorted(nodes) == [(1, number) for number in range(first // 256, size // 256)]
    assert all(value == NODE(8, number) for (_, number), value in nodes.items())


def test_the_empty_tree_begins_every_other_and_only_as_itself() -> None:
    verify_consistency(0, 5, EMPTY_ROOT, root_of(5), [])
    with pytest.raises(ProofInvalid, match="empty tree"):
        verify_consistency(0, 5, root_of(1), root_of(5), [])
    with pytest.raises(ProofInvalid, match="two histories"):
        verify_consistency(5, 5, root_of(4), root_of(5), [])


def test_what_no_tree_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no leaf 5"):
        inclusion_path(5, 5, NODE)
    with pytest.raises(ValueError, match="no beginning"):
        consistency_path(6, 5, NODE)
    with pytest.raises(ValueError, match="2 subtrees"):
        CompactRange(3, [LEAVES[0]])
