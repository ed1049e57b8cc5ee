"""Goal: the demo runs on vLLM, ends with exit code 0, and says how closely it was compared.

Method: the command itself, on a cluster of its own, with one schedule and few iterations; its table
and calibration are held against each other and against the plan in the ledger.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from shiftbook.jobs.config import REQUIRED_INVARIANTS
from shiftbook.jobs.noise import Noise
from shiftbook.ledger.ledger import Ledger
from tests.engines.marks import VLLM

pytestmark = VLLM

DEMO = [sys.executable, "-c", "from shiftbook.ledger.cli import main; main()", "demo"]
LIMIT_S = 300.0


def test_the_demo_is_clean_within_its_calibrated_tolerance(tmp_path: Path) -> None:
    options = ["--engine", "vllm", "--schedule", "static", "--iterations", "2", "--slots", "2"]
    done = subprocess.run(
        [*DEMO, "--out", str(tmp_path), *options, "--format", "json"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["failures"] == []
    assert document["verdict"]["findings"] == []
    noise = Noise(**json.loads((tmp_path / "calibration.json").read_bytes()))
    print(noise.text())
    # Four policies, five ways to cut eight prompts into batches; 24 tokens each, and a turn each.
    assert noise.compared >= 4 * 5 * 8 * (24 + 1)
    assert 0 < noise.mean_gap <= noise.tolerance / 8
    assert noise.text() in done.stderr
    assert {row["value"] for row in document["rows"] if row["what"] == "engine"} == {noise.text()}
    with Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}", read_only=True) as ledger:
        (opened,) = ledger.read(types={"JobOpened"})
    assert opened.body["plan"]["tolerances"] == {"I16": noise.tolerance}
    rows = {row["invariant"]: row for row in document["verdict"]["coverage"] if row["required"]}
    assert rows.keys() >= {*REQUIRED_INVARIANTS, "I16"} - {"integrity", "evidence"}
    # A static run has no moves, nothing was computed twice, and no ranks share a model.
    idle = {name for name, row in rows.items() if row["status"] == "nothing to check"}
    assert idle == {"move-equality", "replay", "I5.fed", "I20.copies"}
    assert {row["status"] for name, row in rows.items() if name not in idle} == {"checked"}
