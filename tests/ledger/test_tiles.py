"""Goal: the folder of tiles is a C2SP tlog-tiles log: a reader of the text alone gets our tree.

Method: a reader written here from the text of tlog-tiles, with none of our tree's code, rebuilds
root and events from the files of every size on the way; widths and paths of the text's own examples
are compared; folders of another history and altered tiles must be refused.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shiftbook.ledger.errors import NoSignedHead, ProofInvalid
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.signing_keys import Ed25519Signer
from shiftbook.ledger.tiles import tile_path, write_tiles
from tests.ledger.stores import attack, literal
from tests.ledger.test_head_signer import grow

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))


def written(folder: Path, level: int | str, size: int) -> list[bytes]:
    """Tiles of a level for a tree of ``size`` entries of that level."""
    tiles = []
    for number in range(-(-size // 256)):
        width = min(256, size - number * 256)
        name = f"{number:03d}" if number < 1000 else f"x{number // 1000:03d}/{number % 1000:03d}"
        full = folder / "tile" / str(level) / name
        if width == 256:
            tiles.append(full.read_bytes())
        else:
            tiles.append(Path(f"{full}.p/{width}").read_bytes())
    return tiles


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def folded(hashes: list[bytes]) -> bytes:
    """Root over hashes, by the definition."""
    if len(hashes) == 1:
        return hashes[0]
    half = 1
    while half * 2 < len(hashes):
        half *= 2
    return sha(b"\x01" + folded(hashes[:half]) + folded(hashes[half:]))


def reread(folder: Path) -> tuple[int, bytes, list[bytes]]:
    """Size, root and entries as a reader of the files finds them, every level checked."""
    lines = (folder / "checkpoint").read_text().split("\n")
    size, root = int(lines[1]), base64.b64decode(lines[2])
    entries: list[bytes] = []
    for bundle in written(folder, "entries", size):
        while bundle:
            length = int.from_bytes(bundle[:2], "big")
            entries.append(bundle[2 : 2 + length])
            bundle = bundle[2 + length :]
    below = [sha(b"\x00" + entry) for entry in entries]
    leaves = below
    level, count = 0, size
    while count:
        tiles = written(folder, level, count)
        hashes = [tile[at : at + 32] for tile in tiles for at in range(0, len(tile), 32)]
        assert hashes == below, level
        below = [folded(hashes[at : at + 256]) for at in range(0, len(hashes) // 256 * 256, 256)]
        level, count = level + 1, count // 256
    assert folded(leaves) == root
    return size, root, entries


def test_paths_are_those_of_the_text() -> None:
    assert tile_path(0, 1234067) == "tile/0/x001/x234/067"
    assert tile_path(2, 0, 1) == "tile/2/000.p/1"
    assert tile_path("entries", 273, 112) == "tile/entries/273.p/112"


def test_the_root_is_rebuilt_from_the_files_at_every_size(store_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiles"
    with Ledger.open(store_url, writer="w") as ledger:
        with pytest.raises(NoSignedHead):
            write_tiles(ledger, folder)
        signer = HeadSigner(ledger, KEY)
        for count in (1, 200, 55, 1, 255, 400, 0):
            if count:
                grow(ledger, count)
            head = signer.sign()
            assert head == write_tiles(ledger, folder)
            size, root, entries = reread(folder)
            assert head is not None
            assert (size, root) == (head.size, head.root)
            assert entries == [row.data for row in ledger.rows(until=size - 1)]
        assert (folder / "tile/1/000.p/3").stat().st_size == 3 * 32
        # An older head's tiles, in a folder of their own.
        assert reread_size(ledger, tmp_path / "older", 256) == 256


def reread_size(ledger: Ledger, folder: Path, size: int) -> int:
    write_tiles(ledger, folder, size=size)
    return reread(folder)[0]


@pytest.mark.slow
def test_the_example_of_the_text(tmp_path: Path) -> None:
    """70,000 entries: 273 full level 0 tiles and one of 112, one full level 1, 17, 1."""
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", writer="w") as ledger:
        for _ in range(7):
            grow(ledger, 10_000)
        HeadSigner(ledger, KEY).sign()
        write_tiles(ledger, tmp_path / "tiles")
    found = {
        str(path.relative_to(tmp_path / "tiles" / "tile"))
        for path in (tmp_path / "tiles" / "tile").rglob("*")
        if path.is_file()
    }
    expected = {f"{level}/{number:03d}" for level in ("0", "entries") for number in range(273)}
    expected |= {"0/273.p/112", "entries/273.p/112", "1/000", "1/001.p/17", "2/000.p/1"}
    assert found == expected
    assert reread(tmp_path / "tiles")[0] == 70_000


def test_only_what_is_new_is_written(store_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiles"
    with Ledger.open(store_url, writer="w") as ledger:
        signer = HeadSigner(ledger, KEY)
        grow(ledger, 600)
        signer.sign()
        write_tiles(ledger, folder)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
        grow(ledger, 600)
        signer.sign()
        write_tiles(ledger, folder)
    changed = {path.name for path, at in before.items() if path.stat().st_mtime_ns != at}
    assert changed == {"checkpoint"}


def test_a_folder_of_another_history_is_refused(
    store_urls: Callable[[str], str], tmp_path: Path
) -> None:
    folder, url = tmp_path / "tiles", store_urls("ledger")
    with Ledger.open(url, writer="w") as ledger:
        grow(ledger, 300)
        HeadSigner(ledger, KEY).sign()
        write_tiles(ledger, folder)
    with Ledger.open(store_urls("other"), writer="w") as other:
        grow(other, 400, "another")
        HeadSigner(other, KEY).sign()
        with pytest.raises(ProofInvalid, match="which is none"):
            write_tiles(other, folder)
    tile = folder / "tile" / "0" / "001.p" / "44"
    tile.write_bytes(tile.read_bytes()[::-1])
    with Ledger.open(url, writer="w") as ledger:
        with pytest.raises(ProofInvalid, match="another history or is damaged"):
            write_tiles(ledger, folder)
        (folder / "checkpoint").write_bytes(b"x")
        with pytest.raises(ProofInvalid, match="empty the folder"):
            write_tiles(ledger, folder)
        shutil.rmtree(folder)
        attack(url, f"update events set data = {literal(url, b'{}')} where position = 299")
        with pytest.raises(ProofInvalid, match="shiftbook verify"):
            write_tiles(ledger, folder)
        assert not (folder / "checkpoint").exists()


def test_names_of_tiles_are_durable_before_the_head_that_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: after a power cut no head stands over a tile whose name is gone.

    Method: exports die at each rename; at the moment at which the next one puts the head in its
    place, every folder on the way to each tile that the old head did not need has been synced by
    it, whoever wrote the tile.
    """
    real_fsync, real_replace = os.fsync, Path.replace
    synced: set[Path] = set()
    needed: list[set[Path]] = []

    def fsync(fd: int) -> None:
        real_fsync(fd)
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")))  # noqa: PTH115

    def folders(folder: Path) -> set[Path]:
        tiles = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".new"]
        tiles = [path for path in tiles if path.name != "checkpoint"]
        ways = {parent for tile in tiles for parent in tile.parents}
        return {way for way in ways if way.is_relative_to(folder)}

    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        grow(ledger, 300)
        HeadSigner(ledger, KEY).sign()
        for died_at in range(1, 7):
            folder = tmp_path / f"new-{died_at}" / "tiles"
            count = 0

            def replace(path: Path, target: Path, died_at: int = died_at) -> Path:
                nonlocal count
                count += 1
                if count == died_at:
                    raise KeyboardInterrupt
                if target.name == "checkpoint":
                    needed.append(folders(target.parent) - synced)
                return real_replace(path, target)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "replace", replace)
                patch.setattr(os, "fsync", fsync)
                with contextlib.suppress(KeyboardInterrupt):
                    write_tiles(ledger, folder)
                synced.clear()
                needed.clear()
                count = died_at
                head = write_tiles(ledger, folder)
                assert needed == [set()], died_at
                assert {folder, folder.parent} <= synced
            assert reread(folder)[0] == head.size == 300
