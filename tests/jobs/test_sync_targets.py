"""Goal: a weight sync reaches every engine that serves, also one that a move brought up meanwhile.

Method: a real gate on a real ledger has a move that is verified; a sync begins, asks for its
targets, and must wait; the move is committed with one engine more, while the sync waits or between
its question and its event. The sync's event must name that engine. Where the loop's records are
spooled while the controller reaches the ledger, the sync cannot ask the gate: it comes behind the
move all the same, in the ledger too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shiftbook.jobs.published import Published
from shiftbook.jobs.right_of_way import RightOfWay
from shiftbook.jobs.syncing import Syncer, Targets
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from tests.jobs.test_right_of_way import TOPOLOGY, way
from tests.ledger.gate_cases import (
    FINGERPRINT,
    WIDE,
    advance,
    await_,
    open_gate,
    proposal,
    running,
    step,
)

PROBE: Any = None
PUBLISHED = Published(1, None, {"head": FINGERPRINT}, FINGERPRINT, 0, PROBE)
ENGINES = tuple(replica.name for replica in WIDE.replicas("rollout"))


def syncer_on(gate: Gate, standing: Grant) -> Syncer:
    recording: Any = SimpleNamespace(flush=lambda: None, spooling=False)
    return syncer_with(gate, standing, recording, way())


def syncer_with(gate: Gate, standing: Grant, recording: Any, right: RightOfWay) -> Syncer:
    fleet: Any = None  # nothing is delivered here
    return Syncer(gate, recording, fleet, "j", standing, right)


def begun_of(syncer: Syncer, targets: Callable[[], Targets]) -> tuple[str, tuple[str, ...]]:
    with syncer._begun(PUBLISHED, 0, targets) as begun:
        return begun


def test_engines_of_a_move_that_was_waited_for_get_the_version(tmp_path: Path) -> None:
    gate = open_gate(f"sqlite:///{tmp_path / 'ledger.db'}")
    standing = running(gate)
    move = advance(gate, gate.grant("j", gate.propose("j", proposal(WIDE))), "verified")
    syncer = syncer_on(gate, standing)
    asked: list[Targets] = []
    begun: list[tuple[str, tuple[str, ...]]] = []

    def targets() -> Targets:
        asked.append(syncer._engines())
        return asked[-1]

    waiting = threading.Thread(target=lambda: begun.append(begun_of(syncer, targets)))
    waiting.start()
    await_(lambda: bool(asked))
    step(gate, move, "committed")
    waiting.join(30)
    assert len(asked[0][1]) == 1
    assert len(ENGINES) == 2
    assert [named for _, named in begun] == [ENGINES]
    (event,) = gate.ledger.read(types={"WeightSyncStarted"})
    assert tuple(event.body["targets"]) == ENGINES
    gate.ledger.close()


def test_engines_of_a_move_that_ends_between_the_question_and_the_sync_get_it(
    tmp_path: Path,
) -> None:
    gate = open_gate(f"sqlite:///{tmp_path / 'ledger.db'}")
    standing = running(gate)
    move = advance(gate, gate.grant("j", gate.propose("j", proposal(WIDE))), "verified")
    syncer = syncer_on(gate, standing)
    asked: list[Targets] = []

    def targets() -> Targets:
        asked.append(syncer._engines())
        if len(asked) == 1:  # the move ends after the topology was read, before the sync is asked
            step(gate, move, "committed")
        return asked[-1]

    _, named = begun_of(syncer, targets)
    assert [len(engines) for _, engines in asked] == [1, 2]
    assert named == ENGINES
    gate.ledger.close()


def test_a_sync_whose_records_are_spooled_waits_for_the_move_all_the_same(tmp_path: Path) -> None:
    """Events of the sync that came to stand within the move would be found illegal."""
    gate = open_gate(f"sqlite:///{tmp_path / 'ledger.db'}")
    standing = running(gate)
    move = advance(gate, gate.grant("j", gate.propose("j", proposal(WIDE))), "verified")
    right, asked = way(), threading.Event()
    assert right.begin_move(move.operation, ["inference"]) is None

    def now(drafts: list[Draft], key: str) -> None:
        gate.ledger.append("j", drafts, key=key)  # as the spool does when it is drained at once

    recording: Any = SimpleNamespace(flush=lambda: None, spooling=True, now=now)
    syncer = syncer_with(gate, standing, recording, right)
    begun: list[tuple[str, tuple[str, ...]]] = []

    def targets() -> Targets:
        asked.set()
        return syncer._engines()

    def deliver() -> None:
        with syncer._begun(PUBLISHED, 0, targets) as begun_sync:
            begun.append(begun_sync)
            assert right.begin_move("move-2", ["inference"]), "before the sync's records stand"

    waiting = threading.Thread(target=deliver)
    waiting.start()
    assert asked.wait(30)
    step(gate, move, "committed")
    right.end_move(move.operation, TOPOLOGY, {}, committed=True)
    waiting.join(30)
    assert [named for _, named in begun] == [ENGINES]
    order = ["ReallocationCommitted", "WeightSyncStarted"]
    assert [event.type for event in gate.ledger.read(types=set(order))] == order
    assert right.begin_move("move-2", ["inference"]) is None
    gate.ledger.close()
