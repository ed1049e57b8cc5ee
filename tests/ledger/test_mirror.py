"""The mirror of a ledger in DuckDB: every table, typed, and brought up to date by position.

Method: ledgers with known events are written through the real ledger and read back as rows; a
mirror that was brought up step by step is compared with one that was made in one go.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from shiftbook.ledger.errors import NotALedger
from shiftbook.ledger.events import observation
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.mirror_build import TABLES, event_batches, projection
from tests.ledger.sample_ledger import (
    DEVICES,
    ROLL,
    Clock,
    Writer,
    open_sample,
    write_every_status,
    write_sample,
)
from tests.ledger.stores import attack, literal

REQUIRED = {
    "reallocations": "job operation status proposed_ns closed_ns strategy before after "
    "bottleneck_before bottleneck_after predicted_gain_s predicted_cost_s since_last_move_s "
    "moved_bytes stall_s kv_tokens_lost realised_gain_s rejected_by reason",
    "weight_syncs": "job operation status version base_version encoding targets moved_bytes "
    "full_bytes stall_s",
    "weight_deliveries": "job operation version target incarnation outcome reason encoding "
    "moved_bytes full_bytes sync_s",
    "iterations": "job attempt iteration wall_s samples_verified device_s reward_mean "
    "policy_version policy_fingerprint",
    "samples": "uid iteration attempt reward advantage tokens token_digest version_min "
    "version_max replica",
}


def table(mirror: Mirror, name: str) -> list[dict[str, Any]]:
    """All rows of a table, in a fixed order."""
    rows = mirror.rows(f"SELECT * FROM {name}")
    return sorted(rows, key=lambda row: str(sorted(row.items(), key=lambda item: item[0])))


@pytest.fixture
def sample(store_url: str) -> Any:
    """The sample on each store."""
    with write_sample(store_url) as ledger:
        yield ledger


def test_every_table_has_rows_of_its_events(sample: Ledger) -> None:
    kinds = [event.type for event in sample.read()]
    with Mirror.open(sample) as mirror:
        counts = {name: len(table(mirror, name)) for name in TABLES}
    assert counts["events"] == len(kinds)
    assert counts["reallocations"] == kinds.count("ReallocationProposed") == 17
    assert counts["candidates"] == 2 * counts["reallocations"]
    assert counts["weight_syncs"] == kinds.count("WeightSyncStarted") == 15
    assert counts["weight_deliveries"] == kinds.count("WeightSyncDelivered") == 15
    assert counts["iterations"] == kinds.count("IterationCompleted") == 15
    assert counts["windows"] == 4 * kinds.count("WindowObserved")
    assert counts["leases"] == 2 * kinds.count("LeaseGranted")
    assert counts["checkpoints"] == kinds.count("CheckpointSaved")
    assert counts["samples"] == 8 * kinds.count("SamplesGenerated")
    assert counts["findings"] == 0


def test_required_columns_stand_and_are_typed(sample: Ledger) -> None:
    with Mirror.open(sample) as mirror:
        kinds = {
            name: {
                row["column_name"]: row["column_type"] for row in mirror.rows(f"DESCRIBE {name}")
            }
            for name in TABLES
        }
        for name, columns in kinds.items():
            # A reserved word as a column would need quotes that no user thinks of.
            mirror.rows(f"SELECT {', '.join(columns)} FROM {name}")
    for name, columns in REQUIRED.items():
        assert set(columns.split()) <= set(kinds[name]), name
    for name, columns in kinds.items():
        for column, kind in columns.items():
            if column.endswith(("_ns", "_bytes")) or column in ("position", "iteration", "version"):
                assert kind == "BIGINT", (name, column)
            elif column.endswith("_s") and column not in ("busy_s", "stall_s"):
                assert kind == "DOUBLE", (name, column)
            elif kind == "JSON":
                assert (name, column) == ("events", "body")
    assert kinds["reallocations"]["stall_s"] == "DOUBLE"
    assert kinds["iterations"]["busy_s"] == "MAP(VARCHAR, DOUBLE)"
    assert kinds["weight_syncs"]["targets"] == "VARCHAR[]"


def test_a_reallocation_tells_its_whole_way(sample: Ledger) -> None:
    with Mirror.open(sample) as mirror:
        row = mirror.rows("SELECT * FROM reallocations WHERE operation = 'move-demo-dynamic-1'")[0]
    assert row["status"] == "committed"
    assert row["before"] == "inference[n/1] rollout[n/0] tool[] trainer[n/1]"
    assert row["after_placement"] == {
        "inference": [],
        "rollout": ["n/0", "n/1"],
        "tool": [],
        "trainer": [],
    }
    assert row["moved_bytes"] == 3_200_000
    assert row["moved_parts"] == {"weights": 3_200_000}
    assert row["kv_tokens_lost"] == 96
    assert row["stall_s"] == pytest.approx(row["stalls"]["rollout"])
    assert row["closed_ns"] - row["proposed_ns"] == pytest.approx(150e6, rel=0.01)
    assert row["since_last_move_s"] is None
    assert row["realised_gain_low_s"] < row["realised_gain_s"] < row["realised_gain_high_s"]


def test_every_status_of_a_reallocation(store_url: str) -> None:
    with write_every_status(store_url) as ledger, Mirror.open(ledger) as mirror:
        rows = mirror.rows("SELECT job, status, rejected_by, rule, reason FROM reallocations")
        folded = {
            operation.status
            for job in ledger.state().jobs.values()
            for operation in job.operations.values()
        }
        findings = table(mirror, "findings")
    assert {row["job"].removeprefix("job-") for row in rows} == {row["status"] for row in rows}
    assert len(folded) == len(rows) == 10
    by = {row["status"]: row for row in rows}
    assert by["rejected"]["rejected_by"] == "gate"
    assert by["rejected"]["rule"] == "cooldown"
    assert by["abandoned"]["reason"] == "a weight sync is due"
    assert by["poisoned"]["reason"].startswith("the receiver died")
    assert [row["positions"] for row in findings] == [[3, 5]]


def test_samples_join_generation_reward_and_consumption(sample: Ledger) -> None:
    with Mirror.open(sample) as mirror:
        rows = mirror.rows("SELECT * FROM samples WHERE job = 'demo-static' AND iteration = 2")
        rewards = mirror.rows("SELECT reward_mean FROM iterations LIMIT 1")
    assert len(rows) == 8
    assert rewards
    for row in rows:
        assert (row["generated"], row["rewarded"], row["consumed"]) == (1, 1, 1)
        assert row["advantage"] == row["reward"] - 0.5
        assert row["version_min"] == row["version_max"] == 2
        assert len(row["token_digest"]) == 32


def test_step_by_step_equals_in_one_go(tmp_path: Path) -> None:
    """Every table at each step, which costs most; how it is read is what the next test asks."""
    step_by_step(lambda name: f"sqlite:///{tmp_path}/{name}.db", some=False)


def test_some_tables_at_each_step_equal_all_in_one_go(
    store_urls: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shiftbook.ledger.mirror_build.BATCH_EVENTS", 7)
    step_by_step(store_urls, some=True)


def step_by_step(urls: Callable[[str], str], *, some: bool) -> None:
    """Goal: a table is the same however often it is brought up, and however far it was behind.

    Method: a ledger grows event by event; at random moments the copy is opened for all tables, or
    for a few drawn ones, so that each falls behind by another stretch; in the end all rows equal
    those of a copy made at once. With small batches, so that such a stretch is several.
    """
    seed = 20
    print("seed", seed)
    chance = random.Random(seed)
    with write_sample(urls("whole"), schedules=("dynamic",), iterations=2) as ledger:
        evidence = ledger.beside(".evidence")
        whole = [event.data for event in ledger.read()]
        with Mirror.open(ledger, in_memory=True) as mirror:
            expected = {name: table(mirror, name) for name in TABLES}
    clock = Clock()
    with (
        Ledger.open(urls("whole"), read_only=True) as source,
        open_sample(urls("steps"), clock) as steps,
    ):
        shutil.copytree(evidence, steps.beside(".evidence"))
        for stored in source.read():
            clock.ns = stored.recorded_ns - 1_000
            steps.append(stored.job, stored.parsed(), operation=stored.operation)
            if chance.random() < 0.2:
                wanted = chance.sample(TABLES, chance.randrange(4)) if some else TABLES
                with Mirror.open(steps, wanted) as mirror:
                    assert mirror.size == stored.position + 1
                    rows = {name: len(table(mirror, name)) for name in {*wanted, "events"}}
                    assert rows["events"] == stored.position + 1
        with Mirror.open(steps) as mirror:
            found = {name: table(mirror, name) for name in TABLES}
    assert len(whole) == len(found["events"])
    for name in TABLES:
        left = [without_writer(row) for row in expected[name]]
        assert [without_writer(row) for row in found[name]] == left, name


def without_writer(row: dict[str, Any]) -> dict[str, Any]:
    """Two handles have two names, and so events of two lengths; all else must agree."""
    return {key: value for key, value in row.items() if key not in ("writer", "bytes")}


def test_only_new_events_are_read_again(sample: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    Mirror.open(sample).close()
    asked: list[int] = []
    monkeypatch.setattr(
        "shiftbook.ledger.mirror_build.event_batches",
        lambda ledger, after, until: asked.append(after) or event_batches(ledger, after, until),
    )
    Mirror.open(sample).close()
    assert asked == []
    size = sample.head().size
    writer = Writer(sample, Clock(), "demo-static", "static", random.Random(1))
    writer.iteration(9, 1.0)
    with Mirror.open(sample) as mirror:
        assert mirror.size == size + 1
        assert mirror.rows("SELECT max(iteration) AS last FROM iterations")[0]["last"] == 9
    assert asked == [size - 1]


def test_only_the_tables_that_are_asked_for_are_brought_up(sample: Ledger) -> None:
    with Mirror.open(sample, ["iterations"]) as mirror:
        assert mirror.size == sample.head().size
        assert mirror.missing_segments == 0
        assert len(table(mirror, "iterations")) > 0
        assert len(table(mirror, "windows")) == 0
        assert len(table(mirror, "samples")) == 0
    with pytest.raises(ValueError, match=r"expected tables of events, .* found moves"):
        Mirror.open(sample, ["moves"])
    with Mirror.open(sample) as late, Mirror.open(sample, in_memory=True) as whole:
        for name in TABLES:
            assert table(late, name) == table(whole, name), name
            assert len(table(late, name)) > 0 or name in ("findings", "shadows"), name


def test_another_ledger_under_the_same_name_is_mirrored_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with write_sample(path, schedules=("static",)) as ledger, Mirror.open(ledger) as mirror:
        assert [row["job"] for row in mirror.rows("SELECT DISTINCT job FROM events")] == [
            "demo-static"
        ]
    for name in (path, *tmp_path.glob("ledger.db-*")):
        name.unlink()
    with write_sample(path, schedules=("dynamic",)) as ledger, Mirror.open(ledger) as mirror:
        assert [row["job"] for row in mirror.rows("SELECT DISTINCT job FROM events")] == [
            "demo-dynamic"
        ]


def test_a_mirror_that_is_no_database_is_made_again(sample: Ledger) -> None:
    path = sample.beside(".mirror.duckdb")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"this is no database" * 1000)
    with Mirror.open(sample) as mirror:
        assert mirror.size == sample.head().size
        assert mirror.path is not None


def test_in_memory_beside_an_open_one_and_where_the_folder_is_read_only(
    sample: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Mirror.open(sample) as first, Mirror.open(sample) as second:
        assert first.path is not None
        assert second.path is None
        assert table(first, "reallocations") == table(second, "reallocations")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with Mirror.open(sample) as third:
        assert third.path is None
        assert third.size == sample.head().size


READER = """
import sys
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
with Ledger.open(sys.argv[1], read_only=True) as ledger, Mirror.open(ledger) as mirror:
    print(mirror.size, flush=True)
    sys.stdin.readline()
    print(len(mirror.rows("SELECT * FROM events")), flush=True)
