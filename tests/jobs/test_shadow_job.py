"""Goal: a static run beside a live one agrees with an honest run, and names what is not.

Method: the reference job trains in this process and is recorded as the job on Ray is; its shadow
runs in a process of its own from the recorded bundles. Then one weight of the live trainer is
changed after an update, behind the recorder's back, bundles are retained away or replaced, and
the shadow is killed in the middle and started again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shiftbook.checkpoint.bundle import retain
from shiftbook.jobs.engine import TorchEngine
from shiftbook.jobs.trainer_state import TrainerState
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.shadowing import Shadow, exit_code
from shiftbook.verify.verdict import verify
from tests.jobs.live_run import JOB, LiveRun
from tests.jobs.live_run import no_object_store as no_object_store

pytestmark = [pytest.mark.usefixtures("no_object_store"), pytest.mark.timeout(600)]

DEADLINE_S = 240.0
NUDGED = "layers.0.attention.qkv.weight"
SHADOWS = {"iterations": 4, "shadow_every": 2, "shadow_iterations": 1}


def compared(run: LiveRun) -> list[dict[str, object]]:
    return [e.body for e in run.ledger.read(types={"ShadowCompared"})]


def nudge(at: int) -> object:
    """Changes one weight of the policy before an iteration begins."""

    def alter(number: int, state: TrainerState) -> None:
        if number == at:
            with torch.no_grad():
                state.ranks.parameters[NUDGED].view(-1)[:64] += 0.25
            print("changed", NUDGED, "before iteration", number)

    return alter


@pytest.mark.slow
def test_a_changed_weight_is_found_with_its_iteration_and_the_job_is_frozen(
    tmp_path: Path,
) -> None:
    """The first window, before the change, agrees; the second begins at a sound bundle."""
    run = LiveRun(tmp_path, alter=nudge(2), **SHADOWS)  # type: ignore[arg-type]
    run.train(3)
    with Shadow(run.ledger, JOB) as shadow:
        first, second = shadow.run()
    assert (first.word, second.word) == ("agreed", "disagreed")
    assert first.compared is not None
    assert first.compared.observations > 100
    difference = second.compared.difference  # type: ignore[union-attr]
    assert difference is not None
    assert (difference.iteration, difference.kind) == (2, "sample")
    assert exit_code([first, second]) == 1
    state = run.ledger.state().job(JOB)
    assert state.safe_mode is not None
    assert state.safe_mode.startswith("shadow: iteration 2, component rollout: sample ")
    types = [event.type for event in run.ledger.read()][-3:]
    assert types == ["ShadowCompared", "ShadowCompared", "SafeModeEntered"]
    # The record says of itself that all is well, but that this run records no weight syncs (I6).
    findings = [f for f in verify(run.url).findings if f.invariant != "I6"]
    assert [finding.invariant for finding in findings] == ["shadow"]
    assert "iteration 2" in findings[0].found
    run.train(1)  # the training goes on
    with Shadow(run.ledger, JOB) as again:
        outcomes = again.run()
    assert [one.before for one in outcomes] == [True, True]
    assert exit_code(outcomes) == 1


class Cooler(TorchEngine):
    """Draws as declared and reports the log-probabilities of another temperature."""

    def _sample(self, logits: Any, sampling: Any) -> None:
        super()._sample(logits, sampling)
        for index, lane in sampling:
            scaled = logits[index].astype(np.float64) / 0.8
            lane.logps[-1] = float(scaled[lane.known[-1]] - np.logaddexp.reduce(scaled))


@pytest.mark.slow
def test_log_probabilities_of_another_temperature_show_in_the_gap(tmp_path: Path) -> None:
    """Tokens, rewards and KL are the honest run's, bit for bit."""
    runs = {}
    for name, engine in (("honest", TorchEngine), ("cooler", Cooler)):
        (tmp_path / name).mkdir()
        run = LiveRun(tmp_path / name, engine=engine, **SHADOWS)  # type: ignore[arg-type]
        run.train(1)
        runs[name] = run
    updates, rewards = {}, {}
    for name, run in runs.items():
        (updates[name],) = (e.body for e in run.ledger.read(types={"UpdateApplied"}))
        (rewards[name],) = (e.body["digest"] for e in run.ledger.read(types={"SamplesRewarded"}))
    assert rewards["honest"] == rewards["cooler"]
    assert updates["honest"]["kl"] == updates["cooler"]["kl"]
    gaps = {name: update["logp_gap"] for name, update in updates.items()}
    print("gap in nats", gaps, "loss", {n: u["loss"] for n, u in updates.items()})
    assert 0 < gaps["honest"] < 1e-5
    assert gaps["cooler"] > 1000 * gaps["honest"]
    with Shadow(runs["honest"].ledger, JOB) as shadow:
        (agreed,) = shadow.run()
    assert agreed.word == "agreed"
    with Shadow(runs["cooler"].ledger, JOB) as shadow:
        (found,) = shadow.run()
        _, _, trace, _ = shadow._last  # type: ignore[misc]
    assert found.word == "disagreed"
    difference = found.compared.difference  # type: ignore[union-attr]
    assert difference is not None
    assert (difference.iteration, difference.kind, difference.what) == (0, "sample", "logps")
    # The shadow's own engine is an honest one: it shows the honest gap, bit for bit.
    (line,) = (line for line in trace.lines if line.name == "logp_gap")
    assert float(line.fields["value"]) == gaps["honest"]


