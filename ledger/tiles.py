"""Writes a ledger as static files in the layout of C2SP tlog-tiles, for any such log's reader.

``tile/<level>/<number>`` holds hashes, ``tile/entries/<number>`` the events themselves, and
``checkpoint`` the signed head. Full tiles never change, so a later call writes what is new only.
"""

from __future__ import annotations

import struct
from pathlib import Path

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.durable import replace_file, sync_path
from shiftbook.ledger.errors import ArchiveError, InvalidNote, NoSignedHead, ProofInvalid
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.merkle import TILE_HEIGHT, TILE_WIDTH, CompactRange
from shiftbook.ledger.signed_note import SignedHead

CHECKPOINT, TILES = "checkpoint", "tile"
"""Names in the folder: the signed head, and the folder of everything under it."""


def tile_path(level: int | str, number: int, width: int = TILE_WIDTH) -> str:
    """Path of a tile; ``level`` is a number, or ``entries`` for a bundle of events."""
    parts = [f"{number % 1000:03d}"]
    while number := number // 1000:
        parts.insert(0, f"x{number % 1000:03d}")
    partial = "" if width == TILE_WIDTH else f".p/{width}"
    return f"{TILES}/{level}/{'/'.join(parts)}{partial}"


def is_tiles(folder: Path) -> bool:
    """True for a folder that holds a checkpoint or tiles, whole or not."""
    return folder.is_dir() and ((folder / CHECKPOINT).is_file() or (folder / TILES).is_dir())


def write_tiles(ledger: Ledger, folder: Path, *, size: int | None = None) -> SignedHead:
    """Bring a folder of tiles up to the last signed head, or the one of ``size`` events.

    The head is written last and in one step, so a reader sees the old tree or the new one, whole.
    Events are hashed and the root is compared before that. Raises NoSignedHead; and ProofInvalid
    where the ledger does not fit its head, or the folder holds another history; ArchiveError where
    a file cannot be written.
    """
    try:
        return _write_tiles(ledger, folder, size)
    except OSError as error:
        raise ArchiveError(
            f"expected to write tiles to {folder}, found: {error.strerror or error}; make the "
            "folder writable and give it space, and export again"
        ) from error


def _write_tiles(ledger: Ledger, folder: Path, size: int | None) -> SignedHead:
    ledger.require_keys()
    tree = ledger.tree()
    head = tree.last_head() if size is None else tree.head(size)
    if head is None:
        raise NoSignedHead(
            "expected a signed head to write tiles for, found none; run `shiftbook sign` first"
        )
    there = _present(folder)
    old = 0 if there is None else there.size
    if there is not None and (
        there.origin != head.origin or old > head.size or tree.root(old) != there.root
    ):
        raise ProofInvalid(
            f"expected tiles of a beginning of {head.origin}, {head.size} events, in {folder}, "
            f"found {there.origin}, {old} events, which is none; name another folder"
        )
    new: list[Path] = []
    above = [path for path in (folder, *folder.parents) if not path.exists()]
    whole = old - old % TILE_WIDTH
    edge = CompactRange(whole, tree.edge(whole))
    for start in range(whole, head.size, TILE_WIDTH):
        width = min(TILE_WIDTH, head.size - start)
        rows = list(ledger.rows(start - 1, until=start + width - 1))
        leaves = [leaf_hash(row.data) for row in rows]
        if [row.position for row in rows] != list(range(start, start + width)):
            raise ProofInvalid(
                f"expected events {start} to {start + width - 1}, found a gap; "
                "run `shiftbook verify`"
            )
        for leaf in leaves:
            edge.append(leaf)
        number = start // TILE_WIDTH
        bundle = b"".join(struct.pack(">H", len(row.data)) + row.data for row in rows)
        _write(folder / tile_path("entries", number, width), bundle, new)
        _write(folder / tile_path(0, number, width), b"".join(leaves), new)
    if edge.root() != head.root:
        raise ProofInvalid(
            f"expected the events to give the root of the signed head of {head.size}, found "
            "another; run `shiftbook verify`"
        )
    level = 1
    while total := head.size >> level * TILE_HEIGHT:
        first = (old >> level * TILE_HEIGHT) // TILE_WIDTH * TILE_WIDTH
        for start in range(first, total, TILE_WIDTH):
            width = min(TILE_WIDTH, total - start)
            hashes = b"".join(tree.hashes(level, start, start + width))
            _write(folder / tile_path(level, start // TILE_WIDTH, width), hashes, new)
        level += 1
    for parent in _folders(new, folder):
        sync_path(parent)
    for path in (folder, *above) if there is None else ():
        sync_path(path.parent)
    replace_file(folder / CHECKPOINT, head.data())
    sync_path(folder)
    return head


def _folders(tiles: list[Path], top: Path) -> list[Path]:
    """Every folder on the way from ``top`` to tiles, deepest first."""
    found = {parent for tile in tiles for parent in tile.parents if parent.is_relative_to(top)}
    return sorted(found, key=lambda folder: len(folder.parts), reverse=True)


def _present(folder: Path) -> SignedHead | None:
    """The head that the folder holds tiles for. Raises ProofInvalid."""
    try:
        return SignedHead.parse((folder / CHECKPOINT).read_bytes())
    except FileNotFoundError:
        return None
    except InvalidNote as error:
        raise ProofInvalid(
            f"expected a checkpoint in {folder}, found other content ({error}); empty the folder"
        ) from error


def _write(path: Path, data: bytes, new: list[Path]) -> None:
    """Write a tile that is not there; one with other content is another history.

    One that is there was written by an export that did not end: its name may not be durable yet.
    """
    new.append(path)
    if path.exists():
        if path.read_bytes() != data:
            raise ProofInvalid(
                f"expected {path} as the ledger has it, found other content: the folder holds "
                "another history or is damaged; write to a new folder and compare"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
