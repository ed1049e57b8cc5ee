"""Writes what a version seals: signed ledgers, archives, tiles and proofs, and every type of event.

``python -m tests.assets.make_sealed tests/assets/NAME`` makes a new folder. A folder that is there
is never written again: what a version wrote must stay readable as that version wrote it. Broken
ones are a good one with one change, which the function that makes it describes.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from shiftbook.ledger.archive import export_archive
from shiftbook.ledger.archive_heads import heads_section
from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.errors import ShiftbookError
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.proof import check_proof, encode_proof, prove_event, prove_since
from shiftbook.ledger.tiles import write_tiles
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import verify
from tests.strategies import known_types, models
from tests.verify.signed_run import EVENTS, KEY, SIZES, write_signed

LEDGER, HEADS, PUB = "ledger.db", "heads", "pub"
ARCHIVE, TILES, PROOF = "archive.tar", "tiles", "proof.json"
NOW_NS = 1_700_000_200_000_000_000


def signed(folder: Path) -> None:
    """A whole small job under five heads, with the heads outside and the key that they ask for."""
    write_signed(folder)
    (folder / PUB).write_text(KEY.verifier.text() + "\n", encoding="utf-8")
    _settle(folder / LEDGER)


def every_type(folder: Path) -> None:
    """Some events of every type, with fields absent and present; no run that could be judged."""
    with Ledger.open(
        f"sqlite:///{folder / LEDGER}", writer="writer-1", actor="tester", now_ns=lambda: NOW_NS
    ) as ledger:
        for name, model in sorted(known_types().items()):
            ledger.append(name, _drawn(model))
    _settle(folder / LEDGER)


def _drawn(model: type[Event]) -> list[Event]:
    drawn: list[Event] = []

    @settings(
        max_examples=4,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(models(model))
    def draw(event: Event) -> None:
        drawn.append(event)

    draw()
    return drawn


def _settle(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.execute("PRAGMA journal_mode=delete").fetchone()
    for suffix in ("-wal", "-shm", ".lock"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _edit(folder: Path, text: str, *values: object) -> None:
    """One statement, past the triggers."""
    with closing(sqlite3.connect(folder / LEDGER)) as connection, connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
            connection.execute(f'DROP TRIGGER "{name}"')
        assert connection.execute(text, values).rowcount


def rewritten(folder: Path) -> None:
    """An event changed with its leaf: only the heads tell."""
    signed(folder)
    with closing(sqlite3.connect(folder / LEDGER)) as connection:
        (data,) = connection.execute("SELECT data FROM events WHERE position = 70").fetchone()
    changed = data.replace(b'"actor":"', b'"actor":"x')
    text = "UPDATE events SET data = ?, leaf = ? WHERE position = 70"
    _edit(folder, text, changed, leaf_hash(changed))


def altered_node(folder: Path) -> None:
    """A bit of a stored hash of the tree."""
    signed(folder)
    with closing(sqlite3.connect(folder / LEDGER)) as connection:
        (value,) = connection.execute("SELECT hash FROM nodes").fetchone()
    _edit(folder, "UPDATE nodes SET hash = ?", bytes([value[0] ^ 1]) + value[1:])


def lost_head(folder: Path) -> None:
    """A head inside is gone; the one outside is there."""
    signed(folder)
    _edit(folder, "DELETE FROM heads WHERE size = ?", SIZES[2])


def rolled_back(folder: Path) -> None:
    """The ledger as it was two heads earlier, beside the heads outside of now."""
    signed(folder)
    kept = folder / HEADS
    heads = kept.read_bytes()
    shutil.rmtree(folder / f"{LEDGER}.evidence")
    for file in (folder / LEDGER, kept):
        file.unlink()
    write_signed(folder, SIZES[:3], _first(SIZES[2]))
    kept.write_bytes(heads)
    _settle(folder / LEDGER)


def _first(events: int) -> Any:
    from tests.verify.signed_run import Run, long_run

    return Run(long_run().entries[:events])


def _exported(folder: Path, make: Callable[[Ledger], object]) -> None:
    """What ``make`` exports stands alone, with heads, key and its evidence."""
    signed(folder)
    with Ledger.open(f"sqlite:///{folder / LEDGER}", read_only=True) as ledger:
        make(ledger)
    (folder / LEDGER).unlink()
    (folder / f"{LEDGER}.lock").unlink(missing_ok=True)


def archive(folder: Path) -> None:
    """One file with events, evidence and heads."""

    def make(ledger: Ledger) -> None:
        sections = heads_section(ledger, 0, EVENTS - 1)
        export_archive(ledger, folder / ARCHIVE, sections=sections)

    _exported(folder, make)
    shutil.rmtree(folder / f"{LEDGER}.evidence")


def tiles(folder: Path) -> None:
    """The tree as C2SP tlog-tiles, at two heads."""

    def make(ledger: Ledger) -> None:
        for size in (SIZES[-2], EVENTS):
            write_tiles(ledger, folder / TILES, size=size)

    _exported(folder, make)
    (folder / f"{LEDGER}.evidence").rename(folder / f"{TILES}.evidence")


def altered_tile(folder: Path) -> None:
    """A bit of a hash in a full tile."""
    tiles(folder)
    file = folder / TILES / "tile" / "0" / "000"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(bytes(data))


def _proof(folder: Path, make: Callable[[Ledger], dict[str, Any]]) -> None:
    _exported(folder, lambda ledger: (folder / PROOF).write_bytes(encode_proof(make(ledger))))
    shutil.rmtree(folder / f"{LEDGER}.evidence")
    (folder / HEADS).unlink()


def inclusion(folder: Path) -> None:
    """That one event stands under the last head."""
    _proof(folder, lambda ledger: prove_event(ledger, 70))


def consistency(folder: Path) -> None:
    """That the last head continues the first."""
    _proof(folder, lambda ledger: prove_since(ledger, next(iter(ledger.tree().heads()))))


def false_inclusion(folder: Path) -> None:
    """The event of a proof changed."""
    inclusion(folder)
    file = folder / PROOF
    changed = file.read_text(encoding="utf-8").replace('"actor\\":\\"', '"actor\\":\\"x', 1)
    file.write_text(changed, encoding="utf-8")


MADE: dict[str, Callable[[Path], None]] = {
    "signed": signed,
    "types": every_type,
    "rewritten": rewritten,
    "altered-node": altered_node,
    "lost-head": lost_head,
    "rolled-back": rolled_back,
    "archive": archive,
    "tiles": tiles,
    "altered-tile": altered_tile,
    "inclusion": inclusion,
    "consistency": consistency,
    "false-inclusion": false_inclusion,
}


def stated(folder: Path) -> dict[str, Any]:
    """What an auditor is told about a folder, as far as it must hold for ever."""
    key = [(folder / PUB).read_text(encoding="utf-8")] if (folder / PUB).exists() else []
    try:
        if (folder / PROOF).exists():
            verifiers = Outside.read([], key).verifiers
            return {"exit_code": 0, **asdict(check_proof((folder / PROOF).read_bytes(), verifiers))}
        name = next(n for n in (ARCHIVE, TILES, LEDGER) if (folder / n).exists())
        verdict = verify(
            f"sqlite:///{folder / name}" if name == LEDGER else str(folder / name),
            outside=Outside.read([str(folder / HEADS)], key) if key else None,
            require_signed=bool(key),
            integrity_only=not key,
        )
    except ShiftbookError as error:
        return {"exit_code": error.exit_code, "error": type(error).__name__}
    return {
        "exit_code": verdict.exit_code,
        "findings": [[f.invariant, f.job, f.position] for f in verdict.findings],
        "protected_until": verdict.protected_until,
        "head": verdict.head,
    }


def make(out: Path) -> None:
    """Write every one into a new folder."""
    out.mkdir()
    told = {}
    for name, maker in MADE.items():
        with tempfile.TemporaryDirectory() as scratch:
            maker(Path(scratch))
            told[name] = stated(Path(scratch))
            with tarfile.open(out / f"{name}.tar.xz", "w:xz", format=tarfile.PAX_FORMAT) as packed:
                for file in sorted(p for p in Path(scratch).rglob("*") if p.is_file()):
                    info = tarfile.TarInfo(file.relative_to(scratch).as_posix())
                    info.size = file.stat().st_size
                    with file.open("rb") as content:
                        packed.addfile(info, content)
    text = json.dumps(told, indent=2, ensure_ascii=False) + "\n"
    (out / "stated.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
