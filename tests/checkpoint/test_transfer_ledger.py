"""Goal: the ledger tells of each delivery, and which version every engine is on at any moment.

Method: syncs between real sources and receivers are begun and ended through the gate of a ledger in
a file; one engine fails, one stays away. The events, the fold after each of them, `shiftbook state`
and `show`, the SQL tables and the verifier's judgement of deliveries are read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from shiftbook.checkpoint.transfer.record import LedgeredSync
from shiftbook.ledger.cli import main
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import IllegalStep, LedgerUnreachable
from shiftbook.ledger.events import life, sync
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from tests.checkpoint.transfer_states import (
    Trainer,
    engine,
    equal,
    logical,
    nudged,
    state,
    sync_all,
)
from tests.ledger.sample_ledger import Clock, Writer, open_sample

JOB = "far"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Ledger]:
    with open_sample(tmp_path / "ledger.db", Clock()) as ledger:
        Writer(ledger, Clock(), JOB, "dynamic", random.Random(0)).open()
        yield ledger


def ledgered(book: Ledger, trainer: Trainer) -> LedgeredSync:
    attempt = book.state().job(JOB).current_attempt()
    assert attempt is not None
    return LedgeredSync(
        Gate(book), JOB, attempt=attempt.attempt, epoch=attempt.epoch, desk=trainer.desk
    )


def standings(book: Ledger) -> dict[str, tuple[str, int | None]]:
    return {n: (e.standing, e.version) for n, e in book.state().job(JOB).engines.items()}


def test_each_target_has_its_events_and_its_version(
    book: Ledger, trainer: Trainer, tmp_path: Path
) -> None:
    first, second = state(1), nudged(state(1), 2)
    second["q"][0, 0] = np.nan
    targets = {"east": 2, "north": 1, "west": 1}
    engines = {n: engine(lambda n=n: trainer.links(n), n, ranks) for n, ranks in targets.items()}
    every = [receiver for receivers in engines.values() for receiver in receivers]

    one = ledgered(book, trainer)
    operation = one.begin(trainer.publish(1, first), targets, limit_s=60)
    assert standings(book) == dict.fromkeys(targets, ("syncing", None))
    sync_all(every)
    one.finish(caches_flushed=("kv",))
    assert standings(book) == dict.fromkeys(targets, ("serving", 1))
    delivered = [e for e in book.read(operation=operation) if e.type == "WeightSyncDelivered"]
    assert {e.body["target"] for e in delivered} == set(targets)
    for event in delivered:
        assert event.body["encoding"] == "whole"
        assert event.body["transport"] == "flight"
        assert event.body["moved_bytes"] > 100_000
        assert event.body["sync_s"] > 0
        assert event.body["nan"] == 0
        assert event.body["root"] == trainer.offers[0].newest().root  # type: ignore[union-attr]

    # The second version: west stays away, north's engine refuses what it is given.
    calls: list[int] = []

    def refuse(tensors: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no room on the device")

    two = ledgered(book, trainer)
    operation = two.begin(trainer.publish(2, second), targets, limit_s=10)
    assert standings(book) == dict.fromkeys(targets, ("syncing", 1))
    sync_all(engines["east"])
    sync_all(engines["north"], install=refuse)
    outcomes = {o.target: o for o in two.finish()}
    assert {n: o.outcome for n, o in outcomes.items()} == {
        "east": "serving",
        "north": "failed",
        "west": "lost",
    }
    assert standings(book) == {"east": ("serving", 2), "north": ("held", 1), "west": ("lost", 1)}
    assert equal(logical([r.tensors for r in engines["east"]], 2), second)
    assert not engines["north"][0].serving

    runner = CliRunner()
    url = book.url
    shown = runner.invoke(main, ["state", JOB, "--ledger", url]).output
    assert "engine       east serving, version 2" in shown
    assert "engine       north held, version 1: TransferError" in shown
    assert "no room on the device" in shown
    listed = json.loads(runner.invoke(main, ["state", "--ledger", url, "--format", "json"]).output)
    assert [e["standing"] for e in listed["engines"]] == ["serving", "held", "lost"]
    story = runner.invoke(main, ["show", operation, "--ledger", url]).output
    assert "patch, flight, 1 NaN, resident, equal to the source" in story
    assert "outcome      west lost: it did not end within the time limit" in story
    log = runner.invoke(main, ["log", "--ledger", url, "--operation", operation]).output
    assert "as a patch" in log

    with Mirror.open(book) as mirror:
        rows = mirror.rows("select * from weight_deliveries where version = 2 order by target")
    assert [row["outcome"] for row in rows] == ["serving", "failed", "lost"]
    assert rows[0]["moved_bytes"] < rows[0]["full_bytes"] / 2
    assert (rows[0]["encoding"], rows[0]["nan"]) == ("patch", 1)
    assert rows[0]["delivered_ns"] >= rows[0]["started_ns"]
    assert rows[1]["position"] is None
    assert "no room" in rows[1]["reason"]


def test_a_sync_that_nobody_takes_fails(book: Ledger, trainer: Trainer) -> None:
    only = ledgered(book, trainer)
    operation = only.begin(trainer.publish(1, state(1)), {"a": 1, "b": 1}, limit_s=0.2)
    only.finish()
    assert [e.type for e in book.read(operation=operation)] == [
        "WeightSyncStarted",
        "WeightSyncFailed",
    ]
    assert standings(book) == {"a": ("held", None), "b": ("held", None)}
    with Mirror.open(book) as mirror:
        rows = mirror.rows("select target, outcome, reason from weight_deliveries order by target")
    assert [(row["target"], row["outcome"]) for row in rows] == [("a", "failed"), ("b", "failed")]
    assert "time limit" in rows[0]["reason"]


def test_the_fold_follows_processes_and_differing_deliveries(
    book: Ledger, trainer: Trainer
) -> None:
    """A new process holds nothing; a lost one neither; nor does one that reads something else."""
    gate = Gate(book)
    attempt = book.state().job(JOB).current_attempt()
    assert attempt is not None
    root = "ab" * 16
    started = sync.WeightSyncStarted(
        attempt=attempt.attempt,
        version=0,
        source={"w": root},
        source_root=root,
        encoding="full",
        targets=("r0", "r1"),
        epoch=attempt.epoch,
    )
    operation = gate.begin_sync(JOB, started)

    def delivery(target: str, **more: Any) -> sync.WeightSyncDelivered:
        return sync.WeightSyncDelivered(
            **{
                "target": target,
                "incarnation": f"{target}#1",
                "version": 0,
                "root": root,
                "fingerprint_of": "resident",
                "moved_bytes": 1,
                "full_bytes": 1,
                "sync_s": 0.1,
                **more,
            }
        )

    gate.sync_delivered(JOB, operation, delivery("r0"))
    gate.sync_delivered(JOB, operation, delivery("r1", root="cd" * 16, differing=("w",)))
    assert standings(book) == {"r0": ("syncing", 0), "r1": ("syncing", None)}
    with pytest.raises(IllegalStep, match="sync-target"):
        gate.sync_delivered(JOB, operation, delivery("elsewhere"))
    gate.sync_committed(
        JOB,
        operation,
        sync.WeightSyncCommitted(
            version=0,
            outcomes=(
                sync.TargetOutcome(target="r0", outcome="serving"),
                sync.TargetOutcome(target="r1", outcome="failed", reason="w differs"),
            ),
            stall_s=0.1,
            caches_flushed=(),
        ),
    )
    assert standings(book) == {"r0": ("serving", 0), "r1": ("held", None)}
    again = life.ReplicaStarted(
        attempt="a",
        component="rollout",
        replica="r0",
        incarnation="r0#2",
        devices=(),
        pid=1,
        node="n",
    )
    book.append(JOB, Draft(again))
    assert standings(book)["r0"] == ("held", None)
    gone = life.ReplicaLost(
        attempt="a", component="rollout", replica="r0", incarnation="r0#2", cause="killed"
    )
    book.append(JOB, Draft(gone))
    assert standings(book)["r0"] == ("lost", None)


def test_an_outage_does_not_stop_a_sync(
    book: Ledger, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every door is shut: the engine takes the version, and the events wait in order."""

    def away(*_: Any, **__: Any) -> Any:
        raise LedgerUnreachable("the disk of the ledger is gone")

    for name in ("begin_sync", "sync_delivered", "sync_committed"):
        monkeypatch.setattr(Gate, name, away)
    only = ledgered(book, trainer)
    catalogue = trainer.publish(1, state(1))
    with pytest.raises(LedgerUnreachable):
        only.begin(catalogue, {"e": 1}, limit_s=30)
    only.begin(catalogue, {"e": 1}, limit_s=30, operation="sync-far-1")
    receivers = engine(lambda: trainer.links("e"), "e", 1)
    sync_all(receivers)
    assert [o.outcome for o in only.finish()] == ["serving"]
    assert receivers[0].version == 1
    assert [d.event.type_() for d in only.unwritten] == [
        "WeightSyncStarted",
        "WeightSyncDelivered",
        "WeightSyncCommitted",
    ]
    assert {d.operation for d in only.unwritten} == {"sync-far-1"}
