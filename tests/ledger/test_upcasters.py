"""Goal: an event of an older schema reads as one of the present schema; its bytes stay as they are.

Method: bodies of every older schema are taken from the golden ledger of schema 1 and lifted; the
register of upcasters is compared with the models; bytes of schema 1 are put into a new ledger
beside present ones, on each store, folded, printed, retried under their key and judged.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from shiftbook.ledger.errors import IdempotencyConflict, InvalidEvent
from shiftbook.ledger.events.base import REGISTRY, Event, UnknownEvent, lifted, parse
from shiftbook.ledger.events.safety import DivergenceFlagged
from shiftbook.ledger.events.upcasters import UPCASTERS
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.summary import summary
from tests.assets.make_golden import unpack

ASSETS = Path(__file__).parents[1] / "assets"
FLAGGED = {"invariant": "I10", "at": 3, "expected": "e", "found": "f", "positions": [3]}


class FlaggedOne(Event):
    """DivergenceFlagged as schema 1 wrote it."""

    model_config: ClassVar = {"extra": "allow"}

    @classmethod
    def type_(cls) -> str:
        return "DivergenceFlagged"

    def plain(self) -> dict:
        return dict(self.model_extra or {})


REGISTRY.pop("FlaggedOne")


def test_every_older_schema_has_an_upcaster_and_no_other_has_one() -> None:
    older = {
        (name, schema) for name, model in REGISTRY.items() for schema in range(1, model.schema_)
    }
    assert set(UPCASTERS) == older
    assert ("DivergenceFlagged", 1) in older


def test_a_finding_of_schema_1_reads_as_the_graver() -> None:
    event = parse("DivergenceFlagged", 1, dict(FLAGGED))
    assert event == DivergenceFlagged(severity="stop", **FLAGGED)
    present = parse("DivergenceFlagged", 2, {**FLAGGED, "severity": "warn"})
    assert isinstance(present, DivergenceFlagged)
    assert present.severity == "warn"


@pytest.mark.parametrize("schema", [0, -1])
def test_a_schema_that_was_never_written(schema: int) -> None:
    with pytest.raises(InvalidEvent, match="expected a schema from 1 to 2"):
        parse("DivergenceFlagged", schema, dict(FLAGGED))


def test_newer_and_unknown_ones_are_kept_as_they_stand() -> None:
    for type_, schema in (("DivergenceFlagged", 3), ("DivergenceFlagged", 10**6), ("New", 1)):
        event = parse(type_, schema, dict(FLAGGED))
        assert isinstance(event, UnknownEvent)
        assert event.plain() == FLAGGED
        assert lifted(type_, schema, FLAGGED) is FLAGGED


def test_schema_2_without_its_field_is_invalid() -> None:
    with pytest.raises(InvalidEvent, match="severity"):
        parse("DivergenceFlagged", 2, dict(FLAGGED))


def test_old_events_of_a_golden_ledger(store_url: str, tmp_path: Path) -> None:
    path = unpack(ASSETS / "schema-1" / "statuses.tar.xz", tmp_path / "golden")
    with Ledger.open(f"sqlite:///{path}", read_only=True) as golden:
        stored = list(golden.read())
    with Ledger.open(store_url) as ledger:
        ledger.restore(stored)
        (old,) = ledger.read(types={"DivergenceFlagged"})
        assert (old.schema, "severity" in old.body) == (1, False)
        parsed = old.parsed()
        assert isinstance(parsed, DivergenceFlagged)
        assert parsed.severity == "stop"
        assert "severity" not in old.plain()["body"], "shown as it was stored"
        assert summary(old).startswith("stop: sampling-order at 3")
        with Mirror.open(ledger, in_memory=True) as mirror:
            assert mirror.rows("SELECT severity FROM findings") == [{"severity": "stop"}]


def test_a_retry_by_a_newer_build_meets_what_an_older_one_wrote(store_url: str) -> None:
    old = FlaggedOne.model_validate(FLAGGED)
    assert (old.type_(), old.schema_, old.plain()) == ("DivergenceFlagged", 1, FLAGGED)
    with Ledger.open(store_url) as ledger:
        first = ledger.append("job", old, key="k")
        again = ledger.append("job", DivergenceFlagged(severity="stop", **FLAGGED), key="k")
        assert again.repeated
        assert again.first == first.first
        with pytest.raises(IdempotencyConflict):
            ledger.append("job", DivergenceFlagged(severity="warn", **FLAGGED), key="k")
        (stored,) = ledger.read()
        assert b"severity" not in stored.data
