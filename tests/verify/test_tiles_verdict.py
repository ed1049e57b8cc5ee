"""Goal: exported tiles are judged as their ledger is, and no change of a file goes unnoticed.

Method: a signed run is exported at two of its heads, so that the folder has full tiles, partial
ones, and a partial one that a larger has replaced. Every file is changed, swapped, deleted,
inserted into, reordered, duplicated and truncated, and single bits flip in each; whole histories
are rewritten, rolled back and forked under a tree that fits. Each must be found, by an auditor with
the key and the heads outside, at the first position that it can be known from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from shiftbook.ledger.cli import main
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.signing_keys import Ed25519Signer
from shiftbook.ledger.tiles import write_tiles
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import Run
from tests.verify.signed_run import EVENTS, KEY, SIZES, THIEF, Signed, long_run, write_signed

FULL, EDGE = 256, EVENTS - 256
"""Events in the full bundle and in the one after it."""


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


def exported(signed: Signed, folder: Path, *sizes: int) -> Path:
    with Ledger.open(f"sqlite:///{signed.path}", read_only=True) as ledger:
        for size in sizes or (SIZES[-2], EVENTS):
            write_tiles(ledger, folder, size=size)
    return folder


@pytest.fixture(scope="module")
def original(signed: Signed) -> Path:
    return exported(signed, signed.path.with_name("tiles"))


@pytest.fixture
def tiles(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "tiles")


def judged(signed: Signed, tiles: Path, **options: object) -> Verdict:
    outside = Outside.read([str(signed.heads)], [KEY.verifier.text()])
    return verify(  # type: ignore[arg-type]
        str(tiles), **{"outside": outside, "evidence": str(signed.evidence), **options}
    )


# -- controls --------------------------------------------------------------------------------


def test_the_verdict_is_that_of_the_ledger(signed: Signed, tiles: Path) -> None:
    verdict = judged(signed, tiles, require_signed=True)
    assert (verdict.exit_code, verdict.findings) == (0, ())
    assert verdict.protected_until == EVENTS - 1
    of_ledger = signed.verify(require_signed=True)
    rows = {row.invariant: row.status for row in of_ledger.coverage.rows}
    assert {row.invariant: row.status for row in verdict.coverage.rows} == rows
    mine, its = (replace(v, url="", coverage=of_ledger.coverage) for v in (verdict, of_ledger))
    assert mine == its
    prefix = judged(signed, tiles, until=150, integrity_only=True)
    assert (prefix.exit_code, prefix.last, prefix.protected_until) == (0, 150, 119)


def test_evidence_beside_the_folder_is_found(signed: Signed, tiles: Path) -> None:
    shutil.copytree(signed.evidence, f"{tiles}.evidence")
    assert judged(signed, tiles, evidence=None).exit_code == 0
    next(Path(f"{tiles}.evidence").iterdir()).unlink()
    assert {f.invariant for f in judged(signed, tiles, evidence=None).findings} == {"evidence"}


def test_findings_are_those_of_the_ledger(tmp_path: Path) -> None:
    run = long_run()
    run.get("UpdateApplied", 0).change(learning_rate=0.5)
    false = write_signed(tmp_path, run=run)
    verdict = judged(false, exported(false, tmp_path / "tiles", EVENTS))
    assert verdict.findings == false.verify().findings != ()


def test_files_beyond_the_head_are_left_alone(signed: Signed, tiles: Path, tmp_path: Path) -> None:
    """As an export leaves them that was killed before it wrote the head."""
    older = exported(signed, tmp_path / "older", SIZES[-2])
    shutil.copy(older / "checkpoint", tiles)
    (tiles / "tile" / "0" / "002").write_bytes(b"x")
    verdict = judged(signed, tiles, outside=Outside((), (KEY.verifier,)))
    assert (verdict.exit_code, verdict.last) == (0, SIZES[-2] - 1)


def test_the_commands(signed: Signed, tmp_path: Path) -> None:
    def call(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, list(words))
        return result.exit_code, result.output

    folder, ledger = str(tmp_path / "tiles"), str(signed.path)
    code, out = call("export", "--ledger", ledger, "--tiles", folder, "--format", "json")
    assert code == 0, out
    document = json.loads(out)
    assert (document["tiles"], document["events"]) == (folder, EVENTS)
    proof = ("--heads", str(signed.heads), "--key", KEY.verifier.text(), "--require-signed")
    code, out = call("verify", folder, "--evidence", str(signed.evidence), *proof)
    assert code == 0, out
    both = ("-o", str(tmp_path / "a.tar"), "--tiles", folder, "--format", "json")
    code, out = call("export", "--ledger", ledger, *both)
    assert code == 0, out
    assert call("verify", str(tmp_path / "a.tar"), *proof)[0] == 0
    assert call("export", "--ledger", ledger)[0] == 2
    assert call("export", "--ledger", ledger, "--tiles", folder, "--since", "3")[0] == 2
    assert call("verify", folder, "--follow")[0] == 2
    assert call("verify", folder, "--record")[0] == 2
    flip(tmp_path / "tiles" / "tile" / "0" / "000", 70 * 32)
    code, out = call("verify", folder, "--integrity-only", *proof)
    assert code == 1
    assert "position 70" in out
    (tmp_path / "tiles" / "checkpoint").write_bytes(b"x")
    code, out = call("verify", folder)
    assert (code, out.count("\n")) == (2, 1)
    assert "restore the folder from a copy" in out


# -- each file -------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def entries(path: Path) -> list[bytes]:
    found, data = [], path.read_bytes()
    while data:
        end = 2 + int.from_bytes(data[:2])
        found.append(data[:end])
        data = data[end:]
    return found


def hashes(path: Path) -> list[bytes]:
    data = path.read_bytes()
    return [data[at : at + 32] for at in range(0, len(data), 32)]


Change = Callable[[list[bytes]], list[bytes]]
INSIDE: dict[str, tuple[Change, int | None]] = {
    "changed": (lambda n: [*n[:5], n[5][:-1] + bytes([n[5][-1] ^ 1]), *n[6:]], 5),
    "two swapped": (lambda n: [*n[:5], n[20], *n[6:20], n[5], *n[21:]], 5),
    "reversed": (lambda n: n[::-1], 0),
    "one deleted": (lambda n: [*n[:5], *n[6:]], None),
    "one inserted": (lambda n: [*n[:5], n[9], *n[5:]], None),
    "one duplicated": (lambda n: [*n[:5], n[4], *n[6:]], 5),
    "truncated": (lambda n: n[:-3], None),
    "cut in an entry": (lambda n: [*n[:-1], n[-1][:-1]], None),
    "emptied": (lambda n: [], None),
}
"""What is done to the entries of a tile, and the first that is wrong; None: the number is."""

STARTS = {"000": 0, f"001.p/{EDGE}": FULL}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("tile", STARTS)
@pytest.mark.parametrize("kind", ["entries", "0"])
def test_inside_a_tile(signed: Signed, tiles: Path, kind: str, tile: str, name: str) -> None:
    change, at = INSIDE[name]
    path = tiles / "tile" / kind / tile
    read = entries if kind == "entries" else hashes
    path.write_bytes(b"".join(change(read(path))))
    verdict = judged(signed, tiles)
    assert verdict.exit_code == 1
    # A cut in the last hash leaves a whole number of them, of which the last is wrong.
    last = EVENTS - 1 if tile != "000" else FULL - 1
    wrong = last if (name, kind) == ("cut in an entry", "0") else STARTS[tile] + (at or 0)
    # The partial tile before it disagrees, which is known of all of its file.
    wrong = FULL if tile != "000" and wrong < FULL + 4 else wrong
    first = verdict.findings[0]
    assert (first.invariant, first.position) == ("integrity", wrong)
    assert verdict.judged_until == wrong - 1
    assert verdict.integrity_broken


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


FILES: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "bundle deleted": (lambda t: (t / "entries/000").unlink(), "integrity", 0),
    "last bundle deleted": (
        lambda t: (t / f"entries/001.p/{EDGE}").unlink(), "integrity", FULL),
    "tile deleted": (lambda t: (t / "0/000").unlink(), "integrity", 0),
    "bundles swapped": (
        lambda t: swap(t / "entries/000", t / f"entries/001.p/{EDGE}"), "integrity", 0),
    "tiles swapped": (lambda t: swap(t / "0/000", t / f"0/001.p/{EDGE}"), "integrity", 0),
    "a bundle under another name": (
        lambda t: shutil.copy(t / "entries/000", t / "entries/001"), "integrity", FULL),
    "replaced bundle changed": (lambda t: flip(t / "entries/001.p/4", 90), "integrity", FULL),
    "replaced tile changed": (lambda t: flip(t / "0/001.p/4", 9), "integrity", FULL),
    "replaced tile cut": (lambda t: (t / "0/001.p/4").write_bytes(b"x"), "integrity", FULL),
    "a narrow tile put in": (
        lambda t: (t / "0/001.p/2").write_bytes(bytes(64)), "integrity", FULL),
    "node changed": (lambda t: flip(t / "1/000.p/1", 9), "heads", 0),
    "node deleted": (lambda t: (t / "1/000.p/1").unlink(), "heads", 0),
    "node cut": (lambda t: (t / "1/000.p/1").write_bytes(b""), "heads", 0),
    "node inserted": (
        lambda t: (t / "1/000.p/2").write_bytes((t / "1/000.p/1").read_bytes() * 3), "heads", 0),
    "level deleted": (lambda t: shutil.rmtree(t / "1"), "heads", 0),
    "all deleted": (lambda t: shutil.rmtree(t), "integrity", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files(signed: Signed, tiles: Path, name: str) -> None:
    change, invariant, at = FILES[name]
    change(tiles / "tile")
    verdict = judged(signed, tiles)
    assert verdict.exit_code == 1
    first = verdict.findings[0]
    assert (first.invariant, first.position) == (invariant, at)
    assert all((first.expected, first.found, first.cause, first.action))


def test_a_flipped_bit_of_any_file_is_never_clean(
    signed: Signed, original: Path, tiles: Path
) -> None:
    for file in sorted(path for path in original.rglob("*") if path.is_file()):
        whole, target = file.read_bytes(), tiles / file.relative_to(original)
        for at in range(0, len(whole), max(1, len(whole) // 12)):
            target.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            try:
                code = judged(signed, tiles, integrity_only=True).exit_code
            except UnreadableStore as error:
                assert file.name == "checkpoint"
                code = error.exit_code
            assert code, (file, at)
        target.write_bytes(whole)
    assert judged(signed, tiles).exit_code == 0


# -- the head and whole histories ------------------------------------------------------------


HEADS: dict[str, tuple[bytes, int, str]] = {
    "of another root": (SignedHead.sign(EVENTS, bytes(32), KEY).data(), EVENTS - 1, "heads"),
    "of a thief": (SignedHead.sign(EVENTS, bytes(32), THIEF).data(), EVENTS - 1, "heads"),
    "of more events": (SignedHead.sign(EVENTS + 5, bytes(32), KEY).data(), 256, "integrity"),
    "of fewer events": (SignedHead.sign(300, bytes(32), KEY).data(), SIZES[-2], "heads"),
}


@pytest.mark.parametrize("name", HEADS)
def test_another_head(signed: Signed, tiles: Path, name: str) -> None:
    note, at, invariant = HEADS[name]
    (tiles / "checkpoint").write_bytes(note)
    verdict = judged(signed, tiles)
    assert verdict.exit_code == 1
    assert (invariant, at) in {(f.invariant, f.position) for f in verdict.findings}


def test_a_rollback_to_an_older_export(signed: Signed, tmp_path: Path) -> None:
    older = exported(signed, tmp_path / "older", SIZES[1])
    verdict = judged(signed, older)
    (finding,) = [f for f in verdict.findings if f.invariant == "outside"]
    assert finding.position == SIZES[1]
    assert "rolled back to an older copy" in finding.cause
    alone = judged(signed, older, outside=Outside((), (KEY.verifier,)), integrity_only=True)
    assert alone.exit_code == 0


@pytest.mark.parametrize("by", [KEY, THIEF], ids=["the signer", "a thief"])
def test_a_rewritten_history_with_a_tree_that_fits(
    signed: Signed, tmp_path: Path, by: Ed25519Signer
) -> None:
    run = Run(long_run().entries)
    for entry in run.entries[120:190]:
        entry.change(start_ns=2)
    fork = write_signed(tmp_path, (60, 120, EVENTS), run, signer=by)
    folder = exported(fork, tmp_path / "tiles", EVENTS)
    verdict = judged(signed, folder, evidence=str(fork.evidence))
    assert verdict.exit_code == 1
    finding = next(f for f in verdict.findings if f.invariant == "outside")
    assert finding.position == 120
    assert verdict.judged_until == 119
