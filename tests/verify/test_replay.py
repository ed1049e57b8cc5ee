"""Goal: a replay says "same" of what is the same and names the first thing that is not.

Method: small jobs are run in processes of their own and in this one, honest and with one injected
difference each; the command is called as a person calls it; golden traces are written, edited,
torn, and made on another stack.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.cli import LazyCommands
from shiftbook.verify.errors import (
    GoldenInvalid,
    ReplayError,
    ReplayFailed,
    TargetNotFound,
)
from shiftbook.verify.replay.commands import replay as replay_command
from shiftbook.verify.replay.compare import first_divergence
from shiftbook.verify.replay.golden import read_golden, write_golden
from shiftbook.verify.replay.outcome import Outcome, replay
from shiftbook.verify.replay.protocol import Conditions, Job, Numbers, Step
from shiftbook.verify.replay.running import Asked
from shiftbook.verify.replay.story import outcome_lines
from shiftbook.verify.replay.target import is_python_target, parse_moves, parse_workers
from tests.verify import replay_jobs

JOBS = "tests.verify.replay_jobs:"


class Root(LazyCommands):
    """The root of the command line with this one command, whatever is installed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["replay"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return replay_command if cmd_name == "replay" else None


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        Root(name="shiftbook").main(["replay", *arguments], prog_name="shiftbook")
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def told(outcome: Outcome) -> str:
    return "\n".join(outcome_lines(outcome))


def test_an_honest_job_is_the_same_under_every_condition(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = call(
        capsys, JOBS + "honest", "--schedule", "other", "--workers", "rollout=2",
        "--moves", "random:7", "--steps", "3",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "same: " in out
    assert "schedule=other workers=rollout=2 moves=random:7" in out
    assert "15 observations in 3 steps" in out


def test_a_sample_that_differs_is_named_by_its_uid(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(
        capsys, JOBS + "slips_with_workers", "--workers", "rollout=2", "--format", "json"
    )
    document = json.loads(out)
    assert code == document["exit_code"] == 1
    assert set(document) == {
        "outcome", "exit_code", "target", "against", "conditions", "steps", "observations",
        "equality", "tolerances", "divergence", "could_not", "notes", "written",
    }  # fmt: skip
    found = document["divergence"]
    assert (found["step"], found["component"], found["uid"]) == (1, "rollout", "000001/1")
    assert found["what"] == "tokens"
    assert found["same_before"] == 6
    code, out, _ = call(capsys, JOBS + "slips_with_workers", "--workers", "rollout=1")
    assert code == 0


def test_a_tensor_that_differs_is_named_with_how_many_elements_and_by_how_much() -> None:
    outcome = replay(JOBS + "breaks_in_moves", Asked(moves=3))
    found = outcome.divergence
    assert outcome.exit_code == 1
    assert found is not None
    assert (found.step, found.component, found.name) == (1, "trainer", "masters/head.weight")
    assert (found.differing, found.elements, found.largest) == (2, 8, 0.25)
    assert found.relative == pytest.approx(0.25 / 22.0)
    text = told(outcome)
    assert "step 1, component trainer: tensor masters/head.weight: its bits came out" in text
    assert "2 of 8 differ, by 0.25 at most" in text
    assert "trainer root masters" in text


def test_noise_is_calibrated_and_more_than_noise_is_found() -> None:
    same = replay(JOBS + "noisy")
    assert same.exit_code == 0, told(same)
    assert same.tolerances
    assert all(0 < value < 1e-5 for value in same.tolerances.values())
    other = replay(JOBS + "noisy", Asked(schedule="other"))
    assert other.exit_code == 1
    assert other.divergence is not None
    assert (other.divergence.step, other.divergence.name) == (1, "loss")
    assert other.divergence.tolerance is not None
    assert other.divergence.relative == pytest.approx(0.005, rel=0.05)
    assert "as calibrated" in told(other)


def test_noise_counts_as_a_divergence_in_a_job_that_declares_bits() -> None:
    noisy = replay_jobs.counting(replay_jobs._noisy)
    assert replay(noisy).exit_code == 1


def test_order_by_hash_shows_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert replay(JOBS + "ordered_by_hash").exit_code == 1
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert replay(JOBS + "ordered_by_hash").exit_code == 0


def test_a_job_gets_the_environment_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALE", raising=False)
    assert replay(JOBS + "with_environment").exit_code == 0


def test_golden_traces_are_written_compared_and_reviewable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = tmp_path / "job.golden"
    code, out, _ = call(capsys, JOBS + "with_tensor", "--golden", str(golden), "--update-golden")
    assert code == 0
    assert "review and commit it" in out
    text = golden.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[1] == f"target: {JOBS}with_tensor"
    assert "0 trainer number loss value=" in text
    assert re.search(r"^1 trainer tensor masters/head.weight form=float32\[8\] ", text, re.M)
    assert re.fullmatch("sha256: [0-9a-f]{64}", lines[-1])
    again = tmp_path / "again.golden"
    assert call(capsys, JOBS + "with_tensor", "--golden", str(again), "--update-golden")[0] == 0
    assert again.read_bytes() == golden.read_bytes()
    for more in ((), ("--steps", "1"), ("--workers", "rollout=2", "--moves", "random:1")):
        assert call(capsys, JOBS + "with_tensor", "--golden", str(golden), *more)[0] == 0, more


def test_a_golden_trace_is_written_anew_and_the_conditions_asked_for_held_against_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is of the reference conditions whatever is asked for, so a fault of others is no part."""
    plain, golden = tmp_path / "plain.golden", tmp_path / "small.golden"
    target = JOBS + "slips_with_workers"
    assert call(capsys, target, "--golden", str(plain), "--update-golden")[0] == 0
    words = (target, "--golden", str(golden), "--update-golden")
    code, out, _ = call(capsys, *words, "--workers", "rollout=2")
    assert code == 1
    assert f"golden trace written to {golden}" in out
    assert "first divergence: step 1" in out
    assert "workers=rollout=2" in out
    assert golden.read_bytes() == plain.read_bytes()
    code, out, _ = call(capsys, *words, "--schedule", "other", "--moves", "random:3")
    assert code == 0
    assert "schedule=other" in out
    assert golden.read_bytes() == plain.read_bytes()


def test_a_divergence_from_a_golden_trace_is_named(tmp_path: Path) -> None:
    golden = tmp_path / "job.golden"
    job = replay_jobs.counting(replay_jobs._moves_lose_an_element, width=8)
    replay(job, golden=golden, update_golden=True)
    assert replay(job, golden=golden).exit_code == 0
    outcome = replay(job, Asked(moves=1), golden=golden)
    assert outcome.exit_code == 1
    assert outcome.divergence is not None
    assert outcome.divergence.name == "masters/head.weight"
    assert "8; how many differ cannot be told from fingerprints" in told(outcome)


@pytest.mark.slow
def test_a_golden_trace_of_noise_keeps_its_tolerance(tmp_path: Path) -> None:
    golden = tmp_path / "job.golden"
    replay(JOBS + "noisy", golden=golden, update_golden=True)
    assert "tolerance: trainer:number:loss " in golden.read_text(encoding="utf-8")
    assert replay(JOBS + "noisy", golden=golden).exit_code == 0
    assert replay(JOBS + "noisy", Asked(schedule="other"), golden=golden).exit_code == 1


def test_no_golden_trace_is_written_of_a_job_that_differs_from_itself(tmp_path: Path) -> None:
    golden = tmp_path / "job.golden"
    outcome = replay(replay_jobs.counting(replay_jobs._noisy), golden=golden, update_golden=True)
    assert outcome.exit_code == 1
    assert not golden.exists()
    assert "--bisect" in told(outcome)


@pytest.mark.slow
def test_a_golden_trace_from_another_stack_cannot_tell(tmp_path: Path) -> None:
    golden = tmp_path / "job.golden"
    replay(JOBS + "breaks_in_moves", golden=golden, update_golden=True)
    trace, _ = read_golden(golden)
    write_golden(golden, replace(trace, stack="torch=1.0 machine=vax"))
    assert replay(JOBS + "breaks_in_moves", golden=golden).exit_code == 0
    outcome = replay(JOBS + "breaks_in_moves", Asked(moves=1), golden=golden)
    assert outcome.exit_code == 2
    assert "machine=vax" in outcome.could_not


def damaged(text: str) -> dict[str, str]:
    return {
        "reward by hand": text.replace("reward=1.0", "reward=0.0", 1),
        "line taken out": "\n".join(text.splitlines()[:9] + text.splitlines()[10:]) + "\n",
        "no digest": text[: text.index("sha256: ")].replace("config-sha256: ", "config: "),
        "cut": text[:200],
        "newer": text.replace("form 1", "form 2"),
        "foreign": "name,value\n1,2\n",
        "empty": "",
    }


@pytest.mark.parametrize("how", sorted(damaged("sha256: ")))
def test_what_update_golden_did_not_write_is_refused(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = tmp_path / "job.golden"
    replay(replay_jobs.honest, golden=golden, update_golden=True)
    golden.write_text(damaged(golden.read_text(encoding="utf-8"))[how], encoding="utf-8")
    code, out, err = call(capsys, JOBS + "honest", "--golden", str(golden))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "golden" in err
    assert "Traceback" not in err


def test_golden_traces_of_other_jobs_and_configurations_are_refused(tmp_path: Path) -> None:
    golden = tmp_path / "job.golden"
    with pytest.raises(GoldenInvalid, match="found no file"):
        replay(JOBS + "honest", golden=golden)
    replay(JOBS + "honest", golden=golden, update_golden=True)
    with pytest.raises(GoldenInvalid, match="found one of tests"):
        replay(JOBS + "with_tensor", golden=golden)
    with pytest.raises(GoldenInvalid, match="at most its 2 steps"):
        replay(JOBS + "honest", Asked(steps=3), golden=golden)
    with pytest.raises(GoldenInvalid, match="seed 0"):
        replay(JOBS + "honest", Asked(seed=1), golden=golden)
    trace, _ = read_golden(golden)
    write_golden(golden, replace(trace, config={"scale": 4}))
    with pytest.raises(GoldenInvalid, match="other: scale"):
        replay(JOBS + "honest", golden=golden)
    notes = tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    with pytest.raises(GoldenInvalid, match="something else"):
        replay(JOBS + "honest", golden=notes, update_golden=True)
    assert notes.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((JOBS + "absent",), "no such name"),
        (("tests.verify.no_such:job",), "found none named tests.verify.no_such"),
        (("no/such.py:job",), "expected a file"),
        ((JOBS + "no_job",), "found object without"),
        ((JOBS + "raises",), "ZeroDivisionError: a loss over no tokens"),
        ((JOBS + "honest", "--schedule", "none"), "among plain, other"),
        ((JOBS + "honest", "--workers", "rollout=9"), "expected 1, 2 workers"),
        ((JOBS + "honest", "--workers", "tool=1"), "among rollout"),
        ((JOBS + "honest", "--workers", "rollout"), "rollout=2,trainer=4"),
        ((JOBS + "honest", "--moves", "often"), "random:7"),
        ((JOBS + "honest", "--update-golden"), "--golden FILE"),
        (("no-such.db",), "no-such.db"),
        ((JOBS + "honest", "--against", "x.db"), "two recorded ledgers"),
        (("a.db", "--bisect"), "give the job's Python path"),
        *(
            ((*base, *option), f"{why}; leave {option[0]} away")
            for base, why, options in (
                (
                    ("a.db", "--against", "b.db"),
                    "--against compares two recorded ledgers and runs nothing",
                    (
                        "--code x:y",
                        "--update-golden",
                        "--golden g",
                        "--bisect",
                        "--steps 1",
                        "--schedule s",
                        "--workers a=1",
                        "--moves none",
                        "--seed 0",
                        "--timeout 9",
                    ),
                ),
                (
                    (JOBS + "honest", "--bisect"),
                    "--bisect compares two runs of a job's Python path",
                    ("--update-golden", "--golden g", "--job j", "--code x:y", "--evidence e"),
                ),
                (
                    (JOBS + "honest",),
                    "TARGET is a job's Python path and no ledger",
                    ("--job j", "--code x:y", "--evidence e"),
                ),
                (
                    ("a.db",),
                    "TARGET is a ledger, which is its own record",
                    ("--golden g", "--update-golden"),
                ),
            )
            for option in map(str.split, options)
        ),
        ((JOBS + "honest", "--job", "j", "--code", "x:y"), "leave --code, --job away"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err


def test_a_job_of_no_steps_cannot_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, JOBS + "nothing")
    assert code == 2
    assert "nothing was observed" in out


def test_jobs_that_break_the_protocol_are_refused() -> None:
    def twice(conditions: Conditions) -> Any:
        yield Step(0, [Numbers("a", {"x": 1.0}), Numbers("a", {"x": 2.0})])

    with pytest.raises(ReplayFailed, match="twice in step 0"):
        replay(Job(twice))
    with pytest.raises(ReplayFailed, match="expected the job to yield Step"):
        replay(Job(lambda conditions: iter([3])))  # type: ignore[arg-type,return-value]
    with pytest.raises(ReplayError, match="cannot; leave --moves away"):
        replay(Job(twice), Asked(moves=1))
    with pytest.raises(TargetNotFound):
        replay(replay_jobs.no_job)


@pytest.mark.slow
def test_rows_of_csv_and_jsonl_name_the_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    target = JOBS + "slips_with_workers"
    code, out, _ = call(capsys, target, "--workers", "rollout=2", "--format", "jsonl")
    row = json.loads(out)
    assert (code, row["step"], row["name"]) == (1, 1, "000001/1")
    code, out, _ = call(capsys, target, "--workers", "rollout=2", "--format", "csv")
    assert code == 1
    assert "000001/1" in out.splitlines()[1]


def test_what_a_partial_schedule_leaves_out_is_told_and_what_it_shows_is_compared(
    tmp_path: Path,
) -> None:
    def run(conditions: Conditions) -> Any:
        wrong = conditions.seed == 1 and conditions.schedule == "recorded"
        whole = conditions.schedule == "plain"
        numbers = {"loss": 0.5 + wrong} | ({"gradient": 1.0} if whole else {"late": 2.0})
        yield Step(0, [Numbers("trainer", numbers)])

    job = Job(run, schedules=("plain", "recorded"), partial=("recorded",))
    golden = tmp_path / "job.golden"
    assert replay(job, golden=golden, update_golden=True).exit_code == 0
    for against in (None, golden):
        same = replay(job, Asked(schedule="recorded"), golden=against)
        assert same.exit_code == 0, told(same)
        assert same.notes[-1].endswith("the job does not show it: trainer number gradient")
    other = replay(job, Asked(seed=1, schedule="recorded"))
    assert other.divergence is not None
    assert (other.divergence.name, other.divergence.what) == ("loss", "value")
    not_declared = Job(run, schedules=("plain", "recorded"))
    missing = replay(not_declared, Asked(schedule="recorded")).divergence
    assert missing is not None
    assert (missing.name, missing.what) == ("gradient", "missing")


def test_missing_and_unexpected_observations_are_divergences() -> None:
    def showing(*names: str) -> Job:
        def run(conditions: Conditions) -> Any:
            yield Step(0, [Numbers("a", dict.fromkeys(names, 1.0))])

        return Job(run)

    from shiftbook.verify.replay.outcome import Runner

    with Runner(showing("x", "y")) as one, Runner(showing("x")) as two:
        both, less = one.run(Asked()), two.run(Asked())
    missing = first_divergence(both, less)
    unexpected = first_divergence(less, both)
    assert missing is not None
    assert (missing.what, missing.name) == ("missing", "y")
    assert unexpected is not None
    assert (unexpected.what, unexpected.name) == ("unexpected", "y")


def test_targets_are_told_from_ledgers() -> None:
    assert is_python_target("package.module:job")
    assert is_python_target("jobs/small.py:Jobs.one")
    for ledger in ("runs/ledger.db", "sqlite:///x.db", "postgresql+psycopg://h/db", "run.tar"):
        assert not is_python_target(ledger)
    assert parse_workers("a=1, b=2") == {"a": 1, "b": 2}
    assert parse_moves("random:12") == 12
    assert parse_moves("none") is None
