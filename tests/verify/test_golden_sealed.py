"""Goal: what an earlier version signed, exported and proved is judged as it was, for ever.

Method: every folder that `make_sealed` packed under tests/assets is unpacked and judged with its
own key and heads by the present code; every event of every type is read as what it is. Nothing in
these folders is changed by that, and broken ones were told from good ones when they were made.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.events.base import UnknownEvent
from shiftbook.ledger.ledger import Ledger
from tests.assets.make_sealed import LEDGER, MADE, PUB, stated

ASSETS = Path(__file__).parents[1] / "assets"
STATED: dict[str, dict[str, Any]] = {
    f"{file.parent.name}/{name}": told
    for file in sorted(ASSETS.glob("*/stated.json"))
    for name, told in json.loads(file.read_text(encoding="utf-8")).items()
}


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(ASSETS / f"{name}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and not p.name.endswith((".lock", "-wal", "-shm"))
    }


def test_every_kind_is_there_and_told_apart() -> None:
    assert {name.partition("/")[2] for name in STATED} == set(MADE)
    good = {"signed", "archive", "tiles", "inclusion", "consistency"}
    for name, told in STATED.items():
        # Drawn events name segments that nobody wrote.
        expected = 0 if name.partition("/")[2] in good else 1
        assert told["exit_code"] == expected, name
        assert (ASSETS / f"{name}.tar.xz").is_file()


@pytest.mark.parametrize("name", STATED)
def test_an_auditor_is_told_the_same(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    before = contents(folder)
    assert json.loads(json.dumps(stated(folder))) == STATED[name]
    assert contents(folder) == before


@pytest.mark.parametrize("name", [n for n in STATED if n.endswith("/types")])
def test_every_type_is_read_as_what_it_is(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    with Ledger.open(f"sqlite:///{folder / LEDGER}", read_only=True) as ledger:
        types = set()
        for event in ledger.read():
            assert not isinstance(event.parsed(), UnknownEvent), event.type
            assert event.plain()["body"] == event.body or event.body != event.body
            types.add(event.type)
        assert len(types) >= 52
        assert ledger.state().size == ledger.head().size


@pytest.mark.parametrize("name", [n for n in STATED if n.endswith("/signed")])
def test_a_signed_one_goes_on(name: str, tmp_path: Path) -> None:
    """New events and a new head come after what an earlier version signed."""
    from shiftbook.ledger.head_signer import HeadSigner
    from shiftbook.ledger.publication import FileOutlet
    from tests.verify.signed_run import KEY

    folder = unpacked(name, tmp_path)
    with Ledger.open(f"sqlite:///{folder / LEDGER}") as ledger:
        known = next(e.parsed() for e in ledger.read() if e.type == "JobClosed")
        ledger.append("another", known)
        HeadSigner(ledger, KEY, [FileOutlet(folder / "heads")]).sign()
        size = ledger.head().size
    assert (folder / PUB).read_text().strip() == KEY.verifier.text()
    assert stated(folder)["protected_until"] == size - 1
