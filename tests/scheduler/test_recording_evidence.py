"""Goal: a job's records go on while the store of their evidence is away, in order and once.

Method: the recording thread of the reference job writes segments to a real server of the S3
protocol that refuses everything for a while; the cluster's writer actor is left out, its appends go
to a real ledger from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.probes import RandomStatesRecorded
from shiftbook.ledger.evidence import read_segment, write_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.segment_place import RemoteFolder
from shiftbook.scheduler import recording
from shiftbook.scheduler.recording import Recording
from tests.s3_server import DOWN, S3Server, running_s3


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, running_s3(patch) as running:
        yield running


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as made:
        monkeypatch.setattr(recording, "WriterClient", lambda url: made)
        monkeypatch.setattr(recording, "RETRY_S", 3600.0)  # drained where the test says so
        yield made


def making(records: Recording, number: int) -> Callable[[], list[Draft]]:
    def make() -> list[Draft]:
        segment = write_segment(records.segments, {"n": [number]})
        event = RandomStatesRecorded(
            attempt="a", iteration=number, moment="start", states={}, segment=segment
        )
        return [Draft(event)]

    return make


def test_a_store_that_is_away_ends_no_training(
    s3: S3Server, ledger: Ledger, tmp_path: Path
) -> None:
    url = f"s3://book/{tmp_path.name}"
    records = Recording(ledger.url, "job", RemoteFolder(url))
    records.now(making(records, 0)())
    assert ledger.head().size == 1
    s3.fault = DOWN
    for number in (1, 2):
        records.later(making(records, number))
    records.flush()
    assert records.spooling, "no move begins meanwhile"
    assert ledger.head().size == 1
    records._writer.close()  # the loop's process ends; what it spooled stays

    with pytest.raises(LedgerUnreachable, match=r"left in .*, found 2 records that have to wait"):
        Recording(ledger.url, "job", RemoteFolder(url))
    s3.fault = None
    again = Recording(ledger.url, "job", RemoteFolder(url))
    again.now(making(again, 3)())
    assert not again.spooling
    again._writer.close()
    found = [e.parsed() for e in ledger.read(types=["RandomStatesRecorded"])]
    events = [event for event in found if isinstance(event, RandomStatesRecorded)]
    assert [event.iteration for event in events] == [0, 1, 2, 3]
    for event in events:
        assert event.segment is not None
        assert read_segment(url, event.segment).to_pydict() == {"n": [event.iteration]}
