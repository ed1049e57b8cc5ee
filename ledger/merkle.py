"""The Merkle tree of RFC 6962 and RFC 9162 over leaf hashes: roots, proofs, and their verification.

Pure functions over 32-byte hashes. Where hashes are stored is the caller's affair: a proof is made
from a function that gives the hash of any complete subtree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from shiftbook.ledger.errors import ProofInvalid

HASH_BYTES = 32

TILE_HEIGHT = 8
"""Levels of one tile of C2SP tlog-tiles; a full tile has 256 hashes."""

TILE_WIDTH = 1 << TILE_HEIGHT

EMPTY_ROOT = hashlib.sha256(b"").digest()
"""Root of the tree without leaves (RFC 9162, 2.1.1)."""

Subtree = Callable[[int, int], bytes]
"""``node(level, index)``: hash of the complete subtree over the leaves from ``index << level`` to
``(index + 1) << level``, exclusive."""


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node: SHA-256(0x01 || left || right) (RFC 9162, 2.1.1)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class CompactRange:
    """The right edge of a tree: the roots of its maximal complete subtrees, largest first.

    A leaf is added, and the root told, in O(log n) hashes. ``on_node`` is called with (tile level
    from 1, number, hash) for each subtree that fills a whole tile of the level below.
    """

    def __init__(
        self,
        size: int = 0,
        edge: Iterable[bytes] = (),
        on_node: Callable[[int, int, bytes], None] | None = None,
    ) -> None:
        self.size = size
        self.edge = list(edge)
        self._on_node = on_node
        if len(self.edge) != size.bit_count():
            raise ValueError(
                f"{size} leaves have {size.bit_count()} subtrees, not {len(self.edge)}"
            )

    def append(self, leaf: bytes) -> None:
        """Add a leaf hash."""
        node, left, level, edge = leaf, self.size, 0, self.edge
        self.size += 1
        while left & 1:
            node = hashlib.sha256(b"\x01" + edge.pop() + node).digest()
            left >>= 1
            level += 1
            if not level % TILE_HEIGHT and self._on_node is not None:
                self._on_node(level // TILE_HEIGHT, left, node)
        edge.append(node)

    def extend(self, count: int, edge: Iterable[bytes]) -> None:
        """Add ``count`` leaves by their own right edge, as ``edge_of`` gives it.

        ``size`` is a multiple of the largest of its subtrees. ``on_node`` is not called for what
        lies inside one of them, nor for these themselves.
        """
        for node in edge:
            level = count.bit_length() - 1
            count -= 1 << level
            left = self.size >> level
            self.size += 1 << level
            while left & 1:
                node = node_hash(self.edge.pop(), node)
                left >>= 1
                level += 1
                if not level % TILE_HEIGHT and self._on_node is not None:
                    self._on_node(level // TILE_HEIGHT, left, node)
            self.edge.append(node)

    def root(self) -> bytes:
        """Root over all leaves so far."""
        if not self.edge:
            return EMPTY_ROOT
        root = self.edge[-1]
        for left in reversed(self.edge[:-1]):
            root = node_hash(left, root)
        return root


def tree_root(leaves: Iterable[bytes]) -> bytes:
    """Root over leaf hashes, in O(log n) memory."""
    tree = CompactRange()
    for leaf in leaves:
        tree.append(leaf)
    return tree.root()


def _split(size: int) -> int:
    """The largest power of two below ``size`` (``k`` of RFC 9162, 2.1.1)."""
    return 1 << (size - 1).bit_length() - 1


def range_root(start: int, stop: int, node: Subtree) -> bytes:
    """Root over the leaves from ``start`` to ``stop``, exclusive: MTH(D[start:stop]).

    ``start`` must be a multiple of the smallest power of two that is at least ``stop - start``,
    as in every subtree that a proof names.
    """
    size = stop - start
    if size == 0:
        return EMPTY_ROOT
    if size & (size - 1) == 0:
        level = size.bit_length() - 1
        return node(level, start >> level)
    middle = start + _split(size)
    return node_hash(range_root(start, middle, node), range_root(middle, stop, node))


def edge_of(size: int, node: Subtree) -> list[bytes]:
    """Right edge of a tree, from its stored subtrees; see CompactRange."""
    edge, start = [], 0
    for level in range(size.bit_length() - 1, -1, -1):
        if size >> level & 1:
            edge.append(node(level, start >> level))
            start += 1 << level
    return edge


def inclusion_path(index: int, size: int, node: Subtree) -> list[bytes]:
    """PATH(index, D[size]), from the leaf upwards (RFC 9162, 2.1.3.1).

    At most 64 hashes. Raises ValueError where the tree has no such leaf.
    """
    if not 0 <= index < size:
        raise ValueError(f"no leaf {index} in a tree of size {size}")
    path, start, stop = [], 0, size
    while stop - start > 1:
        middle = start + _split(stop - start)
        if index < middle:
            path.append((middle, stop))
            stop = middle
        else:
            path.append((start, middle))
            start = middle
    return [range_root(start, stop, node) for start, stop in reversed(path)]


def consistency_path(old: int, new: int, node: Subtree) -> list[bytes]:
    """PROOF(old, D[new]) (RFC 9162, 2.1.4.1); empty where old is 0 or equals new.

    Raises ValueError where the old tree is the larger one.
    """
    if not 0 <= old <= new:
        raise ValueError(f"a tree of size {old} is no beginning of one of size {new}")
    if old in (0, new):
        return []
    path, start, stop, whole = [], 0, new, True
    while stop != old:
        middle = start + _split(stop - start)
        if old <= middle:
            path.append((middle, stop))
            stop = middle
        else:
            path.append((start, middle))
            start, whole = middle, False
    if not whole:
        path.append((start, stop))
    return [range_root(start, stop, node) for start, stop in reversed(path)]


def _sized(hashes: Sequence[bytes]) -> None:
    for value in hashes:
        if len(value) != HASH_BYTES:
            raise ProofInvalid(f"expected hashes of {HASH_BYTES} bytes, found one of {len(value)}")


def verify_inclusion(
    leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes
) -> None:
    """Check that a leaf hash stands at ``index`` of the tree with that size and root.

    RFC 9162, 2.1.3.2. Raises ProofInvalid.
    """
    _sized((leaf, root, *path))
    if not 0 <= index < size:
        raise ProofInvalid(f"expected a position below the size of the tree {size}, found {index}")
    node, last, at = leaf, size - 1, index
    for sibling in path:
        if last == 0:
            raise ProofInvalid(f"expected a shorter path, found one of {len(path)} hashes")
        if at & 1 or at == last:
            node = node_hash(sibling, node)
            while not at & 1 and at:
                at >>= 1
                last >>= 1
        else:
            node = node_hash(node, sibling)
        at >>= 1
        last >>= 1
    if last != 0:
        raise ProofInvalid(f"expected a longer path, found one of {len(path)} hashes")
    if node != root:
        raise ProofInvalid(
            f"expected the root {root.hex()}, found that leaf and path lead to {node.hex()}: this "
            f"is not what stands at position {index}"
        )


def verify_consistency(
    old: int, new: int, old_root: bytes, new_root: bytes, path: Sequence[bytes]
) -> None:
    """Check that the tree of size ``old`` is the beginning of the tree of size ``new``.

    RFC 9162, 2.1.4.2. Raises ProofInvalid.
    """
    _sized((old_root, new_root, *path))
    if not 0 <= old <= new:
        raise ProofInvalid(f"expected a later head of at least {old} events, found one of {new}")
    if old in (0, new):
        _trivial(old, new, old_root, new_root, path)
        return
    hashes = list(path)
    if old & (old - 1) == 0:
        # The old tree is one complete subtree; its root is left out of the path.
        hashes.insert(0, old_root)
    if not hashes:
        raise ProofInvalid("expected a longer path, found an empty one")
    at, last = old - 1, new - 1
    while at & 1:
        at >>= 1
        last >>= 1
    first = second = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            raise ProofInvalid(f"expected a shorter path, found one of {len(path)} hashes")
        if at & 1 or at == last:
            first = node_hash(sibling, first)
            second = node_hash(sibling, second)
            while not at & 1 and at:
                at >>= 1
                last >>= 1
        else:
            second = node_hash(second, sibling)
        at >>= 1
        last >>= 1
    if last != 0:
        raise ProofInvalid(f"expected a longer path, found one of {len(path)} hashes")
    for size, expected, found in ((old, old_root, first), (new, new_root, second)):
        if expected != found:
            raise ProofInvalid(
                f"expected the root {expected.hex()} at size {size}, found that the path leads to "
                f"{found.hex()}: one head is no continuation of the other"
            )


def _trivial(old: int, new: int, old_root: bytes, new_root: bytes, path: Sequence[bytes]) -> None:
    """Trees of one size, and the empty tree, which begins every other."""
    if path:
        raise ProofInvalid(f"expected an empty path, found one of {len(path)} hashes")
    if old == 0 and old_root != EMPTY_ROOT:
        raise ProofInvalid("expected the root of the empty tree at size 0, found another")
    if old == new and old_root != new_root:
        raise ProofInvalid(
            f"expected one root at size {old}, found {old_root.hex()} and {new_root.hex()}: "
            "two histories"
        )
