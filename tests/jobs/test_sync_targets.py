"""Goal: a weight sync reaches every engine that serves, also one that a move brought up meanwhile.

Method: a real gate on a real ledger has a move that is verified; a sync begins, asks for its
targets, and must wait; the move is committed with one engine more. The sync's event must name it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shiftbook.jobs.syncing import Published, Syncer
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


def test_engines_of_a_move_that_was_waited_for_get_the_version(tmp_path: Path) -> None:
    gate = open_gate(f"sqlite:///{tmp_path / 'ledger.db'}")
    standing = running(gate)
    move = advance(gate, gate.grant("j", gate.propose("j", proposal(WIDE))), "verified")
    recording: Any = SimpleNamespace(flush=lambda: None, spooling=False)
    fleet: Any = None  # nothing is delivered here
    syncer = Syncer(gate, recording, fleet, "j", standing)
    probe: Any = None
    published = Published(1, None, {"head": FINGERPRINT}, FINGERPRINT, 0, probe)
    asked: list[tuple[str, ...]] = []
    begun: list[tuple[str, tuple[str, ...]]] = []

    def targets() -> tuple[str, ...]:
        asked.append(syncer._engines(()))
        return asked[-1]

    waiting = threading.Thread(target=lambda: begun.append(syncer._begin(published, 0, targets)))
    waiting.start()
    await_(lambda: bool(asked))
    step(gate, move, "committed")
    waiting.join(30)
    engines = tuple(replica.name for replica in WIDE.replicas("rollout"))
    assert len(asked[0]) == 1
    assert len(engines) == 2
    assert [named for _, named in begun] == [engines]
    (event,) = gate.ledger.read(types={"WeightSyncStarted"})
    assert tuple(event.body["targets"]) == engines
    gate.ledger.close()
