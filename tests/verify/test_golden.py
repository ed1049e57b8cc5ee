"""Goal: what an earlier version wrote is read and judged as it was, for ever.

Method: every golden ledger under tests/assets is copied, opened and judged by the present code, and
the verdict is compared with the one that was stated when it was written. Good ones are read event
by event, and no file of them changes by that.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.events.base import UnknownEvent
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import verify
from tests.assets.make_golden import ARCHIVES, BROKEN, GOOD, PLAIN, stated, unpack

ASSETS = Path(__file__).parents[1] / "assets"
STATED: dict[tuple[str, str], dict[str, Any]] = {
    (file.parent.name, name): verdict
    for file in sorted(ASSETS.glob("*/verdicts.json"))
    for name, verdict in json.loads(file.read_text(encoding="utf-8")).items()
}
SINCE: dict[str, dict[str, Any]] = {"unknown": {"exit_code": 2}}
"""Where the verdict is another on purpose: for events of unknown types and newer schemas there was
a note once, and no finding is made of them today either, but the ledger is not called clean."""
LEDGERS = [key for key in STATED if key[1] in {*GOOD, *BROKEN}]


def ids(value: tuple[str, str]) -> str:
    return "/".join(value)


def laid_out(key: tuple[str, str], folder: Path) -> Path:
    """A golden ledger in a folder where it may be opened."""
    version, name = key
    if name in ARCHIVES:
        return Path(shutil.copy(ASSETS / version / f"{name}.tar", folder))
    if name != PLAIN:
        return unpack(ASSETS / version / f"{name}.tar.xz", folder)
    shutil.copy(ASSETS / version / f"{name}.db", folder / "ledger.db")
    shutil.copytree(ASSETS / version / f"{name}.db.evidence", folder / "ledger.db.evidence")
    return folder / "ledger.db"


def test_every_golden_file_has_a_stated_verdict() -> None:
    assert {version for version, _ in STATED} >= {"schema-1", "schema-2"}
    for version in {version for version, _ in STATED}:
        files = {p.name.split(".")[0] for p in (ASSETS / version).iterdir()} - {"verdicts"}
        assert files == {name for v, name in STATED if v == version}


@pytest.mark.parametrize("key", STATED, ids=ids)
def test_the_verdict_is_the_stated_one(key: tuple[str, str], tmp_path: Path) -> None:
    assert stated(laid_out(key, tmp_path)) == STATED[key] | SINCE.get(key[1], {})


def test_what_is_unknown_in_a_ledger_is_said(tmp_path: Path) -> None:
    """An event of an unknown type, and one of a schema of the future, both after the job's end."""
    url = f"sqlite:///{laid_out(('schema-2', 'unknown'), tmp_path)}"
    newer, unknown = verify(url).could_not
    assert "FanStopped (schema 1) 1 times), the first at position 102" in unknown
    assert "JobClosed at position 103 has schema 99" in newer
    assert verify(url, allow_unknown=True).could_not == (newer,)
    whole = verify(url, until=101)
    assert (whole.exit_code, whole.could_not) == (0, ())


@pytest.mark.parametrize("key", [key for key in LEDGERS if key[1] in GOOD], ids=ids)
def test_every_event_of_a_good_one_is_read(key: tuple[str, str], tmp_path: Path) -> None:
    path = laid_out(key, tmp_path)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
        events = list(ledger.read())
        assert [event.position for event in events] == list(range(ledger.head().size))
        unknown = [event.type for event in events if isinstance(event.parsed(), UnknownEvent)]
        assert unknown == (["FanStopped", "JobClosed"] if key[1] == "unknown" else [])
        for event in events:
            assert event.plain()["body"] == event.body, "shown as it stands"
        assert ledger.state().size == len(events)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_a_golden_ledger_can_be_written_on(tmp_path: Path) -> None:
    """A ledger of every earlier layout takes new events, and what stood in it stands."""
    for version in sorted({version for version, _ in LEDGERS}):
        folder = tmp_path / version
        folder.mkdir()
        path = laid_out((version, "unknown"), folder)
        with Ledger.open(f"sqlite:///{path}") as ledger:
            before = [event.data for event in ledger.read()]
            known = next(e.parsed() for e in ledger.read() if e.type == "JobClosed")
            ledger.append("another", known)
            assert [event.data for event in ledger.read()][:-1] == before
