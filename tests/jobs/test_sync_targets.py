"""Goal: a weight sync reaches every engine that serves, also one that a move brought up meanwhile.

Method: a real gate on a real ledger has a move that is verified; a sync begins, asks for its
targets, and must wait; the move is committed with one engine more, while the sync waits or between
its question and its event. The sync's event must name that engine.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shiftbook.jobs.syncing import Published, Syncer, Targets
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
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
    fleet: Any = None  # nothing is delivered here
    return Syncer(gate, recording, fleet, "j", standing)


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

    waiting = threading.Thread(target=lambda: begun.append(syncer._begin(PUBLISHED, 0, targets)))
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

    _, named = syncer._begin(PUBLISHED, 0, targets)
    assert [len(engines) for _, engines in asked] == [1, 2]
    assert named == ENGINES
    gate.ledger.close()
