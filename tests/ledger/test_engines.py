"""Goal: at any moment the state says which version each engine holds, however it came to it.

Method: engines are synced, started anew, brought up under new names, used and lost, event by
event, and the state is read after each; a late word about a process that was replaced, and one
about something that is no engine, must change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from shiftbook.ledger.events import life
from shiftbook.ledger.events.state import StateFirstUsed
from shiftbook.ledger.events.sync import (
    TargetOutcome,
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncStarted,
)
from tests.ledger.sample_ledger import Clock, Writer, hex128, open_sample

JOB = "job"
Standing = tuple[str, int | None, str | None]


class Engines(Writer):
    """A job whose engines come and go."""

    def start(self, replica: str, life_: int, component: str = "rollout") -> None:
        """Another process serves a replica."""
        self.put(
            life.ReplicaStarted(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=f"{replica}#{life_}",
                devices=("n/0",),
                pid=7,
                node="n",
            )
        )

    def use(
        self,
        replica: str,
        life_: int,
        version: int,
        *,
        component: str = "rollout",
        after: Literal["restore", "sync", "move", "start"] = "move",
        readable: bool = True,
    ) -> None:
        """A process tells what it read before its first work."""
        self.put(
            StateFirstUsed(
                attempt=self.attempt,
                component=component,
                replica=replica,
                incarnation=f"{replica}#{life_}",
                after=after,
                use="generation",
                policy_version=version,
                parts={"model": hex128(f"policy {version}")} if readable else {},
            )
        )

    def lose(self, replica: str, life_: int) -> None:
        """A process is gone."""
        self.put(
            life.ReplicaLost(
                attempt=self.attempt,
                component="rollout",
                replica=replica,
                incarnation=f"{replica}#{life_}",
                cause="killed",
            )
        )

    def known(self, replica: str) -> Standing | None:
        """Standing, version and root of an engine; None where the state knows no such engine."""
        engine = self.ledger.state().job(JOB).engines.get(replica)
        return None if engine is None else (engine.standing, engine.version, engine.root)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Engines]:
    clock = Clock()
    with open_sample(tmp_path / "ledger.db", clock) as ledger:
        made = Engines(ledger, clock, JOB, "dynamic", random.Random(1))
        made.open()
        made.version = 3
        yield made


@pytest.fixture
def first(job: Engines) -> str:
    """An engine of rollout after the first sync."""
    name = next(iter(job.topology.replicas("rollout"))).name
    assert job.known(name) is None
    job.sync()
    assert job.known(name) == ("serving", 3, hex128("policy 3"))
    return name


def test_an_engine_that_a_move_brings_up_holds_what_it_read_first(job: Engines, first: str) -> None:
    new = "rollout-new"
    job.start(new, 1)
    assert job.known(new) == ("held", None, None)
    job.use(new, 1, 3)
    assert job.known(new) == ("serving", 3, hex128("policy 3"))
    assert job.ledger.state().job(JOB).replicas[new].version == 3


def test_one_that_was_started_anew_holds_nothing_until_it_is_used(job: Engines, first: str) -> None:
    job.start(first, 2)
    assert job.known(first) == ("held", None, None)
    job.use(first, 2, 3, after="start")
    assert job.known(first) == ("serving", 3, hex128("policy 3"))


def test_weights_that_cannot_be_read_have_a_version_and_no_root(job: Engines, first: str) -> None:
    job.start(first, 2)
    job.use(first, 2, 3, readable=False)
    assert job.known(first) == ("serving", 3, None)


def test_a_first_use_that_is_told_late_changes_nothing(job: Engines, first: str) -> None:
    """Neither of a process that was replaced, nor of an older version than was delivered since."""
    job.start(first, 2)
    job.use(first, 1, 3, after="sync")
    assert job.known(first) == ("held", None, None)
    job.use(first, 2, 3)
    job.use(first, 2, 2)
    assert job.known(first) == ("serving", 3, hex128("policy 3"))


def test_one_whose_sync_went_wrong_stays_held_whatever_is_told_late(
    job: Engines, first: str
) -> None:
    """Another root was read than was sent: nobody knows what it holds, and it serves nothing."""
    job.version, operation = 4, "sync-torn"
    root = hex128("policy 4")
    job.put(
        WeightSyncStarted(
            attempt=job.attempt,
            version=4,
            source={"w": root},
            source_root=root,
            encoding="full-bf16",
            targets=(first,),
            epoch=job.epoch,
        ),
        operation,
    )
    job.put(
        WeightSyncDelivered(
            target=first,
            incarnation=f"{first}#1",
            version=4,
            root=hex128("torn"),
            fingerprint_of="resident",
            differing=("w",),
            moved_bytes=1,
            full_bytes=1,
            sync_s=0.1,
        ),
        operation,
    )
    failed = TargetOutcome(target=first, outcome="failed", reason="w differs")
    job.put(
        WeightSyncCommitted(version=4, outcomes=(failed,), stall_s=0.1, caches_flushed=()),
        operation,
    )
    assert job.known(first) == ("held", None, None)
    job.use(first, 1, 3, after="sync")
    assert job.known(first) == ("held", None, None)


def test_one_that_is_lost_or_left_out_serves_by_no_first_use(job: Engines, first: str) -> None:
    job.version = 4
    job.sync(fail=True)
    assert job.known(first) == ("held", 3, hex128("policy 3"))
    job.use(first, 1, 3, after="sync")
    assert job.known(first) == ("held", 3, hex128("policy 3"))
    job.lose(first, 1)
    job.use(first, 1, 4)
    assert job.known(first) == ("lost", None, None)


def test_what_takes_no_syncs_is_no_engine(job: Engines, first: str) -> None:
    job.start("trainer-new", 1, "trainer")
    job.use("trainer-new", 1, 3, component="trainer")
    assert job.known("trainer-new") is None


def test_before_any_sync_nobody_knows_what_takes_them(job: Engines) -> None:
    job.start("rollout-new", 1)
    job.use("rollout-new", 1, 0)
    assert job.known("rollout-new") is None