@pytest.mark.slow
def test_bundles_that_are_gone_or_others_are_told_and_not_judged(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, **SHADOWS)
    run.train(4)
    run.close()
    gone, left = [Path(str(e.body["path"])) for e in run.ledger.read(types={"CheckpointSaved"})][
        0:4:2
    ]
    aside = tmp_path / "aside"
    shutil.copytree(left, aside)
    retain(run.bundles, 1)
    shutil.copytree(sorted(run.bundles.glob("*"))[-1], left)
    with Shadow(run.ledger, JOB) as shadow:
        outcomes = shadow.run()
    assert [one.word for one in outcomes] == ["could not tell"] * 2
    assert str(gone) in outcomes[0].could_not
    assert "protect them from retention" in outcomes[0].could_not
    assert "put back the one that the ledger names" in outcomes[1].could_not
    assert exit_code(outcomes) == 2
    assert compared(run) == []
    row = verify(run.url).coverage.row("shadow")
    assert row.status == "not checked"
    assert "was not compared by a shadow (2 times)" in row.reason
    shutil.rmtree(left)
    shutil.copytree(aside, left)
    with Shadow(run.ledger, JOB) as shadow:
        outcomes = shadow.run()
    assert [one.word for one in outcomes] == ["could not tell", "agreed"]
    assert verify(run.url).coverage.row("shadow").status == "partly"


@pytest.mark.slow
def test_a_shadow_that_follows_may_be_killed_and_started_again(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, **SHADOWS)
    run.train(1)
    command = [sys.executable, "-m", "tests.jobs.run_shadow", JOB, "--ledger", run.url]
    command += ["--follow", "--format", "jsonl"]
    root = Path(__file__).parents[2]
    killed = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)
    try:
        child = _child_of(killed.pid)
    finally:
        killed.kill()
        killed.wait()
    _ends(child)  # by itself, with the process that asked for it
    assert compared(run) == []
    again = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        run.train(3)
        run.close()
        out, _ = again.communicate(timeout=DEADLINE_S)
    finally:
        again.kill()
    told = [json.loads(line) for line in out.splitlines()]
    assert [(one["iteration"], one["outcome"]) for one in told] == [(0, "agreed"), (2, "agreed")]
    assert again.returncode == 0
    assert [event["iteration"] for event in compared(run)] == [0, 2]
    with Ledger.open(run.url, read_only=True, create=False) as ledger:
        assert ledger.state().job(JOB).safe_mode is None
    row = verify(run.url).coverage.row("shadow")
    assert (row.status, row.checks) == ("checked", 2)


def _ends(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def _child_of(pid: int) -> int:
    """The process that runs the job again, once it is there."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        for child in children:
            if b"shiftbook.verify.replay.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        threading.Event().wait(0.02)
    raise AssertionError("the shadow ran nothing")
