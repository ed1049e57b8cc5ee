"""An honest run whose heads are signed as it is written and published outside the database."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from shiftbook.ledger.events.observation import ComponentWindow, WindowObserved
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import FileOutlet
from shiftbook.ledger.signing_keys import Ed25519Signer
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import Entry, Run, honest_run

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
THIEF = Ed25519Signer("example.com/runs", bytes(32))


def long_run() -> Run:
    """The honest run, with telemetry windows before its end so that it fills a tile."""
    run = honest_run()
    window = WindowObserved(
        attempt="a2",
        iteration=3,
        start_ns=1,
        window_s=1.0,
        components={
            "rollout": ComponentWindow(
                replicas=1, throughput=1.0, queue=0, running=1, waiting=0, busy_share=0.5
            )
        },
    )
    at = run.at("JobClosed")
    run.entries[at:at] = [Entry(window) for _ in range(200)]
    return run


EVENTS = len(long_run().entries)
SIZES = (60, 120, 180, 260, EVENTS)
"""Events under each head; the last one covers all."""


@dataclass(frozen=True)
class Signed:
    """A ledger file, the heads outside it, and copies of both that may be damaged."""

    path: Path
    heads: Path

    def copy(self, folder: Path) -> Signed:
        """Ledger, heads and evidence in another folder."""
        folder.mkdir(exist_ok=True)
        copy = Signed(folder / "ledger.db", folder / "heads")
        shutil.copy(self.path, copy.path)
        shutil.copy(self.heads, copy.heads)
        shutil.copytree(self.evidence, copy.evidence, dirs_exist_ok=True)
        return copy

    @property
    def evidence(self) -> Path:
        return Path(f"{self.path}.evidence")

    def verify(self, *, key: bool = True, heads: bool = True, **options: object) -> Verdict:
        """The verdict of an auditor who has the key and the heads outside."""
        outside = Outside.read(
            [str(self.heads)] if heads else [], [KEY.verifier.text()] if key else []
        )
        return verify(f"sqlite:///{self.path}", outside=outside, **options)  # type: ignore[arg-type]


def write_signed(
    folder: Path,
    sizes: tuple[int, ...] = SIZES,
    run: Run | None = None,
    signer: Ed25519Signer = KEY,
) -> Signed:
    """Write the run piece by piece and sign after each; all of the ledger stands in its file."""
    entries = (run or long_run()).entries
    signed = Signed(folder / "ledger.db", folder / "heads")
    for start, stop in zip((0, *sizes), (*sizes, len(entries)), strict=False):
        if entries[start:stop]:
            Run(entries[start:stop]).write(signed.path)
        if stop in sizes:
            with Ledger.open(f"sqlite:///{signed.path}") as ledger:
                HeadSigner(ledger, signer, [FileOutlet(signed.heads)]).sign()
    with sqlite3.connect(signed.path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=delete")
    return signed