"""


def test_a_reader_of_another_process_keeps_its_copy_while_it_is_renewed(sample: Ledger) -> None:
    size = sample.head().size
    with subprocess.Popen(
        [sys.executable, "-c", READER, sample.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) == size
        Writer(sample, Clock(), "demo-static", "static", random.Random(1)).iteration(9, 1.0)
        with Mirror.open(sample) as mirror:
            assert mirror.size == size + 1
            assert mirror.path is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert int(reader.stdout.readline()) == size
    assert reader.returncode == 0


def test_a_missing_segment_is_noted_and_taken_in_when_it_is_back(sample: Ledger) -> None:
    folder = sample.beside(".evidence")
    hidden = sorted(folder.iterdir())[0]
    shutil.move(hidden, folder.parent / hidden.name)
    with Mirror.open(sample) as mirror:
        assert mirror.missing_segments == 1
        problem = mirror.rows("SELECT problem FROM segments WHERE NOT loaded")[0]["problem"]
        assert hidden.name in problem
        few = mirror.rows("SELECT count(*) AS n FROM sample_rows")[0]["n"]
    shutil.move(folder.parent / hidden.name, hidden)
    with Mirror.open(sample) as mirror:
        assert mirror.missing_segments == 0
        assert mirror.rows("SELECT count(*) AS n FROM sample_rows")[0]["n"] == few + 8


def test_numbers_that_json_has_no_place_for(store_url: str) -> None:
    clock = Clock()
    with open_sample(store_url, clock) as ledger:
        writer = Writer(ledger, clock, "job ünïcode '\"", "dynamic", random.Random(1))
        writer.open()
        operation = writer.move(ROLL, "pause", float("nan"), moved_bytes=2**64 - 1)
        writer.iteration(0, float("inf"))
        with Mirror.open(ledger) as mirror:
            move = mirror.rows("SELECT * FROM reallocations")[0]
            row = mirror.rows("SELECT * FROM iterations")[0]
            stored = mirror.rows(
                "SELECT body ->> '$.moved_bytes' AS text FROM events "
                "WHERE type = 'ReallocationCommitted'"
            )[0]
    assert move["operation"] == operation
    assert move["job"] == "job ünïcode '\""
    assert move["predicted_gain_s"] != move["predicted_gain_s"]
    assert row["wall_s"] == float("inf")
    # Too wide for a BIGINT: null in the typed column, and whole in the body.
    assert move["moved_bytes"] is None
    assert stored["text"] == str(2**64 - 1)


def test_components_with_quotes_in_their_names(store_url: str) -> None:
    clock = Clock()
    with open_sample(store_url, clock) as ledger:
        part = observation.ComponentWindow(
            replicas=1, throughput=float("nan"), queue=5, running=1, waiting=0, busy_share=0.5
        )
        ledger.append(
            "job",
            observation.WindowObserved(
                attempt="a", iteration=0, start_ns=1, window_s=1.0, components={"a \"b'.$": part}
            ),
        )
        with Mirror.open(ledger) as mirror:
            rows = mirror.rows("SELECT component, queue, throughput, kv_use FROM windows")
    assert math.isnan(rows[0].pop("throughput"))
    assert rows == [{"component": "a \"b'.$", "queue": 5, "kv_use": None}]


def test_leases_end_when_a_later_event_says_so(store_url: str) -> None:
    clock = Clock()
    with open_sample(store_url, clock) as ledger:
        writer = Writer(ledger, clock, "job", "static", random.Random(1))
        writer.open()
        with Mirror.open(ledger) as mirror:
            assert [row["ended_by"] for row in table(mirror, "leases")] == [None, None]
        writer.close(0)
        with Mirror.open(ledger) as mirror:
            rows = table(mirror, "leases")
    assert {row["device"] for row in rows} == set(DEVICES)
    assert {row["ended_by"] for row in rows} == {"released"}
    assert all(row["ended_ns"] > row["granted_ns"] for row in rows)


def test_every_projection_opens_with_a_sentence() -> None:
    for name in TABLES:
        first = projection(name).splitlines()[0]
        assert first.startswith(f"-- {name}: "), name


@pytest.mark.parametrize("damage", [b"{not json", b"\xff\xfe", b""])
def test_damaged_events_are_one_error_that_names_verify(
    damage: bytes, sample: Ledger, store_url: str
) -> None:
    Mirror.open(sample).close()
    writer = Writer(sample, Clock(), "demo-static", "static", random.Random(1))
    position = writer.window(9, 0.1, 1)
    data = literal(store_url, damage)
    attack(store_url, f"UPDATE events SET data = {data} WHERE position = {position}")
    with pytest.raises(NotALedger, match="shiftbook verify"):
        Mirror.open(sample)


def test_an_empty_ledger_has_every_table_empty(store_url: str) -> None:
    with open_sample(store_url) as ledger, Mirror.open(ledger) as mirror:
        assert {name: len(table(mirror, name)) for name in TABLES} == dict.fromkeys(TABLES, 0)


def test_the_open_copy_cannot_be_written(sample: Ledger) -> None:
    with Mirror.open(sample) as mirror, pytest.raises(duckdb.Error):
        mirror.connection.execute("DELETE FROM events")
